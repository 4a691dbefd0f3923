"""What a process did when: spans of a run's timeline, few enough to be written down with every step.

A span is (lane, what, begin, end): whose it is, what it is ("generate", "score", "logprobs", "train", "sync", "save",
"evaluate" or "wait"), and Unix seconds.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

Interval = tuple[float, float]  # wall-clock seconds, from and to
Span = tuple[str, str, float, float]
MOST = 12  # spans of one kind that a lane has in a step
SHORTEST_S = 1e-3  # what is shorter would only be a line


class Spans(list[Span]):
    """Collects spans until they are taken. They may be measured in several tasks at once, in one event loop."""

    @contextmanager
    def measure(self, lane: str, what: str) -> Iterator[None]:
        """The time of the `with` block, whatever its end."""
        begin = time.time()
        try:
            yield
        finally:
            self.append((lane, what, begin, time.time()))

    def take(self) -> list[Span]:
        """Those since the last call, condensed."""
        found = condensed(self)
        self.clear()
        return found


def condensed(spans: Iterable[Span], most: int = MOST) -> list[Span]:
    """The spans with those of one lane and kind joined where they overlap; where more than `most` of them are left, across
    the shortest gaps as well.

    >>> condensed([("e", "wait", 0, 2), ("e", "wait", 1, 3), ("e", "wait", 3.5, 4), ("e", "wait", 9, 10)], most=2)
    [('e', 'wait', 0, 4), ('e', 'wait', 9, 10)]
    """
    kinds: dict[tuple[str, str], list[Interval]] = {}
    for lane, what, begin, end in spans:
        kinds.setdefault((lane, what), []).append((begin, end))
    few: list[Span] = []
    for kind, intervals in kinds.items():
        apart = union(intervals)
        gaps = sorted((after[0] - before[1] for before, after in itertools.pairwise(apart)), reverse=True)
        closed = union(apart, gaps[most - 1] if len(gaps) >= most else 0.0)
        few += [(*kind, begin, end) for begin, end in closed if end - begin >= SHORTEST_S]
    return few


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The intervals in order, those joined that overlap or lie at most `gap` apart.

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
