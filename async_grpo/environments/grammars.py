"""`OutputGrammars`: the grammars that engines enforce in turns whose form a request requires.

A grammar is made and compiled in a separate process (`inference.output_grammars`), before an engine sees it.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from async_grpo.environments.call_formats import HARMONY_CHANNEL, THOUGHT_TAGS
from async_grpo.environments.call_reader import MEMORY_LIMIT_BYTES, NONE, CallReader
from async_grpo.environments.processes import EnvironmentFailed, EnvironmentProcess
from async_grpo.environments.typed_output import TypedOutput
from async_grpo.errors import ConfigurationError, RequestRefused
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.options.source_file import SourceFile

COMPILE_S = 20.0  # maximum seconds to make and compile a grammar. The engine compiles it once more
MAX_GRAMMARS = 256  # number of grammars that are remembered
FREE_INSTEAD = "leave it out, or start the run with --typed-output hint"
# Control token around answers -> the family of models that writes it. Answers of these families are not plain text
FRAMED_ANSWERS = {HARMONY_CHANNEL: "gpt-oss", "<|START_RESPONSE|>": "Cohere Command"}


class GrammarProcess(EnvironmentProcess):
    """The process that makes grammars."""

    kind = "the process of"
    host = "async_grpo.inference.output_grammars:hosted_grammars"
    start_timeout_s = 300.0  # importing vLLM takes seconds, and minutes on a busy machine


@dataclass(frozen=True)
class Thought:
    """The tags of a thought that comes before an answer; both "" if there is none.

    Attributes:
        begin: Text with which the policy may begin a thought; "" if the prompt has already begun the thought.
        end: Text with which the thought ends.
    """

    begin: str = ""
    end: str = ""


def thought_before_answer(prompt_text: str, template_text: str) -> Thought:
    r"""Return the thought that the policy may have before its answer.

    Args:
        prompt_text: The text that the policy continues.
        template_text: The chat template.

    >>> thought_before_answer("<|im_start|>assistant\n<think>\n", "")
    Thought(begin='', end='</think>')
    """
    ending = prompt_text[-80:].rstrip()
    for begin, end in THOUGHT_TAGS:
        if ending.endswith(begin):
            return Thought(end=end)
        # If the policy must not think, the template ends the prompt with an empty thought, which is already closed
        if ending.endswith(end):
            return Thought()
    for begin, end in THOUGHT_TAGS:
        if begin in template_text or end in template_text:
            return Thought(begin, end)
    return Thought()


class OutputGrammars:
    """Makes grammars, and remembers them.

    Args:
        reader: Reads the policy's calls, and knows their format.
        prompts: The chat template.
    """

    def __init__(self, reader: CallReader, prompts: PromptRenderer) -> None:
        self._reader = reader
        self._prompts = prompts
        self._process: GrammarProcess | None = None
        self._grammars: dict[str, asyncio.Task[str]] = {}

    async def grammar_of(
        self, typed: TypedOutput, tools: Sequence[Mapping[str, Any]] | None, prompt_text: str
    ) -> str:
        """Return the grammar of a turn, the JSON text of a structural tag of xgrammar.

        Args:
            typed: The form that the turn must have.
            tools: JSON schemas of the tools that the policy may call.
            prompt_text: The text that the policy continues.

        Raises:
            RequestRefused: The form cannot be enforced.
        """
        fields = await self._request_fields(typed, tools or (), prompt_text)
        key = json.dumps(fields)
        if key not in self._grammars:
            if len(self._grammars) >= MAX_GRAMMARS:
                # Delete the oldest grammar, which is the first one, because dictionaries keep the order of insertion
                del self._grammars[next(iter(self._grammars))]
            task = asyncio.ensure_future(self._made(fields))
            self._grammars[key] = task
            task.add_done_callback(partial(self._forget_failure, key))
        return await asyncio.shield(self._grammars[key])

    def _forget_failure(self, key: str, task: asyncio.Task[str]) -> None:
        """Forget a grammar that could not be made, so that the next request tries again.

        The machine may have been busy, or another schema may have ended the process.
        """
        has_failed = task.cancelled() or task.exception() is not None
        if has_failed and self._grammars.get(key) is task:
            del self._grammars[key]

    async def _request_fields(
        self, typed: TypedOutput, tools: Sequence[Mapping[str, Any]], prompt_text: str
    ) -> dict[str, Any]:
        """Return the fields of a `GrammarRequest`."""
        field_name = "tool_choice" if typed.required_tools else "response_format"
        for mark, family in FRAMED_ANSWERS.items():
            if mark in self._prompts.template_text:
                raise RequestRefused(
                    f"{field_name}: the form of an answer cannot be enforced for {family}, whose answers stand between "
                    f"control tokens: {FREE_INSTEAD}"
                )
        thought = thought_before_answer(prompt_text, self._prompts.template_text)
        if not thought.end and self._reader.has_vllm_reasoning_parser:
            raise RequestRefused(
                f"{field_name}: it is not known where the thought of this model ends (--reasoning-parser): {FREE_INSTEAD}"
            )
        callable_tools: list[Mapping[str, Any]] = []
        for tool in tools:
            function = tool.get("function", {})
            if not typed.required_tools or function.get("name") in typed.required_tools:
                callable_tools.append(tool)
        call_format = await self._reader.call_format() if callable_tools else None
        if call_format is None:
            if typed.required_tools:
                raise RequestRefused(
                    f"{field_name}: a call cannot be required, because calls stay text (--tool-parser {NONE})"
                )
            callable_tools = []
        return {
            "schema": typed.schema,
            "tools": callable_tools,
            "tool_parser": call_format,
            "has_one_call": typed.has_one_call,
            "thought_begin": thought.begin,
            "thought_end": thought.end,
        }

    async def _made(self, fields: Mapping[str, Any]) -> str:
        """Return the grammar that the process makes.

        Raises:
            RequestRefused: The grammar cannot be made, or takes too long.
        """
        process = self._grammar_process()
        # The time limit does not include the start, which raises a helpful error if vLLM is not installed
        await process.start()
        try:
            answer = await process.ask("grammar", 0, dict(fields), timeout_s=COMPILE_S)
        except EnvironmentFailed as error:
            raise RequestRefused(
                f"the form of the answer cannot be enforced: {error}; simplify it, or start the run with "
                "--typed-output hint"
            ) from error
        return answer["grammar"]

    def _grammar_process(self) -> GrammarProcess:
        if self._process is None:
            if self._reader.model_path is None:
                raise ConfigurationError("grammars of answers need the folder of the model")
            self._process = GrammarProcess(
                SourceFile(module_name="", text="", path="", name=""),
                "grammars of answers",
                {"model_path": self._reader.model_path},
                memory_limit_bytes=MEMORY_LIMIT_BYTES,
            )
        return self._process

    async def close(self) -> None:
        """End the process."""
        for task in list(self._grammars.values()):
            task.cancel()
        if self._process is not None:
            await self._process.close()
