"""`StepAssembler`: the small state machine that turns finished groups into optimizer steps.

    offer(group) -> what the ranks get now, in order:  Round (one micro-batch per rank) ...  Round, StepClosed

Group number i (counted at admission) belongs to step i // P. Groups of the current step are packed the moment they
arrive, in any order; groups of later steps wait for their turn. Nothing else can respect the staleness bound: with
(S + 1) * P groups alive, letting a younger group overtake an older one would make some group S + 1 steps old.
"""

from dataclasses import dataclass

from async_grpo.errors import StalenessViolated
from async_grpo.experience.packing import Packer
from async_grpo.types import Group, MicroBatch


@dataclass(frozen=True)
class Round:
    """One micro-batch for every rank."""

    micro_batches: list[MicroBatch]


@dataclass(frozen=True)
class StepClosed:
    """All groups of `step` have been handed out."""

    step: int
    groups: list[Group]


class StepAssembler:
    """Conserves groups: each one offered is in exactly one step, and every step has exactly `groups_per_step`."""

    def __init__(self, groups_per_step: int, max_staleness: int, packer: Packer) -> None:
        self.groups_per_step, self.max_staleness, self.packer = groups_per_step, max_staleness, packer
        self.step = 0  # the step being filled; it trains policy version `step`
        self._taken: list[Group] = []
        self._early: dict[int, list[Group]] = {}  # finished groups of later steps

    def offer(self, group: Group) -> list[Round | StepClosed]:
        """A group is complete. Returns the events that follow from it."""
        step = group.prompt.ordinal // self.groups_per_step
        assert step >= self.step, (
            f"group {group.prompt.ordinal} was offered twice, or after its step {step} closed"
        )
        if step > self.step:
            self._early.setdefault(step, []).append(group)
            return []
        events = self._take(group)
        while len(self._taken) == self.groups_per_step:
            events.append(self._close())
            for early in self._early.pop(self.step, []):
                events += self._take(early)
        return events

    def _take(self, group: Group) -> list[Round]:
        self._assert_fresh(group)
        self._taken.append(group)
        rounds = [self.packer.add(sample) for sample in group.samples if sample.advantages is not None]
        if len(self._taken) == self.groups_per_step:
            rounds.append(self.packer.flush())
        return [Round(micro_batches) for micro_batches in rounds if micro_batches]

    def _close(self) -> StepClosed:
        closed = StepClosed(self.step, self._taken)
        self.step, self._taken = self.step + 1, []
        return closed

    def _assert_fresh(self, group: Group) -> None:
        age = self.step - group.oldest_version
        if not 0 <= age <= self.max_staleness:
            raise StalenessViolated(
                f"group {group.prompt.ordinal} (admitted under version {group.admitted_version}) holds a token of "
                f"version {group.oldest_version}, but step {self.step} trains version {self.step} with at most "
                f"{self.max_staleness} steps of staleness"
            )
