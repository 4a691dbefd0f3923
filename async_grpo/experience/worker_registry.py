"""`WorkerRegistry`: who can work, and who gets the next piece of it.

The unit of admission is one sequence: a worker takes up to `max_sequences` at once, each is given back when it ends.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from async_grpo.errors import WorkerLost
from async_grpo.messages import WorkerInfo
from async_grpo.options.fields import refuse
from async_grpo.options.source_file import find_entry

AFFINITY = 0.25  # of its places or tokens: so much fuller may a worker be that has a request's beginning in its cache


@dataclass
class Member:
    """A registered worker and what it has been given."""

    info: WorkerInfo
    active: bool = False  # gets work; False until it holds the current weights
    is_leaving: bool = False  # never again
    sequences: int = 0  # outstanding
    tokens: int = 0  # outstanding, as estimated when admitted
    column: int = -1  # among the active ones

    def has_room(self, sequences: int) -> bool:
        return self.active and self.sequences + sequences <= self.info.max_sequences


# (workers with room for it, sequences, tokens of all of them) -> the one that gets the work
SchedulingPolicy = Callable[[Sequence[Member], int, int], Member]


def least_loaded(members: Sequence[Member], sequences: int, tokens: int) -> Member:
    """The worker whose fuller resource, places or tokens, would be the emptiest."""

    def load(member: Member) -> float:
        places = (member.sequences + sequences) / member.info.max_sequences
        return max(places, (member.tokens + tokens) / member.info.max_tokens)

    return min(members, key=load)


SCHEDULING_POLICIES: dict[str, SchedulingPolicy] = {"least_loaded": least_loaded}


def scheduling_policy(name: str) -> SchedulingPolicy:
    """The policy that `--scheduling` names: an entry, or FILE.py:NAME of a function of the user's own."""
    return find_entry(name, SCHEDULING_POLICIES, lambda own: own, "scheduling")


@dataclass
class Lease:
    """Work admitted to one worker: `sequences` of `tokens_each` that were not given back yet."""

    member: Member
    sequences: int
    tokens_each: int

    @property
    def worker_id(self) -> str:
        return self.member.info.worker_id


