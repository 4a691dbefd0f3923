"""`PromptRenderer`: turns a row's messages or text into the token ids of its prompt.

Training, held-out evaluation, `async-grpo verify` and the endpoint render messages here, and nowhere else, so that the
policy is evaluated and trained on the same prompts.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from jinja2 import TemplateSyntaxError

from async_grpo.errors import ConfigurationError
from async_grpo.experience.control_spellings import control_token_spellings
from async_grpo.experience.instruction_roles import InstructionRoles
from async_grpo.experience.prompt_options import MODEL_DEFAULTS, PromptOptions
from async_grpo.experience.row_messages import (
    ROLES,
    SYSTEM_ROLES,
    Message,
    message_with_parts,
    num_characters,
    prompt_of,
    row_messages,
    row_tools,
    template_message,
    with_json_arguments,
)
from async_grpo.experience.row_schemas import PROMPT_COLUMNS
from async_grpo.experience.template_examiner import PROBE, TemplateExaminer
from async_grpo.experience.template_variables import check_variables, syntax_problem
from async_grpo.options.fields import refuse
from async_grpo.processes.deadline import interrupted_after
from async_grpo.processes.untrusted_files import all_is_text

TEMPLATE_S = 30.0  # maximum number of seconds that a chat template may take for one row
# A prompt with more characters per allowed token than this is refused, because tokenizing it would take minutes and
# gigabytes of memory
MAX_CHARACTERS_PER_TOKEN = 256
# Finds comparisons such as `message.content is none` in a template. Such a template expects none as the content of a
# message that only has tool calls. Any other template would write the word "None" into the prompt
TESTS_FOR_NONE = re.compile(
    r"content['\"]?\]?\s{0,9}(?:is\s{1,9}(?:not\s{1,9})?|[!=]=\s{0,9})none", re.IGNORECASE
)
# Comparisons such as `role == "ipython"` and `role in ["user", "observation"]`. The lengths are limited, because a template
# from an untrusted folder could make an unlimited search take quadratic time
COMPARES_ROLE = re.compile(
    r"""\brole['"]?\]?\s{0,9}(?:[!=]=|(?:not\s{1,9})?in)\s{0,9}(['"][^'"]{1,80}['"]|[\[(][^\])]{0,400}[\])])"""
)
QUOTED = re.compile(r"""['"]([^'"]+)['"]""")


