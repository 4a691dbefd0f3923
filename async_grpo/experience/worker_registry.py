"""`WorkerRegistry`: who can work, and who gets the next piece of it.

The unit of admission is one sequence: a worker takes up to `max_sequences` at once and each is given back the moment
it ends. Which of the workers with room gets a piece, a scheduling policy says.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.options.source_file import find_entry
from async_grpo.types import WorkerInfo


@dataclass
class Member:
    """A registered worker and what it has been given."""

    info: WorkerInfo
    active: bool = False  # gets work; False until it holds the current weights
    sequences: int = 0  # outstanding
    tokens: int = 0  # outstanding, as estimated when admitted

    def load_with(self, sequences: int, tokens: int) -> float:
        """The fuller of its two resources once it also had this work."""
        return max(
            (self.sequences + sequences) / self.info.max_sequences,
            (self.tokens + tokens) / self.info.max_tokens,
        )


# (workers with room for it, sequences, tokens of all of them) -> the one that gets the work
SchedulingPolicy = Callable[[Sequence[Member], int, int], Member]


def least_loaded(members: Sequence[Member], sequences: int, tokens: int) -> Member:
    """The worker whose fuller resource, places or tokens, would be the emptiest."""
    return min(members, key=lambda member: member.load_with(sequences, tokens))


SCHEDULING_POLICIES: dict[str, SchedulingPolicy] = {"least_loaded": least_loaded}


def scheduling_policy(name: str) -> SchedulingPolicy:
    """The policy that `--scheduling` names: an entry, or FILE.py:NAME of a function of the user's own.

    >>> scheduling_policy("random")
    Traceback (most recent call last):
    async_grpo.errors.ConfigurationError: --scheduling 'random' is unknown; known: least_loaded; or FILE.py:NAME
    """
    return find_entry(name, SCHEDULING_POLICIES, lambda own: own, "scheduling")


@dataclass
class Lease:
    """Work admitted to one worker: `sequences` of `tokens_each`, given back one by one."""

    lease_id: int
    worker_id: str
    sequences: int
    tokens_each: int


@dataclass
class _Waiter:
    sequences: int
    tokens_each: int
    granted: asyncio.Future = field(repr=False)


class WorkerRegistry:
    """One per kind of worker. Synchronous but for `acquire`; must live in one event loop.

    Args:
        kind: "generation" or "logprob", for messages.
        grace_s: how long `acquire` waits while no worker at all is registered.
        policy: chooses among the workers with room.
    """

    def __init__(self, kind: str, grace_s: float = 30.0, policy: SchedulingPolicy = least_loaded) -> None:
        self.kind, self.grace_s, self._policy = kind, grace_s, policy
        self._members: dict[str, Member] = {}
        self._leases: dict[int, Lease] = {}
        self._waiters: deque[_Waiter] = deque()
        self._lease_ids = itertools.count()
        self._last_loss = "none has registered yet"
        self._empty_since: float | None = time.monotonic()

    # Membership -------------------------------------------------------------------------------------------------

    def register(self, info: WorkerInfo) -> None:
        """Let a worker in. It gets no work before `activate`."""
        if info.max_sequences < 1 or info.max_tokens < 1:
            raise ConfigurationError(
                f"{info.worker_id} offers {info.max_sequences} sequences, {info.max_tokens} tokens"
            )
        self._members[info.worker_id] = Member(info)
        self._empty_since = None

    def activate(self, worker_id: str) -> None:
        """The worker holds the current weights: it may be given work."""
        self._members[worker_id].active = True
        self._serve_waiters()

    def deregister(self, worker_id: str, reason: str) -> None:
        """Fence a worker: no more work for it, its leases are void. Unknown ids are ignored (it may be told twice)."""
        if self._members.pop(worker_id, None) is None:
            return
        self._last_loss = f"{worker_id}: {reason}"
        self._leases = {i: lease for i, lease in self._leases.items() if lease.worker_id != worker_id}
        if not self._members:
            self._empty_since = time.monotonic()

    def members(self) -> list[WorkerInfo]:
        return [member.info for member in self._members.values()]

    def outstanding(self) -> tuple[int, int]:
        """(sequences, tokens) admitted and not yet given back."""
        members = self._members.values()
        return sum(m.sequences for m in members), sum(m.tokens for m in members)

    # Scheduling -------------------------------------------------------------------------------------------------

    async def acquire(self, sequences: int, tokens_each: int) -> Lease:
        """Admit `sequences` sequences to one worker (together, for the prefix they share); first come, first served.

        Raises:
            ConfigurationError: no registered worker could ever take so many at once.
            WorkerLost: no worker was registered for `grace_s` seconds.
        """
        self._refuse_impossible(sequences)
        waiter = _Waiter(sequences, tokens_each, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._serve_waiters()
        try:
            while not waiter.granted.done():
                await asyncio.wait({waiter.granted}, timeout=1.0)
                if not waiter.granted.done():  # the workers may have changed meanwhile
                    self._refuse_impossible(sequences)
                    self._refuse_deserted()
            return waiter.granted.result()
        except BaseException:
            self._forget(waiter)
            raise

    def release(self, lease_id: int, sequences: int = 1) -> None:
        """Give back `sequences` of a lease. A void lease (its worker is gone) is ignored: loads never go negative."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        sequences = min(sequences, lease.sequences)
        member = self._members[lease.worker_id]
        member.sequences -= sequences
        member.tokens -= sequences * lease.tokens_each
        lease.sequences -= sequences
        if lease.sequences == 0:
            del self._leases[lease_id]
        self._serve_waiters()

    def largest_capacity(self) -> int:
        """Sequences that the largest registered worker takes at once (0: none is registered)."""
        return max((member.info.max_sequences for member in self._members.values()), default=0)

    def _serve_waiters(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            fitting = [member for member in self._members.values() if _has_room(member, waiter.sequences)]
            if not fitting:
                return  # the first in line waits, and so does everybody behind it: no starvation
            member = self._policy(fitting, waiter.sequences, waiter.sequences * waiter.tokens_each)
            self._waiters.popleft()
            waiter.granted.set_result(self._admit(member, waiter))

    def _admit(self, member: Member, waiter: _Waiter) -> Lease:
        lease = Lease(next(self._lease_ids), member.info.worker_id, waiter.sequences, waiter.tokens_each)
        member.sequences += lease.sequences
        member.tokens += lease.sequences * lease.tokens_each
        self._leases[lease.lease_id] = lease
        return Lease(lease.lease_id, lease.worker_id, lease.sequences, lease.tokens_each)

    def _forget(self, waiter: _Waiter) -> None:
        """The caller went away: leave the queue, or hand back what was granted in the meantime."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._serve_waiters()  # somebody behind it may fit
        elif waiter.granted.done():
            lease = waiter.granted.result()
            self.release(lease.lease_id, lease.sequences)

    def _refuse_impossible(self, sequences: int) -> None:
        if self._members and sequences > self.largest_capacity():
            raise ConfigurationError(
                f"{sequences} sequences at once fit no {self.kind} worker: the largest takes "
                f"{self.largest_capacity()} (--max_num_seqs + --overhead_seqs). Raise these, or lower "
                "--samples-per-question"
            )

    def _refuse_deserted(self) -> None:
        if self._empty_since is not None and time.monotonic() - self._empty_since > self.grace_s:
            raise WorkerLost(
                f"no {self.kind} worker for {self.grace_s:.0f} s (last: {self._last_loss}). Start one: "
                f"python worker_dispatcher.py --mode {self.kind} ..."
            )


def _has_room(member: Member, sequences: int) -> bool:
    return member.active and member.sequences + sequences <= member.info.max_sequences
