"""The training loop: take experience, do an optimizer step, publish the weights, write the metrics."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from async_grpo.algorithm.pass_plan import ONE_PASS, PassPlan
from async_grpo.errors import RunFailed
from async_grpo.messages import SaveRequested, StepEnd, WorkersJoined
from async_grpo.metrics.memory_report import COMPARED_AT_STEP, memory_alarms, memory_lines
from async_grpo.metrics.spans import Span
from async_grpo.modeling.policy import PolicyModel
from async_grpo.processes.out_of_memory import naming_out_of_memory
from async_grpo.processes.waits import waiting
from async_grpo.protocols import ExperienceSource, Proof, WeightPublisher
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.checkpoint import Checkpointer
from async_grpo.training.distributed import Ranks
from async_grpo.training.export import ModelExporter
from async_grpo.training.memory_cures import CHECKPOINT, EXPORT, SENDING
from async_grpo.training.moving_reference import KeptWeights

log = logging.getLogger(__name__)
# Alarms for the two reasons why a step does not update the weights
ALL_TOKENS_LEFT_OUT = (
    "the step trained nothing: every token of it was left out of the loss (see num_non_masked_tokens, rejected_share and "
    "reward counts; --mask-truncated, --max-token-staleness, --rejection-* and --zero-variance leave tokens out)"
)
NOT_FINITE = (
    "the step trained nothing: its loss or its gradient was not finite, so the weights were not updated (see "
    "backward_loss, grad_norm and the trainer's log). More such steps in a row than --nonfinite-steps end the run"
)
# Activities within a step, whose times are part of `time_per_batch`
DURING_STEP = ("waiting_for_experience", "computing", "publishing_weights")
# Activities after a step, whose times are not part of `time_per_batch`. Not all ranks take part in these activities
AFTER_STEP = ("evaluating", "checkpointing")
SPAN_KINDS = {
    "waiting_for_experience": "wait",
    "computing": "train",
    "publishing_weights": "sync",
    "evaluating": "evaluate",
    "checkpointing": "save",
}
WriteLine = Callable[[dict[str, Any]], None]
StepCondition = Callable[[int], bool]  # number of completed steps -> bool
# Number of completed steps -> metrics. Called on every rank after the weights of a step are published
AfterStep = Callable[[int], dict[str, float]]


@dataclass
class Trainer:
    """Runs `num_steps` optimizer steps on this rank. Every rank makes the same calls in the same order."""

    policy: PolicyModel
    accumulator: GradientAccumulator
    source: ExperienceSource
    publisher: WeightPublisher
    exporter: ModelExporter
    ranks: Ranks
    num_steps: int
    after_step: AfterStep = lambda step: {}
    # Whether the next step may begin while the weights of this step are still transferred
    overlaps: StepCondition = lambda step: False
    saves_after: StepCondition = lambda step: False  # whether a checkpoint is saved after this step
    plan: PassPlan = ONE_PASS  # after which steps the engines get new weights
    # Weights of a moving reference, or of the old policy of DiffusionNFT; by default none
    reference: KeptWeights = field(default_factory=KeptWeights)
    checkpointer: Checkpointer | None = None
    # Called before new weights are sent. If the engine on this GPU sleeps during training and is about to wake, the
    # function frees unused memory for it
    release_memory: Callable[[], None] = lambda: None
    write: WriteLine = lambda line: None  # writes a metrics line; called only on rank 0
    version: int = 0  # number of completed optimizer steps, which is also the policy version
    samples: int = 0  # number of samples in the completed steps
    end_reason: str = ""  # why the run ended early; "" if it did not
    # Waits for the proof that the last published weights arrived, and returns the metrics of their sync. Before the
    # first sync it is `dict`, which returns {}
    _proof: Proof = dict
    _is_sync_reported: bool = False  # whether a metrics line already contains the metrics of the last sync
    _num_lines: int = 0  # number of metrics lines that this process has written

    def run(self) -> None:
        """Train until `num_steps` steps are completed, and save a last checkpoint and the model.

        If the run is asked to end early, for example by SIGTERM, save only a checkpoint.
        """
        self._begin()
        while self.version < self.num_steps:
            clock = StepClock(self.ranks)
            step_end = self._accumulate_until_step_end(clock)
            if step_end is None:
                return
            metrics = self._take_step(step_end, clock)
            metrics |= self._publish(clock)
            clock.stop()
            with clock.measure("evaluating"):
                metrics |= self.after_step(self.version)
            with clock.measure("checkpointing"):
                self._save_if_due()
            self._write_line(step_end, metrics | clock.report())
        self._finish()

    def _begin(self) -> None:
        """Send the first weights, and let the first completions begin."""
        with naming_out_of_memory("in the self-test of the first weight sync", SENDING):
            self._proof = self._send_after_self_test()
        self.source.start()
        # This takes seconds for a large model. Meanwhile the first completions are generated
        self.accumulator.make_moments()

    def _accumulate_until_step_end(self, clock: "StepClock") -> StepEnd | None:
        """Accumulate gradients until the step ends.

        Returns:
            The message that ended the step. None if the run ends before the end of the step; its last checkpoint is
            then saved.
        """
        while True:
            with clock.measure("waiting_for_experience"):
                message = self.source.next_message(self.ranks.rank)
            if isinstance(message, StepEnd):
                return message
            if isinstance(message, WorkersJoined):
                # The weights do not change within a step, so the gradients that are accumulated so far stay valid
                with clock.measure("publishing_weights"), self._naming_sync():
                    self._send_after_self_test()
            elif isinstance(message, SaveRequested):
                # A checkpoint may be saved in the middle of a step. It contains the groups of this step too, so a
                # resumed run trains on them again
                with clock.measure("checkpointing"):
                    self._save(message.end_reason)
                if message.end_reason:
                    self.end_reason = message.end_reason
                    return None
            else:
                with clock.measure("computing"):
                    self.accumulator.add(message)

    def _send_after_self_test(self) -> Proof:
        """Send the weights of policy and reference to the workers that have no weights of this run yet, with a self-test.

        At the start of a run these are all workers, later those that have just joined.

        Returns:
            The proof of the policy's weights, which this method has waited for.
        """
        wait_for_proof = self.publisher.publish(self.policy, self.version, self_test=True)
        wait_for_proof()
        self.reference.send_after_self_test(self.version)
        return wait_for_proof

    def _take_step(self, step_end: StepEnd, clock: "StepClock") -> dict[str, Any]:
        """Apply the accumulated gradient.

        Return the metrics of this step, and those of the sync of the previous weights.
        """
        with clock.measure("publishing_weights"), self._naming_sync():
            # Wait until the previous weights are proven. If they did not arrive, this raises, and training does not
            # continue
            sync_metrics = self._proof()
        metrics: dict[str, Any] = {} if self._is_sync_reported else dict(sync_metrics)
        self._is_sync_reported = True
        with clock.measure("computing"):
            metrics |= self.accumulator.finish()
        # If `--passes-max-kl` ends the batch early, the version still counts all steps of the batch: the batch's number,
        # the bound on staleness and the learning rate follow from the number of steps
        if metrics.get("passes_stopped"):
            next_version = self.plan.cycle_end(self.version)
            self.accumulator.advance_schedules(next_version - self.version)
            self.version = next_version
        else:
            self.version += 1
        self.accumulator.steps = self.version
        self.samples += step_end.num_samples
        return metrics

    def _publish(self, clock: "StepClock") -> dict[str, Any]:
        """Send the new weights to the engines, and return the metrics of the transfer.

        If the transfer may overlap with the next step, do not wait for it; `_take_step` of the next step then returns
        its metrics. Between the passes over a batch, send nothing.
        """
        if not self.plan.ends_cycle(self.version):
            return {}
        with clock.measure("publishing_weights"), self._naming_sync():
            self.release_memory()
            # Send the reference first. Then groups that start with the new policy are compared with the new reference
            metrics = self.reference.follow(self.version)
            self._proof = self.publisher.publish(self.policy, self.version, self_test=False)
            # If an export follows, wait for the proof first: weights that failed it must not be exported
            may_overlap = self.overlaps(self.version) and not self.exporter.is_due(self.samples)
            self._is_sync_reported = not may_overlap
            return metrics if may_overlap else metrics | self._proof()

    def _naming_sync(self) -> AbstractContextManager[None]:
        """Return a context in which an out-of-memory error says that the weights were being sent."""
        return naming_out_of_memory(f"while the weights of step {self.version} were sent", SENDING)

    def _finish(self) -> None:
        """Save the last checkpoint and the final model."""
        # Wait for an earlier checkpoint first, because `save` does nothing while a checkpoint is being written
        self._wait_for_checkpoint()
        self._save()
        with naming_out_of_memory("while the final model was saved", EXPORT):
            self.exporter.save_final(self.policy, self.samples)
        self._wait_for_checkpoint()

    def _wait_for_checkpoint(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def _save_if_due(self) -> None:
        # Between the passes over a batch, the engines do not have the trainer's weights, so a run could not be resumed from
        # a checkpoint of this step
        if not self.plan.ends_cycle(self.version):
            return
        # Save no checkpoint here after the last step, because `_finish` saves it
        if self.saves_after(self.version) and self.version < self.num_steps:
            self._save()
        with naming_out_of_memory(f"while the model of step {self.version} was saved", EXPORT):
            self.exporter.save_if_due(self.policy, self.samples)

    def _save(self, end_reason: str = "") -> None:
        """Save a checkpoint. If there is a reason to end the run, wait until the checkpoint is written.

        Raises:
            RunFailed: The run is to end, and its last checkpoint could not be written.
        """
        if self.checkpointer is None:
            return
        # The checkpoint also contains groups that are not trained yet. They are saved with this version number, so the
        # engines must already have the weights of this version
        self._proof()
        with naming_out_of_memory(
            f"while the state of step {self.version} was copied for a checkpoint", CHECKPOINT
        ):
            self.checkpointer.save(self.version, self.samples, end_reason)
        if end_reason and not self.checkpointer.wait():
            raise RunFailed(f"the run was to end ({end_reason}); its last checkpoint could not be written")

    def _write_line(self, step_end: StepEnd, metrics: dict[str, Any]) -> None:
        """Write the metrics line of the step, on rank 0."""
        if not self.ranks.is_main:
            return
        alarms = list(step_end.stats.get("alarms", []))
        # The entries of the engines come with the statistics of the step, those of the ranks with the metrics of
        # training
        memory = {**metrics.get("memory", {}), **step_end.stats.get("memory", {})}
        alarms += self._compare_memory(memory)
        if metrics.get("update_skipped") and not metrics.get("passes_stopped"):
            has_tokens = metrics["num_non_masked_tokens"] > 0
            alarms.append(NOT_FINITE if has_tokens else ALL_TOKENS_LEFT_OUT)
        self.write(
            {
                **step_end.stats,
                **metrics,
                "spans": [*step_end.stats.get("spans", []), *metrics["spans"]],
                "memory": memory,
                "alarms": alarms,
                "step": self.version,
                "policy_version": self.version,
                "samples_in_batch": step_end.num_samples,
                "groups_in_batch": step_end.num_groups,
                "total_samples_accumulated": self.samples,
                "samples_per_second": step_end.num_samples / metrics["time_per_batch"],
                "timestamp": time.time(),
            }
        )

    def _compare_memory(self, memory: Mapping[str, Mapping[str, float]]) -> list[str]:
        """Log the memory that each process uses, beside the memory that was planned for it, and return alarms.

        This happens only once, after the first steps. At other steps, return [].
        """
        self._num_lines += 1
        is_last = self.version == self.num_steps
        if self._num_lines != COMPARED_AT_STEP and not (is_last and self._num_lines < COMPARED_AT_STEP):
            return []
        for line in memory_lines(memory):
            log.info("%s", line)
        return memory_alarms(memory)


class StepClock:
    """Measures how long this rank spends on each activity of a step.

    Spans are in Unix time, so that they can be compared with those of other processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._started = time.perf_counter()
        self._time_per_batch = 0.0
        self._seconds = dict.fromkeys((*DURING_STEP, *AFTER_STEP), 0.0)
        self._spans: list[Span] = []

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Add the duration of the `with` block to an activity, including the GPU work that the block starts."""
        begin_unix = time.time()
        begin = time.perf_counter()
        with waiting("rank", f"rank {self._ranks.rank}", activity):
            yield
            self._ranks.synchronize()
        elapsed = time.perf_counter() - begin
        self._seconds[activity] += elapsed
        track = f"trainer {self._ranks.rank}"
        self._spans.append((track, SPAN_KINDS[activity], begin_unix, begin_unix + elapsed))

    def stop(self) -> None:
        """Stop the clock of `time_per_batch`. Call this once the new weights have been sent to the engines."""
        self._time_per_batch = time.perf_counter() - self._started

    def report(self) -> dict[str, Any]:
        """Return the seconds of each activity by its name. A collective.

        Activities within the step have the mean over the ranks, activities after the step the maximum.
        """
        during_step = [self._seconds[activity] for activity in DURING_STEP]
        after_step = [self._seconds[activity] for activity in AFTER_STEP]
        sums, maxima = self._ranks.sum_and_max(during_step, after_step)
        report: dict[str, Any] = {}
        for activity, total in zip(DURING_STEP, sums.tolist(), strict=True):
            report[f"seconds_{activity}"] = total / self._ranks.world_size
        for activity, longest in zip(AFTER_STEP, maxima.tolist(), strict=True):
            report[f"seconds_{activity}"] = longest
        report["time_per_batch"] = self._time_per_batch
        report["spans"] = self._spans
        return report
