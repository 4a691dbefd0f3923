"""`StalenessBudget`: permission to generate, given before generating, so that no sample is ever born too old.

With P groups per optimizer step and at most S steps of staleness, at most (S + 1) * P groups are alive between their
admission and the moment the weights trained on them are live in the engines. Why that bounds the age: step k turns
version k into k + 1 and takes the groups number k * P ... (k + 1) * P - 1 (`StepAssembler`). When version v is live,
v * P groups have been released, so a group i that is admitted now has i < (v + S + 1) * P: it is trained in a step
of at most v + S, and no token of it is older than v.

S = 0 is the same code: P groups alive, all of them of the version being trained.
"""

import asyncio


class StalenessBudget:
    """Counts the groups alive. `admit` waits for a free slot; `weights_live` frees the slots of a finished step.

    >>> budget = StalenessBudget(groups_per_step=2, max_staleness=1)
    >>> budget.capacity, budget.free
    (4, 4)
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        if groups_per_step < 1 or max_staleness < 0:
            raise ValueError(
                f"impossible budget: {groups_per_step} groups per step, max staleness {max_staleness}"
            )
        self.capacity = (max_staleness + 1) * groups_per_step
        self.alive = 0
        self.live_version = 0
        self._freed = asyncio.Condition()

    @property
    def free(self) -> int:
        return self.capacity - self.alive

    async def admit(self) -> int:
        """Take one slot, waiting as long as it takes (the trainer's own deadlines bound it).

        Returns:
            The policy version that is live now.
        """
        async with self._freed:
            await self._freed.wait_for(lambda: self.free > 0)
            self.alive += 1
            return self.live_version

    async def weights_live(self, version: int, groups: int) -> None:
        """Policy `version`, trained on `groups` groups, now generates: their slots are free."""
        async with self._freed:
            assert self.live_version <= version and groups <= self.alive, (
                self.live_version,
                version,
                groups,
                self.alive,
            )
            self.live_version = version
            self.alive -= groups
            self._freed.notify_all()
