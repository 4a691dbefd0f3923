"""Limits the calls of remote judges: concurrent calls, calls per minute and tokens per minute.

    permit = await limiter.acquire("judge", limits, tokens=800)     # waits for its turn
    try: ...
    finally: await limiter.release("judge", permit, used_tokens=650)

For the calls of one key, from all callers together, the limiter guarantees the following if every call starts within
`slack_s` after its permit. A rate is the limit per minute divided by 60 + `slack_s` seconds.

- At most `concurrency` permits are in use at any time.
- In every window of 60 s, at most `requests_per_minute` calls start, with at most `tokens_per_minute` tokens in total.
  A call that needs more tokens than this limit starts alone.
- In every shorter window of W seconds, at most rate * (W + burst_s + slack_s) + 1 calls start. For tokens, the bound is
  their rate * (W + burst_s + slack_s), plus the tokens of one call. Both bounds are 1.1 times as high while the limiter
  makes up for time that was lost to late timers or full concurrency.

A call's number of tokens is an estimate until its permit is released. Tokens that it did not use are available at once.
Tokens that it used beyond the estimate delay later calls. There are `concurrency` slots, and a call counts toward the
rates only when a slot is free. Otherwise, calls that wait for a slot could all start at once later. Within a phase
(training or evaluation), calls start in order of arrival. The phases take turns. Neither aiolimiter nor pyrate-limiter
can do all of this.
"""

import asyncio
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import WINDOW_S, Limits

ROUNDING = 1e-9  # tolerance in tokens, because sums of fractions are not exact
CATCH_UP_FACTOR = 1.1  # calls start at this multiple of the rate to make up for lost time
CATCH_UP_S = 5.0  # maximum lost time that the limiter makes up for, in seconds


class RateLimiter(Protocol):
    """Grants permits for calls. `Limiter` does so for one process, and `RemoteRateLimiter` for a whole cluster."""

    async def acquire(self, key: str, limits: Limits, *, tokens: float = 0.0, phase: str = "train") -> int:
        """Wait for a permit for one call that is expected to use `tokens`. The wait may be cancelled."""

    async def release(self, key: str, permit: int, *, used_tokens: float | None = None) -> None:
        """Release the permit of a call that has ended. `used_tokens` replaces the estimate. This must not wait."""


class Limiter:
    """The `RateLimiter` of this process. Use it from one event loop.

    Args:
        resumed: Whether this limiter replaces an earlier one, whose calls it does not know. Then no key begins with a
            burst.
    """

    def __init__(self, *, resumed: bool = False) -> None:
        self._resumed = resumed
        self._queues: dict[str, _Queue] = {}

    async def acquire(self, key: str, limits: Limits, *, tokens: float = 0.0, phase: str = "train") -> int:
        """Wait for a permit (see `RateLimiter`). If the wait is cancelled, the slot and the tokens are returned.

        Raises:
            ConfigurationError: The key is in use with other limits.
            ValueError: The number of tokens is negative or not finite.
        """
        if not 0 <= tokens < math.inf:
            raise ValueError(f"a call for {key!r} cannot use {tokens} tokens")
        queue = self._queues.setdefault(key, _Queue(self._resumed))
        queue.set_limits(key, limits)
        return await queue.wait(phase, float(tokens))

    async def release(self, key: str, permit: int, *, used_tokens: float | None = None) -> None:
        """Release a permit (see `RateLimiter`).

        Raises:
            ValueError: The permit is not in use, or the number of tokens is negative or not finite.
        """
        if used_tokens is not None and not 0 <= used_tokens < math.inf:
            raise ValueError(f"permit {permit} of {key!r} cannot have used {used_tokens} tokens")
        queue = self._queues.get(key)
        if queue is None or permit not in queue.permits:
            raise ValueError(f"permit {permit} of {key!r} is not out: it was never given, or released before")
        queue.end(permit, used_tokens)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return, by key, the number of permits `in_flight`, permits `granted` so far, and calls `waiting` by phase."""
        return {key: queue.stats() for key, queue in self._queues.items()}


class _Queue:
    """The calls of one key: waiting calls by phase, and permits that are in use."""

    def __init__(self, resumed: bool) -> None:
        self._requests = Meter(resumed=resumed)
        self._tokens = Meter(resumed=resumed)
        # The waiting calls of each phase, beginning with the phase whose turn is next. The values of a call are its tokens
        # and the time at which it began to wait
        self._phases: dict[str, dict[asyncio.Future[int], tuple[float, float]]] = {}
        self._ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._granted = 0
        self._limits: Limits | None = None
        self.permits: dict[int, Start] = {}  # start of each call in the meter of tokens, by permit

    def set_limits(self, key: str, limits: Limits) -> None:
        """Set the limits. Raise ConfigurationError if the key is in use with other limits."""
        if limits == self._limits:
            return
        if self.permits or any(self._phases.values()):
            raise ConfigurationError(
                f"{key!r} is in use under {self._limits}: it cannot also have {limits}: "
                "give both uses the same limits, or give one of them another name"
            )
        self._limits = limits
        self._slots = limits.concurrency or math.inf
        self._requests.set(limits.requests_per_minute, limits.burst_s, limits.slack_s)
        self._tokens.set(limits.tokens_per_minute, limits.burst_s, limits.slack_s)

    async def wait(self, phase: str, tokens: float) -> int:
        """Wait for a permit and return its number."""
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting_turns = self._phases.setdefault(phase, {})
        waiting_turns[turn] = (tokens, _now())
        self._grant()
        try:
            return await turn
        except asyncio.CancelledError:
            self._phases[phase].pop(turn, None)
            if not turn.cancelled():
                # The permit was granted just before the cancellation, and only this code can release it
                self.end(turn.result(), 0.0)
            self._grant()
            raise

    def end(self, permit: int, used_tokens: float | None) -> None:
        """Release a permit, and correct the number of tokens of its call."""
        start = self.permits.pop(permit)
        if used_tokens is not None:
            self._tokens.correct(start, used_tokens, _now())
        self._grant()

    def stats(self) -> dict[str, Any]:
        """Return the counts of this key for `Limiter.stats`."""
        waiting = {phase: len(turns) for phase, turns in self._phases.items() if turns}
        return {"in_flight": len(self.permits), "waiting": waiting, "granted": self._granted}

    def _grant(self) -> None:
        """Grant permits to the calls that may start now, and set a timer for the next call."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while True:
            phase = self._next_phase()
            if phase is None:
                return
            has_free_slot = len(self.permits) < self._slots
            if not has_free_slot:
                return
            turn, (tokens, since) = next(iter(self._phases[phase].items()))
            now = _now()
            may_start = max(self._requests.may_start(1.0, now), self._tokens.may_start(tokens, now))
            if may_start > now:
                # Not even a small call may overtake the first call in line
                self._timer = asyncio.get_running_loop().call_at(may_start, self._grant)
                return
            del self._phases[phase][turn]
            # Move the phase to the end, so that the phases take turns
            self._phases[phase] = self._phases.pop(phase)
            permit = next(self._ids)
            self._requests.start(1.0, now, since)
            self.permits[permit] = self._tokens.start(tokens, now, since)
            self._granted += 1
            turn.set_result(permit)

    def _next_phase(self) -> str | None:
        """Return the first phase with a waiting call, or None if no call waits."""
        for phase, turns in self._phases.items():
            # A cancelled call stays in line until its task runs again, but it must not get a permit
            cancelled_turns = list(itertools.takewhile(asyncio.Future.done, turns))
            for turn in cancelled_turns:
                del turns[turn]
            if turns:
                return phase
        return None


