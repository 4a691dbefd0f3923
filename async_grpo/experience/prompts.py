"""`PromptRenderer`: turns a row's messages or text into the token ids of its prompt.

Training, held-out evaluation, `async-grpo verify` and the endpoint render messages here, and nowhere else, so that the
policy is evaluated and trained on the same prompts.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.prompt_options import MODEL_DEFAULTS, PromptOptions
from async_grpo.experience.row_messages import (
    ROLES,
    SYSTEM_ROLES,
    Message,
    num_characters,
    prompt_of,
    row_messages,
    row_tools,
    template_message,
)
from async_grpo.experience.row_schemas import PROMPT_COLUMNS
from async_grpo.options.fields import nearest, refuse
from async_grpo.processes.deadline import interrupted_after
from async_grpo.processes.untrusted_files import all_is_text

TEMPLATE_S = 30.0  # maximum number of seconds that a chat template may take for one row
# A prompt with more characters per allowed token than this is refused, because tokenizing it would take minutes and
# gigabytes of memory
MAX_CHARACTERS_PER_TOKEN = 256
MAX_EXAMINED = (
    64  # maximum number of conversations with different roles that are rendered again to examine the template
)
# A template that tests whether a content is none expects none beside tool calls; others would write the word "None"
TESTS_FOR_NONE = re.compile(r"content['\"]?\]?\s*(?:is\s+(?:not\s+)?|[!=]=\s*)none", re.IGNORECASE)
# `role == "ipython"`, and `role in ["user", "observation"]`
COMPARES_ROLE = re.compile(
    r"""\brole['"]?\]?\s*(?:[!=]=|(?:not\s+)?in)\s*(['"][^'"]+['"]|[\[(][^\])]*[\])])"""
)
QUOTED = re.compile(r"""['"]([^'"]+)['"]""")
PROBE = "xprobe"  # text of a few letters, which chat templates and tokenizers do not change
log = logging.getLogger(__name__)


