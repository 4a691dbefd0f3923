"""The walls of the training room: what the loop asks of the other rooms, and nothing more."""

from typing import Any, Protocol

from async_grpo.modeling.policy import PolicyModel
from async_grpo.types import MicroBatch, StepEnd


class ExperienceSource(Protocol):
    """Hands out the micro-batches of each step; every rank gets equally many between two StepEnds."""

    def start(self) -> None:
        """Begin to generate. Called once on every rank, after the first weights are live."""

    def next_message(self, rank: int) -> MicroBatch | StepEnd:
        """The next message for `rank`; waits for it, and raises when its deadline passes."""


class WeightPublisher(Protocol):
    """Brings the policy's weights to the engines and proves that they landed."""

    def publish(self, model: PolicyModel, version: int, *, self_test: bool) -> dict[str, float]:
        """Publish `model` as `version`; a collective, called on every rank. Returns metrics of the transfer.

        self_test: first change every tensor visibly and check that the engines notice.
        """


class MetricsSink(Protocol):
    """Where a step's line goes; called on rank 0 only."""

    def write(self, line: dict[str, Any]) -> None: ...


class StepHook(Protocol):
    """Something to do after a step, such as an evaluation; called on every rank, new weights live."""

    def on_step(self, step: int) -> dict[str, float]:
        """`step` optimizer steps are completed; what is returned joins the step's metrics line."""


class NoHook:
    """Nothing to do after a step."""

    def on_step(self, step: int) -> dict[str, float]:
        return {}
