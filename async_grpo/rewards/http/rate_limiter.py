"""Limits on the calls of remote judges: calls at once, calls per minute, tokens per minute.

    permit = await limiter.acquire("judge", limits, tokens=800)     # waits its turn
    try: ...
    finally: await limiter.release("judge", permit, used_tokens=650)

What holds for one key, over all its callers, as long as a call starts within `slack_s` of its permit:

- never more than `concurrency` permits are out;
- in every window of 60 s, wherever it begins, at most `requests_per_minute` calls start, and the tokens of those that
  start are at most `tokens_per_minute` (one call larger than that starts alone);
- in every shorter window of W seconds at most rate * (W + burst_s + slack_s) + 1 calls start (tokens: + one call); while
  time is caught up that was lost to late timers or busy slots, 1.1 times that.

Tokens are an estimate until the release: too much may be used at once, too little is waited for.
Slot and rate are taken in the same moment, or a queue behind busy slots would start all at once.
Within a phase calls start in their order; phases take turns. (Neither aiolimiter nor pyrate-limiter does this.)
"""

import asyncio
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import WINDOW_S, Limits

ROUNDING = 1e-9  # of sums of token counts that are no integers
CATCH_UP_FACTOR = 1.1  # how much faster than the rate lost time is caught up,
CATCH_UP_S = 5.0  # and how much of it


class RateLimiter(Protocol):
    """Where permits come from: a `Limiter` in this process, or one for a whole cluster."""

    async def acquire(self, key: str, limits: Limits, *, tokens: float = 0.0, phase: str = "train") -> int:
        """A permit for one call that is expected to use `tokens`; waits its turn and may be cancelled."""

    async def release(self, key: str, permit: int, *, used_tokens: float | None = None) -> None:
        """The call is over; `used_tokens` replaces the estimate. Must not wait for anything."""


class Limiter:
    """`RateLimiter` in this process, for one event loop. `resumed`: it follows a limiter whose calls it does not know, so
    no key begins with a burst."""

    def __init__(self, *, resumed: bool = False) -> None:
        self._resumed = resumed
        self._queues: dict[str, _Queue] = {}

    async def acquire(self, key: str, limits: Limits, *, tokens: float = 0.0, phase: str = "train") -> int:
        """See `RateLimiter`. Cancelling it gives back the slot and the tokens.

        Raises ConfigurationError if the key is in use under other limits, ValueError for senseless tokens.
        """
        if not 0 <= tokens < math.inf:
            raise ValueError(f"a call for {key!r} cannot use {tokens} tokens")
        queue = self._queues.setdefault(key, _Queue(self._resumed))
        queue.set(key, limits)
        return await queue.wait(phase, float(tokens))

    async def release(self, key: str, permit: int, *, used_tokens: float | None = None) -> None:
        """See `RateLimiter`. Raises ValueError if the permit is not out, or for a senseless `used_tokens`."""
        if used_tokens is not None and not 0 <= used_tokens < math.inf:
            raise ValueError(f"permit {permit} of {key!r} cannot have used {used_tokens} tokens")
        queue = self._queues.get(key)
        if queue is None or permit not in queue.permits:
            raise ValueError(f"permit {permit} of {key!r} is not out: it was never given, or released before")
        queue.end(permit, used_tokens)

    def stats(self) -> dict[str, dict[str, Any]]:
        """By key: permits `in_flight`, `waiting` by phase, and how many were `granted` so far."""
        return {key: queue.stats() for key, queue in self._queues.items()}


