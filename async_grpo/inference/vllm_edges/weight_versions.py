"""Which policy version sampled each token.

Written for vLLM 0.31. From 0.32 on, `CompletionOutput.weight_versions` says it: spans of output tokens, by the label that
`AsyncLLM.finish_weight_update` was given. 0.31 takes the label and tells nobody. There, this module notes when the label
changed, and compares it with the time at which the engine made each output: no step runs while weights change, and the
monotonic clock is one for all processes of a machine. It replaces methods of the engine's output processor, because only
they see which tokens came with which step.

Not needed any more when no known version lacks `CompletionOutput.weight_versions`.
"""

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestState

TELLS_VERSIONS = any(field.name == "weight_versions" for field in fields(CompletionOutput))
FIRST_LABEL = "default"  # as vLLM calls the weights of the model's folder


class VersionSpan(NamedTuple):
    """As `vllm.outputs.WeightVersionSpan`: the output tokens [start, end) were sampled by weights of this label."""

    version: str
    start: int
    end: int


class LabelHistory:
    """The labels of an engine's weights, and when each came into use."""

    def __init__(self) -> None:
        self._changes = [(0.0, FIRST_LABEL)]  # (monotonic time, label)

    def change(self, label: str) -> None:
        """Note that the weights have this label from now on."""
        self._changes.append((time.monotonic(), label))

    def at(self, moment: float) -> str:
        """Return the label at a moment of the monotonic clock."""
        for since, label in reversed(self._changes):
            if since <= moment:
                return label
        return FIRST_LABEL


def note_versions(engine: AsyncLLM) -> None:
    """Let the outputs of the engine have `weight_versions`, if it does not tell them itself."""
    if not TELLS_VERSIONS:
        note_versions_by_time(engine)


def note_versions_by_time(engine: AsyncLLM) -> None:
    """Let finished and unfinished outputs of the engine have `weight_versions`, by the time of its steps."""
    history = LabelHistory()
    processor = engine.output_processor
    process_outputs = processor.process_outputs
    update_weight_version = engine.update_weight_version

    def process_noted(outputs: Sequence[Any], made_at: float, *further: Any) -> Any:
        label = history.at(made_at)
        for output in outputs:
            state = processor.request_states.get(output.request_id)
            if state is not None and output.new_token_ids:
                _note_label(state, label)
        return process_outputs(outputs, made_at, *further)

    async def update_noted(new_version: str) -> None:
        # Requests are held meanwhile: the steps before have an earlier time, and those after a later one
        await update_weight_version(new_version)
        history.change(new_version)

    processor.process_outputs = process_noted
    engine.update_weight_version = update_noted
    RequestState._new_completion_output = new_output_with_versions


def _note_label(state: RequestState, label: str) -> None:
    """Begin a span at the next token of the request, if the label is a new one."""
    if not hasattr(state, "label_starts"):
        state.label_starts = []
    if not state.label_starts or state.label_starts[-1][0] != label:
        state.label_starts.append((label, state.detokenizer.num_output_tokens()))


def version_spans(state: RequestState) -> list[Any] | None:
    """Return the spans of the tokens that a request has so far; None if no label was noted."""
    if TELLS_VERSIONS:
        return state._weight_version_spans()
    starts = getattr(state, "label_starts", [])
    if not starts:
        return None
    ends = [start for _, start in starts[1:]]
    ends.append(state.detokenizer.num_output_tokens())
    return [VersionSpan(label, start, end) for (label, start), end in zip(starts, ends, strict=True)]


_new_completion_output = RequestState._new_completion_output


def new_output_with_versions(self: RequestState, *args: Any, **options: Any) -> CompletionOutput:
    """Replace `RequestState._new_completion_output`: the output has `weight_versions`, as in vLLM 0.32."""
    output = _new_completion_output(self, *args, **options)
    output.weight_versions = version_spans(self)
    return output
