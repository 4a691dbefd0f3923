"""Makes the grammar of a typed answer in a separate process, and compiles it there before an engine does.

The request that the process receives, and its answer:

    {"call": "grammar", "arguments": [fields of GrammarRequest]}     ->  the grammar, a structural tag of xgrammar

The process is separate, because a JSON schema may make the compiler crash, or take any time and memory. In this case
only this process ends, and the request is refused. The engine later compiles the same grammar with the same library.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from async_grpo.errors import ConfigurationError, RequestRefused
from async_grpo.inference.enforceable_schemas import (
    refuse_ignored_keywords,
    refuse_without_answers,
    with_lengths_as_patterns,
)
from async_grpo.modeling.load import load_tokenizer
from async_grpo.processes.untrusted_files import is_deeper
from async_grpo.rewards.adapter.decorators import AdapterTraits
from async_grpo.rewards.adapter.result import describe, failure
from async_grpo.rewards.isolation.child import Answers
from async_grpo.rewards.isolation.lines import Message

# Maximum number of white-space characters in a row between two parts of JSON, enough for an indentation. Without a
# limit, a policy that hesitates could write white space up to the last token of its turn
MAX_WHITE_SPACE = 40
# Maximum depths of objects and lists. vLLM 0.32 refuses schemas and grammars that are nested deeper, because they take long
# to compile. vLLM 0.31 does not, so this process checks them
MAX_SCHEMA_DEPTH = 64
MAX_GRAMMAR_DEPTH = 80
# White space that may stand between a thought and the answer
AFTER_THOUGHT = {"type": "regex", "pattern": "[ \\n]{0,4}"}


@dataclass(frozen=True)
class GrammarRequest:
    """The required form of a turn of the policy.

    Attributes:
        schema: JSON text of the schema of an answer; "" if the turn must consist of calls.
        tools: JSON schemas of the tools that the turn may call. With both tools and a schema, the turn may be calls or
            an answer.
        tool_parser: Name of vLLM's tool parser for the format of the calls; None without tools.
        has_one_call: Whether the turn may have at most one call.
        thought_begin: Text with which a thought begins; "" if the prompt has already begun one.
        thought_end: Text with which a thought ends; "" if there is no thought before the answer.
    """

    schema: str
    tools: Sequence[Mapping[str, Any]]
    tool_parser: str | None
    has_one_call: bool
    thought_begin: str
    thought_end: str


def hosted_grammars(greeting: Message) -> tuple[bool, Callable[[], "GrammarHost"]]:
    """Return False, because the host is not async, and a function that creates it (see `isolation.child.Host`)."""
    logging.disable()
    return False, partial(GrammarHost, **greeting["options"])


class GrammarHost:
    """A `Host` that makes grammars.

    Args:
        model_path: Folder of the model, for whose tokenizer grammars are compiled.

    Raises:
        ConfigurationError: vLLM or xgrammar cannot be imported.
    """

    def __init__(self, model_path: str) -> None:
        try:
            import xgrammar
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ConfigurationError(
                f"vLLM and xgrammar, which make grammars of answers, cannot be imported ({error}): install them, or give "
                "--typed-output hint"
            ) from error
        self.traits = AdapterTraits()
        self._tool_parsers = ToolParserManager
        self._tokenizer = load_tokenizer(model_path)
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(self._tokenizer),
            max_threads=1,
            cache_enabled=False,
        )

    async def call(self, method: str, *arguments: Any) -> None:
        """Do nothing, because there is nothing to warm up or close."""

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """Return one answer to each request. See `Host`."""
        return [[self._reply(request["sample"])] for request in requests]

    def _reply(self, request: Message) -> dict[str, Any]:
        try:
            return {"status": "ok", "grammar": self._grammar(GrammarRequest(**request["arguments"][0]))}
        except Exception as error:
            return failure(describe(error))

    def _grammar(self, request: GrammarRequest) -> str:
        """Return the grammar as the JSON text of a structural tag.

        Raises:
            RequestRefused: xgrammar does not support the schema, or the format of the calls.
        """
        from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

        answers: list[dict[str, Any]] = []
        if request.schema:
            schema = json.loads(request.schema)
            _refuse_deep_nesting("schema", schema, MAX_SCHEMA_DEPTH)
            refuse_ignored_keywords(schema)
            refuse_without_answers(schema)
            # Some combinations contain a keyword that xgrammar ignores, such as `propertyNames` together with
            # `properties`. vLLM has a list of these combinations
            if has_xgrammar_unsupported_json_features(schema):
                raise RequestRefused(
                    "the schema has keywords that cannot be enforced together, such as a pattern and a length, "
                    "properties and patternProperties, or a format that is not known"
                )
            answers.append(
                {
                    "type": "json_schema",
                    "json_schema": with_lengths_as_patterns(schema),
                    "max_whitespace_cnt": MAX_WHITE_SPACE,
                }
            )
        if request.tools:
            answers.append(self._calls(request))
        tag = {"type": "structural_tag", "format": _after_thought(request, _any_of(answers))}
        _refuse_deep_nesting("grammar", tag, MAX_GRAMMAR_DEPTH)
        grammar = json.dumps(tag)
        try:
            self._compiler.compile_structural_tag(grammar)
        except RuntimeError as error:
            raise RequestRefused(f"xgrammar refuses it: {_reason_of(error)}") from None
        return grammar

    def _calls(self, request: GrammarRequest) -> dict[str, Any]:
        """Return the format of one or several calls, in the notation of the model family."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        tools = []
        for tool in request.tools:
            # Without `strict`, the grammar would allow any JSON as arguments of a call
            function = {**tool["function"], "strict": True}
            if isinstance(function.get("parameters"), dict):
                function["parameters"] = _enforceable_parameters(tool["function"])
            tools.append({**tool, "function": function})
        chat_request = ChatCompletionRequest(
            model="policy",
            messages=[{"role": "user", "content": ""}],
            tools=tools,
            tool_choice="required",
        )
        assert request.tool_parser is not None, "the format of calls is known if there are tools"
        parser_class = self._tool_parsers.get_tool_parser(request.tool_parser)
        # vLLM has no structural tag for the formats of some parsers
        try:
            tag = parser_class(self._tokenizer, chat_request.tools).get_structural_tag(chat_request)
        except ValueError:
            tag = None
        if tag is None:
            raise RequestRefused(
                f"calls in the format {request.tool_parser} cannot be enforced, because vLLM has no grammar of them"
            )
        call_format: dict[str, Any] = tag.model_dump(mode="json")["format"]
        for part in _parts_of(call_format):
            if part.get("type") == "json_schema":
                part["max_whitespace_cnt"] = MAX_WHITE_SPACE
            # A list of calls has this field, and no other part (vLLM 0.31 has no function that sets it)
            if request.has_one_call and "stop_after_first" in part:
                part["stop_after_first"] = True
        return call_format


