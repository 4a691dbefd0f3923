"""`InstructionRoles`: changes the roles of system and developer messages, so that a chat template does not drop them.

Many public templates are older than the role `developer`. They silently leave out such messages, or refuse them. So
developer messages become system messages. Some templates write only the first of two system messages, so the two are
joined.
"""

from collections.abc import Sequence
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.row_messages import SYSTEM_ROLES
from async_grpo.experience.template_examiner import PROBE, ApplyTemplate

# More system messages than this are joined, without trying whether the template writes all of them
MAX_PROBED = 8
SEPARATOR = "\n\n"  # between the texts of joined messages
ADVICE = "write the text into a message of the user, or give another template with --chat-template FILE"

Messages = list[dict[str, Any]]


class InstructionRoles:
    """Renders short conversations to find out which roles a chat template writes. Each result is stored.

    Args:
        template_name: Name of the template in error messages.
        apply: Applies the template. It raises ConfigurationError if the template refuses the messages.
    """

    def __init__(self, template_name: str, apply: ApplyTemplate) -> None:
        self._template_name = template_name
        self._apply = apply
        # (roles, whether there are tools) -> why the template does not write messages of these roles; "" if it does
        self._problems: dict[tuple[tuple[str, ...], bool], str] = {}

    def mapped(self, messages: Messages, tools: list[dict[str, Any]] | None) -> Messages:
        """Return the messages with roles that the template writes.

        Args:
            messages: The conversation.
            tools: JSON schemas of the tools. Some templates cannot be used without tools.

        Raises:
            ConfigurationError: The template does not write a developer message under any role.
        """
        num_leading = 0
        while num_leading < len(messages) and messages[num_leading].get("role") in SYSTEM_ROLES:
            num_leading += 1
        has_developer = any(message.get("role") == "developer" for message in messages)
        if num_leading < 2 and not has_developer:
            return messages
        leading = self._leading(messages[:num_leading], tools)
        later = []
        for message in messages[num_leading:]:
            if message.get("role") == "developer":
                message = message | {"role": self._role_of_later_message(_roles_of(leading), tools)}
            later.append(message)
        return [*leading, *later]

    def _leading(self, messages: Messages, tools: list[dict[str, Any]] | None) -> Messages:
        """Return the messages before the first question, changed if the template would otherwise drop some of them.

        Developer messages may become system messages, and several messages may be joined to one.
        """
        if not messages:
            return []
        as_system = [message | {"role": "system"} for message in messages]
        for candidate in (messages, as_system):
            if len(candidate) <= MAX_PROBED and not self._problem(_roles_of(candidate), tools):
                return candidate
        joined = SEPARATOR.join(message["content"] for message in messages)
        for role in SYSTEM_ROLES:
            if not self._problem((role,), tools):
                return [{"role": role, "content": joined}]
        if "developer" not in _roles_of(messages):
            # The template may refuse these system messages: it raises an error later. If it leaves them out, a warning
            # is logged elsewhere
            return messages
        raise ConfigurationError(
            f"{self._template_name} writes neither a developer nor a system message ({self._problem(('system',), tools)}): "
            f"{ADVICE}"
        )

    def _role_of_later_message(
        self, leading_roles: tuple[str, ...], tools: list[dict[str, Any]] | None
    ) -> str:
        """Return the role under which the template writes a developer message after a question and its answer.

        Args:
            leading_roles: Roles of the messages before the question.
            tools: JSON schemas of the tools.

        Raises:
            ConfigurationError: The template writes no such message under any role.
        """
        problem = ""
        for role in ("developer", "system"):
            problem = self._problem((*leading_roles, "user", "assistant", role), tools)
            if not problem:
                return role
        raise ConfigurationError(
            f"{self._template_name} writes neither a developer nor a system message behind a question ({problem}): {ADVICE}"
        )

    def _problem(self, roles: tuple[str, ...], tools: list[dict[str, Any]] | None) -> str:
        """Return why the template does not write all messages of these roles and a question; "" if it does."""
        key = (roles, bool(tools))
        if key not in self._problems:
            probes = [f"{PROBE}{number}x" for number in range(len(roles))]
            conversation = [
                {"role": role, "content": probe} for role, probe in zip(roles, probes, strict=True)
            ]
            try:
                is_written = self._are_written([*conversation, {"role": "user", "content": PROBE}], tools)
                self._problems[key] = "" if is_written else "it leaves the text out"
            except ConfigurationError as error:
                self._problems[key] = str(error)
        return self._problems[key]

    def _are_written(self, messages: Messages, tools: list[dict[str, Any]] | None) -> bool:
        """Return whether the template writes all messages, as they are or changed, for example in capital letters.

        Raises:
            ConfigurationError: The template refuses the messages.
        """
        text = self._apply(messages, tools)
        for index, message in enumerate(messages):
            if message["content"] in text:
                continue
            changed_message = message | {"content": f"{message['content']} {PROBE}"}
            if self._apply([*messages[:index], changed_message, *messages[index + 1 :]], tools) == text:
                return False
        return True


def _roles_of(messages: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(str(message["role"]) for message in messages)
