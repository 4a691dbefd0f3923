"""Bound the age of all tokens: a group needs permission before it is generated, and must be trained by a certain step.

A group is alive from its admission until the weights trained on it are live in the engines (`StalenessBudget`). With P
groups per optimizer step and at most S steps of staleness, at most `capacity` groups are alive, by default (S + 1) * P.
Let `slack` = (S + 1) * P - capacity be the unused part of this bound.

Step k turns policy version k into k + 1 and trains P groups (`StepAssembler`). Group i is due in step (i + slack) // P
and must not be trained later. A group is early from the time when it is placed in a step until the step in which it is
due. At most `slack` groups may be early at the same time.

Why this bounds the age: when version v is live, the v * P groups of steps 0 to v - 1 are no longer alive. At most
`capacity` other groups are alive, so a group i that is admitted now has i < v * P + capacity. Adding `slack` to both
sides gives i + slack < (v + S + 1) * P. So the group is due in step v + S at the latest, and none of its tokens is
older than v.

Why no group is trained too late: the groups that are due in step k or earlier are those with i < (k + 1) * P - slack.
So there are (k + 1) * P - slack of them. By the end of step k, (k + 1) * P groups are trained. At most `slack` of these
are early, which means that they are due after step k. So at least (k + 1) * P - slack trained groups are due in step k
or earlier, and these must be all of them. Without slack, step k trains the groups from k * P to (k + 1) * P - 1.

With several passes over each batch, a "step" of the assembler is a minibatch, and the engines get new weights only at the
end of a cycle. A cycle is all passes over one batch (see `PassPlan`): C optimizer steps, which train K groups. These groups
are alive until the weights after the cycle are live. `max_staleness` still counts optimizer steps: a token of version v may
be trained in the S + 1 steps from v to v + S. Engines get weights only between cycles, so a cycle begins at step v, and
these steps contain (S + 1) // C whole cycles. (A worker that joins within a cycle gets weights from within it. Its tokens
are younger, so the bound holds for them, too.) So at most (S + 1) // C * K groups may be alive, and `slack` is the part of
this number that `capacity` leaves unused.

Why this bounds the age with several passes: cycles and steps are numbered from 0. When version v is live, the K * (v // C)
groups of the first v // C cycles are no longer alive. As above, a group i that is admitted now therefore has
i + slack < K * (v // C + (S + 1) // C). A cycle trains K groups, so the group is due in a cycle with a number below
v // C + (S + 1) // C. Cycle c ends before step (c + 1) * C. So every step that trains the group is below
(v // C + (S + 1) // C) * C, which is at most v + S + 1: no pass trains a token that is more than S steps old.
"""

import asyncio
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass

from async_grpo.algorithm.pass_plan import ONE_PASS, PassPlan
from async_grpo.errors import StalenessViolated
from async_grpo.experience.config import BatchConfig
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.packing import Packer
from async_grpo.messages import MicroBatch
from async_grpo.types import Group


