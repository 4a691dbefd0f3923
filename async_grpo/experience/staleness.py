"""How the age of every token is bounded: permission before generating, and a last step for every group.

With P groups per optimizer step and at most S steps of staleness, `capacity` groups (by default (S + 1) * P) are alive
between their admission and the moment the weights trained on them are live in the engines (`StalenessBudget`).
`slack` = (S + 1) * P - capacity is what is left of the bound: so many groups may be trained before their turn.

Step k turns version k into k + 1 and takes P groups (`StepAssembler`). Group i is due in step (i + slack) // P and must
not be trained later. Why that bounds the age: when version v is live, v * P groups have been released, so a group i that
is admitted now has i < v * P + capacity: it is due in step v + S at the latest, and no token of it is older than v.
Why no group comes too late: (k + 1) * P - slack groups are due in step k or before, and of the (k + 1) * P groups that
are trained by its end at most `slack` are due later. Without slack, step k takes the groups k * P ... (k + 1) * P - 1.
"""

import asyncio
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass

from async_grpo.errors import StalenessViolated
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.packing import Packer
from async_grpo.messages import MicroBatch
from async_grpo.types import Group


class StalenessBudget:
    """Counts the groups alive. `admit` waits for a free slot; `weights_live` frees the slots of a finished step.

    `capacity`: how many may be alive, from P to (S + 1) * P; the fewer, the younger are the tokens on average.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, capacity: int | None = None) -> None:
        most = (max_staleness + 1) * groups_per_step
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.capacity = capacity or most
        self.slack = most - self.capacity
        assert groups_per_step <= self.capacity <= most, (groups_per_step, capacity, most)
        self.alive = 0
        self.live_version = 0
        self._freed = asyncio.Condition()

    @property
    def free(self) -> int:
        return self.capacity - self.alive

    def restore(self, live_version: int, alive: int) -> None:
        """Go on where so many groups were alive under that policy."""
        self.live_version, self.alive = live_version, alive

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


Event = list[MicroBatch] | StepComplete  # a round, a micro-batch for each rank; or the end of the step


class StepAssembler:
    """Turns finished groups into optimizer steps of `groups_per_step` each, as fresh as the budget bounds.

    A finished group that is due in the current step takes a place in it; one that is due later does so as long as fewer
    than `slack` such groups have. So a waiting group, finished or not, always finds a place in time. The groups of a
    step go to the packer as they come (`streams`), or all at once, in order of admission.
    """

    def __init__(
        self,
        budget: StalenessBudget,
        packer: Packer,
        advantages: GroupAdvantages,
        *,
        whole_steps: bool = False,
    ) -> None:
        self.groups_per_step, self.max_staleness = budget.groups_per_step, budget.max_staleness
        self.slack, self.packer, self.advantages = budget.slack, packer, advantages
        self.streams = advantages.group_local and not whole_steps
        self.step = 0  # the step being filled; it trains policy version `step`
        self._finished: list[Group] = []  # without a place, in the order of admission
        self._placed: list[Group] = []  # of this step, for the rest of their minibatch
        self._taken: list[Group] = []  # of this step, with their advantages
        self._ahead: list[int] = []  # when the groups are due that have a place before their turn

    def restore(self, step: int, admitted: int, alive: Collection[int]) -> None:
        """Go on with `step`, where of the groups admitted so far those of these sequence numbers were not trained."""
        self.step, first = step, max(0, step * self.groups_per_step - self.slack)
        trained = (number for number in range(first, admitted) if number not in alive)
        self._ahead = [due for due in map(self._due, trained) if due > step]

    def offer(self, group: Group) -> list[Event]:
        """A group is complete. Returns the last rounds and the end of every step that it completes."""
        number = group.sequence_number
        assert self._due(number) >= self.step, f"group {number} comes after step {self.step} began"
        insort(self._finished, group, key=lambda finished: finished.sequence_number)
        events: list[Event] = []
        while self._finished and self._takes_place(self._finished[0]):
            self._placed.append(self._finished.pop(0))
            if self.streams or len(self._placed) == self.groups_per_step:
                events += self._train_placed()
        return events

    def _due(self, sequence_number: int) -> int:
        """The last step that may train the group."""
        return (sequence_number + self.slack) // self.groups_per_step

    def _takes_place(self, group: Group) -> bool:
        if (due := self._due(group.sequence_number)) > self.step:
            if len(self._ahead) == self.slack:
                return False
            self._ahead.append(due)
        return True

    def _train_placed(self) -> list[Event]:
        self._placed.sort(key=lambda group: group.sequence_number)
        for group in self._placed:
            if not 0 <= self.step - group.oldest_version <= self.max_staleness:
                raise StalenessViolated(
                    f"group {group.sequence_number} (admitted under version {group.admitted_version}) holds a token of "
                    f"version {group.oldest_version}, but step {self.step} allows {self.max_staleness} steps of staleness"
                )
        ready, self._placed = self.advantages(self._placed, self.step), []
        self._taken += ready
        for sample in (sample for group in ready for sample in group.samples):
            if sample.advantages is not None:
                for sequence in sample.sequences:
                    self.packer.add(sequence)
        events: list[Event] = []
        if len(self._taken) == self.groups_per_step:
            events += [*self.packer.flush(), StepComplete(self.step, self._taken)]
            self.step, self._taken = self.step + 1, []
            self._ahead = [due for due in self._ahead if due > self.step]
        return events
