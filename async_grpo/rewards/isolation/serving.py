"""How a reward's process is given its requests, and what becomes of those that it dies of.

InLine         it serves one after the other, and the next one lies ready in its pipe
AmongOthers    it serves several at a time, each by itself or in batches
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.adapter.traits import AdapterTraits
from async_grpo.rewards.isolation.batches import Batches, TimeLeft
from async_grpo.rewards.isolation.child_process import ChildProcess, ProcessDied, Reply
from async_grpo.types import RewardStatus

ATTEMPTS = 2  # processes that a sample may crash before it has failed
IN_PIPE = 2  # requests sent to a process that serves one at a time: the one it works on, and the next

Answers = list[dict[str, Any]]


class NoAnswers(Exception):
    """What becomes of a request instead, and how many attempts were made."""

    def __init__(self, reason: str, attempts: int, status: RewardStatus = RewardStatus.FAILED) -> None:
        super().__init__(reason)
        self.reason, self.attempts, self.status = reason, attempts, status


class Process(Protocol):
    """What is needed of an AdapterProcess."""

    adapter: str
    kind: AdapterTraits
    child: ChildProcess | None
    closed: bool
    unheard: asyncio.Task[None] | None

    async def start(self) -> None: ...

    async def abandon(self, child: ChildProcess, request_id: int) -> None: ...


class InLine:
    """One request after the other: it is known which one the process died of.

    The others in its pipe go to the next process as if nothing had been. One that is cancelled in the pipe is computed
    for nobody: to end the process would cost the one that is being served.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._places = asyncio.Semaphore(IN_PIPE)
        self._last: tuple[ChildProcess, Reply] | None = None  # that was sent last, and to whom

    async def serve(self, what: str, bodies: list[bytes], timeout_s: float) -> tuple[Answers, int]:
        """The answers to a message (`samples` or a `group`), and the attempts that it took.

        Raises:
            NoAnswers: a time-out, or too many crashes.
            WorkerLost: the worker is closed.
        """
        attempts, left_s, reason = 0, timeout_s, ""
        while attempts < ATTEMPTS:
            async with self._places:
                # Behind what is computed for nobody nothing is sent: it might wait for several of these
                if self._process.unheard is not None and not self._process.unheard.done():
                    await asyncio.wait((self._process.unheard,))
                try:
                    await self._process.start()
                except ConfigurationError as error:
                    raise NoAnswers(str(error), attempts + 1) from error
                except ProcessDied as error:
                    attempts, reason = attempts + 1, str(error)
                    continue
                child = self._process.child
                assert child is not None
                before = self._last[1] if self._last and self._last[0] is child else None
                request_id, reply = child.ask(what, bodies)
                self._last, begun_at = (child, reply), math.inf
                try:
                    if before is not None:
                        await asyncio.wait((before,))
                    begun_at = time.monotonic()
                    # Not awaited itself: that would cancel it with us, and who comes next waits for it, too
                    await asyncio.wait((reply,), timeout=left_s)
                    if not reply.done():
                        raise NoAnswers(_late(timeout_s), attempts + 1, RewardStatus.TIMED_OUT)
                    return reply.result()["answers"], attempts + 1
                except WorkerLost as error:
                    if self._process.closed:
                        raise
                    left_s -= time.monotonic() - begun_at
                    if isinstance(error, ProcessDied) and _was_answered(before):
                        attempts, reason = attempts + 1, str(error)
                finally:
                    if child.is_asked(request_id):  # timed out or cancelled
                        if begun_at < math.inf:
                            await self._process.abandon(child, request_id)
                        else:
                            unheard = self._finish(child, request_id, before, reply, left_s)
                            self._process.unheard = asyncio.create_task(unheard)
        raise NoAnswers(reason, attempts)

    async def _finish(
        self, child: ChildProcess, request_id: int, before: Reply | None, reply: Reply, left_s: float
    ) -> None:
        """Wait for what nobody waits for any more; end the process if that takes longer than it may."""
        if before is not None:
            await asyncio.wait((before,))
        await asyncio.wait((reply,), timeout=left_s)
        if not reply.done():
            await self._process.abandon(child, request_id)


