"""Messages as text and tokens, by the model's own chat template; what the policy said, as a message.

A message of the policy is put into the template as it was sampled, tool calls and thoughts included: whoever talks with it
gets the same message taken apart. What the template makes of it then shows whether it keeps histories as they were.
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

Message = Mapping[str, Any]  # as in the API of OpenAI: role, content, tool_calls, tool_call_id
BEGIN_CALL, END_CALL = "<tool_call>", "</tool_call>"  # of Hermes, Qwen and others
MOST_CHARACTERS = 64  # of a token, on average
LOOK_BACK = 8  # tokens before a piece, with which it is decoded: some tokenizers drop a first space


class TrajectoryOver(Exception):
    """A limit of the trajectory is reached: its program can only end."""


class Chat:
    """A tokenizer with its chat template. Without one, messages cannot be rendered, texts and tokens can be used.

    Args:
        longest: tokens of a sequence. What is longer for certain is not tokenised, it would hold up the run.
        split_control_tokens: control tokens that a foreign text spells stay text (see `control_tokens`).
    """

    def __init__(self, tokenizer: Any, longest: int = 1 << 31, split_control_tokens: bool = True) -> None:
        self._tokenizer, self._longest = tokenizer, longest
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self.control_tokens = ControlTokens(tokenizer) if split_control_tokens else None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if hasattr(backend, "encode_batch_fast") else None

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the text that the policy goes on with. ConfigurationError: the template refuses the messages."""
        refuse(
            not self._has_template,
            "the tokenizer has no chat template: give tokens, or another model",
        )
        asks = not messages or messages[-1].get("role") != "assistant"
        try:
            return self._tokenizer.apply_chat_template(
                list(map(_with_arguments, messages)),
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=asks,
                continue_final_message=not asks,
            )
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise ConfigurationError(f"the chat template refuses these messages: {error}") from error

    def render_foreign(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_trusted: Sequence[bool] = (),
    ) -> Rendered:
        """Return what `render` does, with breaks in the control tokens that foreign texts spell.

        is_trusted: of each message, whether its control tokens are meant: the policy's words, and the user's own data.

        ConfigurationError: the template refuses the messages, or objects and lists in them are nested too deeply.
        """
        if self.control_tokens is None:
            return Rendered(self.render(messages, tools))
        marker = new_marker()
        marked_messages = list[Message]()
        try:
            for place, message in enumerate(messages):
                trusted = place < len(is_trusted) and is_trusted[place]
                marked = message if trusted else self.control_tokens.marked(_with_arguments(message), marker)
                marked_messages.append(marked)
            marked_tools = self.control_tokens.marked(tools, marker) if tools else None
        except RecursionError as error:
            raise ConfigurationError(
                "objects and lists in the messages or in the tools' descriptions are nested too deeply"
            ) from error
        rendered = without_markers(self.render(marked_messages, marked_tools), marker)
        return self.control_tokens.needed(rendered)

    def breaks_of(self, text: str) -> tuple[int, ...]:
        """Return where a foreign text must be cut, that no control token be found in it."""
        return () if self.control_tokens is None else self.control_tokens.breaks_of(text)

    def encode(self, text: str, *, begins: bool = False, breaks: Sequence[int] = ()) -> np.ndarray:
        """Return the token ids, (N,) int32, with control tokens as the text spells them, but for those at `breaks`.

        begins: it begins a sequence, with the special tokens that the model expects there, unless it spells the first
        one itself.

        TrajectoryOver: it is too long.
        """
        too_many = len(breaks) >= self._longest  # each piece has a token at least
        if too_many or len(text) > MOST_CHARACTERS * self._longest:
            raise TrajectoryOver(too_long(self._longest))
        text = text.encode(errors="replace").decode()  # a lone surrogate, from JSON, is none to a tokenizer
        begins = begins and not text.startswith(getattr(self._tokenizer, "bos_token", None) or "\0")
        first, *others = cut(text, breaks)
        ids = self._encoded([first], special_tokens=begins)
        if others:
            ids += self._encoded(others, special_tokens=False)
        return np.asarray(ids, np.int32)

    def _encoded(self, texts: list[str], special_tokens: bool) -> list[int]:
        """Return the ids of the texts, one after the other. The backend's batches do without Python's lock."""
        if self._backend is None:
            parts = [self._tokenizer.encode(text, add_special_tokens=special_tokens) for text in texts]
            return [token_id for part in parts for token_id in part]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=special_tokens)
        if sum(map(len, encodings)) > self._longest:
            raise TrajectoryOver(too_long(self._longest))
        return [token_id for encoding in encodings for token_id in encoding.ids]

    def decode(self, token_ids: np.ndarray, after: np.ndarray) -> str:
        """Return the text of tokens that stand `after` others."""
        context = after[-LOOK_BACK:].tolist()
        whole = self._decoded([*context, *token_ids.tolist()])
        return whole[len(self._decoded(context)) :]

    def _decoded(self, token_ids: list[int]) -> str:
        cleans = getattr(self._tokenizer, "clean_up_tokenization_spaces", False)
        if self._backend is None or cleans:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=False)
        return text