class _Queue:
    """The calls of one key: those that wait, by phase, and those that are out."""

    def __init__(self, resumed: bool) -> None:
        self._requests, self._tokens = Meter(resumed=resumed), Meter(resumed=resumed)
        # By phase, the next one first: each turn's tokens, and since when it waits
        self._phases: dict[str, dict[asyncio.Future[int], tuple[float, float]]] = {}
        self._ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._granted = 0
        self._limits: Limits | None = None
        self.permits: dict[int, Start] = {}  # of tokens

    def set(self, key: str, limits: Limits) -> None:
        """Raises ConfigurationError if the key is in use under others."""
        if limits == self._limits:
            return
        if self.permits or any(self._phases.values()):
            wish = f"it cannot also have {limits}: give both the same, or one another name"
            raise ConfigurationError(f"{key!r} is in use under {self._limits}: {wish}")
        self._limits, self._slots = limits, limits.concurrency or math.inf
        self._requests.set(limits.requests_per_minute, limits.burst_s, limits.slack_s)
        self._tokens.set(limits.tokens_per_minute, limits.burst_s, limits.slack_s)

    async def wait(self, phase: str, tokens: float) -> int:
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._phases.setdefault(phase, {})[turn] = tokens, _now()
        self._grant()
        try:
            return await turn
        except asyncio.CancelledError:
            self._phases[phase].pop(turn, None)
            if not turn.cancelled():  # granted in this very turn of the event loop
                self.end(turn.result(), 0.0)
            self._grant()
            raise

    def end(self, permit: int, used_tokens: float | None) -> None:
        tokens = self.permits.pop(permit)
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
        while (phase := self._next_phase()) and len(self.permits) < self._slots:
            turn, (tokens, since) = next(iter(self._phases[phase].items()))
            now = _now()
            may_start = max(self._requests.may_start(1.0, now), self._tokens.may_start(tokens, now))
            if may_start > now:  # no other overtakes the first in line, however small
                self._timer = asyncio.get_running_loop().call_at(may_start, self._grant)
                return
            del self._phases[phase][turn]
            self._phases[phase] = self._phases.pop(phase)
            permit = next(self._ids)
            self._requests.start(1.0, now, since)
            self.permits[permit] = self._tokens.start(tokens, now, since)
            self._granted += 1
            turn.set_result(permit)

    def _next_phase(self) -> str | None:
        for phase, turns in self._phases.items():
            for turn in list(itertools.takewhile(asyncio.Future.done, turns)):
                del turns[turn]  # cancelled, and its caller has not yet been told: it cannot take a permit
            if turns:
                return phase
        return None


@dataclass(slots=True)
class Start:
    """A call that started, and its cost (1 of requests, or tokens)."""

    at: float
    cost: float


class Meter:
    """One rate, for a caller that asks `may_start` and then calls `start` in the same moment (in seconds).

    The law is the exact record of the last window. The pace spreads calls over it (generic cell rate algorithm,
    ITU-T I.371): each call moves a virtual clock on by cost / rate, which may run `burst_s` ahead.
    The next in line waits for that cost: a call larger than a burst waits no longer than any other. One that is
    `resumed` does not know what started before: it begins with an interval and no burst.
    """

    def __init__(self, *, resumed: bool = False) -> None:
        self._starts: deque[Start] = deque()
        self._total = 0.0  # cost of `_starts`
        self._resumed = resumed
        self._clock = -math.inf  # when all that has started would be over at an even pace,
        self._hasty_clock = -math.inf  # and at the highest one

    def set(self, per_minute: float | None, burst_s: float, slack_s: float) -> None:
        """From now on this limit (None: no limit), with the past as it was."""
        self._limit = math.inf if per_minute is None else per_minute
        self._burst_s, self._window_s = burst_s, WINDOW_S + slack_s
        self._rate = self._limit / self._window_s  # per second

    def may_start(self, cost: float, now: float) -> float:
        """The first moment at which a call of `cost` may start, if nothing else does before."""
        self._forget(now)
        if self._resumed:
            self._resumed, self._clock = False, now + self._burst_s + 1.0 / self._rate
        moment = max(self._clock, self._hasty_clock) - self._burst_s
        excess = self._total + cost - self._limit
        for start in self._starts:
            if excess <= ROUNDING:
                break
            excess -= start.cost
            moment = max(moment, start.at + self._window_s)
        return moment

    def start(self, cost: float, now: float, since: float) -> Start:
        """Record that a call starts now that has waited `since` then."""
        start = Start(now, cost)
        self._starts.append(start)
        self._total += cost
        self._clock = max(since, now - CATCH_UP_S, self._clock) + cost / self._rate
        self._hasty_clock = max(now, self._hasty_clock) + cost / self._rate / CATCH_UP_FACTOR
        return start

    def correct(self, start: Start, cost: float, now: float) -> None:
        """That call was of another cost: what it lacked is waited for, what it did not use is free."""
        self._forget(now)
        more, start.cost = cost - start.cost, cost
        if start.at + self._window_s > now:
            self._total += more
        more /= self._rate
        self._clock = max(self._clock, now if more > 0 else -math.inf) + more
        self._hasty_clock = max(now, max(now, self._hasty_clock) + more / CATCH_UP_FACTOR)

    def _forget(self, now: float) -> None:
        while self._starts and self._starts[0].at + self._window_s <= now:
            self._total -= self._starts.popleft().cost
        if not self._starts:
            self._total = 0.0  # no rounding error outlives a pause


def _now() -> float:
    return asyncio.get_running_loop().time()
