"""Limits on the calls of remote judges: how many calls at once, how many per minute, how many tokens per minute.

    permit = await limiter.acquire("judge", limits, tokens=800)     # waits its turn
    try: ...
    finally: await limiter.release("judge", permit, used_tokens=650)

What holds for one key, over all its callers, as long as a call starts within `slack_s` of its permit:

- never more than `concurrency` permits are out;
- in every window of 60 s, wherever it begins, at most `requests_per_minute` calls start, and the tokens of those that
  start are at most `tokens_per_minute` (one call larger than that starts alone);
- in every shorter window of W seconds at most rate * (W + burst_s + slack_s) + 1 calls start (tokens: + one call); while
  time is caught up that was lost to late timers or busy slots, 1.1 times that.

Tokens are an estimate until the release: what was too much may be used at once, what was too little is waited for.

The price of the first promise is that a saturated key gets 60 / (60 + slack_s) of its limit (99.2 %). Slot and rate are
taken in the same moment: a queue behind busy slots that took its rate beforehand would start all at once.

Of the libraries that were looked at, aiolimiter is a bucket in one process, and pyrate-limiter counts what starts, over
processes too: neither couples a slot with two rates, corrects an estimate afterwards, or lets two phases take turns.

Order: first come, first served within a phase; phases that wait take turns, whatever their backlogs.
"""

import asyncio
import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.limits import Limits, Meter, Start


class RateLimiter(Protocol):
    """Where permits come from: a `Limiter` in this process, or one for a whole cluster."""

    async def acquire(self, key: str, limits: Limits, *, tokens: float = 0.0, phase: str = "train") -> int:
        """A permit for one call that is expected to use `tokens`; waits its turn and may be cancelled."""
        ...

    async def release(self, key: str, permit: int, *, used_tokens: float | None = None) -> None:
        """The call is over; `used_tokens` replaces the estimate. Must not wait for anything."""
        ...


class Limiter:
    """`RateLimiter` in this process, for one event loop.

    Args:
        resumed: it follows a limiter whose calls it does not know: no key begins with a burst.
    """

    def __init__(self, *, resumed: bool = False) -> None:
        self._resumed = resumed
        self._queues: dict[str, _Queue] = {}

    async def acquire(self, key: str, limits: Limits, *, tokens: float = 0.0, phase: str = "train") -> int:
        """See `RateLimiter`. Cancelling it leaves no trace.

        Raises:
            ConfigurationError: other limits than those under which the key is in use now.
            ValueError: a negative or infinite number of tokens.
        """
        if not 0 <= tokens < math.inf:
            raise ValueError(f"a call for {key!r} cannot use {tokens} tokens")
        queue = self._queue(key, limits)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        queue.append(phase, turn, float(tokens))
        try:
            return await turn
        except asyncio.CancelledError:  # also when the permit was given in this very turn of the event loop
            queue.withdraw(phase, turn)
            raise

    async def release(self, key: str, permit: int, *, used_tokens: float | None = None) -> None:
        """See `RateLimiter`.

        Raises:
            ValueError: the permit is not out: never given, or released already; a senseless `used_tokens`.
        """
        queue = self._holding(key, permit)
        if used_tokens is not None and not 0 <= used_tokens < math.inf:
            raise ValueError(f"permit {permit} of {key!r} cannot have used {used_tokens} tokens")
        queue.release(permit, used_tokens)

    def refund(self, key: str, permit: int) -> None:
        """The permit was not used: as if it had never been given.

        Raises:
            ValueError: it is not out.
        """
        self._holding(key, permit).refund(permit)

    def stats(self) -> dict[str, dict[str, Any]]:
        """By key: permits `in_flight`, `waiting` by phase, and how many were `granted` so far."""
        return {key: queue.stats() for key, queue in self._queues.items()}

    def _holding(self, key: str, permit: int) -> "_Queue":
        queue = self._queues.get(key)
        if queue is None or permit not in queue.permits:
            raise ValueError(f"permit {permit} of {key!r} is not out: it was never given, or released before")
        return queue

    def _queue(self, key: str, limits: Limits) -> "_Queue":
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(limits, self._resumed)
        elif queue.limits != limits:
            if queue.in_use:
                raise ConfigurationError(
                    f"{key!r} is in use under {queue.limits}: it cannot also have {limits}. Give both the same "
                    "limits, or the endpoint another name"
                )
            queue.set(limits)
        return queue


@dataclass(frozen=True, slots=True)
class _Wait:
    tokens: float
    since: float


class _Queue:
    """The calls of one key: those that wait, by phase, and those that are out."""

    def __init__(self, limits: Limits, resumed: bool) -> None:
        self._requests, self._tokens = Meter(resumed=resumed), Meter(resumed=resumed)
        self._phases: dict[str, OrderedDict[asyncio.Future[int], _Wait]] = {}  # the next phase is the first
        self._ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._granted = 0
        self.permits: dict[int, tuple[Start, Start]] = {}
        self.set(limits)

    def set(self, limits: Limits) -> None:
        self.limits = limits
        self._requests.set(limits.requests_per_minute, limits.burst_s, limits.slack_s)
        self._tokens.set(limits.tokens_per_minute, limits.burst_s, limits.slack_s)

    @property
    def in_use(self) -> bool:
        return bool(self.permits) or any(self._phases.values())

    def append(self, phase: str, turn: asyncio.Future[int], tokens: float) -> None:
        self._phases.setdefault(phase, OrderedDict())[turn] = _Wait(tokens, _now())
        self._grant()

    def withdraw(self, phase: str, turn: asyncio.Future[int]) -> None:
        if turn in self._phases[phase]:
            del self._phases[phase][turn]
        elif turn.done() and not turn.cancelled():  # granted, and its caller never heard of it
            self.refund(turn.result())
        self._grant()

    def refund(self, permit: int) -> None:
        request, tokens = self.permits.pop(permit)
        self._requests.cancel(request, _now())
        self._tokens.cancel(tokens, _now())
        self._granted -= 1
        self._grant()

    def release(self, permit: int, used_tokens: float | None) -> None:
        _, tokens = self.permits.pop(permit)
        if used_tokens is not None:
            self._tokens.correct(tokens, used_tokens, _now())
        self._grant()

    def stats(self) -> dict[str, Any]:
        waiting = {phase: len(turns) for phase, turns in self._phases.items() if turns}
        return {"in_flight": len(self.permits), "waiting": waiting, "granted": self._granted}

    def _grant(self) -> None:
        """Give permits to the calls that may start now, and come back when the next one may."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while (phase := self._next_phase()) and len(self.permits) < (self.limits.concurrency or math.inf):
            turn, wait = next(iter(self._phases[phase].items()))
            now = _now()
            may_start = max(self._requests.may_start(1.0, now), self._tokens.may_start(wait.tokens, now))
            if may_start > now:  # no other overtakes the first in line, however small
                self._timer = asyncio.get_running_loop().call_at(may_start, self._grant)
                return
            del self._phases[phase][turn]
            self._phases[phase] = self._phases.pop(phase)
            permit = next(self._ids)
            self.permits[permit] = (
                self._requests.start(1.0, now, wait.since),
                self._tokens.start(wait.tokens, now, wait.since),
            )
            self._granted += 1
            turn.set_result(permit)

    def _next_phase(self) -> str | None:
        for phase, turns in self._phases.items():
            while turns:
                if not (turn := next(iter(turns))).done():
                    return phase
                del turns[turn]  # cancelled, and its caller has not yet been told: it cannot take a permit
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
