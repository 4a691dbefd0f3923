"""`Chat`: converts messages to text and tokens with the model's chat template, and turns of the policy to messages.

The policy's turn reaches the agent split into content, tool calls and thoughts. When the agent sends that message back,
the template gets the originally sampled text. So the rendered text shows whether the agent kept the history unchanged.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from async_grpo.environments.control_tokens import ControlTokens, Rendered, cut, new_marker, without_markers
from async_grpo.errors import ConfigurationError
from async_grpo.experience.prompt_options import MODEL_DEFAULTS, PromptOptions
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.experience.row_messages import Message, template_message
from async_grpo.processes.untrusted_files import parse_json

# Tags around a tool call, as Hermes, Qwen and other models write them
BEGIN_CALL = "<tool_call>"
END_CALL = "</tool_call>"

# A text is refused as too long, without tokenizing it, if it has more than this number of characters per allowed token
MAX_CHARACTERS_PER_TOKEN = 64
PIECES_PER_CALL = 8192  # maximum number of pieces of a text that one call of the tokenizer encodes
# Number of earlier tokens that are decoded together with new ones. Decoded alone, new tokens may lose their first
# space, because some tokenizers drop the space at the beginning of a text
LOOK_BACK_TOKENS = 8


class TrajectoryOver(Exception):
    """The trajectory has reached a limit. Its program gets no more turns, and must end."""


class Chat:
    """A tokenizer with its chat template. Without a template, prompts must be text or tokens instead of messages.

    Args:
        tokenizer: A tokenizer of the transformers library.
        longest: Maximum length of a sequence, in tokens. A text that is certainly longer is refused before
            tokenization, because tokenizing it would delay the run.
        split_control_tokens: Whether control tokens that are spelled in foreign text stay plain text (see
            `control_tokens`).
        options: Options of the chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        longest: int = 1 << 31,
        split_control_tokens: bool = True,
        options: PromptOptions = MODEL_DEFAULTS,
    ) -> None:
        self.control_tokens = ControlTokens(tokenizer) if split_control_tokens else None
        self._tokenizer = tokenizer
        self._longest = longest
        self.prompts = PromptRenderer(tokenizer, options)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if hasattr(backend, "encode_batch_fast") else None

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the text that the policy continues.

        Raises:
            ConfigurationError: There is no template, or it refuses the messages, or a message has no text.
        """
        return self.prompts.render(messages, tools)

    def render_foreign(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_trusted: Sequence[bool] = (),
    ) -> Rendered:
        """Return the text of `render`, with a break inside each control token that is spelled in foreign text.

        Args:
            messages: The conversation.
            tools: JSON schemas of the tools.
            is_trusted: For each message, whether its control tokens are intended. This is true for messages of the
                policy and for the user's data. Messages without an entry count as foreign.

        Raises:
            ConfigurationError: The template refuses the messages, or objects and lists in them are nested too deeply.
        """
        if self.control_tokens is None:
            return Rendered(self.render(messages, tools))
        marker = new_marker()
        marked_messages: list[Message] = []
        try:
            for index, message in enumerate(messages):
                if index < len(is_trusted) and is_trusted[index]:
                    marked_messages.append(message)
                else:
                    parsed = template_message(message)
                    marked_messages.append(self.control_tokens.marked(parsed, marker))
            marked_tools = self.control_tokens.marked(tools, marker) if tools else None
        except RecursionError as error:
            raise ConfigurationError(
                "objects and lists in the messages or in the tools' descriptions are nested too deeply"
            ) from error
        rendered = without_markers(self.render(marked_messages, marked_tools), marker)
        return self.control_tokens.needed(rendered)

    def breaks_of(self, text: str) -> tuple[int, ...]:
        """Return the positions at which a foreign text must be cut, so that none of its tokens is a control token."""
        return () if self.control_tokens is None else self.control_tokens.breaks_of(text)

    def encode(self, text: str, *, begins: bool = False, breaks: Sequence[int] = ()) -> np.ndarray:
        """Return the token ids of a text, (N,) int32. A control token in it becomes one token, unless a break cuts it.

        Args:
            text: The text.
            begins: Whether the text begins a sequence. If so, the special tokens that the model expects at the
                beginning are added, unless the text already spells the first one.
            breaks: Positions that no token may span.

        Raises:
            TrajectoryOver: The text is too long.
        """
        # Each piece between two breaks has at least one token
        has_too_many_pieces = len(breaks) >= self._longest
        if has_too_many_pieces or len(text) > MAX_CHARACTERS_PER_TOKEN * self._longest:
            raise TrajectoryOver(too_long(self._longest))
        # Text from JSON may contain a lone surrogate, which tokenizers refuse; it is replaced by a question mark
        text = text.encode(errors="replace").decode()
        ids = self.prompts.beginning_tokens(text) if begins else []
        ids += self._encoded(cut(text, breaks))
        return np.asarray(ids, np.int32)

    def _encoded(self, texts: list[str]) -> list[int]:
        """Return the token ids of all texts, concatenated."""
        token_ids: list[int] = []
        if self._backend is None:
            for text in texts:
                token_ids += self._tokenizer.encode(text, add_special_tokens=False)
            return token_ids
        for first in range(0, len(texts), PIECES_PER_CALL):
            # In batches: the backend releases Python's lock while it encodes, but not while it converts the results, so
            # a single large call would block all other threads
            encodings = self._backend.encode_batch_fast(
                texts[first : first + PIECES_PER_CALL], add_special_tokens=False
            )
            num_new_tokens = sum(len(encoding) for encoding in encodings)
            if len(token_ids) + num_new_tokens > self._longest:
                raise TrajectoryOver(too_long(self._longest))
            for encoding in encodings:
                token_ids += encoding.ids
        return token_ids

    def decode(self, token_ids: np.ndarray, after: np.ndarray) -> str:
        """Return the text of `token_ids`, which come after the tokens `after` in their sequence."""
        context = after[-LOOK_BACK_TOKENS:].tolist()
        text_with_context = self._decoded([*context, *token_ids.tolist()])
        return text_with_context[len(self._decoded(context)) :]

    def _decoded(self, token_ids: list[int]) -> str:
        cleans_up_spaces = getattr(self._tokenizer, "clean_up_tokenization_spaces", False)
        if self._backend is None or cleans_up_spaces:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=False)
        return text


def too_long(tokens: int) -> str:
    """Return a text for errors with the limit in tokens and the option that sets it."""
    return f"{tokens} tokens (--max-generation-tokens, and the prompt)"


def message_of(text: str, turn: int = 0) -> dict[str, Any]:
    """Return a turn of the policy as a message, whose tool calls are separated from the text.

    Args:
        text: The sampled text without its end token.
        turn: Number of the turn, which becomes part of the calls' ids.

    >>> message_of('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': '{"a": 1}'}
    >>> message_of("four")
    {'role': 'assistant', 'content': 'four'}
    """
    calls: list[dict[str, Any]] = []
    content, call_texts = take_out_calls(text)
    for call_text in call_texts:
        try:
            call = parse_json(call_text)
            name = call["name"]
            arguments = call.get("arguments", {})
        except (ValueError, KeyError, TypeError):
            # An invalid call is skipped. If there is no valid one, the message keeps the whole text, so that the
            # program can point out the error
            continue
        calls.append(
            {
                "id": f"call_{turn}_{len(calls)}",
                "type": "function",
                "function": {"name": str(name), "arguments": json.dumps(arguments)},
            }
        )
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": content.strip() or None, "tool_calls": calls}


def take_out_calls(text: str) -> tuple[str, list[str]]:
    """Return the text without the tool calls, and the calls.

    A call is a text in braces between two tags, and contains no tag itself.

    This takes linear time. A regular expression would hold Python's lock while it searches a long text.

    >>> take_out_calls("a<tool_call> {1} </tool_call>b<tool_call>{2}<tool_call>c</tool_call>")
    ('ab<tool_call>{2}<tool_call>c</tool_call>', ['{1}'])
    """
    texts: list[str] = []
    calls: list[str] = []
    text_begin = 0  # beginning of the part that is not in `texts` yet
    begin = text.find(BEGIN_CALL)
    while begin >= 0:
        end = text.find(END_CALL, begin + len(BEGIN_CALL))
        if end < 0:
            break
        # Begin at the last begin tag before the end tag, so that the call contains no tag
        begin = text.rfind(BEGIN_CALL, begin, end)
        inside = text[begin + len(BEGIN_CALL) : end].strip()
        if len(inside) > 1 and inside.startswith("{") and inside.endswith("}"):
            texts.append(text[text_begin:begin])
            calls.append(inside)
            text_begin = end + len(END_CALL)
        begin = text.find(BEGIN_CALL, end)
    texts.append(text[text_begin:])
    return "".join(texts), calls


def before_any(stop: Sequence[str], text: str) -> str:
    """Return the text before the first occurrence of any of the `stop` texts.

    >>> before_any(["Observation:"], "I look. Observation: it")
    'I look. '
    """
    end = len(text)
    for stop_text in stop:
        place = text.find(stop_text)
        if place >= 0:
            end = min(end, place)
    return text[:end]


def message_key(message: Message) -> str:
    """Return a key that identifies a message of the policy, even if a client has added fields to it."""
    calls = []
    for call in message.get("tool_calls") or ():
        if isinstance(call, Mapping):
            function = call.get("function", {})
            calls.append([call.get("id"), function.get("name"), function.get("arguments")])
    return json.dumps([message.get("content") or "", calls])
