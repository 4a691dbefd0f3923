"""One adapter's queue and workers.

    score -> queue (first come, first served) -> the worker that has least to do -> result

A worker is given as many samples at a time as it takes (`capacity`). One that would be idle between two quick samples,
while an answer and the next question travel, is given a few more (`prefetch`): `PREFETCH_S` worth of its work. Those
that still wait for their turn `TAKE_BACK_S` later are taken back: another worker may be idle.

A worker that raises or does not answer is fenced: closed and replaced before it is given another sample, so that a late
answer can never reach the wrong sample. Its samples go back to the head of the queue once, then they have failed. When
the last worker cannot be replaced, the lane is broken: every sample fails with the reason, at once. Every `regrow_s` it
is tried again to make the workers that are missing.
"""

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.jobs import Job, PostProcessing, Scoring
from async_grpo.rewards.queue_stats import QueueStats
from async_grpo.rewards.verifier_worker import MakeWorker, Timeouts, VerifierWorker
from async_grpo.rewards.worker_slot import PREFETCH_S, WorkerSlot
from async_grpo.types import AdapterResult

logger = logging.getLogger(__name__)

ATTEMPTS = 2  # workers that a sample is given to before it has failed
TAKE_BACK_S = 10 * PREFETCH_S  # by then the one before them clearly takes longer than samples did of late


