"""`Limits`: what one endpoint allows its callers. `Meter`: one rate, what has started in the last minute, and when the next
call may (see `rate_limiter`)."""

import math
from collections import deque
from dataclasses import dataclass, fields, replace

from async_grpo.errors import ConfigurationError

WINDOW_S = 60.0
ROUNDING = 1e-9  # of sums of token counts that are no integers
CATCH_UP_FACTOR = 1.1  # how much faster than the rate lost time is caught up,
CATCH_UP_S = 5.0  # and how much of it


@dataclass(frozen=True)
class Limits:
    """What one key allows; None is no limit.

    Args:
        concurrency: permits out at the same time.
        requests_per_minute, tokens_per_minute: spread evenly over the minute.
        burst_s: after a lull (or a late timer) so many seconds' worth may start at once, and at least one call.
        slack_s: the longest time that may pass between a permit and the start of its call.

    Raises:
        ConfigurationError: a limit that would let nothing through, or is no number.
    """

    concurrency: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    burst_s: float = 0.05
    slack_s: float = 0.5

    def __post_init__(self) -> None:
        if self.concurrency is not None and (
            self.concurrency != int(self.concurrency) or self.concurrency < 1
        ):
            raise ConfigurationError(
                f"concurrency must be 1 or more, or None for no limit: {self.concurrency}"
            )
        for name in ("requests_per_minute", "tokens_per_minute"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigurationError(f"{name} must be above 0 and finite, or None for no limit: {rate}")
        if not (0 <= self.burst_s < WINDOW_S and 0 <= self.slack_s < WINDOW_S):
            raise ConfigurationError(
                f"burst_s and slack_s must lie in [0, {WINDOW_S:g}) seconds: {self.burst_s}, {self.slack_s}"
            )

    def over(self, others: "Limits") -> "Limits":
        """These, and the others where these say nothing.

        >>> Limits(concurrency=8).over(Limits(concurrency=2, requests_per_minute=60)).requests_per_minute
        60
        """
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            others, **{name: value for name, value in said.items() if value != getattr(Limits, name)}
        )


@dataclass(slots=True)
class Start:
    """A call that started, and its cost (1 of requests, or tokens)."""

    at: float
    cost: float


class Meter:
    """One rate, for a caller that asks `may_start` and then calls `start` in the same moment. Moments are seconds.

    The law is the exact record of the last window of 60 s (and `slack_s`): costs in it sum up to the limit at most.
    The pace spreads calls over it (the generic cell rate algorithm, ITU-T I.371): each call moves a virtual clock on by
    cost / rate, and that clock may run `burst_s` ahead. The first in line waits for what came before it, and what comes
    after it waits for its cost, so that a call larger than a burst waits no longer than any other.

    Time that is lost while somebody waits (a late timer, a permit that was handed back) would be lost for good, a per
    cent here and there on a busy machine: it is caught up, at no more than `CATCH_UP_FACTOR` times the rate.

    Args:
        resumed: what started before is not known: begin with an interval and no burst.

    >>> meter = Meter()
    >>> meter.set(60, burst_s=0, slack_s=0)
    >>> started = meter.start(3, now=100.0)
    >>> meter.may_start(1, now=100.0)  # 3 of 60 per minute were started at once
    103.0
    >>> meter.correct(started, 1, now=100.0)  # it cost 1
    >>> meter.may_start(1, now=100.0)
    101.0
    """

    def __init__(self, *, resumed: bool = False) -> None:
        self._starts: deque[Start] = deque()
        self._total = 0.0  # cost of `_starts`
        self._resumed = resumed
        self._clock = -math.inf  # when all that has started would be over at an even pace,
        self._hasty_clock = -math.inf  # and at the highest one

    def set(self, per_minute: float | None, burst_s: float, slack_s: float) -> None:
        """From now on this limit (None: no limit), with the past as it was."""
        self._limit, self._burst_s, self._window_s = per_minute, burst_s, WINDOW_S + slack_s

    def may_start(self, cost: float, now: float) -> float:
        """The first moment at which a call of `cost` may start, if nothing else does before."""
        if self._limit is None:
            return -math.inf
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

    def start(self, cost: float, now: float, since: float | None = None) -> Start:
        """Record that a call starts now that has waited `since` then (None: it did not)."""
        start = Start(now, cost)
        if self._limit is not None:
            self._starts.append(start)
            self._total += cost
            idle_until = max(now if since is None else since, now - CATCH_UP_S)
            self._clock = max(idle_until, self._clock) + cost / self._rate
            self._hasty_clock = max(now, self._hasty_clock) + cost / self._rate / CATCH_UP_FACTOR
        return start

    def correct(self, start: Start, cost: float, now: float) -> None:
        """That call was of another cost. What it lacked is waited for from now on; what it did not use is free."""
        if self._limit is not None:
            more = self._amend(start, cost, now) / self._rate
            self._clock = max(self._clock, now if more > 0 else -math.inf) + more
            self._hasty_clock = max(now, max(now, self._hasty_clock) + more / CATCH_UP_FACTOR)

    def cancel(self, start: Start, now: float) -> None:
        """That call did not start. The time that has passed since is not for others to start in all at once."""
        if self._limit is not None:
            less = -self._amend(start, 0.0, now) / self._rate
            self._clock -= less
            self._hasty_clock -= max(0.0, less / CATCH_UP_FACTOR - (now - start.at))

    def _amend(self, start: Start, cost: float, now: float) -> float:
        """Correct the record; returns by how much."""
        self._forget(now)
        more, start.cost = cost - start.cost, cost
        if start.at + self._window_s > now:
            self._total += more
        return more

    @property
    def _rate(self) -> float:
        """Per second; of a meter without a limit it is never asked for."""
        return (self._limit or math.inf) / self._window_s

    def _forget(self, now: float) -> None:
        while self._starts and self._starts[0].at + self._window_s <= now:
            self._total -= self._starts.popleft().cost
        if not self._starts:
            self._total = 0.0  # no rounding error outlives a pause