class WorkerRegistry:
    """One per kind of worker ("generation", ...). Synchronous but for `acquire`; must live in one event loop.

    grace_s: how long `acquire` waits while no worker at all is registered. policy: chooses among the workers with room.
    """

    def __init__(self, kind: str, grace_s: float = 30.0, policy: SchedulingPolicy = least_loaded) -> None:
        self.kind, self.grace_s, self._policy = kind, grace_s, policy
        self._members: dict[str, Member] = {}
        self._turn = asyncio.Lock()  # first come, first served
        self._wanted = 1  # sequences, by who has the turn
        self._changed = asyncio.Event()  # for it: its wait may have ended
        self._last_loss = "none has registered yet"
        self._empty_since = time.monotonic()  # if there are no members
        self._expected_until = 0.0
        self._members_changed()

    def _members_changed(self) -> None:
        self._active = active = [member for member in self._members.values() if member.active]
        self._largest = max((member.info.max_sequences for member in self._members.values()), default=0)
        # (2, active): places and tokens, as arrays to compare a thousand workers in microseconds
        limits = [m.info.max_sequences for m in active], [m.info.max_tokens for m in active]
        self._limits = np.array(limits, float)
        self._held = np.array([[m.sequences for m in active], [m.tokens for m in active]], float)
        for column, member in enumerate(active):
            member.column = column
        self._changed.set()

    def register(self, info: WorkerInfo) -> None:
        """Let a worker in. It gets no work before `activate`."""
        offer = f"{info.worker_id} offers {info.max_sequences} sequences, {info.max_tokens} tokens"
        refuse(info.max_sequences < 1 or info.max_tokens < 1, offer)
        self.deregister(info.worker_id, "it registered again")
        self._members[info.worker_id] = Member(info)
        self._members_changed()

    def activate(self, worker_id: str) -> None:
        """The worker holds the current weights: it may be given work, unless it is leaving."""
        member = self._members[worker_id]
        member.active = not member.is_leaving
        self._members_changed()

    def retire(self, worker_id: str) -> None:
        """No more work for a worker that is leaving; it keeps what it has. Unknown ids are ignored."""
        if (member := self._members.get(worker_id)) is not None:
            member.active, member.is_leaving = False, True
            self._members_changed()

    def outstanding(self, worker_id: str) -> int:
        """The sequences that a worker has; 0 if it is no member."""
        return self._members[worker_id].sequences if worker_id in self._members else 0

    def deregister(self, worker_id: str, reason: str) -> None:
        """Fence a worker: no more work for it, its leases are void. Unknown ids are ignored (it may be told twice)."""
        if (member := self._members.pop(worker_id, None)) is not None:
            member.active = False
            self._last_loss, self._empty_since = f"{worker_id}: {reason}", time.monotonic()
            self._members_changed()

    def expect(self, for_s: float) -> None:
        """A worker is on its way: for so long `acquire` waits without any, at least."""
        self._expected_until = time.monotonic() + for_s

    def members(self) -> list[WorkerInfo]:
        return [member.info for member in self._members.values()]

    async def acquire(self, sequences: int, tokens_each: int, prefers: str = "") -> Lease:
        """Admit `sequences` sequences to one worker (together, for the prefix they share); first come, first served.
        `prefers`: the id of one that knows their beginning, and gets them unless it is much fuller than another.

        ConfigurationError: no registered worker could ever take so many at once.
        WorkerLost: no worker was registered for `grace_s` seconds.
        """
        async with self._turn:  # behind it everybody waits: no starvation
            while (member := self._choose(sequences, sequences * tokens_each, prefers)) is None:
                self._refuse_in_vain(sequences)
                self._wanted = sequences
                self._changed.clear()
                left_s = None if self._members else self._given_up_at - time.monotonic()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._changed.wait()
            self._give(member, sequences, sequences * tokens_each)
            return Lease(member, sequences, tokens_each)

    def release(self, lease: Lease, sequences: int = 1) -> None:
        """Give back `sequences` of a lease. Of a void one (its worker is gone) nobody will hear."""
        sequences = min(sequences, lease.sequences)
        lease.sequences -= sequences
        self._give(lease.member, -sequences, -sequences * lease.tokens_each)
        if lease.member.has_room(self._wanted):  # no other has, or nobody waits
            self._changed.set()

    def _give(self, member: Member, sequences: int, tokens: int) -> None:
        member.sequences += sequences
        member.tokens += tokens
        if member.active:
            self._held[:, member.column] = member.sequences, member.tokens

    def _choose(self, sequences: int, tokens: int, prefers: str) -> Member | None:
        """The active member that gets the work; None: no one has room."""
        known = self._members.get(prefers)
        if self._policy is not least_loaded or not self._active:
            fitting = [member for member in self._active if member.has_room(sequences)]
            chosen = self._policy(fitting, sequences, tokens) if fitting else None
            return known if known in fitting else chosen
        shares = np.add(self._held, ((sequences,), (tokens,))) / self._limits  # `least_loaded`, all at once
        loads = np.where(shares[0] <= 1, shares.max(axis=0), np.inf)
        best = int(loads.argmin())
        if known is not None and known.active and loads[known.column] <= loads[best] + AFFINITY:
            best = known.column
        return self._active[best] if shares[0, best] <= 1 else None

    @property
    def _given_up_at(self) -> float:
        return max(self._empty_since + self.grace_s, self._expected_until)

    def _refuse_in_vain(self, sequences: int) -> None:
        refuse(
            bool(self._members) and sequences > self._largest,
            f"{sequences} sequences at once fit no {self.kind} worker: the largest takes {self._largest} "
            "(--max_num_seqs + --overhead_seqs). Raise these, or lower --samples-per-question",
        )
        if not self._members and time.monotonic() >= self._given_up_at:
            waited_s = time.monotonic() - self._empty_since
            raise WorkerLost(
                f"no {self.kind} worker for {waited_s:.0f} s (last: {self._last_loss}). Start one: "
                f"python worker_dispatcher.py --mode {self.kind} ..."
            )
