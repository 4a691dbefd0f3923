"""How the age of every token is bounded: permission before generating, and a fixed place for every group.

With P groups per optimizer step and at most S steps of staleness, at most (S + 1) * P groups are alive between their
admission and the moment the weights trained on them are live in the engines (`StalenessBudget`). Why that bounds the age:
step k turns version k into k + 1 and takes the groups number k * P ... (k + 1) * P - 1 (`StepAssembler`). When version v
is live, v * P groups have been released, so a group i that is admitted now has i < (v + S + 1) * P: it is trained in a
step of at most v + S, and no token of it is older than v. Letting a younger group overtake would break the bound.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from async_grpo.errors import StalenessViolated
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.packing import Packer
from async_grpo.types import Group, MicroBatch


class StalenessBudget:
    """Counts the groups alive. `admit` waits for a free slot; `weights_live` frees the slots of a finished step."""

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
    """Turns finished groups into optimizer steps of `groups_per_step` each.

    Groups of the current step are packed as they arrive, in any order, or all at once for a batch-coupled estimator.
    """

    def __init__(
        self, groups_per_step: int, max_staleness: int, packer: Packer, advantages: GroupAdvantages
    ) -> None:
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.packer, self.advantages = packer, advantages
        self.step = 0  # the step being filled; it trains policy version `step`
        self._taken: list[Group] = []  # of this step, with their advantages
        # By step: for their turn, or for the rest of their minibatch
        self._waiting: defaultdict[int, list[Group]] = defaultdict(list)

    def offer(self, group: Group) -> list[Event]:
        """A group is complete. Returns what follows from it, in order."""
        step = group.sequence_number // self.groups_per_step
        assert step >= self.step, f"group {group.sequence_number} comes after its step {step} closed"
        self._waiting[step].append(group)
        enough = 1 if self.advantages.group_local else self.groups_per_step
        events: list[Event] = []
        while len(self._waiting[self.step]) >= enough:
            ready = self._waiting.pop(self.step)
            for finished in ready:
                self._assert_fresh(finished)
            ready = self.advantages(ready, self.step)
            self._taken += ready
            trained = [s for finished in ready for s in finished.samples if s.advantages is not None]
            events += filter(None, map(self.packer.add, trained))
            if len(self._taken) == self.groups_per_step:
                events += filter(None, [self.packer.flush()])
                events.append(StepComplete(self.step, self._taken))
                self.step, self._taken = self.step + 1, []
        return events

    def _assert_fresh(self, group: Group) -> None:
        age = self.step - group.oldest_version
        if not 0 <= age <= self.max_staleness:
            raise StalenessViolated(
                f"group {group.sequence_number} (admitted under version {group.admitted_version}) holds a token of version "
                f"{group.oldest_version}, but step {self.step} allows {self.max_staleness} steps of staleness"
            )
