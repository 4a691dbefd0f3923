"""Samples that come one by one, scored several in one call."""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from async_grpo.rewards.adapter.traits import AdapterTraits

Ask = Callable[[list[bytes]], Awaitable[list[dict[str, Any]]]]
Turn = Callable[[], AbstractAsyncContextManager[None]]


class TimeLeft:
    """The time of one request, in seconds: it begins with `run`, and stands still while a process is started."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self.deadline = timeout_s, math.inf

    def run(self) -> float:
        """It is sent; the first time counts. Returns the deadline."""
        self.deadline = min(self.deadline, time.monotonic() + self._timeout_s)
        return self.deadline

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done meanwhile is on nobody's time."""
        stopped_at = time.monotonic()
        yield
        self.deadline += time.monotonic() - stopped_at


class _Batch:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.full, self.sent = asyncio.Event(), asyncio.Event()
        self.num_waiting = 0
        self.answers: asyncio.Task[list[dict[str, Any]]]


class Batches:
    """Sends a batch when it is full, or when its first sample has waited for `kind.max_wait_s`, one after the other.

    While the process is busy the next batch goes on growing. One that nobody waits for any more is cancelled.

    Args:
        ask: sends the samples, as JSON, and returns the answers; cancelled, it stops the work.
        turn: entered when the process is ready for a batch, left when it has answered.
    """

    def __init__(self, kind: AdapterTraits, ask: Ask, turn: Turn) -> None:
        self._kind, self._ask, self._turn = kind, ask, turn
        self._open: _Batch | None = None

    async def score(self, body: bytes, time_left: TimeLeft) -> dict[str, Any]:
        """The answer to one sample. Raises TimeoutError. Its time begins when its batch is sent: the wait is bounded
        by the time of the one before it."""
        batch = self._open
        if batch is None:
            batch = self._open = _Batch()
            batch.answers = asyncio.create_task(self._run(batch))
        place = len(batch.bodies)
        batch.bodies.append(body)
        batch.num_waiting += 1
        if len(batch.bodies) >= self._kind.capacity:
            self._close(batch)
        try:
            await batch.sent.wait()
            await asyncio.wait((batch.answers,), timeout=time_left.run() - time.monotonic())
            in_time = batch.answers.done()
        finally:
            batch.num_waiting -= 1
            if batch.num_waiting == 0 and not batch.answers.done():
                batch.answers.cancel()
                await asyncio.gather(batch.answers, return_exceptions=True)
        if not in_time:
            raise TimeoutError
        return batch.answers.result()[place]

    async def _run(self, batch: _Batch) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(self._kind.max_wait_s):
                await batch.full.wait()
        except TimeoutError:
            pass
        try:
            async with self._turn():
                self._close(batch)
                batch.sent.set()
                return await self._ask(batch.bodies)
        finally:
            self._close(batch)
            batch.sent.set()  # else whoever waits would never hear why it was not

    def _close(self, batch: _Batch) -> None:
        batch.full.set()
        if self._open is batch:
            self._open = None
