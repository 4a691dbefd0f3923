"""`CallReader`: divides a turn of the policy into thought, content and tool calls, in the format of the model's family.

The format is that of the chat template, unless the user names a parser. It is found by rendering a call with the
template and by looking for a reader that reads it correctly: first the formats that are read in this process
(`call_formats`), then vLLM's tool parsers, in a separate process (`inference.tool_parsers`).
"""

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from async_grpo.environments.call_formats import (
    FORMATS,
    THOUGHT_TAGS,
    FunctionCall,
    ReadTurn,
    split_thought,
)
from async_grpo.environments.processes import EnvironmentFailed, EnvironmentProcess
from async_grpo.errors import ConfigurationError
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.experience.template_turns import (
    CALL_ARGUMENTS,
    CALL_NAME,
    PROBE_TOOLS,
    CallSpelling,
    TurnFrame,
    call_spelling,
    turn_frame,
)
from async_grpo.options.source_file import SourceFile
from async_grpo.processes.offload import offloaded

NONE = "none"  # value of --tool-parser and --reasoning-parser
# Address space of the process of vLLM's parsers. torch and vLLM reserve far more memory than they use
MEMORY_LIMIT_BYTES = 64 * 2**30
CHOOSE_S = 120.0  # maximum seconds for trying all of vLLM's parsers
READ_S = 20.0  # maximum seconds for one turn in the process of vLLM's parsers
# Parsers that are preferred if several of them read the template's call, in this order
PREFERRED = (
    "hermes qwen3_coder mistral llama3_json llama4_json deepseek_v3 deepseek_v31 deepseek_v32 glm45 kimi_k2 minimax_m2"
).split()
# Some templates show tools to the policy, but cannot write its calls. The format of such a template is recognized by a
# text that it contains: text -> name of the parser
FORMATS_BY_MARK = {
    "<|tool_call|>": "granite",
    "functools[": "phi4_mini_json",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "tool_declare<|im_middle|>": "kimi_k2",
    "<tool_call>": "hermes",
}
# Parts of a call that vLLM's parsers do not expect when the chat template is that of Hugging Face
UNREAD_MARKS = ("<|python_start|>", "<|python_end|>")
UNREAD_CALL_ID = re.compile(r"\[CALL_ID\]\w{1,64}")
# Ids that Mistral's models write into their calls. Other families write none, and the ids of Mistral have nine characters
SAMPLED_ID = re.compile(r'(?:\[CALL_ID\]|"id": ?")([a-zA-Z0-9]{9})(?=["\[])')

log = logging.getLogger(__name__)


class ParserProcess(EnvironmentProcess):
    """The process of vLLM's parsers."""

    kind = "the process of"
    host = "async_grpo.inference.tool_parsers:hosted_parsers"
    start_timeout_s = 300.0  # importing vLLM takes seconds, and minutes on a busy machine


