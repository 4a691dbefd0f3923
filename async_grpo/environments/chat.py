"""Messages as text and tokens, by the model's own chat template; what the policy said, as a message.

A message of the policy is put into the template as it was sampled, tool calls and thoughts included: whoever talks with it
gets the same message taken apart. What the template makes of it then shows whether it keeps histories as they were.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from jinja2 import TemplateError

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse

Message = Mapping[str, Any]  # as in the API of OpenAI: role, content, tool_calls, tool_call_id
# Of Hermes, Qwen and others. It stops at the next tag, or a babble of tags would take its square in time
TOOL_CALL = re.compile(r"<tool_call>\s*(\{(?:(?!</?tool_call>).)*\})\s*</tool_call>", re.DOTALL)
MOST_CHARACTERS = 64  # of a token, on average
LOOK_BACK = 8  # tokens before a piece, with which it is decoded: some tokenizers drop a first space


class TrajectoryOver(Exception):
    """A limit of the trajectory is reached: its program can only end."""


class Chat:
    """A tokenizer with its chat template. Without one, messages cannot be rendered, texts and tokens can be used.

    Args:
        longest: tokens of a sequence. What is longer for certain is not tokenised, it would hold up the run.
    """

    def __init__(self, tokenizer: Any, longest: int = 1 << 31) -> None:
        self._tokenizer, self._longest = tokenizer, longest
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text that the policy goes on with. ConfigurationError: the template refuses the messages."""
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
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigurationError(f"the chat template refuses these messages: {error}") from error

    def encode(self, text: str, *, begins: bool = False) -> np.ndarray:
        """(N,) int32; special tokens as the text spells them, and if it `begins` a sequence those that the model expects,
        unless it spells the first one itself.

        TrajectoryOver: it is too long.
        """
        if len(text) > MOST_CHARACTERS * self._longest:
            raise TrajectoryOver(too_long(self._longest))
        text = text.encode(errors="replace").decode()  # a lone surrogate, from JSON, is none to a tokenizer
        begins = begins and not text.startswith(getattr(self._tokenizer, "bos_token", None) or "\0")
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=begins), np.int32)

    def decode(self, token_ids: np.ndarray, after: np.ndarray) -> str:
        """The text of tokens that stand `after` others."""
        context = after[-LOOK_BACK:].tolist()
        whole = self._tokenizer.decode([*context, *token_ids.tolist()], skip_special_tokens=False)
        return whole[len(self._tokenizer.decode(context, skip_special_tokens=False)) :]


def _with_arguments(message: Message) -> dict[str, Any]:
    """A message whose calls have their arguments as objects: what templates expect, and OpenAI's API writes as text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        with suppress(ValueError, TypeError, KeyError, RecursionError):  # then it stays as it came
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, **({"tool_calls": calls} if calls else {})}


def too_long(tokens: int) -> str:
    """The limit, by its options."""
    return f"{tokens} tokens (--max-generation-tokens, and the prompt)"


def message_of(text: str, turn: int = 0) -> dict[str, Any]:
    """What was said, without its end token, as a message: calls of tools are taken out, arguments stay JSON in a string.
    `turn`: its number, part of the ids by which the answers to its calls are known.

    >>> message_of('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': '{"a": 1}'}
    >>> message_of("four")
    {'role': 'assistant', 'content': 'four'}
    """
    calls: list[dict[str, Any]] = []
    for found in TOOL_CALL.finditer(text):
        try:
            call = json.loads(found[1])
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, RecursionError):
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
    content = TOOL_CALL.sub("", text).strip()
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def before_any(stop: Sequence[str], text: str) -> str:
    """The text as far as the first of these texts.

    >>> before_any(["Observation:"], "I look. Observation: it")
    'I look. '
    """
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def key_of(message: Message) -> str:
    """By which a message of the policy is known again, whatever else a client has put into it."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    told = [(call.get("id"), *map(call.get("function", {}).get, ("name", "arguments"))) for call in calls]
    return json.dumps([message.get("content") or "", told])
