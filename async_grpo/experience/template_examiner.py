"""`TemplateExaminer`: warns about parts of conversations that a chat template silently leaves out."""

import logging
from contextlib import suppress
from typing import Any, Protocol

from async_grpo.errors import ConfigurationError

MAX_EXAMINED = 64  # maximum number of conversations with different roles that are rendered again
PROBE = "xprobe"  # text of a few letters, which chat templates and tokenizers do not change
log = logging.getLogger(__name__)


class ApplyTemplate(Protocol):
    """Applies a chat template to messages and tools, and returns the text."""

    def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        begins_turn: bool = True,
    ) -> str: ...


class TemplateExaminer:
    """Renders conversations once more with changes, to find out what a chat template leaves out.

    Args:
        template_name: Name of the template in warnings.
        apply: Applies the template. It raises ConfigurationError if the template refuses the messages.
    """

    def __init__(self, template_name: str, apply: ApplyTemplate) -> None:
        self._template_name = template_name
        self._apply = apply
        self._warnings: set[str] = set()  # kinds of the warnings that were already logged
        self._examined: set[tuple[str, ...]] = set()  # roles of the conversations that were examined

    def examine(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str, place: str
    ) -> None:
        """Warn about parts of a conversation that the template leaves out. Each combination of roles is examined once.

        Args:
            messages: The conversation.
            tools: JSON schemas of the tools.
            text: The rendered conversation.
            place: File and line of the row.
        """
        roles = tuple(message["role"] for message in messages)
        combination = (*roles, "with tools") if tools else roles
        if combination in self._examined or len(self._examined) >= MAX_EXAMINED:
            return
        self._examined.add(combination)
        # The template may refuse a changed conversation, for example one without tools. This is not an error of the row
        with suppress(ConfigurationError):
            self.warn_about_generation_prompt(messages, tools, text, place)
        with suppress(ConfigurationError):
            if tools and self._apply(messages, None) == text:
                self.warn("tools", f"{place}: {self._template_name} does not use the column tools")
        with suppress(ConfigurationError):
            self._warn_about_lost_messages(messages, tools, place)

    def warn_about_generation_prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str, place: str
    ) -> None:
        """Warn if the template begins answers with a header that it does not add to the prompt.

        A header is, for example, `<|im_start|>assistant`. Templates of the form `[INST] ... [/INST]` have none, because
        an answer directly follows the prompt.
        """
        if self._apply(messages, tools, begins_turn=False) != text:
            return
        answer = {"role": "assistant", "content": PROBE}
        answered = self._apply([*messages, answer], tools, begins_turn=False)
        end = answered.rfind(PROBE)
        beginning = answered[len(text) : end]
        if end < 0 or not answered.startswith(text) or not beginning.strip():
            return
        self.warn(
            "generation prompt",
            f"{place}: {self._template_name} ignores add_generation_prompt, so completions begin right behind the last "
            f"message, while answers begin with {beginning!r}: copy the template into a file, end it with "
            f"{{% if add_generation_prompt %}}{{{{ {beginning!r} }}}}{{% endif %}}, and give it as --chat-template FILE",
        )

    def _warn_about_lost_messages(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, place: str
    ) -> None:
        """Warn about roles whose messages the template leaves out."""
        markers = [f"{PROBE}{number}x" for number in range(len(messages))]
        marked = [_marked(message, marker) for message, marker in zip(messages, markers, strict=True)]
        text = self._apply(marked, tools)
        for message, marker, marked_message in zip(messages, markers, marked, strict=True):
            if marked_message == message or marker in text:
                continue
            subject = (
                "tool calls" if message.get("tool_calls") else f"messages of the role {message['role']!r}"
            )
            self.warn(
                subject,
                f"{place}: {self._template_name} leaves out {subject}: give one that writes them with --chat-template "
                "FILE, or change the rows",
            )

    def warn(self, kind: str, warning: str) -> None:
        """Log a warning, unless one of this kind was logged already."""
        if kind not in self._warnings:
            self._warnings.add(kind)
            log.warning("%s", warning)


def _marked(message: dict[str, Any], marker: str) -> dict[str, Any]:
    """Return the message with a marker for its text, or for the names of its tool calls if it has any."""
    if message.get("tool_calls"):
        calls = []
        for call in message["tool_calls"]:
            calls.append({**call, "function": {**call["function"], "name": marker}})
        return {**message, "tool_calls": calls}
    if not message["content"].strip():
        return message
    return {**message, "content": marker}
