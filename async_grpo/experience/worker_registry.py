"""`WorkerRegistry` keeps track of the workers that can take work, and chooses the worker for the next sequences.

A worker accepts up to `max_sequences` sequences at once. Each sequence is released when it ends.
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

# A request goes to the worker whose prefix cache contains its beginning, unless the load of that worker exceeds the lowest
# load by more than this. A load of 1.0 means that all of a worker's places or tokens are in use
AFFINITY = 0.25


@dataclass
class Member:
    """A registered worker and its load."""

    info: WorkerInfo
    active: bool = False  # whether the worker gets work; False until it has the current weights
    is_leaving: bool = False  # whether the worker is about to end and gets no new work
    sequences: int = 0  # number of unfinished sequences
    tokens: int = 0  # number of tokens of the unfinished sequences, as estimated at their admission
    column: int = -1  # index among the active members

    def has_room(self, sequences: int) -> bool:
        """Return whether the worker can accept this number of additional sequences."""
        return self.active and self.sequences + sequences <= self.info.max_sequences


# Function of (workers with room, number of new sequences, their tokens in total) that returns the worker that gets them
SchedulingPolicy = Callable[[Sequence[Member], int, int], Member]


def least_loaded(members: Sequence[Member], sequences: int, tokens: int) -> Member:
    """Return the worker that has the lowest load after it accepts the new sequences.

    The load is the share of the worker's maximum number of sequences or tokens that is in use, whichever is larger.
    """

    def load(member: Member) -> float:
        share_of_places = (member.sequences + sequences) / member.info.max_sequences
        share_of_tokens = (member.tokens + tokens) / member.info.max_tokens
        return max(share_of_places, share_of_tokens)

    return min(members, key=load)


SCHEDULING_POLICIES: dict[str, SchedulingPolicy] = {"least_loaded": least_loaded}


def scheduling_policy(name: str) -> SchedulingPolicy:
    """Return the policy that `--scheduling` names: an entry of `SCHEDULING_POLICIES`, or the user's FILE.py:NAME."""
    return find_entry(name, SCHEDULING_POLICIES, lambda policy: policy, "scheduling")


@dataclass
class Lease:
    """Sequences that were admitted together to one worker."""

    member: Member
    sequences: int  # number of sequences that are not released yet
    tokens_each: int  # estimated length of each sequence, in tokens

    @property
    def worker_id(self) -> str:
        """Return the id of the worker."""
        return self.member.info.worker_id


