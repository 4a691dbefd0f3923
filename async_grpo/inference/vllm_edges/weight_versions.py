"""Record which policy version sampled each token.

Written for vLLM 0.31. The caller passes a version label to `AsyncLLM.finish_weight_update`. From vLLM 0.32 on,
`CompletionOutput.weight_versions` lists spans of output tokens with their label. vLLM 0.31 does not return the label.
For vLLM 0.31, this module records when the label changes, and compares these times with the time of each engine step.
This is exact, because no step runs while weights change, and all processes of a machine share the monotonic clock. The
module replaces methods of the engine's output processor, because only these methods see which step made which tokens.

Not needed any more when all versions in KNOWN_VERSIONS have `CompletionOutput.weight_versions`.
"""

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestState

TELLS_VERSIONS = any(field.name == "weight_versions" for field in fields(CompletionOutput))
FIRST_LABEL = "default"  # vLLM's label for the weights from the model's folder


class VersionSpan(NamedTuple):
    """Like `vllm.outputs.WeightVersionSpan`: weights of this version sampled the output tokens [start, end)."""

    version: str
    start: int
    end: int


class LabelHistory:
    """The version labels of an engine's weights, each with the time of its first use."""

    def __init__(self) -> None:
        self._changes = [(0.0, FIRST_LABEL)]  # (monotonic time, label)

    def change(self, label: str) -> None:
        """Record that the weights have this label from now on."""
        self._changes.append((time.monotonic(), label))

    def at(self, moment: float) -> str:
        """Return the label of the weights that were in use at a time of the monotonic clock."""
        for since, label in reversed(self._changes):
            if since <= moment:
                return label
        return FIRST_LABEL


def note_versions(engine: AsyncLLM) -> None:
    """Add `weight_versions` to the engine's outputs, if this vLLM version does not do so itself."""
    if not TELLS_VERSIONS:
        note_versions_by_time(engine)


def note_versions_by_time(engine: AsyncLLM) -> None:
    """Add `weight_versions` to the engine's finished and unfinished outputs, derived from the times of its steps."""
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
        # No engine step runs during this call, because requests are paused. So the time of the change lies between two
        # steps
        await update_weight_version(new_version)
        history.change(new_version)

    processor.process_outputs = process_noted
    engine.update_weight_version = update_noted
    RequestState._new_completion_output = new_output_with_versions


def _note_label(state: RequestState, label: str) -> None:
    """Begin a new span at the request's next token, if the label has changed."""
    if not hasattr(state, "label_starts"):
        state.label_starts = []
    if not state.label_starts or state.label_starts[-1][0] != label:
        state.label_starts.append((label, state.detokenizer.num_output_tokens()))


def version_spans(state: RequestState) -> list[Any] | None:
    """Return the weight-version spans of the tokens that a request has generated; None if no version was recorded."""
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
    """Replace `RequestState._new_completion_output`: add `weight_versions` to the output, as vLLM 0.32 does."""
    output = _new_completion_output(self, *args, **options)
    output.weight_versions = version_spans(self)
    return output
