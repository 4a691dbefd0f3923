"""How the age of every token is bounded: permission before generating, and a fixed place for every group.

With P groups per optimizer step and at most S steps of staleness, at most (S + 1) * P groups are alive between their
admission and the moment the weights trained on them are live in the engines (`StalenessBudget`). Why that bounds the age:
step k turns version k into k + 1 and takes the groups number k * P ... (k + 1) * P - 1 (`StepAssembler`). When version v
is live, v * P groups have been released, so a group i that is admitted now has i < (v + S + 1) * P: it is trained in a
step of at most v + S, and no token of it is older than v. Nothing but the order of admission can respect the bound: with
(S + 1) * P groups alive, letting a younger group overtake an older one would make some group S + 1 steps old.

S = 0 is the same code: P groups alive, all of them of the version being trained.
"""

import asyncio
from dataclasses import dataclass

from async_grpo.errors import StalenessViolated
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.packing import Packer
from async_grpo.types import Group, MicroBatch


class StalenessBudget:
    """Counts the groups alive. `admit` waits for a free slot; `weights_live` frees the slots of a finished step.

    >>> budget = StalenessBudget(groups_per_step=2, max_staleness=1)
    >>> budget.capacity, budget.free
    (4, 4)
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.capacity = (max_staleness + 1) * groups_per_step
        self.alive = 0
        self.live_version = 0
        self._freed = asyncio.Condition()

    @property
    def free(self) -> int:
        return self.capacity - self.alive

    async def admit(self) -> int:
        """Take one slot, waiting as long as it takes; returns the policy version that is live now."""
        async with self._freed:
            await self._freed.wait_for(lambda: self.free > 0)
            self.alive += 1
            return self.live_version

    async def weights_live(self, version: int, groups: int) -> None:
        """Policy `version`, trained on `groups` groups, now generates: their slots are free."""
        async with self._freed:
            assert self.live_version <= version and groups <= self.alive, (self.__dict__, version, groups)
            self.live_version = version
            self.alive -= groups
            self._freed.notify_all()


@dataclass(frozen=True)
class StepComplete:
    """All groups of `step` have been handed out."""

    step: int
    groups: list[Group]


Event = list[MicroBatch] | StepComplete  # a micro-batch for each rank, or the end of the step


class StepAssembler:
    """Turns finished groups into optimizer steps; each group is in exactly one, and each has `groups_per_step`.

    Group number i (counted at admission) belongs to step i // P. Groups of the current step are packed the moment they
    arrive, in any order; groups of later steps wait for their turn. A batch-coupled estimator needs all P groups at once:
    then nothing is packed before the last of them has arrived.
    """

    def __init__(
        self, groups_per_step: int, max_staleness: int, packer: Packer, advantages: GroupAdvantages
    ) -> None:
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.packer, self.advantages = packer, advantages
        self.step = 0  # the step being filled; it trains policy version `step`
        self._taken: list[Group] = []  # of this step, with their advantages
        self._coupled: list[Group] = []  # of this step, waiting for the others of a batch-coupled estimator
        self._early: dict[int, list[Group]] = {}  # finished groups of later steps

    def offer(self, group: Group) -> list[Event]:
        """A group is complete. Returns what follows from it, in order."""
        step = group.sequence_number // self.groups_per_step
        assert step >= self.step, f"group {group.sequence_number} comes after its step {step} closed"
        if step > self.step:
            self._early.setdefault(step, []).append(group)
            return []
        events = self._take(group)
        while len(self._taken) == self.groups_per_step:
            events.append(StepComplete(self.step, self._taken))
            self.step, self._taken = self.step + 1, []
            for early in self._early.pop(self.step, []):
                events += self._take(early)
        return events

    def _take(self, group: Group) -> list[Event]:
        self._assert_fresh(group)
        self._coupled.append(group)
        missing = self.groups_per_step - len(self._taken) - len(self._coupled)
        if missing and not self.advantages.group_local:
            return []
        groups, self._coupled = self.advantages(self._coupled, self.step), []
        self._taken += groups
        trained = [sample for group in groups for sample in group.samples if sample.advantages is not None]
        rounds = [self.packer.add(sample) for sample in trained]
        if not missing:
            rounds.append(self.packer.flush())
        return [micro_batches for micro_batches in rounds if micro_batches]

    def _assert_fresh(self, group: Group) -> None:
        age = self.step - group.oldest_version
        if not 0 <= age <= self.max_staleness:
            raise StalenessViolated(
                f"group {group.sequence_number} (admitted under version {group.admitted_version}) holds a token of "
                f"version {group.oldest_version}, but step {self.step} trains version {self.step} with at most "
                f"{self.max_staleness} steps of staleness"
            )
