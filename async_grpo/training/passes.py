"""`Passes`: train each batch several times (`--passes-per-batch`).

Each rank keeps the micro-batches of a batch in main memory. During the first pass, it also keeps the log-probs that the
trainer computed just before each optimizer step. In later passes, these are the log-probs of the old policy: the
denominator of the ratio with `--old-policy current`, and the policy from which `--passes-max-kl` measures the distance.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from async_grpo.algorithm.pass_plan import PassPlan
from async_grpo.messages import FirstPass, Message, MicroBatch, SaveRequested, StepEnd, WorkersJoined
from async_grpo.protocols import ExperienceSource
from async_grpo.training.batch_tensors import BatchTensors


@dataclass
class _Minibatch:
    """The micro-batches that this rank trained in one step of the first pass, with their results."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    # Results of the first pass, in the order of `micro_batches`. The list is shorter until all of them are computed
    results: list[FirstPass] = field(default_factory=list)
    end: StepEnd | None = None  # the message that ended the step; None until it arrives


class Passes:
    """An `ExperienceSource` that returns the micro-batches of each batch several times.

    The first pass returns the messages of another source as they arrive. Each later pass returns the minibatches of the
    batch in a random order, which depends only on the seed, the batch and the pass. All ranks use the same order.

    Args:
        source: The source of the first pass.
        plan: Numbers of minibatches and passes.
        seed: Seed of the order.
        late_workers_wait: Whether workers that join in the middle of the first pass get their weights only at the end
            of the batch. This is necessary with `--weight-sync-deltas`. There, engines get only the difference to the
            weights that were sent last. If a late worker got weights in the middle of the batch, these would be the
            last ones, and the other workers would not have them.
    """

    def __init__(
        self, source: ExperienceSource, plan: PassPlan, seed: int, *, late_workers_wait: bool = False
    ) -> None:
        self._source = source
        self._plan = plan
        self._seed = seed
        self._late_workers_wait = late_workers_wait
        self._minibatches: list[_Minibatch] = []  # the minibatches of the current batch
        self._pass_number = 1
        # Messages of the current later pass that are not returned yet
        self._repeated: deque[Message] = deque()
        # Messages that wait for the end of the batch: requests for a checkpoint, because only then do the engines have
        # the trainer's weights, and because the groups that are alive then are those that a resumed run has to train.
        # With `late_workers_wait`, also the messages about workers that joined
        self._requests: deque[Message] = deque()
        self.start = source.start

    def next_message(self, rank: int) -> Message:
        """Return the next message of a rank; see `ExperienceSource`."""
        if not self._repeated and self._has_finished_pass():
            self._begin_pass()
        if self._repeated:
            return self._repeated.popleft()
        if self._requests and not self._minibatches:
            return self._requests.popleft()
        return self._message_of_first_pass(rank)

    def keep_results(self, batch: BatchTensors) -> None:
        """Keep the results of the first pass for a micro-batch. A call in a later pass does nothing.

        If the loss needs the whole step, this is called only after the last micro-batch of the step.
        """
        if batch.is_repeated or not self._minibatches:
            return
        minibatch = self._minibatches[-1]
        # If this rank got no sample in the step, the trainer computes a dummy micro-batch, which is not among
        # `micro_batches`
        if len(minibatch.results) < len(minibatch.micro_batches):
            minibatch.results.append(first_pass_results(batch))

    def end_batch(self) -> None:
        """Skip the remaining steps of the batch."""
        self._minibatches = []
        self._repeated.clear()
        self._pass_number = 1

    def _message_of_first_pass(self, rank: int) -> Message:
        while True:
            message = self._source.next_message(rank)
            if isinstance(message, MicroBatch):
                self._unfinished_minibatch().micro_batches.append(message)
                return message
            if isinstance(message, StepEnd):
                self._unfinished_minibatch().end = message
                return replace(message, stats={**message.stats, "pass": 1})
            assert isinstance(message, SaveRequested | WorkersJoined), message
            # Workers that join in the middle of a batch get weights at once: if all other engines were lost, the first
            # pass could not end without them. These weights are newer than those at the start of the batch, with which
            # the other engines generate, so no token becomes too old
            is_needed_now = isinstance(message, WorkersJoined) and not self._late_workers_wait
            if is_needed_now or all(minibatch.end is None for minibatch in self._minibatches):
                return message
            self._requests.append(message)

    def _unfinished_minibatch(self) -> _Minibatch:
        """Return the minibatch of the current step. After the end of a step, begin a new one."""
        if not self._minibatches or self._minibatches[-1].end is not None:
            self._minibatches.append(_Minibatch())
        return self._minibatches[-1]

    def _has_finished_pass(self) -> bool:
        """Return whether the messages of all steps of the batch have been returned, up to the `StepEnd` of the last one."""
        is_complete = len(self._minibatches) == self._plan.num_minibatches
        return is_complete and self._minibatches[-1].end is not None

    def _begin_pass(self) -> None:
        """Prepare the messages of the next pass. After the last pass, forget the batch."""
        if self._pass_number == self._plan.num_passes:
            self.end_batch()
            return
        self._pass_number += 1
        first_end = self._minibatches[0].end
        assert first_end is not None
        batch_number = first_end.step // self._plan.num_minibatches
        random = np.random.default_rng([self._seed, batch_number, self._pass_number])
        for position, index in enumerate(random.permutation(self._plan.num_minibatches)):
            minibatch = self._minibatches[index]
            for micro_batch, results in zip(minibatch.micro_batches, minibatch.results, strict=True):
                self._repeated.append(replace(micro_batch, first_pass=results))
            self._repeated.append(self._repeated_end(minibatch, position))

    def _repeated_end(self, minibatch: _Minibatch, position: int) -> StepEnd:
        """Return the `StepEnd` of a step in a later pass.

        It counts 0 groups and 0 samples, because the first pass counted them.
        """
        end = minibatch.end
        assert end is not None
        batch_number = end.step // self._plan.num_minibatches
        steps_in_batch = (self._pass_number - 1) * self._plan.num_minibatches + position
        step = batch_number * self._plan.cycle_steps + steps_in_batch
        later_steps = step - self._plan.first_step(end.step)
        stats = {
            "iteration": batch_number,
            "batch_done": self._plan.ends_cycle(step + 1),
            "pass": self._pass_number,
            **_older(end.stats, later_steps),
        }
        return StepEnd(end.step, num_groups=0, num_samples=0, stats=stats)


def first_pass_results(batch: BatchTensors) -> FirstPass:
    """Return the log-probs before the step, as arrays (N,) on the CPU.

    With a critic, return the inputs of its loss as well.
    """

    def array(values: Tensor | None) -> np.ndarray | None:
        return None if values is None else values[0].detach().cpu().numpy().copy()

    logprobs = batch.logprobs[0].float().cpu().numpy().copy()
    if batch.returns is None:
        return FirstPass(logprobs)
    return FirstPass(logprobs, array(batch.advantages), array(batch.returns), array(batch.old_values))


def _older(stats: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the staleness metrics of a step with the ages of all tokens increased by a number of steps."""
    if "staleness_tokens" not in stats:
        return {}
    ages = {str(int(age) + steps): count for age, count in stats["staleness_tokens"].items()}
    num_tokens = sum(ages.values())
    num_stale = num_tokens - ages.get("0", 0)
    return {
        "staleness_mean": stats["staleness_mean"] + steps,
        "staleness_max": stats["staleness_max"] + steps,
        "staleness_fraction": num_stale / num_tokens,
        "staleness_tokens": ages,
    }