class WorkerRegistry:
    """The registered workers of one kind, such as "generation". Use it in one event loop.

    Args:
        kind: The kind of the workers.
        grace_s: Seconds that `acquire` waits for a worker while none is registered.
        policy: Chooses among the workers that have room for a request.
    """

    def __init__(self, kind: str, grace_s: float = 30.0, policy: SchedulingPolicy = least_loaded) -> None:
        self.kind = kind
        self.grace_s = grace_s
        self._policy = policy
        self._members: dict[str, Member] = {}
        # taken by the first waiting caller of `acquire`, so that callers are served in order
        self._turn = asyncio.Lock()
        self._wanted = 1  # number of sequences that the first waiting caller needs
        self._changed = asyncio.Event()  # set when the first waiting caller should try again
        self._last_loss = "none has registered yet"
        self._empty_since = time.monotonic()  # time of the last loss; used only while there are no members
        self._expected_until = 0.0
        self._members_changed()

    def _members_changed(self) -> None:
        """Update everything that is derived from the members."""
        self._active = [member for member in self._members.values() if member.active]
        self._largest = max((member.info.max_sequences for member in self._members.values()), default=0)
        # (2, active members): numbers of sequences and of tokens. With arrays, the loads of a thousand workers are
        # compared in microseconds
        self._limits = np.empty((2, len(self._active)))
        self._held = np.empty((2, len(self._active)))
        for column, member in enumerate(self._active):
            member.column = column
            self._limits[:, column] = member.info.max_sequences, member.info.max_tokens
            self._held[:, column] = member.sequences, member.tokens
        self._changed.set()

    def register(self, info: WorkerInfo) -> None:
        """Add a worker. It gets work only after `activate`."""
        problem = (
            f"{info.worker_id} takes {info.max_sequences} sequences and {info.max_tokens} tokens: too few"
        )
        refuse(info.max_sequences < 1 or info.max_tokens < 1, problem)
        self.deregister(info.worker_id, "it registered again")
        self._members[info.worker_id] = Member(info)
        self._members_changed()

    def activate(self, worker_id: str) -> None:
        """Start giving work to a worker that has the current weights, unless it is leaving."""
        member = self._members[worker_id]
        member.active = not member.is_leaving
        self._members_changed()

    def retire(self, worker_id: str) -> None:
        """Mark a worker as leaving: it finishes its sequences but gets no new work. Unknown ids are ignored."""
        member = self._members.get(worker_id)
        if member is None:
            return
        member.active = False
        member.is_leaving = True
        self._members_changed()

    def outstanding(self, worker_id: str) -> int:
        """Return the number of unfinished sequences of a worker, or 0 if it is not registered."""
        return self._members[worker_id].sequences if worker_id in self._members else 0

    def deregister(self, worker_id: str, reason: str) -> None:
        """Remove a worker. Unknown ids are ignored, because a loss may be reported twice."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        member.active = False
        self._last_loss = f"{worker_id}: {reason}"
        self._empty_since = time.monotonic()
        self._members_changed()

    def expect(self, for_s: float) -> None:
        """Let `acquire` wait at least `for_s` seconds while there are no workers, because one is about to register."""
        self._expected_until = time.monotonic() + for_s

    def members(self) -> list[WorkerInfo]:
        """Return the descriptions of all registered workers."""
        return [member.info for member in self._members.values()]

    async def acquire(self, sequences: int, tokens_each: int, prefers: str = "") -> Lease:
        """Wait for a worker with room, and admit sequences to it. Callers are served in order.

        All sequences go to one worker because they share a prefix.

        Args:
            sequences: Number of sequences.
            tokens_each: Estimated length of each sequence, in tokens.
            prefers: Id of the worker whose cache contains the beginning of the sequences, if any. That worker is chosen
                unless its load is much higher than that of another worker.

        Raises:
            ConfigurationError: No registered worker can ever accept this number of sequences at once.
            WorkerLost: No worker was registered for `grace_s` seconds.
        """
        tokens = sequences * tokens_each
        async with self._turn:  # later callers wait for this one, so that no caller starves
            member = self._choose(sequences, tokens, prefers)
            while member is None:
                self._refuse_hopeless_wait(sequences)
                self._wanted = sequences
                self._changed.clear()
                timeout_s = None if self._members else self._wait_deadline - time.monotonic()
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._changed.wait()
                member = self._choose(sequences, tokens, prefers)
            self._add_load(member, sequences, tokens)
            return Lease(member, sequences, tokens_each)

    def release(self, lease: Lease, sequences: int = 1) -> None:
        """Release some sequences of a lease. This is also allowed if the worker was lost."""
        sequences = min(sequences, lease.sequences)
        lease.sequences -= sequences
        self._add_load(lease.member, -sequences, -sequences * lease.tokens_each)
        # The first waiting caller of `acquire` found no room at other workers, so it is woken only if this one has room
        if lease.member.has_room(self._wanted):
            self._changed.set()

    def _add_load(self, member: Member, sequences: int, tokens: int) -> None:
        """Add sequences and tokens to the load of a member; negative numbers subtract."""
        member.sequences += sequences
        member.tokens += tokens
        if member.active:
            self._held[:, member.column] = member.sequences, member.tokens

    def _choose(self, sequences: int, tokens: int, prefers: str) -> Member | None:
        """Return the active member that gets a request, or None if no member has room.

        Args:
            sequences: Number of sequences of the request.
            tokens: Estimated number of their tokens.
            prefers: Id of the worker whose prefix cache contains the beginning of the request; "" if there is none.
        """
        preferred = self._members.get(prefers)
        if self._policy is not least_loaded or not self._active:
            fitting = [member for member in self._active if member.has_room(sequences)]
            chosen = self._policy(fitting, sequences, tokens) if fitting else None
            return preferred if preferred in fitting else chosen
        # The policy `least_loaded`, computed for all members at once
        shares = np.add(self._held, ((sequences,), (tokens,))) / self._limits
        loads = np.where(shares[0] <= 1, shares.max(axis=0), np.inf)
        best = int(loads.argmin())
        if preferred is not None and preferred.active and loads[preferred.column] <= loads[best] + AFFINITY:
            best = preferred.column
        return self._active[best] if shares[0, best] <= 1 else None

    @property
    def _wait_deadline(self) -> float:
        """Return the time (`time.monotonic`) until which `acquire` waits for a first worker."""
        return max(self._empty_since + self.grace_s, self._expected_until)

    def _refuse_hopeless_wait(self, sequences: int) -> None:
        """Raise an error if no worker can ever accept this number of sequences, or if none has registered in time."""
        refuse(
            bool(self._members) and sequences > self._largest,
            f"{sequences} sequences at once fit no {self.kind} worker: the largest takes {self._largest} "
            "(--max_num_seqs + --overhead_seqs). Raise these, or lower --samples-per-question",
        )
        if not self._members and time.monotonic() >= self._wait_deadline:
            waited_s = time.monotonic() - self._empty_since
            raise WorkerLost(
                f"no {self.kind} worker for {waited_s:.0f} s (last: {self._last_loss}). Start one: "
                f"python worker_dispatcher.py --mode {self.kind} ..."
            )