@dataclass(slots=True)
class Start:
    """When a call started, and its cost."""

    at: float  # by the clock of the event loop
    cost: float  # 1 in a meter of requests, or the number of tokens in a meter of tokens


class Meter:
    """Enforces the limit of one rate. Call `start` directly after `may_start`, with the same time `now`, in seconds.

    A record of all calls in the last window enforces the limit exactly. In addition, the generic cell rate algorithm
    (ITU-T I.371) spreads the calls over the window: each call advances a virtual clock by cost / rate, and this clock
    may be `burst_s` ahead of the real one. The cost of a call delays only the next calls, not the call itself, so that
    a call larger than a burst waits no longer than any other.

    Args:
        resumed: Whether calls that the meter does not know may have started earlier. If so, the meter begins with a
            pause and without a burst.
    """

    def __init__(self, *, resumed: bool = False) -> None:
        self._starts: deque[Start] = deque()
        self._total = 0.0  # total cost of `_starts`
        self._resumed = resumed
        self._clock = -math.inf  # virtual clock: when the rate allows the next call, without bursts
        # A second virtual clock, at CATCH_UP_FACTOR times the rate, that ignores lost time. It limits how fast calls make
        # up for the time that `_clock` has lost
        self._hasty_clock = -math.inf

    def set(self, per_minute: float | None, burst_s: float, slack_s: float) -> None:
        """Change the limit. None removes it. Calls that were already counted stay counted."""
        self._limit = math.inf if per_minute is None else per_minute
        self._burst_s = burst_s
        self._window_s = WINDOW_S + slack_s
        self._rate = self._limit / self._window_s  # per second

    def may_start(self, cost: float, now: float) -> float:
        """Return the earliest time at which a call of this cost may start if no other call starts first."""
        self._forget(now)
        if self._resumed:
            self._resumed = False
            self._clock = now + self._burst_s + 1.0 / self._rate
        moment = max(self._clock, self._hasty_clock) - self._burst_s
        excess = self._total + cost - self._limit
        for start in self._starts:
            if excess <= ROUNDING:
                break
            excess -= start.cost
            moment = max(moment, start.at + self._window_s)
        return moment

    def start(self, cost: float, now: float, since: float) -> Start:
        """Record that a call starts now. It has waited since the time `since`."""
        start = Start(now, cost)
        self._starts.append(start)
        self._total += cost
        self._clock = max(since, now - CATCH_UP_S, self._clock) + cost / self._rate
        self._hasty_clock = max(now, self._hasty_clock) + cost / self._rate / CATCH_UP_FACTOR
        return start

    def correct(self, start: Start, cost: float, now: float) -> None:
        """Replace the estimated cost of a call by `cost`.

        If `cost` exceeds the estimate, later calls wait longer. Otherwise, the rest is available to them at once.
        """
        self._forget(now)
        additional_cost = cost - start.cost
        start.cost = cost
        is_in_window = start.at + self._window_s > now
        if is_in_window:
            self._total += additional_cost
        additional_s = additional_cost / self._rate
        if additional_s > 0:
            self._clock = max(self._clock, now)
        self._clock += additional_s
        self._hasty_clock = max(now, max(now, self._hasty_clock) + additional_s / CATCH_UP_FACTOR)

    def _forget(self, now: float) -> None:
        """Remove the records of calls that started before the current window."""
        while self._starts and self._starts[0].at + self._window_s <= now:
            self._total -= self._starts.popleft().cost
        if not self._starts:
            self._total = 0.0  # rounding errors must not add up over the run


def _now() -> float:
    return asyncio.get_running_loop().time()