def _enforceable_parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, without the keywords that a grammar cannot enforce.

    They can be dropped, because the tool itself checks its arguments.

    Raises:
        RequestRefused: Some part of the schema is fulfilled by no finite arguments.
    """
    parameters = function["parameters"]
    try:
        refuse_without_answers(parameters)
    except RequestRefused as refusal:
        raise RequestRefused(f"tool {function.get('name')!r}: {refusal}") from None
    return with_lengths_as_patterns(parameters)


def _parts_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in the format of an answer, without the objects in the schemas that the user wrote."""
    children: Iterable[Any] = ()
    if isinstance(value, list):
        children = value
    elif isinstance(value, dict):
        yield value
        has_schema = "json_schema" in value
        children = () if has_schema else value.values()
    for child in children:
        yield from _parts_of(child)


def _reason_of(error: RuntimeError) -> str:
    """Return the message of an error of xgrammar without its place in the source code."""
    line = str(error).splitlines()[0]
    _, mark, after_file = line.partition(".cc:")
    return after_file.partition(": ")[2] if mark else line


def _refuse_deep_nesting(name: str, value: Any, max_depth: int) -> None:
    """Raise RequestRefused if objects and lists are nested too deeply in a schema or grammar."""
    if is_deeper(value, max_depth):
        raise RequestRefused(
            f"the {name} is nested too deeply: objects and lists may be nested at most {max_depth} levels deep"
        )


def _any_of(formats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def _after_thought(request: GrammarRequest, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the format of an answer that may follow a thought. The thought may be any text."""
    if not request.thought_end:
        return answer
    thought: dict[str, Any] = {
        "type": "sequence",
        "elements": [
            {
                "type": "tag",
                "begin": request.thought_begin,
                "content": {"type": "any_text"},
                "end": request.thought_end,
            },
            AFTER_THOUGHT,
        ],
    }
    if request.thought_begin:
        thought = {"type": "optional", "content": thought}
    return {"type": "sequence", "elements": [thought, answer]}
