"""The training loop: take what experience has, step, publish, write it down."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from async_grpo.errors import RunFailed
from async_grpo.messages import SaveRequested, StepEnd, WorkersJoined
from async_grpo.metrics.spans import Span
from async_grpo.modeling.policy import PolicyModel
from async_grpo.processes.waits import waiting
from async_grpo.protocols import ExperienceSource, Proof, WeightPublisher
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.checkpoint import Checkpointer
from async_grpo.training.distributed import Ranks
from async_grpo.training.export import ModelExporter

TRAINED_NOTHING = (
    "the step trained nothing: every token of it was left out of the loss (see num_non_masked_tokens, rejected_share and "
    "reward counts; --mask-truncated, --max-token-staleness, --rejection-* and --zero-variance leave tokens out)"
)
DURING_STEP = ("waiting_for_experience", "computing", "publishing_weights")
AFTER_STEP = ("evaluating", "checkpointing")  # not part of `time_per_batch`; not every rank has a part in it
KINDS = dict(zip((*DURING_STEP, *AFTER_STEP), ("wait", "train", "sync", "evaluate", "save"), strict=True))
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
    exporter: ModelExporter
    ranks: Ranks
    num_steps: int
    after_step: AfterStep = lambda step: {}
    overlaps: Overlaps = lambda step: False
    saves_after: Overlaps = lambda step: False  # a checkpoint of that step
    checkpointer: Checkpointer | None = None
    write: WriteLine = lambda line: None  # only rank 0 writes
    version: int = 0  # optimizer steps completed
    samples: int = 0  # trained on
    end_reason: str = ""  # why the run ends before its time
    _proof: Proof = dict  # of the last weights published

    def run(self) -> None:
        """Publish the weights, train to `num_steps`, or until it is to end, and leave checkpoint and model."""
        self._proof = self.publisher.publish(self.policy, self.version, self_test=True)
        self._proof()
        self.source.start()
        while self.version < self.num_steps:
            clock = StepClock(self.ranks)
            end = self._accumulate_until_step_end(clock)
            if end is None:
                return
            with clock.measure("publishing_weights"):
                metrics: dict[str, Any] = dict(self._proof())  # no step on top of weights that did not land
            with clock.measure("computing"):
                metrics |= self.accumulator.finish()
            self.version += 1
            self.samples += end.num_samples
            with clock.measure("publishing_weights"):
                self._proof = self.publisher.publish(self.policy, self.version, self_test=False)
                if not self.overlaps(self.version) or self.exporter.is_due(self.samples):
                    metrics |= self._proof()  # what follows speaks of a proven policy
            clock.stop()
            with clock.measure("evaluating"):
                metrics |= self.after_step(self.version)
            with clock.measure("checkpointing"):
                self._save_if_due()
            self._write_line(end, metrics | clock.report())
        self._finish()

    def _finish(self) -> None:
        wait = self.checkpointer.wait if self.checkpointer else bool
        wait()  # or the last one would be left out for the sake of one before it
        self._save()
        self.exporter.save_final(self.policy, self.samples)
        wait()

    def _save_if_due(self) -> None:
        if self.saves_after(self.version) and self.version < self.num_steps:
            self._save()
        self.exporter.save_if_due(self.policy, self.samples)

    def _save(self, end_reason: str = "") -> None:
        if self.checkpointer is None:
            return
        self._proof()  # the groups alive are those of a policy that is live
        self.checkpointer.save(self.version, self.samples, end_reason)
        if end_reason and not self.checkpointer.wait():
            raise RunFailed(f"the run was to end ({end_reason}); its last checkpoint could not be written")

    def _accumulate_until_step_end(self, clock: "StepClock") -> StepEnd | None:
        """The end of the step; None: the run ends before, and what it goes on with is saved."""
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
            if isinstance(message, SaveRequested):
                # Within a step, too: its groups are alive until its weights are, and will be trained on again
                with clock.measure("checkpointing"):
                    self._save(message.end_reason)
                if message.end_reason:
                    self.end_reason = message.end_reason
                    return None
                continue
            with clock.measure("computing"):
                self.accumulator.add(message)

    def _write_line(self, end: StepEnd, metrics: dict[str, Any]) -> None:
        line = {
            **end.stats,
            **metrics,
            "spans": [*end.stats.get("spans", []), *metrics["spans"]],
            "alarms": end.stats.get("alarms", []) + [TRAINED_NOTHING] * bool(metrics.get("update_skipped")),
            "step": self.version,
            "policy_version": self.version,
            "samples_in_batch": end.num_samples,
            "groups_in_batch": end.num_groups,
            "total_samples_accumulated": self.samples,
            "samples_per_second": end.num_samples / metrics["time_per_batch"],
            "timestamp": time.time(),
        }
        if self.ranks.is_main:
            self.write(line)


class StepClock:
    """Where the seconds of a step go on this rank, by cause; its intervals are in Unix time, as other processes' are."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._started, self._time_per_batch = ranks, time.perf_counter(), 0.0
        self._seconds = dict.fromkeys((*DURING_STEP, *AFTER_STEP), 0.0)
        self._spans: list[Span] = []

    @contextmanager
    def measure(self, cause: str) -> Iterator[None]:
        """Add the time of the `with` block, the device's work in it included, to `cause`."""
        wall, start = time.time(), time.perf_counter()
        with waiting("rank", f"rank {self._ranks.rank}", cause):
            yield
            self._ranks.synchronize()
        elapsed = time.perf_counter() - start
        self._seconds[cause] += elapsed
        self._spans.append((f"trainer {self._ranks.rank}", KINDS[cause], wall, wall + elapsed))

    def stop(self) -> None:
        """The step is done: its weights are live, or on their way. What follows is measured apart."""
        self._time_per_batch = time.perf_counter() - self._started

    def report(self) -> dict[str, Any]:
        """A collective: means over the ranks; of what follows the step, the longest of any rank."""
        own = list(self._seconds.values())
        sums, longest = self._ranks.sum_and_max(own[: len(DURING_STEP)], own[len(DURING_STEP) :])
        means = (sums / self._ranks.world_size).tolist()
        seconds = dict(zip(self._seconds, (*means, *longest.tolist()), strict=True))
        return {
            **{f"seconds_{cause}": value for cause, value in seconds.items()},
            "time_per_batch": self._time_per_batch,
            "spans": self._spans,
        }
