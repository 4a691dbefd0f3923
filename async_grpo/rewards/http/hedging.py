"""Hedged requests (Dean and Barroso, "The Tail at Scale", 2013): the slow few get a rival, and the first answer wins."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

ENOUGH = 20  # latencies before a quantile of them means anything
REMEMBERED = 500


class Latencies:
    """The last 500 latencies, in seconds.

    >>> latencies = Latencies()
    >>> latencies.quantile(0.5) is None
    True
    >>> for milliseconds in range(1, 101): latencies.add(milliseconds / 1000)
    >>> latencies.quantile(0.5), latencies.quantile(0.95)
    (0.05, 0.095)
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def quantile(self, share: float, enough: int = ENOUGH) -> float | None:
        """The nearest-rank quantile; None before there are `enough`."""
        if len(self._seconds) < enough:
            return None
        return sorted(self._seconds)[math.ceil(share * len(self._seconds)) - 1]


async def first_answer(
    start: Callable[[asyncio.Future[str]], Awaitable[T]],
    rival: Callable[[str], Awaitable[T]],
    patience_s: float,
) -> T:
    """What `start` returns, or its `rival`, which is started when `start` goes on for longer than `patience_s`.

    The first to return wins and the other is cancelled; one that fails leaves it to the other. If both fail, the
    error is that of `start`.

    Args:
        start: gets a future to set when its request leaves (patience begins there), to where it went.
        rival: gets where that was.
    """
    sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    tasks = [asyncio.ensure_future(start(sent))]
    try:
        await asyncio.wait({tasks[0], sent}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({tasks[0]}, timeout=patience_s)
        if not tasks[0].done():
            tasks.append(asyncio.ensure_future(rival(sent.result())))
        for task in asyncio.as_completed(tasks):
            try:
                return await task
            except Exception:
                continue  # the other one may still answer
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the loser's permit is back before we are
