"""Who waits for whom in this process, and since when: what a stall is explained by."""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_open: dict[int, tuple[str, str, str, float]] = {}
_ids = itertools.count()


class Wait(NamedTuple):
    """`who` (a rank, a prompt, a judge's call) waits for `whom`."""

    kind: str  # see `metrics.diagnosis`
    who: str
    whom: str
    age_s: float


@contextmanager
def waiting(kind: str, who: str, whom: str) -> Iterator[None]:
    """As long as the block lasts, `situation` tells of this wait."""
    wait = next(_ids)
    _open[wait] = kind, who, whom, time.monotonic()
    try:
        yield
    finally:
        del _open[wait]


def situation() -> dict[str, Any]:
    """The id and the waits of this process. May be called in any thread."""
    now, waits = time.monotonic(), list(_open.values())
    told = [Wait(kind, who, whom, now - since) for kind, who, whom, since in waits]
    return {"pid": os.getpid(), "waits": told}