class PromptRenderer:
    """A tokenizer with its chat template, and the user's options for it.

    Args:
        tokenizer: A tokenizer of the transformers library. Its template is replaced by that of `--chat-template`.
        options: The user's options.

    Raises:
        ConfigurationError: The file of `--chat-template` cannot be read, or the template does not know a variable of
            `--chat-template-kwargs`.
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
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._check_variables()
        self._known_roles = (*ROLES, *self._roles_in_template())
        self._warnings: set[str] = set()  # warnings that were already logged
        self._examined: set[tuple[str, ...]] = set()  # roles of the conversations that were examined
        self._has_rendered_rows = False

    @cached_property
    def _template_text(self) -> str:
        """The text of the chat template, or of all of them if the tokenizer has several."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    def _check_variables(self) -> None:
        """Refuse a variable of `--chat-template-kwargs` that the template does not read: it would change nothing."""
        words = sorted(set(re.findall(r"\b[A-Za-z_]\w*\b", self._template_text)))
        for name, value in self._variables.items():
            refuse(
                name not in words,
                f"--chat-template-kwargs {name}={value}: {self._template_name} has no variable {name!r}, so it would "
                f"change nothing{nearest(name, words)}",
            )

    def _roles_in_template(self) -> list[str]:
        """Return the roles that the template compares with, beside those of OpenAI's API."""
        roles: set[str] = set()
        for comparison in COMPARES_ROLE.findall(self._template_text):
            roles.update(QUOTED.findall(comparison))
        return sorted(roles - set(ROLES))

    def prompt_tokens(self, row: Any, max_prompt_tokens: int, place: str = "") -> list[int]:
        """Return the token ids of a row's prompt.

        The prompt is `input_token_ids` if the row has that column. Else it is `messages`, or `prompt` if that is a list,
        after the chat template. Else it is the text in `input` or `prompt`. A column that is null counts as missing.

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
        """Return the token ids of a prompt that is a text or a list of messages."""
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
                self._warn("unused", f"{place}: the column tools is not used, because the prompt is a text")
            return self.beginning_tokens(prompt) + self._tokenizer.encode(prompt, add_special_tokens=False)
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
                self._examine(messages, tools, text, place)
        except ConfigurationError:
            raise
        except (TimeoutError, ValueError) as error:
            raise ConfigurationError(f"{self._template_name} cannot be applied: {error}") from error
        return text

    def _refuse_control_tokens(self, text: str) -> None:
        """Refuse a text with control tokens as a user's message: a chat template was applied to it already."""
        control_tokens = [
            token for token in getattr(self._tokenizer, "all_special_tokens", ()) if len(token) > 1
        ]
        spelled_token = next((token for token in control_tokens if token in text), None)
        refuse(
            spelled_token is not None,
            f"--system-prompt: the prompt is a text with the control token {spelled_token}, so it is in the form of a chat "
            "already; write messages instead, or leave the option out",
        )

    def beginning_tokens(self, text: str) -> list[int]:
        """Return the special tokens that the tokenizer puts in front of a text that begins a sequence.

        They are [] if the text itself begins with the first one. Special tokens that the tokenizer appends to a text
        are left out, because the policy continues the text.
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
        template_messages = self._with_system_prompt([template_message(message) for message in messages])
        continues = bool(messages) and messages[-1].get("role") == "assistant"
        return self._applied(
            template_messages,
            [dict(tool) for tool in tools] if tools else None,
            begins_turn=not continues,
            continues=continues,
        )

    def answered_tokens(self) -> list[int]:
        """Return the token ids of a conversation with an answer, which contain the token that ends an answer.

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
    ) -> str:
        """Apply the chat template to messages, as transformers does, and return the text.

        Args:
            messages: Messages in the form that chat templates expect.
            tools: JSON schemas of the tools.
            begins_turn: Whether the template adds the beginning of the policy's turn.
            continues: Whether the text ends within the last message, which the policy continues.

        Raises:
            ConfigurationError: The template refuses the messages.
        """
        if not TESTS_FOR_NONE.search(self._template_text):
            messages = _with_texts(messages)
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=begins_turn,
                continue_final_message=continues,
                **self._variables,
            )
        # A template is a program from the model's folder, which may raise any exception
        except Exception as error:
            words = str(error) or type(error).__name__
            raise ConfigurationError(f"{self._template_name} refuses these messages: {words}") from error

    def _examine(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str, place: str
    ) -> None:
        """Warn about what the template leaves out of a conversation. Each combination of roles is examined once.

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
        # The template may refuse conversations that no row has
        with suppress(ConfigurationError):
            self._warn_about_generation_prompt(messages, tools, text, place)
        with suppress(ConfigurationError):
            if tools and self._applied(messages, None) == text:
                self._warn("tools", f"{place}: {self._template_name} does not use the column tools")
        with suppress(ConfigurationError):
            self._warn_about_lost_messages(messages, tools, place)

    def _warn_about_generation_prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str, place: str
    ) -> None:
        """Warn if an answer has a beginning that the template does not add to the prompt.

        Templates of the form `[INST] ... [/INST]` add nothing either, but an answer follows their prompt directly.
        """
        if self._applied(messages, tools, begins_turn=False) != text:
            return
        answer = {"role": "assistant", "content": PROBE}
        answered = self._applied([*messages, answer], tools, begins_turn=False)
        end = answered.rfind(PROBE)
        beginning = answered[len(text) : end]
        if end < 0 or not answered.startswith(text) or not beginning.strip():
            return
        self._warn(
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
        text = self._applied(marked, tools)
        for message, marker, marked_message in zip(messages, markers, marked, strict=True):
            if marked_message == message or marker in text:
                continue
            subject = (
                "tool calls" if message.get("tool_calls") else f"messages of the role {message['role']!r}"
            )
            self._warn(
                subject,
                f"{place}: {self._template_name} leaves out {subject}: give one that writes them with --chat-template "
                "FILE, or change the rows",
            )

    def warn_if_unused(self) -> None:
        """Warn if options of the template were given, and no row was a conversation."""
        has_options = self._options.chat_template is not None or bool(self._variables)
        if has_options and not self._has_rendered_rows:
            self._warn(
                "no messages",
                "no prompt is a conversation (the columns messages, or a list in prompt), so --chat-template and "
                "--chat-template-kwargs change none",
            )

    def _warn(self, kind: str, warning: str) -> None:
        """Log a warning, unless one of this kind was logged already."""
        if kind not in self._warnings:
            self._warnings.add(kind)
            log.warning("%s", warning)


def _with_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with an empty text for each content that is None."""
    with_texts = []
    for message in messages:
        with_texts.append({**message, "content": ""} if message["content"] is None else message)
    return with_texts


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