class CallReader:
    """Reads turns of the policy.

    Args:
        prompts: The chat template.
        model_path: Folder of the model; None if vLLM's parsers cannot be used.
        tool_parser: Name of a tool parser, as vLLM names it; "none" leaves calls in the text; None chooses the parser of
            the chat template's format.
        reasoning_parser: Name of one of vLLM's reasoning parsers; "none" leaves thoughts in the text; None divides the
            turn at the tags of THOUGHT_TAGS.

    Attributes:
        model_path: Folder of the model.
        num_unread: Number of turns that the parser's process could not read in time.
    """

    def __init__(
        self,
        prompts: PromptRenderer,
        model_path: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self.num_unread = 0
        self._prompts = prompts
        self.model_path = model_path
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._process: ParserProcess | None = None
        self._choice: asyncio.Task[str | None] | None = None

    async def start(self) -> None:
        """Check the parsers that the user named.

        Raises:
            ConfigurationError: vLLM has no parser of this name, or it does not fit the model's tokenizer.
        """
        if _of_vllm(self._tool_parser) or _of_vllm(self._reasoning_parser):
            await self._check_parser(self._tool_parser)

    async def close(self) -> None:
        """End the process of vLLM's parsers."""
        if self._choice is not None:
            self._choice.cancel()
        if self._process is not None:
            await self._process.close()

    async def check_tools(self) -> None:
        """Check that calls of tools can be read. Call this before a turn for which there are tools.

        Raises:
            ConfigurationError: The chat template does not show tools to the policy, or its format of calls is unknown.
        """
        await self.call_format()

    @property
    def has_vllm_reasoning_parser(self) -> bool:
        """Return whether one of vLLM's parsers separates thoughts from answers."""
        return _of_vllm(self._reasoning_parser)

    async def call_format(self) -> str | None:
        """Return the name of the calls' format; None if calls are not read. It is chosen once.

        Raises:
            ConfigurationError: See `check_tools`.
        """
        if self._tool_parser == NONE:
            return None
        if self._tool_parser is not None:
            return self._tool_parser
        if self._choice is None:
            self._choice = asyncio.ensure_future(self._chosen())
            self._choice.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._choice)

    async def _chosen(self) -> str:
        """Choose the format that the chat template uses."""
        if not self._prompts.has_template:
            raise ConfigurationError(
                "there are tools, and the model's tokenizer has no chat template: give --chat-template FILE"
            )
        spelling = call_spelling(self._prompts)
        if not spelling.shows_tools:
            raise ConfigurationError(_no_tools(spelling))
        if spelling.text:
            return await self._reader_of(spelling)
        for mark, name in FORMATS_BY_MARK.items():
            if mark in self._prompts.template_text:
                if _of_vllm(name):
                    await self._check_parser(name)
                return name
        raise ConfigurationError(
            "the chat template shows tools to the policy, but writes no calls, so their format is not known: give "
            f"--tool-parser NAME, or --tool-parser {NONE}, with which calls stay text. {spelling.refusal}".rstrip()
        )

    async def _reader_of(self, spelling: CallSpelling) -> str:
        """Return the name of the first parser that correctly reads the calls that the chat template has written."""
        _, text = split_thought(spelling.text, THOUGHT_TAGS)
        probes: list[tuple[str, tuple[tuple[str, Any], ...]]] = [(text, ((CALL_NAME, CALL_ARGUMENTS),))]
        if spelling.text_of_two:
            _, text_of_two = split_thought(spelling.text_of_two, THOUGHT_TAGS)
            probes.append((text_of_two, 2 * ((CALL_NAME, CALL_ARGUMENTS),)))
        for name, read in FORMATS.items():
            if all(_as_values(read(text)) == calls for text, calls in probes):
                return name
        process = self._parser_process()
        plain_probes = [(_without_unread(text), calls) for text, calls in probes]
        names: list[str] = []
        # If no parser reads two calls in one turn, as with Llama 4, try again with a single call
        while plain_probes and not names:
            try:
                answer = await process.ask("choose", 0, plain_probes, PROBE_TOOLS, timeout_s=CHOOSE_S)
            except EnvironmentFailed as error:
                raise ConfigurationError(
                    f"no tool parser could be chosen: {error}; give --tool-parser NAME"
                ) from error
            names = sorted(answer["names"], key=_preference)
            plain_probes.pop()
        if not names:
            raise ConfigurationError(
                f"the chat template writes calls of tools such as {text[:200]!r}, which none of vLLM's tool parsers "
                f"reads: give --tool-parser NAME, another --chat-template, or --tool-parser {NONE}, with which calls "
                "stay text"
            )
        return names[0]

    async def _check_parser(self, tool_parser: str | None) -> None:
        """Check that vLLM has the tool parser and `--reasoning-parser`, and that they fit the model's tokenizer.

        Raises:
            ConfigurationError: They cannot be used.
        """
        process = self._parser_process()
        await process.start()  # says so if vLLM cannot be imported
        try:
            await process.ask("check", 0, *self._names(tool_parser), timeout_s=CHOOSE_S)
        except EnvironmentFailed as error:
            raise ConfigurationError(f"the turns of the policy cannot be read: {error}") from error

    def _names(self, tool_parser: str | None) -> tuple[str | None, str | None]:
        """Return the names of vLLM's tool parser and reasoning parser that read a turn."""
        return (
            tool_parser if _of_vllm(tool_parser) else None,
            self._reasoning_parser if _of_vllm(self._reasoning_parser) else None,
        )

    def _parser_process(self) -> ParserProcess:
        """Return the process of vLLM's parsers, which starts when it is first asked something."""
        if self._process is None:
            if self.model_path is None:
                raise ConfigurationError("vLLM's tool parsers need the folder of the model")
            self._process = ParserProcess(
                SourceFile(module_name="", text="", path="", name=""),
                "tool parsers",
                {"model_path": self.model_path},
                memory_limit_bytes=MEMORY_LIMIT_BYTES,
            )
        return self._process

    async def read(self, text: str, prompt_text: str, tools: Sequence[Mapping[str, Any]] | None) -> ReadTurn:
        """Return the parts of a turn.

        Args:
            text: The sampled text.
            prompt_text: The text that the policy continued. It may have opened a thought.
            tools: JSON schemas of the tools. Without tools, no calls are looked for.
        """
        name = await self.call_format() if tools else None
        if self._reasoning_parser in (None, NONE):
            uses_frame = name not in FORMATS
            thought, rest = await offloaded(
                len(text), self._without_thought, text, prompt_text, uses_frame=uses_frame
            )
        else:
            turn = await self._read_in_process(text, name, tools or ())
            if _of_vllm(name):
                return turn
            thought = turn.thought
            rest = turn.content
        if name is None:
            return ReadTurn(thought, rest)
        if name in FORMATS:
            turn = await offloaded(len(rest), FORMATS[name], rest)
        else:
            turn = await self._read_in_process(_without_unread(rest), name, tools or ())
            if name == "mistral":
                turn = _with_sampled_ids(turn, rest)
        return turn if turn.thought is not None else replace(turn, thought=thought)

    @cached_property
    def _frame(self) -> TurnFrame:
        if not self._prompts.has_template:
            return TurnFrame()
        try:
            return turn_frame(self._prompts, [tag for tags in THOUGHT_TAGS for tag in tags])
        except ConfigurationError:
            return TurnFrame()

    def _without_thought(self, text: str, prompt_text: str, *, uses_frame: bool) -> tuple[str | None, str]:
        if self._reasoning_parser == NONE:
            return None, text
        if uses_frame:
            parts = self._frame.split(text)
            if parts is not None:
                return parts
        ending = prompt_text[-80:].rstrip()
        is_open = any(ending.endswith(begin) for begin, _ in THOUGHT_TAGS)
        return split_thought(text, THOUGHT_TAGS, is_open)

    async def _read_in_process(
        self, text: str, tool_parser: str | None, tools: Sequence[Mapping[str, Any]]
    ) -> ReadTurn:
        """Return the parts of a text. If the process does not answer in time, the whole text is content."""
        names = self._names(tool_parser)
        try:
            answer = await self._parser_process().ask("read", 0, *names, text, list(tools), timeout_s=READ_S)
        except EnvironmentFailed as error:
            self.num_unread += 1
            if self.num_unread == 1:
                log.warning(
                    "a turn of the policy could not be searched for calls, and counts as text: %s", error
                )
            return ReadTurn(None, text)
        calls = tuple(FunctionCall(call["name"], call["arguments"]) for call in answer["calls"])
        return ReadTurn(answer["thought"], answer["content"], calls)


