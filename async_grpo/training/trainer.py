"""The training loop: take what experience has, step, publish, write it down."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from async_grpo.modeling.policy import PolicyModel
from async_grpo.protocols import ExperienceSource, WeightPublisher
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.checkpoint import CheckpointWriter
from async_grpo.training.distributed import Ranks
from async_grpo.training.step_clock import StepClock
from async_grpo.types import StepEnd, WorkersJoined

TRAINED_NOTHING = (
    "the step trained nothing: every token of it was left out of the loss (see num_non_masked_tokens, rejected_share and "
    "reward counts; --mask-truncated, --max-token-staleness, --rejection-* and --zero-variance leave tokens out)"
)
WriteLine = Callable[[dict[str, Any]], None]
Overlaps = Callable[[int], bool]  # steps done -> is the next one accumulated while the weights travel?
AfterStep = Callable[[int], dict[str, float]]  # steps done -> metrics; on every rank, new weights live


@dataclass
class Trainer:
    """Runs `num_steps` optimizer steps on this rank; every rank runs the same calls in the same order."""

    policy: PolicyModel
    accumulator: GradientAccumulator
    source: ExperienceSource
    publisher: WeightPublisher
    checkpoints: CheckpointWriter
    ranks: Ranks
    num_steps: int
    after_step: AfterStep | None = None
    overlaps: Overlaps = lambda step: False
    write: WriteLine | None = None  # only rank 0 writes
    version: int = 0  # optimizer steps completed
    samples: int = 0  # trained on

    def run(self) -> None:
        """Publish the first weights, train to `num_steps`, and leave a checkpoint of the last ones."""
        proof = self.publisher.publish(self.policy, self.version, self_test=True)
        proof()
        self.source.start()
        while self.version < self.num_steps:
            clock = StepClock(self.ranks)
            end = self._accumulate_until_step_end(clock)
            with clock.measure("publishing_weights"):
                metrics: dict[str, Any] = dict(proof())  # no step on top of weights that did not land
            with clock.measure("computing"):
                metrics |= self.accumulator.finish()
            self.version += 1
            self.samples += end.num_samples
            with clock.measure("publishing_weights"):
                proof = self.publisher.publish(self.policy, self.version, self_test=False)
                if not self.overlaps(self.version) or self.checkpoints.is_due(self.samples):
                    metrics |= proof()  # what follows speaks of a proven policy
            clock.stop()
            with clock.measure("evaluating"):
                metrics |= self.after_step(self.version) if self.after_step else {}
            with clock.measure("checkpointing"):
                self.checkpoints.save_if_due(self.policy, self.samples)
            self._write_line(end, metrics | clock.report())
        self.checkpoints.save_final(self.policy, self.samples)

    def _accumulate_until_step_end(self, clock: StepClock) -> StepEnd:
        while True:
            with clock.measure("waiting_for_experience"):
                message = self.source.next_message(self.ranks.rank)
            if isinstance(message, StepEnd):
                return message
            if isinstance(message, WorkersJoined):
                # The weights are the same throughout a step, and so are gradients
                with clock.measure("publishing_weights"):
                    self.publisher.publish(self.policy, self.version, self_test=True)()
                continue
            with clock.measure("computing"):
                self.accumulator.add(message)

    def _write_line(self, end: StepEnd, metrics: dict[str, Any]) -> None:
        line = {
            **end.stats,
            **metrics,
            "alarms": end.stats.get("alarms", []) + [TRAINED_NOTHING] * bool(metrics.get("update_skipped")),
            "step": self.version,
            "policy_version": self.version,
            "samples_in_batch": end.num_samples,
            "groups_in_batch": end.num_groups,
            "total_samples_accumulated": self.samples,
            "samples_per_second": end.num_samples / metrics["time_per_batch"],
            "timestamp": time.time(),
        }
        if self.ranks.is_main and self.write is not None:
            self.write(line)
