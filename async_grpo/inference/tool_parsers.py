"""Reads tool calls with vLLM's own parsers, in a separate process (see `environments.call_reader`).

The requests that the process receives, and its answers:

    {"call": "choose", "arguments": [probes, tools]}         ->  names of the parsers that read every probe correctly
    {"call": "check", "arguments": [*names]}                 ->  fails if the parsers of these names cannot be used
    {"call": "read", "arguments": [*names, text, tools]}     ->  thought, content and calls of a turn

`names` are the names of a tool parser and of a reasoning parser. Each of them may be None.

The process is separate for three reasons: importing vLLM takes seconds, a parser may take any time for a text of the
policy, and the controller's Python may have no vLLM.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.load import load_tokenizer
from async_grpo.rewards.adapter.decorators import AdapterTraits
from async_grpo.rewards.adapter.result import describe, failure
from async_grpo.rewards.isolation.child import Answers
from async_grpo.rewards.isolation.lines import Message

# A text, and the calls that a parser should find in it: (name, arguments) each
Probe = tuple[str, Sequence[tuple[str, dict[str, Any]]]]


# vLLM's parsers of Llama's formats. They skip a JSON object that follows another one without a space
LLAMA_PARSERS = ("llama3_json", "llama4_json")


def hosted_parsers(greeting: Message) -> tuple[bool, Callable[[], "ToolParserHost"]]:
    """Return False, because the host is not async, and a function that creates it (see `isolation.child.Host`)."""
    logging.disable()  # parsers would log each text that they cannot read
    return False, partial(ToolParserHost, **greeting["options"])


class ToolParserHost:
    """A `Host` that reads turns of the policy.

    Args:
        model_path: Folder of the model, whose tokenizer the parsers use.

    Raises:
        ConfigurationError: vLLM cannot be imported.
    """

    def __init__(self, model_path: str) -> None:
        try:
            from vllm.parser import ParserManager
            from vllm.reasoning import ReasoningParserManager
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ConfigurationError(
                f"vLLM, whose tool parsers are needed, cannot be imported: {error}"
            ) from error
        self.traits = AdapterTraits()
        self._manager = ParserManager
        self._tokenizer = load_tokenizer(model_path)
        self._tool_parsers = sorted(ToolParserManager.lazy_parsers)
        self._reasoning_parsers = sorted(ReasoningParserManager.lazy_parsers)

    def _parser_class(self, tool_parser: str | None, reasoning_parser: str | None = None) -> Any:
        return self._manager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=tool_parser is not None,
        )

    async def call(self, method: str, *arguments: Any) -> None:
        """Do nothing, because there is nothing to warm up or close."""

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """Return one answer to each request. See `Host`."""
        return [[self._reply(request["sample"])] for request in requests]

    def _reply(self, request: Message) -> dict[str, Any]:
        try:
            methods: dict[str, Callable[..., dict[str, Any]]] = {
                "choose": self._choose,
                "check": self._check,
                "read": self._read,
            }
            return {"status": "ok"} | methods[request["call"]](*request["arguments"])
        except Exception as error:
            return failure(describe(error))

    def _choose(self, probes: Sequence[Probe], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"names": [name for name in self._tool_parsers if self._reads_all(name, probes, tools)]}

    def _check(self, tool_parser: str | None, reasoning_parser: str | None) -> dict[str, Any]:
        """Raise ConfigurationError if vLLM has no parsers of these names, or they do not fit the model's tokenizer."""
        _check_name("--tool-parser", tool_parser, self._tool_parsers)
        _check_name("--reasoning-parser", reasoning_parser, self._reasoning_parsers)
        # A parser refuses a tokenizer that lacks its control tokens. The exception may be of any class
        try:
            self._parser_class(tool_parser, reasoning_parser)(self._tokenizer)
        except Exception as error:
            names = " and ".join(filter(None, (tool_parser, reasoning_parser)))
            raise ConfigurationError(
                f"the parser {names} does not fit the model's tokenizer: {error}"
            ) from error
        return {}

    def _read(
        self,
        tool_parser: str | None,
        reasoning_parser: str | None,
        text: str,
        tools: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        if tool_parser in LLAMA_PARSERS:
            text = with_spaces_between_objects(text)
        return self._parsed(self._parser_class(tool_parser, reasoning_parser), text, tools)

    def _reads_all(self, name: str, probes: Sequence[Probe], tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a parser finds exactly the calls of each probe."""
        # Most parsers refuse the tokenizer of another model family, with any class of exception; some need packages
        # that are not installed
        try:
            parser_class = self._parser_class(name)
            for text, expected_calls in probes:
                if name in LLAMA_PARSERS:
                    text = with_spaces_between_objects(text)
                calls = self._parsed(parser_class, text, tools)["calls"]
                found_calls = [[call["name"], json.loads(call["arguments"])] for call in calls]
                if found_calls != [list(call) for call in expected_calls]:
                    return False
        except Exception:
            return False
        return True

    def _parsed(self, parser_class: Any, text: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return thought, content and calls of a text. Each text gets a new parser, because a parser keeps a state."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(
            model="policy", messages=[{"role": "user", "content": ""}], tools=list(tools) or None
        )
        parser = parser_class(self._tokenizer, tools=request.tools)
        thought, content, calls = parser.parse(
            text,
            request,
            enable_auto_tools=bool(tools) and parser_class.tool_parser_cls is not None,
            model_output_token_ids=self._tokenizer.encode(text, add_special_tokens=False),
        )
        return {
            "thought": thought,
            "content": content or "",
            "calls": [{"name": call.name, "arguments": call.arguments} for call in calls or ()],
        }


def _check_name(option: str, name: str | None, known_names: Sequence[str]) -> None:
    if name is not None and name not in known_names:
        raise ConfigurationError(f"{option} {name!r} is unknown; known: {', '.join(known_names)}")


def with_spaces_between_objects(text: str) -> str:
    """Put a space between JSON objects at the beginning of a text that directly follow each other.

    >>> with_spaces_between_objects('{"a": "}{"}{"b": 2} and {"c": 3}{"d": 4}')
    '{"a": "}{"} {"b": 2} and {"c": 3}{"d": 4}'
    """
    decoder = json.JSONDecoder()
    objects: list[str] = []
    begin = 0
    while text.startswith("{", begin):
        try:
            _, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            break
        objects.append(text[begin:end])
        begin = end
    return " ".join(objects) + text[begin:]