class AmongOthers:
    """Several at a time: nobody knows which one the process died of, so each is tried again alone."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._places, self._gathering = asyncio.Semaphore(process.kind.capacity), asyncio.Lock()
        self._lock = asyncio.Lock()  # of a process that serves one batch after the other
        self._batches = (
            Batches(process.kind, self._score_batch, self._turn) if process.kind.is_batch else None
        )

    async def serve(self, what: str, bodies: list[bytes], timeout_s: float) -> tuple[Answers, int]:
        """As `InLine.serve`; the time starts when they are sent for the first time.

        Raises:
            WorkerLost: also if the process was ended for another sample, or no time was left to try again alone.
        """
        attempts, time_left, reason = 0, TimeLeft(timeout_s), ""
        while attempts < ATTEMPTS:
            async with self._alone(time_left.deadline) if attempts else self._places:
                attempts += 1
                try:
                    with time_left.stopped():
                        await self._process.start()
                    call = self._score if what == "samples" else self._post_process
                    return await call(bodies, time_left), attempts
                except TimeoutError as error:
                    if attempts > 1 and self._process.kind.capacity > 1:
                        raise self._no_time_left() from None  # another one's crash may have taken its time
                    raise NoAnswers(_late(timeout_s), attempts, RewardStatus.TIMED_OUT) from error
                except ConfigurationError as error:
                    raise NoAnswers(str(error), attempts) from error
                except ProcessDied as error:
                    if self._process.closed:
                        raise
                    reason = str(error)
        raise NoAnswers(reason, attempts)

    @contextlib.asynccontextmanager
    async def _alone(self, deadline: float) -> AsyncIterator[None]:
        """All places: nothing else is in flight meanwhile."""
        taken = 0
        try:
            try:
                async with asyncio.timeout(deadline - time.monotonic()), self._gathering:
                    while taken < self._process.kind.capacity:
                        await self._places.acquire()
                        taken += 1
            except TimeoutError:
                raise self._no_time_left() from None
            yield
        finally:
            for _ in range(taken):
                self._places.release()

    def _no_time_left(self) -> WorkerLost:
        return WorkerLost(f"no time is left to try again after a crash of {self._process.adapter!r}")

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """The process is there, and serves nobody else."""
        async with self._lock:
            await self._process.start()  # it may have died meanwhile
            yield

    async def _score(self, bodies: list[bytes], time_left: TimeLeft) -> Answers:
        if self._batches is not None:
            return [await self._batches.score(bodies[0], time_left)]
        return await self._exchange("samples", bodies, time_left.run())

    async def _score_batch(self, bodies: list[bytes]) -> Answers:
        return await self._exchange("samples", bodies, math.inf)

    async def _post_process(self, bodies: list[bytes], time_left: TimeLeft) -> Answers:
        async with contextlib.nullcontext() if self._process.kind.is_async else self._turn():
            return await self._exchange("group", bodies, time_left.run())

    async def _exchange(self, what: str, bodies: list[bytes], deadline: float) -> Answers:
        child = self._process.child
        assert child is not None, "`start` comes first"
        request_id, reply = child.ask(what, bodies)
        try:
            return await _in_time(reply, deadline)
        finally:
            if child.is_asked(request_id):  # timed out or cancelled
                await self._process.abandon(child, request_id)


async def _in_time(reply: Reply, deadline: float) -> Answers:
    """The answers of the reply. Raises TimeoutError after the deadline (inf for none), and what the reply raises."""
    timer = None
    if deadline < math.inf:
        timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), _expire, reply)
    try:
        answers: Answers = (await reply)["answers"]
        return answers
    finally:
        if timer is not None:
            timer.cancel()


def _expire(reply: Reply) -> None:
    if not reply.done():
        reply.set_exception(TimeoutError())
        reply.exception()  # who still waits gets it all the same; nobody need wait


def _was_answered(reply: Reply | None) -> bool:
    return reply is None or (reply.done() and reply.exception() is None)


def _late(timeout_s: float) -> str:
    return f"no answer within {timeout_s:g} s"