class StalenessBudget:
    """Limits the number of groups that are alive: from their admission until the weights trained on them are live.

    `admit` waits for a free slot, and `weights_live` frees the slots of a finished step.

    Args:
        groups_per_step: Groups that one optimizer step trains (P).
        max_staleness: Steps by which a token may be older than the policy that is trained (S).
        capacity: Maximum number of groups alive. It must be at least the number of groups that are trained between two
            weight syncs (with one pass, P). None means the largest number that the bound allows (with one pass,
            (S + 1) * P). A lower number makes the tokens younger on average.
        plan: Says which optimizer steps train a minibatch, if batches are trained in several passes.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        capacity: int | None = None,
        plan: PassPlan = ONE_PASS,
    ) -> None:
        max_capacity = plan.minibatches_alive(max_staleness) * groups_per_step
        min_capacity = plan.cycle_minibatches * groups_per_step
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.plan = plan
        self.capacity = capacity or max_capacity
        assert min_capacity <= self.capacity <= max_capacity, (min_capacity, capacity, max_capacity)
        self.slack = max_capacity - self.capacity
        self.alive = 0
        self.live_version = 0
        self._slots_freed = asyncio.Condition()

    @property
    def free(self) -> int:
        """Return the number of free slots."""
        return self.capacity - self.alive

    def restore(self, live_version: int, alive: int) -> None:
        """Continue a run in which policy `live_version` was live and `alive` groups were alive."""
        self.live_version = live_version
        self.alive = alive

    async def admit(self) -> int:
        """Wait for a free slot, take it, and return the policy version that is then live."""
        async with self._slots_freed:
            await self._slots_freed.wait_for(lambda: self.free > 0)
            self.alive += 1
            return self.live_version

    async def weights_live(self, version: int, groups: int) -> None:
        """Free the slots of `groups` groups, because policy `version`, which was trained on them, is now live."""
        async with self._slots_freed:
            assert self.live_version <= version, (self.live_version, version)
            assert groups <= self.alive, (groups, self.alive)
            self.live_version = version
            self.alive -= groups
            self._slots_freed.notify_all()


def make_budget(config: BatchConfig) -> StalenessBudget:
    """Return the budget that the options ask for."""
    return StalenessBudget(
        config.groups_per_step,
        config.max_staleness,
        config.groups_alive,
        config.pass_plan,
    )


class FirstStepPace:
    """Limits the completions generated at once to the number that one step needs, until the first step is trained.

    If the engines also computed completions of the second step at this time, those of the first step would take longer,
    on a CPU twice as long. The trainer has nothing to do until the first step's completions are finished.

    Args:
        samples_per_step: Number of completions that one optimizer step trains.
    """

    def __init__(self, samples_per_step: int) -> None:
        self._samples_per_step = samples_per_step
        self._unfinished = 0  # number of admitted completions that are not generated yet
        self._is_over = False  # whether the first step is trained
        self._changed = asyncio.Event()

    async def wait_for_room(self) -> None:
        """Wait until fewer completions than a step needs are being generated, or the first step is trained."""
        while self._unfinished >= self._samples_per_step and not self._is_over:
            self._changed.clear()
            await self._changed.wait()

    def admitted(self, count: int) -> None:
        """Note that this number of completions will be generated."""
        self._unfinished += count

    def generated(self, count: int) -> None:
        """Note that this number of completions was generated."""
        self._unfinished = max(0, self._unfinished - count)
        self._changed.set()

    def end(self) -> None:
        """Note that the first step is trained."""
        self._is_over = True
        self._changed.set()


@dataclass(frozen=True)
class StepComplete:
    """The end of a step: all of its micro-batches have been returned."""

    step: int  # number of the minibatch; with one pass over each batch, it is the number of the step
    groups: list[Group]


# A round of micro-batches, one for each rank, or the end of the step
Event = list[MicroBatch] | StepComplete


class StepAssembler:
    """Turns finished groups into optimizer steps of `groups_per_step` groups, within the staleness bound.

    A finished group is placed in the current step if it is due there. A group that is due later is placed early as long
    as fewer than `slack` groups are early. So every group can be trained by its due step.

    The groups of a step go to the packer one by one as they finish (`streams`), or all at once in the order of
    admission.

    Args:
        budget: The staleness budget, which sets the size of a step, the staleness bound and the slack.
        packer: Receives the samples that are trained on.
        advantages: Turns the verdicts of groups into advantages.
        whole_steps: Pack a step only when all of its groups are finished, so that its micro-batches do not depend on
            the order in which they finish.
    """

    def __init__(
        self,
        budget: StalenessBudget,
        packer: Packer,
        advantages: GroupAdvantages,
        *,
        whole_steps: bool = False,
    ) -> None:
        self.groups_per_step = budget.groups_per_step
        self.max_staleness = budget.max_staleness
        self.plan = budget.plan
        self.slack = budget.slack
        self.packer = packer
        self.advantages = advantages
        self.streams = advantages.group_local and not whole_steps
        self.step = 0  # the step (with several passes, the minibatch) that is being filled
        # finished groups that are not in a step yet, in the order of admission
        self._finished: list[Group] = []
        # groups with a place in this step whose advantages are not computed yet
        self._placed: list[Group] = []
        self._trained: list[Group] = []  # groups of this step whose samples went to the packer
        # due steps of the groups that were placed early
        self._early_groups_due: list[int] = []

    def restore(self, step: int, admitted: int, alive: Collection[int]) -> None:
        """Continue a run at `step`.

        Args:
            step: The step to be filled next.
            admitted: Number of groups admitted so far.
            alive: Sequence numbers of the admitted groups that have not been trained.
        """
        self.step = step
        # All groups with lower numbers were due in an earlier step, so they cannot be early
        first_possibly_early = max(0, step * self.groups_per_step - self.slack)
        self._early_groups_due = []
        for sequence_number in range(first_possibly_early, admitted):
            due = self._due(sequence_number)
            is_trained = sequence_number not in alive
            if is_trained and due > step:
                self._early_groups_due.append(due)

    def offer(self, group: Group) -> list[Event]:
        """Accept a finished group, and end its step if it is the last group of the step.

        Returns:
            For each step that ends, its last rounds of micro-batches and then a `StepComplete`. The list is empty if no
            step ends.

        Raises:
            StalenessViolated: A token is older than the bound allows.
        """
        assert self._due(group.sequence_number) >= self.step, (
            f"group {group.sequence_number} was due in step {self._due(group.sequence_number)}, but step {self.step} is "
            "being filled"
        )
        insort(self._finished, group, key=lambda finished: finished.sequence_number)
        events: list[Event] = []
        # If the first finished group gets no place, no other does, because later groups are not due earlier
        while self._finished and self._claim_place(self._finished[0]):
            self._placed.append(self._finished.pop(0))
            is_whole = len(self._placed) == self.groups_per_step
            if self.streams or is_whole:
                events += self._train_placed()
        return events

    def _due(self, sequence_number: int) -> int:
        """Return the last step that may train the group."""
        return (sequence_number + self.slack) // self.groups_per_step

    def _claim_place(self, group: Group) -> bool:
        """Take a place in the current step for the group, if it may be trained in this step.

        It may be trained if it is due in this step. If it is due later, it may be trained as long as fewer than `slack`
        groups are early, and counts as early from then on.

        Returns:
            Whether the group got a place.
        """
        due = self._due(group.sequence_number)
        if due > self.step:
            if len(self._early_groups_due) == self.slack:
                return False
            self._early_groups_due.append(due)
        return True

    def _train_placed(self) -> list[Event]:
        """Compute the advantages of the placed groups, pack their samples, and end the step if it is complete."""
        self._placed.sort(key=lambda group: group.sequence_number)
        for group in self._placed:
            self._refuse_stale(group)
        groups = self.advantages(self._placed, self.plan.last_step(self.step))
        self._placed = []
        self._trained += groups
        for group in groups:
            for sample in group.samples:
                if sample.advantages is None:
                    continue
                for sequence in sample.sequences:
                    self.packer.add(sequence)
        if len(self._trained) < self.groups_per_step:
            return []

        events: list[Event] = [*self.packer.flush(), StepComplete(self.step, self._trained)]
        self.step += 1
        self._trained = []
        self._early_groups_due = [due for due in self._early_groups_due if due > self.step]
        return events

    def _refuse_stale(self, group: Group) -> None:
        # `self.step` is a minibatch, and `last_step` the last step of its cycle: the minibatch is not trained later
        staleness = self.plan.last_step(self.step) - group.oldest_version
        if not 0 <= staleness <= self.max_staleness:
            raise StalenessViolated(
                f"group {group.sequence_number} (started under version {group.start_version}) holds a token of "
                f"version {group.oldest_version}, but step {self.step} allows {self.max_staleness} steps of staleness"
            )
