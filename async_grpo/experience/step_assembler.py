"""`StepAssembler`: the small state machine that turns finished groups into optimizer steps.

    offer(group) -> what the ranks get now, in order:  MicroBatchRound (one micro-batch per rank) ...  ..., StepComplete

Group number i (counted at admission) belongs to step i // P. Groups of the current step are packed the moment they
arrive, in any order; groups of later steps wait for their turn. Nothing else can respect the staleness bound: with
(S + 1) * P groups alive, letting a younger group overtake an older one would make some group S + 1 steps old.

A batch-coupled estimator needs all P groups at once: then nothing is packed before the last of them has arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from async_grpo.errors import StalenessViolated
from async_grpo.experience.packing import Packer
from async_grpo.types import Group, MicroBatch


@dataclass(frozen=True)
class MicroBatchRound:
    """One micro-batch for every rank."""

    micro_batches: list[MicroBatch]


@dataclass(frozen=True)
class StepComplete:
    """All groups of `step` have been handed out."""

    step: int
    groups: list[Group]


class Advantages(Protocol):
    """Gives the samples of groups their advantages; `group_local`: those of one group at a time will do."""

    @property
    def group_local(self) -> bool: ...

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]: ...


class StepAssembler:
    """Conserves groups: each one offered is in exactly one step, and every step has exactly `groups_per_step`."""

    def __init__(
        self, groups_per_step: int, max_staleness: int, packer: Packer, advantages: Advantages
    ) -> None:
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.packer, self.advantages = packer, advantages
        self.step = 0  # the step being filled; it trains policy version `step`
        self._taken: list[Group] = []  # of this step, with their advantages
        self._awaiting_advantages: list[
            Group
        ] = []  # of this step, waiting for the others of a batch-coupled estimator
        self._early: dict[int, list[Group]] = {}  # finished groups of later steps

    def offer(self, group: Group) -> list[MicroBatchRound | StepComplete]:
        """A group is complete. Returns the events that follow from it."""
        step = group.sequence_number // self.groups_per_step
        assert step >= self.step, (
            f"group {group.sequence_number} was offered twice, or after its step {step} closed"
        )
        if step > self.step:
            self._early.setdefault(step, []).append(group)
            return []
        events: list[MicroBatchRound | StepComplete] = [*self._take(group)]
        while len(self._taken) == self.groups_per_step:
            events.append(self._close())
            for early in self._early.pop(self.step, []):
                events += self._take(early)
        return events

    def _take(self, group: Group) -> list[MicroBatchRound]:
        self._assert_fresh(group)
        self._awaiting_advantages.append(group)
        missing = self.groups_per_step - len(self._taken) - len(self._awaiting_advantages)
        if missing and not self.advantages.group_local:
            return []
        with_advantages, self._awaiting_advantages = self.advantages(self._awaiting_advantages, self.step), []
        self._taken += with_advantages
        trained = [
            sample for group in with_advantages for sample in group.samples if sample.advantages is not None
        ]
        rounds = [self.packer.add(sample) for sample in trained]
        if not missing:
            rounds.append(self.packer.flush())
        return [MicroBatchRound(micro_batches) for micro_batches in rounds if micro_batches]

    def _close(self) -> StepComplete:
        closed = StepComplete(self.step, self._taken)
        self.step, self._taken = self.step + 1, []
        return closed

    def _assert_fresh(self, group: Group) -> None:
        age = self.step - group.oldest_version
        if not 0 <= age <= self.max_staleness:
            raise StalenessViolated(
                f"group {group.sequence_number} (admitted under version {group.admitted_version}) holds a token of "
                f"version {group.oldest_version}, but step {self.step} trains version {self.step} with at most "
                f"{self.max_staleness} steps of staleness"
            )