def _no_tools(spelling: CallSpelling) -> str:
    problem = (
        f"it refuses them: {spelling.refusal}" if spelling.refusal else "its text does not depend on them"
    )
    return (
        f"there are tools, but the chat template does not show them to the policy ({problem}): give --chat-template FILE "
        f"with a template for tools, or another model; for a model that knows its tools without being shown them, "
        f"--tool-parser NAME; or --tool-parser {NONE}, with which calls stay text"
    )


def _of_vllm(name: str | None) -> bool:
    """Return whether this is the name of one of vLLM's parsers, which run in a separate process."""
    return name not in (None, NONE, *FORMATS)


def _as_values(turn: ReadTurn) -> tuple[tuple[str, Any], ...]:
    return tuple((call.name, json.loads(call.arguments)) for call in turn.calls)


def _preference(name: str) -> tuple[int, str]:
    return (PREFERRED.index(name) if name in PREFERRED else len(PREFERRED), name)


def _with_sampled_ids(turn: ReadTurn, text: str) -> ReadTurn:
    """Return the turn with the ids that the policy wrote, if it wrote one for each call."""
    ids = SAMPLED_ID.findall(text)
    if len(ids) != len(turn.calls):
        return turn
    calls = tuple(replace(call, id=call_id) for call, call_id in zip(turn.calls, ids, strict=True))
    return replace(turn, calls=calls)


def _without_unread(text: str) -> str:
    for mark in UNREAD_MARKS:
        text = text.replace(mark, "")
    return UNREAD_CALL_ID.sub("", text)
