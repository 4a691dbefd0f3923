"""Record who waits for whom in this process, and since when, so that a stall can be explained."""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

# Kind, waiter, what it waits for, and `time.monotonic` at the begin of each wait, by id
_open_waits: dict[int, tuple[str, str, str, float]] = {}
_ids = itertools.count()


class Wait(NamedTuple):
    """One wait."""

    kind: str  # see `metrics.diagnosis`
    who: str  # a rank, a prompt, or a judge's call
    whom: str  # what it waits for
    age_s: float


@contextmanager
def waiting(kind: str, waiter: str, awaited: str) -> Iterator[None]:
    """Record a wait while the block runs.

    Args:
        kind: Kind of the wait; see `metrics.diagnosis`.
        waiter: A rank, a prompt, or a judge's call.
        awaited: What it waits for.
    """
    wait_id = next(_ids)
    _open_waits[wait_id] = (kind, waiter, awaited, time.monotonic())
    try:
        yield
    finally:
        del _open_waits[wait_id]


def situation() -> dict[str, Any]:
    """Return the id (`pid`) and the `waits` of this process. May be called in any thread."""
    now = time.monotonic()
    # A copy, which other threads do not change
    open_waits = list(_open_waits.values())
    waits = [Wait(kind, waiter, awaited, now - begin) for kind, waiter, awaited, begin in open_waits]
    return {"pid": os.getpid(), "waits": waits}
