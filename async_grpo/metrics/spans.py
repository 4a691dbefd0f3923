"""Collect the spans of a run's timeline, and join them until they are few enough to be written with every step.

A span is (lane, activity, begin, end). The lane is the process or worker that was busy. The activity is "generate",
"score", "logprobs", "train", "sync", "save", "evaluate" or "wait". Begin and end are Unix times in seconds.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

Interval = tuple[float, float]  # begin and end, Unix times in seconds
Span = tuple[str, str, float, float]
MOST = 12  # maximum number of spans with the same lane and activity in one step
SHORTEST_S = 1e-3  # shortest span in seconds that is kept; shorter ones would be invisible in a picture


class Spans(list[Span]):
    """Collects spans until `take` returns them. Several tasks of one event loop may measure at the same time."""

    @contextmanager
    def measure(self, lane: str, activity: str) -> Iterator[None]:
        """Add a span for the `with` block, even if it raises an exception."""
        begin = time.time()
        try:
            yield
        finally:
            self.append((lane, activity, begin, time.time()))

    def take(self) -> list[Span]:
        """Return the spans since the last call, joined by `condensed`."""
        spans = condensed(self)
        self.clear()
        return spans


def condensed(spans: Iterable[Span], max_spans: int = MOST) -> list[Span]:
    """Join overlapping spans with the same lane and activity.

    If more than `max_spans` spans of a lane and activity are left, those with the shortest gaps between them are joined
    as well.

    >>> condensed([("e", "wait", 0, 2), ("e", "wait", 1, 3), ("e", "wait", 3.5, 4), ("e", "wait", 9, 10)], max_spans=2)
    [('e', 'wait', 0, 4), ('e', 'wait', 9, 10)]
    """
    kinds: dict[tuple[str, str], list[Interval]] = {}
    for lane, activity, begin, end in spans:
        kinds.setdefault((lane, activity), []).append((begin, end))
    joined: list[Span] = []
    for kind, intervals in kinds.items():
        intervals = union(intervals)
        gaps = [after[0] - before[1] for before, after in itertools.pairwise(intervals)]
        if len(gaps) >= max_spans:
            # Keep the `max_spans` - 1 longest gaps, and close all others
            longest_closed_gap = sorted(gaps, reverse=True)[max_spans - 1]
            intervals = union(intervals, longest_closed_gap)
        joined += [(*kind, begin, end) for begin, end in intervals if end - begin >= SHORTEST_S]
    return joined


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return the intervals in ascending order. Intervals that overlap or are at most `gap` apart are joined.

    >>> union([(1, 3), (5, 6), (0, 2)])
    [(0, 3), (5, 6)]
    """
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin - joined[-1][1] <= gap:
            begin, last = joined.pop()
            end = max(last, end)
        joined.append((begin, end))
    return joined
