"""Records who waits for what in this process, and since when, so that a stall can be explained."""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

# Id of an open wait -> (kind, waiter, what it waits for, `time.monotonic()` at its beginning)
_open_waits: dict[int, tuple[str, str, str, float]] = {}
_ids = itertools.count()


class Wait(NamedTuple):
    """A wait of this process that has not ended yet."""

    kind: str  # kind of the wait; see `metrics.diagnosis`
    who: str  # the waiter: a rank, a prompt, or a judge's call
    whom: str  # what the waiter waits for
    age_s: float


@contextmanager
def waiting(kind: str, waiter: str, awaited: str) -> Iterator[None]:
    """Record a wait while the block runs.

    Args:
        kind: Kind of the wait; see `metrics.diagnosis`.
        waiter: What waits: a rank, a prompt, or a judge's call.
        awaited: What the waiter waits for.
    """
    wait_id = next(_ids)
    _open_waits[wait_id] = (kind, waiter, awaited, time.monotonic())
    try:
        yield
    finally:
        del _open_waits[wait_id]


def situation() -> dict[str, Any]:
    """Return this process's id (`pid`) and its open `waits`. May be called in any thread."""
    now = time.monotonic()
    # Copy the values, because other threads may change the dictionary meanwhile
    open_waits = list(_open_waits.values())
    waits = [Wait(kind, waiter, awaited, now - begin) for kind, waiter, awaited, begin in open_waits]
    return {"pid": os.getpid(), "waits": waits}