class PromptRenderer:
    """A tokenizer with its chat template, and the user's options for it.

    Args:
        tokenizer: A tokenizer of the transformers library. Its template is replaced by that of `--chat-template`.
        options: The user's options.

    Raises:
        ConfigurationError: The file of `--chat-template` cannot be read or is not a template; or the template does not
            use a variable of `--chat-template-kwargs`, or would misunderstand its value.
    """

    def __init__(self, tokenizer: Any, options: PromptOptions = MODEL_DEFAULTS) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._variables = options.template_variables
        template = options.read_template()
        self._template_name = "the model's chat template"
        if template is not None:
            tokenizer.chat_template = template
            self._template_name = f"the chat template {options.chat_template}"
            problem = syntax_problem(template)
            refuse(bool(problem), f"--chat-template {options.chat_template}, {problem}")
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        check_variables(self._variables, self._templates, self._template_name)
        self._known_roles = (*ROLES, *self._roles_in_template())
        self._instruction_roles = InstructionRoles(
            self._template_name, partial(self._applied, keeps_roles=True)
        )
        self._examiner = TemplateExaminer(self._template_name, self._applied)
        self._has_rendered_rows = False

    @cached_property
    def _templates(self) -> list[str]:
        """The texts of all chat templates that the tokenizer has, usually one."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        return list(template.values()) if isinstance(template, dict) else [str(template)]

    @cached_property
    def _template_text(self) -> str:
        return "\n".join(self._templates)

    @cached_property
    def _tests_for_none(self) -> bool:
        """Return whether a message that has calls and no text must have the content None, not "", in this template."""
        return TESTS_FOR_NONE.search(self._template_text) is not None

    def _roles_in_template(self) -> list[str]:
        """Return the roles that the template compares with and that OpenAI's API does not have."""
        roles: set[str] = set()
        for comparison in COMPARES_ROLE.findall(self._template_text):
            roles.update(QUOTED.findall(comparison))
        return sorted(roles - set(ROLES))

    def prompt_tokens(self, row: Any, max_prompt_tokens: int, place: str = "") -> list[int]:
        """Return the token ids of a row's prompt.

        The first of these columns that the row has is the prompt: `input_token_ids`; the list `messages`, or `prompt` if it
        is a list, to which the chat template is applied; the text in `input` or `prompt`. A column that is null counts as
        missing.

        Args:
            row: The row.
            max_prompt_tokens: Maximum length of a prompt. A prompt that is certainly longer is refused before it is
                tokenized.
            place: File and line of the row, for warnings.

        Raises:
            ConfigurationError: The row has no prompt, or its prompt cannot be tokenized.
        """
        if not isinstance(row, dict):
            raise ConfigurationError(f"a row must be an object, not {type(row).__name__}")
        token_ids = row.get("input_token_ids")
        if token_ids is not None:
            are_ids = isinstance(token_ids, list) and all(type(token_id) is int for token_id in token_ids)
            refuse(not are_ids, "input_token_ids must be a list of integers")
            refuse(
                self._options.system_prompt is not None,
                "--system-prompt: the prompt is given as input_token_ids, to which no message can be added; remove the "
                "column, or leave the option out",
            )
            return token_ids
        for name in (*PROMPT_COLUMNS, "tools"):
            refuse(
                not all_is_text(row.get(name)),
                f"{name} holds half of a surrogate pair (\\ud800 to \\udfff), which is no text: correct the row",
            )
        return self._encoded_prompt(prompt_of(row), row, max_prompt_tokens, place)

    def _encoded_prompt(self, prompt: Any, row: Mapping[str, Any], max_tokens: int, place: str) -> list[int]:
        """Return the token ids of a prompt: a text or a list of messages. `place` (file and line) is for warnings."""
        refuse(prompt is None, "a row needs input_token_ids, messages, or prompt/input text")
        if isinstance(prompt, str) and self._options.system_prompt is not None:
            self._refuse_control_tokens(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list):
            refuse(
                not self.has_template,
                "a row of messages, but the model's tokenizer has no chat template: give one with --chat-template FILE, "
                "or the whole prompt as a text in the column input",
            )
            prompt = row_messages(prompt, self._known_roles)
        count = num_characters(prompt)
        refuse(
            count > MAX_CHARACTERS_PER_TOKEN * max_tokens,
            f"a prompt of {count} characters; at most {max_tokens} tokens fit this model and --max-generation-tokens. "
            "Shorten or drop the row",
        )
        if isinstance(prompt, str):
            if row.get("tools"):
                self._examiner.warn(
                    "unused", f"{place}: the column tools is not used, because the prompt is a text"
                )
            return self.beginning_tokens(prompt) + self._tokenizer.encode(prompt, add_special_tokens=False)
        if not self._has_rendered_rows:
            self._warn_about_control_tokens(prompt, place)
        self._has_rendered_rows = True
        text = self._rendered_row(self._with_system_prompt(prompt), row_tools(row), place)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _rendered_row(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, place: str
    ) -> str:
        try:
            # A template is a program from the model's folder, which may take any time
            with interrupted_after(TEMPLATE_S, self._template_name):
                text = self._applied(messages, tools)
                self._examiner.examine(messages, tools, text, place)
        except ConfigurationError:
            raise
        except (TimeoutError, ValueError) as error:
            raise ConfigurationError(f"{self._template_name} cannot be applied: {error}") from error
        return text

    def text_with_parts(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """Return the text of a prompt whose messages have lists of parts as contents, such as images.

        Raises:
            ConfigurationError: The template refuses the messages.
        """
        try:
            with interrupted_after(TEMPLATE_S, self._template_name):
                return self._applied(self._with_system_prompt(messages), tools)
        except TimeoutError as error:
            raise ConfigurationError(f"{self._template_name} cannot be applied: {error}") from error

    def _refuse_control_tokens(self, text: str) -> None:
        """Raise ConfigurationError if a text contains control tokens, because it then already has the form of a chat."""
        spellings = control_token_spellings(self._tokenizer)
        spelled_token = next((spelling for spelling in spellings if spelling in text), None)
        refuse(
            spelled_token is not None,
            f"--system-prompt: the prompt is a text with the control token {spelled_token}, so it is in the form of a chat "
            "already; write messages instead, or leave the option out",
        )

    def _warn_about_control_tokens(self, messages: Sequence[Message], place: str) -> None:
        """Warn if a message spells control tokens, probably because a chat template was already applied to its text."""
        text = "\n".join(message["content"] or "" for message in messages)
        spellings = control_token_spellings(self._tokenizer)
        spelled_token = next((spelling for spelling in spellings if spelling in text), None)
        if spelled_token is not None:
            self._examiner.warn(
                "control tokens",
                f"{place}: a message spells the control token {spelled_token}, which the template does not escape: if the "
                "text is a whole prompt already, give it as the column input, or with --prompt-as text",
            )

    def beginning_tokens(self, text: str) -> list[int]:
        """Return the special tokens that the tokenizer puts in front of a text that begins a sequence.

        The result is [] if the text itself begins with the first of these tokens. Special tokens that the tokenizer
        appends to a text are left out, because the policy continues the text.
        """
        spelling = ""
        if self._tokens_before_text:
            spelling = self._tokenizer.decode(self._tokens_before_text[:1])
        begin_token = getattr(self._tokenizer, "bos_token", None)
        is_spelled = any(token and text.startswith(token) for token in (spelling, begin_token))
        return [] if is_spelled else list(self._tokens_before_text)

    @cached_property
    def _tokens_before_text(self) -> list[int]:
        """The special tokens that the tokenizer puts in front of a text."""
        plain = self._tokenizer.encode(PROBE, add_special_tokens=False)
        whole = self._tokenizer.encode(PROBE, add_special_tokens=True)
        for place in range(len(whole) - len(plain) + 1):
            if whole[place : place + len(plain)] == plain:
                return whole[:place]
        return []

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the text that the policy continues. The last message is continued if it is the assistant's.

        Raises:
            ConfigurationError: There is no template, or it refuses the messages, or a message has no text.
        """
        refuse(
            not self.has_template,
            "the tokenizer has no chat template: give --chat-template FILE, or tokens, or another model",
        )
        template_messages = self._with_system_prompt([message_with_parts(message) for message in messages])
        continues = bool(messages) and messages[-1].get("role") == "assistant"
        refuse(
            continues and "tool_calls" in template_messages[-1],
            "the last message is the assistant's and has tool calls, after which it cannot be continued: add a message "
            "of the role tool with the answer of each call",
        )
        return self._applied(
            template_messages,
            [dict(tool) for tool in tools] if tools else None,
            begins_turn=not continues,
            continues=continues,
        )

    def whole_text(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, begins_turn: bool = False
    ) -> str:
        """Return the text of a conversation that need not end with a question; see `render`.

        Raises:
            ConfigurationError: There is no template, or it refuses the messages.
        """
        refuse(not self.has_template, "the tokenizer has no chat template: give --chat-template FILE")
        whole_messages = self._with_system_prompt([template_message(message) for message in messages])
        return self._applied(whole_messages, tools, begins_turn=begins_turn)

    @property
    def system_prompt(self) -> str | None:
        """Return the text of the system message that is added to conversations without one; None if none is added."""
        return self._options.system_prompt

    @property
    def template_text(self) -> str:
        """Return the chat template; "" if there is none."""
        return self._template_text

    def answered_tokens(self) -> list[int]:
        """Return the token ids of a short conversation with an answer. They contain the token that ends an answer.

        Raises:
            ConfigurationError: There is no template, or it refuses the conversation.
        """
        conversation = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        text = self._applied(self._with_system_prompt(conversation), None, begins_turn=False)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _with_system_prompt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        has_system = any(message.get("role") in SYSTEM_ROLES for message in messages)
        if self._options.system_prompt is None or has_system:
            return messages
        return [{"role": "system", "content": self._options.system_prompt}, *messages]

    def _applied(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        begins_turn: bool = True,
        continues: bool = False,
        keeps_roles: bool = False,
    ) -> str:
        """Apply the chat template to messages, as transformers does, and return the text.

        Args:
            messages: Messages in the form that chat templates expect.
            tools: JSON schemas of the tools.
            begins_turn: Whether the template adds the beginning of the policy's turn.
            continues: Whether the text ends within the last message, which the policy continues.
            keeps_roles: Whether system and developer messages keep their roles. Otherwise, they get roles whose
                messages the template writes into the text (see `InstructionRoles`).

        Raises:
            ConfigurationError: The template refuses the messages, or does not write developer messages under any role.
        """
        if not keeps_roles:
            messages = self._instruction_roles.mapped(messages, tools)
        if not self._tests_for_none:
            messages = _with_texts(messages)
        settings = {
            "tools": tools,
            "tokenize": False,
            "add_generation_prompt": begins_turn,
            "continue_final_message": continues,
            **self._variables,
        }
        # A template is a program from the model's folder, which may raise any exception
        try:
            return self._tokenizer.apply_chat_template(messages, **settings)
        except TemplateSyntaxError as error:
            raise ConfigurationError(
                f"{self._template_name} cannot be read, line {error.lineno}: {error.message}: give another one by "
                "--chat-template FILE"
            ) from error
        except Exception as error:
            # Try two other forms of the messages. Most templates expect the arguments of tool calls as objects, but
            # DeepSeek's as JSON texts. Some templates compare a content with none, but also take its length
            if any(message.get("tool_calls") for message in messages):
                for other_form in (with_json_arguments(messages), _with_texts(messages)):
                    with suppress(Exception):
                        return self._tokenizer.apply_chat_template(other_form, **settings)
            words = str(error) or type(error).__name__
            is_added = messages[0]["content"] == self._options.system_prompt
            hint = " (the first message is that of --system-prompt)" if is_added else ""
            if isinstance(self._tokenizer.chat_template, dict):
                hint += "; the model has several templates: write one of them into a file for --chat-template FILE"
            raise ConfigurationError(
                f"{self._template_name} refuses these messages: {words}{hint}"
            ) from error

    def warn_about_use(self, has_environment: bool) -> None:
        """Warn about a chat template that no row has used. Call this after all prompts were rendered.

        If the run has an environment, check whether the template fits its messages. Otherwise, warn if options of the
        template are set, because they have no effect.

        Args:
            has_environment: Whether the run has an environment, which makes messages, too.
        """
        if self._has_rendered_rows:
            return
        if has_environment and self.has_template:
            question = self._with_system_prompt([{"role": "user", "content": PROBE}])
            with suppress(ConfigurationError):
                text = self._applied(question, None)
                self._examiner.warn_about_generation_prompt(
                    question, None, text, "messages of the environment"
                )
        has_options = self._options.chat_template is not None or bool(self._variables)
        if has_options and not has_environment:
            self._examiner.warn(
                "no messages",
                "no prompt is a conversation (the column messages, or a list in prompt), so --chat-template and "
                "--chat-template-kwargs change none",
            )


def _with_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with an empty text in place of each content that is None."""
    with_texts = []
    for message in messages:
        with_texts.append({**message, "content": ""} if message["content"] is None else message)
    return with_texts
