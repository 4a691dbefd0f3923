"""Samples that come one by one, scored several in one call."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from async_grpo.errors import WorkerLost
from async_grpo.rewards.kinds import Kind

Ask = Callable[[list[bytes]], Awaitable[list[dict[str, Any]]]]


class _Batch:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.full = asyncio.Event()
        self.sent = False
        self.num_waiting = 0
        self.answers: asyncio.Task[list[dict[str, Any]]]


class Batches:
    """Sends a batch when it is full, or when its first sample has waited for `kind.max_wait_s`, one after the other.

    While the process is busy the next batch goes on growing. One that nobody waits for any more is cancelled.

    Args:
        ask: sends the samples, as JSON, and returns the answers; cancelled, it stops the work.
        turn: held while the process is busy.
    """

    def __init__(self, kind: Kind, ask: Ask, turn: asyncio.Lock) -> None:
        self._kind, self._ask, self._turn = kind, ask, turn
        self._open: _Batch | None = None

    async def score(self, body: bytes, timeout_s: float) -> dict[str, Any]:
        """The answer to one sample. Raises TimeoutError; WorkerLost if its turn did not come in that time."""
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
            await asyncio.wait((batch.answers,), timeout=timeout_s)
            in_time = batch.answers.done()
        finally:
            batch.num_waiting -= 1
            if batch.num_waiting == 0 and not batch.answers.done():
                batch.answers.cancel()
                await asyncio.gather(batch.answers, return_exceptions=True)
        if in_time:
            return batch.answers.result()[place]
        if not batch.sent:
            raise WorkerLost(f"no batch could be sent for {timeout_s:.3g} s")
        raise TimeoutError

    async def _run(self, batch: _Batch) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(self._kind.max_wait_s):
                await batch.full.wait()
        except TimeoutError:
            pass
        try:
            async with self._turn:
                self._close(batch)
                batch.sent = True
                return await self._ask(batch.bodies)
        finally:
            self._close(batch)

    def _close(self, batch: _Batch) -> None:
        batch.full.set()
        if self._open is batch:
            self._open = None
