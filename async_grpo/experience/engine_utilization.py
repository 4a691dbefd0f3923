"""`EngineUtilization`: when the staleness budget lets the engines hold work; laid over when they really held some."""

import time
from collections.abc import Callable, Sequence

Interval = tuple[float, float]  # wall-clock seconds, from and to


class EngineUtilization:
    """Notes when work was allowed: the budget has a free slot, or admitted sequences are unfinished. Call `set` at changes.

    >>> clock = iter([0.0, 1.0, 4.0, 6.0])
    >>> utilization = EngineUtilization(lambda: next(clock))
    >>> utilization.set(sequences=8, free_slots=0)    # at 1: a free slot until here, from now on work
    >>> utilization.set(sequences=0, free_slots=0)    # at 4: the budget is used up
    >>> utilization.take(busy=[(1.5, 3.0), (2.0, 4.5)])    # at 6
    {'engine_busy_s': 2.5, 'engine_allowed_s': 4.0, 'wait_generation_budget_s': 2.0}
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._since = clock, clock()
        self._is_allowed = True
        self._allowed: list[Interval] = []
        self._barred_s = 0.0

    def set(self, *, sequences: int, free_slots: int) -> None:
        """The state from now on."""
        self._close_interval()
        self._is_allowed = bool(sequences or free_slots)

    def take(self, busy: Sequence[Interval] = ()) -> dict[str, float]:
        """Seconds since the last call.

        Args:
            busy: when any engine held at least one unfinished request, as the engines report it.
        """
        self._close_interval()
        allowed, self._allowed = self._allowed, []
        barred_s, self._barred_s = self._barred_s, 0.0
        return {
            "engine_busy_s": overlap_s(busy, allowed),
            "engine_allowed_s": sum(end - start for start, end in allowed),
            "wait_generation_budget_s": barred_s,
        }

    def _close_interval(self) -> None:
        now = self._clock()
        if self._is_allowed:
            self._allowed.append((self._since, now))
        else:
            self._barred_s += now - self._since
        self._since = now


def overlap_s(several: Sequence[Interval], disjoint: Sequence[Interval]) -> float:
    """Seconds that lie in any of `several` (which may overlap) and in one of `disjoint`.

    >>> overlap_s([(0, 2), (1, 3), (5, 6)], [(2, 5.5)])
    1.5
    """
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in _union(several)
        for other_start, other_end in disjoint
    )


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
