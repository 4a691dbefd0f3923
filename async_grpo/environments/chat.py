"""`Chat`: messages as text and tokens, by the model's own chat template; and turns of the policy as messages.

An agent receives a turn of the policy taken apart: content, tool calls, thoughts. When it sends the message back, the
template receives the text as it was sampled instead. Whether the template keeps a history as it was then shows in its
output.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from jinja2 import TemplateError

from async_grpo.environments.control_tokens import ControlTokens, Rendered, cut, new_marker, without_markers
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse
from async_grpo.processes.untrusted_files import parse_json

Message = Mapping[str, Any]  # as in OpenAI's API: role, content, tool_calls, tool_call_id

# Tags around a call, as Hermes, Qwen and other models write them
BEGIN_CALL = "<tool_call>"
END_CALL = "</tool_call>"

MAX_CHARACTERS_PER_TOKEN = 64  # on average over a text
# Tokens are decoded together with so many tokens before them, because some tokenizers drop the first space of a text
PIECES_PER_CALL = 8192  # pieces of a text that one call of the tokenizer encodes
LOOK_BACK_TOKENS = 8


class TrajectoryOver(Exception):
    """The trajectory has reached a limit. Its program can only end."""


class Chat:
    """A tokenizer with its chat template. Without a template, only texts and tokens can be used.

    Args:
        tokenizer: A tokenizer of transformers.
        longest: Limit of a sequence, in tokens. A text that must be longer is refused before tokenization, which would hold
            up the run.
        split_control_tokens: Control tokens that a foreign text spells stay plain text (see `control_tokens`).
    """

    def __init__(self, tokenizer: Any, longest: int = 1 << 31, split_control_tokens: bool = True) -> None:
        self.control_tokens = ControlTokens(tokenizer) if split_control_tokens else None
        self._tokenizer = tokenizer
        self._longest = longest
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if hasattr(backend, "encode_batch_fast") else None

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the text that the policy continues.

        Raises:
            ConfigurationError: There is no template, or it refuses the messages.
        """
        refuse(
            not self._has_template,
            "the tokenizer has no chat template: give tokens, or another model",
        )
        # A conversation that ends with a message of the policy is a turn that the policy continues
        begins_turn = not messages or messages[-1].get("role") != "assistant"
        try:
            return self._tokenizer.apply_chat_template(
                [_with_parsed_arguments(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=begins_turn,
                continue_final_message=not begins_turn,
            )
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise ConfigurationError(f"the chat template refuses these messages: {error}") from error

    def render_foreign(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_trusted: Sequence[bool] = (),
    ) -> Rendered:
        """Return the text of `render`, with breaks in the control tokens that foreign texts spell.

        Args:
            messages: The conversation.
            tools: JSON schemas of the tools.
            is_trusted: For each message, whether its control tokens are meant: those of the policy and of the user's data
                are. Messages beyond the end of the list are foreign.

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
                    parsed = _with_parsed_arguments(message)
                    marked_messages.append(self.control_tokens.marked(parsed, marker))
            marked_tools = self.control_tokens.marked(tools, marker) if tools else None
        except RecursionError as error:
            raise ConfigurationError(
                "objects and lists in the messages or in the tools' descriptions are nested too deeply"
            ) from error
        rendered = without_markers(self.render(marked_messages, marked_tools), marker)
        return self.control_tokens.needed(rendered)

    def breaks_of(self, text: str) -> tuple[int, ...]:
        """Return the places at which a foreign text must be cut, so that no control token is found in it."""
        return () if self.control_tokens is None else self.control_tokens.breaks_of(text)

    def encode(self, text: str, *, begins: bool = False, breaks: Sequence[int] = ()) -> np.ndarray:
        """Return the token ids of a text, (N,) int32. Control tokens that it spells become control tokens.

        Args:
            text: The text.
            begins: The text begins a sequence. The special tokens that the model expects there are added, unless the text
                spells the first one itself.
            breaks: Places that no token may span.

        Raises:
            TrajectoryOver: The text is too long.
        """
        # Each piece between two breaks has one token or more
        has_too_many_pieces = len(breaks) >= self._longest
        if has_too_many_pieces or len(text) > MAX_CHARACTERS_PER_TOKEN * self._longest:
            raise TrajectoryOver(too_long(self._longest))
        # JSON may spell a lone surrogate, which tokenizers refuse
        text = text.encode(errors="replace").decode()
        begin_token = getattr(self._tokenizer, "bos_token", None)
        has_begin_token = begin_token is not None and begin_token != "" and text.startswith(begin_token)
        first_piece, *other_pieces = cut(text, breaks)
        ids = self._encoded([first_piece], special_tokens=begins and not has_begin_token)
        if other_pieces:
            ids += self._encoded(other_pieces, special_tokens=False)
        return np.asarray(ids, np.int32)

    def _encoded(self, texts: list[str], special_tokens: bool) -> list[int]:
        """Return the token ids of all texts end to end."""
        token_ids: list[int] = []
        if self._backend is None:
            for text in texts:
                token_ids += self._tokenizer.encode(text, add_special_tokens=special_tokens)
            return token_ids
        for first in range(0, len(texts), PIECES_PER_CALL):
            # The backend works on a batch without holding Python's lock, but takes and returns it with the lock
            encodings = self._backend.encode_batch_fast(
                texts[first : first + PIECES_PER_CALL], add_special_tokens=special_tokens
            )
            num_new_tokens = sum(len(encoding) for encoding in encodings)
            if len(token_ids) + num_new_tokens > self._longest:
                raise TrajectoryOver(too_long(self._longest))
            for encoding in encodings:
                token_ids += encoding.ids
        return token_ids

    def decode(self, token_ids: np.ndarray, after: np.ndarray) -> str:
        """Return the text of tokens that follow the tokens `after`."""
        context = after[-LOOK_BACK_TOKENS:].tolist()
        text_with_context = self._decoded([*context, *token_ids.tolist()])
        return text_with_context[len(self._decoded(context)) :]

    def _decoded(self, token_ids: list[int]) -> str:
        cleans_up_spaces = getattr(self._tokenizer, "clean_up_tokenization_spaces", False)
        if self._backend is None or cleans_up_spaces:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=False)
        return text


def _with_parsed_arguments(message: Message) -> dict[str, Any]:
    """Return a message with the arguments of its calls as objects, which templates expect; OpenAI's API has JSON texts."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str | bytes):
            # A text that is no JSON, or is nested too deeply, stays a text
            with suppress(ValueError):
                function["arguments"] = parse_json(arguments)
        calls.append({**call, "function": function})
    if not calls:
        return dict(message)
    return {**message, "tool_calls": calls}


def too_long(tokens: int) -> str:
    """Return a limit of tokens with the option that sets it."""
    return f"{tokens} tokens (--max-generation-tokens, and the prompt)"


def message_of(text: str, turn: int = 0) -> dict[str, Any]:
    """Return a turn of the policy as a message, with its calls of tools taken out of the text.

    Args:
        text: The sampled text without its end token.
        turn: Number of the turn, a part of the calls' ids.

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
            # Without other calls, the message keeps the text, and the program can answer that it is no call
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
    """Return the text without the calls, and the calls. A call stands in braces between two tags, and contains no tag.

    This takes linear time. A regular expression would hold Python's lock while it searches a long text.

    >>> take_out_calls("a<tool_call> {1} </tool_call>b<tool_call>{2}<tool_call>c</tool_call>")
    ('ab<tool_call>{2}<tool_call>c</tool_call>', ['{1}'])
    """
    texts: list[str] = []
    calls: list[str] = []
    text_begin = 0  # of the text that is not in `texts` yet
    begin = text.find(BEGIN_CALL)
    while begin >= 0:
        end = text.find(END_CALL, begin + len(BEGIN_CALL))
        if end < 0:
            break
        # The last tag before the end, so that the call contains no tag
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
    """Return the text up to the first of the `stop` texts.

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
    """Return a key by which a message of the policy is recognized, whatever fields a client has added to it."""
    calls = []
    for call in message.get("tool_calls") or ():
        if isinstance(call, Mapping):
            function = call.get("function", {})
            calls.append([call.get("id"), function.get("name"), function.get("arguments")])
    return json.dumps([message.get("content") or "", calls])