class AdapterQueue:
    """See the module; `start` before the first `score`, `close` at the end."""

    def __init__(self, adapter: str, make_worker: MakeWorker, num_workers: int, timeouts: Timeouts) -> None:
        self.adapter = adapter
        self.stats = QueueStats()
        self._make_worker = make_worker
        self._num_workers = num_workers
        self._timeouts = timeouts
        self._queue: list[Job] = []  # a heap
        self._tickets = itertools.count()
        self._seats: list[WorkerSlot] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers: set[VerifierWorker] = set()
        self._regrowing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._out_of_order = ""  # why no sample can be scored any more

    @property
    def queue_depth(self) -> int:
        return len(self._queue)

    @property
    def has_post_process(self) -> bool:
        """Whether its workers look at groups; known once it has been started."""
        return self.stats.has_hook

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    async def start(self) -> None:
        """Make the workers that are missing; none once it is closed. Raises what the last attempt to make one raised."""
        if self._closed:
            return
        makes = [
            asyncio.create_task(self._make(), name=f"making a verifier of {self.adapter}")
            for _ in range(self._num_workers - len(self._workers))
        ]
        self._tasks.update(makes)
        made = await asyncio.gather(*makes, return_exceptions=True)
        self._tasks.difference_update(makes)
        if self._closed:
            return
        self._seats += [WorkerSlot(worker) for worker in made if not isinstance(worker, BaseException)]
        for error in made:
            if isinstance(error, BaseException):
                raise error

    async def score(self, sample: dict[str, Any]) -> AdapterResult:
        """The adapter's result; FAILED when the lane is broken or closed. Cancelling it frees the worker."""
        return await self._done(Scoring(next(self._tickets), self.adapter, sample))

    async def post_process(
        self, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult]
    ) -> list[AdapterResult]:
        """The group's results after the adapter has looked at all of them; FAILED, all of them, if it could not."""
        return await self._done(PostProcessing(next(self._tickets), self.adapter, samples, results))

    async def _done(self, job: Job) -> Any:
        if self._out_of_order:
            self._fail(job, self._out_of_order)
        elif not self._seats:
            raise RuntimeError(f"the verifier lane of {self.adapter!r} was used before its start")
        else:
            heapq.heappush(self._queue, job)
            self._dispatch()
        return await job.outcome

    async def close(self) -> None:
        """Cancel what runs, fail what waits, close the workers; takes a few `grace_s` at most."""
        self._closed = True
        self._break(f"the verifier lane of {self.adapter!r} was closed")
        tasks = self._tasks | self._regrowing
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * self._timeouts.grace_s)
        await asyncio.gather(*(self._discard(worker) for worker in tuple(self._workers)))

    def _dispatch(self) -> None:
        """Give samples to workers, as long as there are both; the worker that has least to do comes first."""
        while self._queue:
            seat = min((seat for seat in self._seats if seat.has_room), key=_busy, default=None)
            if seat is None:
                return
            job = heapq.heappop(self._queue)
            if job.outcome.done():  # its caller gave up while it waited
                continue
            seat.jobs.append(job)
            task = asyncio.create_task(self._work(seat, job), name=f"verifier of {self.adapter}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, seat: WorkerSlot, job: Job) -> None:
        worker, taken_at = seat.worker, time.monotonic()
        try:
            failure_reason = await self._serve(seat, worker, job)
        except BaseException as error:  # closing, or a bug of ours: nobody else will answer this job
            self._fail(job, self._out_of_order or f"{type(error).__name__}: {error}")
            raise
        finally:
            seat.jobs.remove(job)
        if not failure_reason and not job.outcome.done():  # taken back
            seat.stop_prefetch()  # or it would be given the same one again
            self._queue_again(job)
            return
        seat.served(taken_at)
        if failure_reason:
            first = seat.mark_lost(worker)
            self._retry_or_fail(job, failure_reason)
            if first:
                await self._replace(seat, worker, failure_reason)
        self._dispatch()

    async def _serve(self, seat: WorkerSlot, worker: VerifierWorker, job: Job) -> str:
        """Let the worker score the job. Returns why the worker cannot be trusted any more, "" if it can.

        A job that has no outcome then was taken back, for it was not its turn yet.
        """
        taken_at = time.monotonic()
        job.queue_s += taken_at - job.queued_at
        job.queued_at = taken_at
        answer_s = self._timeouts.answer_s + getattr(worker, "max_queue_s", 0.0)
        call = asyncio.ensure_future(job.run(worker, self._timeouts.timeout_s))
        call.add_done_callback(_retrieve)
        try:
            ended = seat.is_ahead(job) and await _ended(call, job, TAKE_BACK_S)
            taken_back = not ended and seat.is_ahead(job)
            silent = not (ended or taken_back or await _ended(call, job, answer_s))
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait({call}, timeout=self._timeouts.grace_s)
            self.stats.busy_s += time.monotonic() - taken_at
        if silent:
            return f"no answer within {answer_s:g} s"
        return "" if taken_back and call.cancelled() else self._deliver(call, job)

    def _deliver(self, call: asyncio.Future[Any], job: Job) -> str:
        if not call.done():
            return f"it went on for {self._timeouts.grace_s:g} s after the call was cancelled"
        if call.cancelled():
            return "" if job.outcome.done() else "it cancelled its own call"
        try:
            answer = call.result()
            if not job.outcome.done():
                job.deliver(answer, self.stats)
        except Exception as error:  # it raised, or its answer is none: it may be of another make
            return f"{type(error).__name__}: {error}"
        return ""

    def _retry_or_fail(self, job: Job, failure_reason: str) -> None:
        job.workers_lost += 1
        job.queued_at = time.monotonic()
        if job.workers_lost >= ATTEMPTS:
            failure_reason = (
                f"{ATTEMPTS} workers of {self.adapter!r} were lost over it, the last: {failure_reason}"
            )
            self._fail(job, self._out_of_order or failure_reason)
        else:
            self._queue_again(job)

    def _queue_again(self, job: Job) -> None:
        if self._out_of_order:
            self._fail(job, self._out_of_order)
        elif not job.outcome.done():
            heapq.heappush(self._queue, job)
            self._dispatch()

    async def _replace(self, seat: WorkerSlot, worker: VerifierWorker, failure_reason: str) -> None:
        try:
            seat.take(await self._replacement_of(worker, failure_reason))
        except Exception as error:
            self._seats.remove(seat)
            logger.error("a verifier of %r less, %d left: %s", self.adapter, len(self._seats), error)
            if not self._seats:
                self._break(str(error))
            if not self._regrowing:
                task = asyncio.create_task(self._regrow(), name=f"regrowing verifiers of {self.adapter}")
                self._regrowing.add(task)
                task.add_done_callback(self._regrowing.discard)

    async def _replacement_of(self, worker: VerifierWorker, failure_reason: str) -> VerifierWorker:
        logger.warning("a verifier worker of %r is replaced: %s", self.adapter, failure_reason)
        self.stats.workers_lost += 1
        await self._discard(worker)
        try:
            return await self._make()
        except Exception as error:
            message = f"no worker of {self.adapter!r} can be made any more: {type(error).__name__}: {error}"
            raise WorkerLost(message) from error

    async def _make(self) -> VerifierWorker:
        """Make a worker, with a few attempts; an error in the user's settings is not worth a second one."""
        error: Exception = WorkerLost(f"no attempt was made to make a worker of {self.adapter!r}")
        for delay_s in self._timeouts.backoff_s:
            await asyncio.sleep(delay_s)
            try:
                async with asyncio.timeout(self._timeouts.make_s):
                    worker = await self._make_worker(self.adapter)
            except ConfigurationError:
                raise
            except TimeoutError:
                error = WorkerLost(
                    f"no worker of {self.adapter!r} was ready within {self._timeouts.make_s:g} s"
                )
            except Exception as latest:  # whatever the transport raises
                error = latest
            else:
                self._workers.add(worker)
                self.stats.has_hook |= getattr(worker, "has_post_process", False)
                return worker
        raise error

    async def _discard(self, worker: VerifierWorker) -> None:
        self._workers.discard(worker)
        try:
            async with asyncio.timeout(self._timeouts.grace_s):
                await worker.close()
        except Exception as error:  # it is broken anyway, and nothing is given to it any more
            logger.warning("closing a worker of %r: %s: %s", self.adapter, type(error).__name__, error)

    async def _regrow(self) -> None:
        """Make the missing workers, however long it takes: what broke them may pass."""
        while len(self._workers) < self._num_workers:
            await asyncio.sleep(self._timeouts.regrow_s)
            try:
                worker = await self._make()
            except Exception as error:  # it was said why before; the next attempt comes
                logger.warning("still no worker of %r: %s: %s", self.adapter, type(error).__name__, error)
                continue
            logger.warning("a verifier of %r is back", self.adapter)
            self._out_of_order = ""
            self._seats.append(WorkerSlot(worker))
            self._dispatch()

    def _break(self, reason: str) -> None:
        """From now on every sample fails with the reason, those in the queue included."""
        self._out_of_order = self._out_of_order or reason
        while self._queue:
            self._fail(heapq.heappop(self._queue), self._out_of_order)

    def _fail(self, job: Job, reason: str) -> None:
        if not job.outcome.done():
            job.fail(reason, self.stats)


def _busy(seat: WorkerSlot) -> int:
    return len(seat.jobs)


async def _ended(call: asyncio.Future[Any], job: Job, timeout_s: float) -> bool:
    """Whether there is an answer, or nobody who waits for it, in time."""
    await asyncio.wait({call, job.outcome}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return call.done() or job.outcome.done()


def _retrieve(call: asyncio.Future[AdapterResult]) -> None:
    """Look at the error of an abandoned call, or the event loop reports it as never retrieved."""
    if not call.cancelled():
        call.exception()