def _with_arguments(message: Message) -> dict[str, Any]:
    """A message whose calls have their arguments as objects: what templates expect, and OpenAI's API writes as text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str | bytes):
            with suppress(ValueError):  # text that is no JSON, or is nested too deeply, stays text
                function["arguments"] = parse_json(arguments)
        calls.append({**call, "function": function})
    return {**message, **({"tool_calls": calls} if calls else {})}


def too_long(tokens: int) -> str:
    """The limit, by its options."""
    return f"{tokens} tokens (--max-generation-tokens, and the prompt)"


def message_of(text: str, turn: int = 0) -> dict[str, Any]:
    """Return what was said, without its end token, as a message: calls of tools are taken out, their arguments stay JSON.

    turn: its number, part of the ids by which the answers to its calls are known.

    >>> message_of('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': '{"a": 1}'}
    >>> message_of("four")
    {'role': 'assistant', 'content': 'four'}
    """
    calls: list[dict[str, Any]] = []
    beside, call_texts = take_out_calls(text)
    for call_text in call_texts:
        try:
            call = parse_json(call_text)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError):
            continue  # it stays in the text: who asked for a call can say that this is none
        calls.append(
            {
                "id": f"call_{turn}_{len(calls)}",
                "type": "function",
                "function": {"name": str(name), "arguments": json.dumps(arguments)},
            }
        )
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": beside.strip() or None, "tool_calls": calls}


def take_out_calls(text: str) -> tuple[str, list[str]]:
    """Return the text beside the calls, and the calls: what stands in braces between two tags, with no tag in it.

    In linear time, without a regular expression: one would keep Python's lock for all of a long text.

    >>> take_out_calls("a<tool_call> {1} </tool_call>b<tool_call>{2}<tool_call>c</tool_call>")
    ('ab<tool_call>{2}<tool_call>c</tool_call>', ['{1}'])
    """
    beside, calls, at = [], list[str](), 0  # `at`: where what is not yet looked at begins
    begin = text.find(BEGIN_CALL)
    while begin >= 0:
        inside_at = begin + len(BEGIN_CALL)
        end = text.find(END_CALL, inside_at)
        if end < 0:
            break
        begin = text.rfind(BEGIN_CALL, begin, end)  # the last one before the end: no tag in between
        inside = text[begin + len(BEGIN_CALL) : end].strip()
        if len(inside) > 1 and inside.startswith("{") and inside.endswith("}"):
            beside.append(text[at:begin])
            calls.append(inside)
            at = end + len(END_CALL)
        begin = text.find(BEGIN_CALL, end)
    beside.append(text[at:])
    return "".join(beside), calls


def before_any(stop: Sequence[str], text: str) -> str:
    """Return the text as far as the first of these texts.

    >>> before_any(["Observation:"], "I look. Observation: it")
    'I look. '
    """
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def message_key(message: Message) -> str:
    """Return that by which a message of the policy is known again, whatever else a client has put into it."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    described = [
        (call.get("id"), *map(call.get("function", {}).get, ("name", "arguments"))) for call in calls
    ]
    return json.dumps([message.get("content") or "", described])
