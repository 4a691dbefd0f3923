"""One adapter's queue and workers.

    score -> queue (first come, first served) -> the worker that has least to do -> result

A worker with `prefetch` is given `PREFETCH_S` worth of its work more than it serves (`capacity`); what still waits for its
turn `TAKE_BACK_S` later is taken back. This is the only place that gives a sample to a worker again: see "The way of one
verdict" in docs/rewards.md. A lost worker is closed before anything else is given to its successor, so that a late answer
can never reach the wrong sample. While no worker can be made, every sample fails with the reason, at once.
"""

import asyncio
import heapq
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.processes.waits import waiting
from async_grpo.rewards.adapter.result import failure
from async_grpo.rewards.inline import InlineReward
from async_grpo.rewards.verifier_worker import (
    PREFETCH_S,
    CallInterrupted,
    Job,
    MakeWorker,
    ProcessDied,
    QueueStats,
    Timeouts,
    VerifierWorker,
    WorkerSlot,
    fields_of,
)
from async_grpo.types import AdapterResult

logger = logging.getLogger(__name__)

ATTEMPTS = 2  # at a sample, by processes that die over it or workers that are lost
TAKE_BACK_S = 2 * PREFETCH_S  # by then the sample before it clearly takes longer than the others did


class AdapterQueue:
    """See the module; `start` before the first `score`, `close` at the end. Bound to one event loop."""

    def __init__(self, adapter: str, make_worker: MakeWorker, num_workers: int, timeouts: Timeouts) -> None:
        self.adapter, self.stats = adapter, QueueStats()
        self._make_worker, self._num_workers, self._timeouts = make_worker, num_workers, timeouts
        self._waiting: list[tuple[int, Job]] = []  # a heap, by ticket, also of those that come back
        self._tickets = itertools.count()
        self._slots: list[WorkerSlot] = []  # of the workers that live
        self._given: set[Job] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._makes: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.inline: InlineReward | None = None  # the worker, if it answers at once
        self._broken_reason = ""  # why no sample can be scored any more

    def counts(self) -> dict[str, Any]:
        """Counts and seconds since the last `take_counts`, what waits now, and who serves it."""
        return self.stats.as_dict() | {"queue_depth": len(self._waiting), "workers": len(self._slots)}

    def take_counts(self) -> dict[str, Any]:
        """`counts`, with the sums of what its judges count (`JudgeWorker.take_stats`); all begin anew."""
        counts, of_judges = self.counts(), Counter[str]()
        self.stats.reset()
        for slot in self._slots:
            if take_stats := getattr(slot.worker, "take_stats", None):
                of_judges.update(take_stats())
        return counts | of_judges

    async def start(self) -> None:
        """Make the workers that are missing; none once it is closed. Raises what the last attempt to make one raised."""
        if self._closed:
            return
        makes = [_run(self._make(), self._makes) for _ in range(self._num_workers - len(self._slots))]
        for error in filter(None, await asyncio.gather(*makes, return_exceptions=True)):
            if not self._closed:
                raise error

    async def score(self, sample: dict[str, Any]) -> AdapterResult:
        """The adapter's result; FAILED when the queue is broken or closed. Cancelling it frees the worker."""
        if self.inline is not None and not self._broken_reason:
            result = await self.inline.score(sample, self._timeouts.timeout_s)
            self.stats.sums["busy_s"] += result.latency_s
            self.stats.add(result)
            return result
        job = Job(next(self._tickets), "score", sample)
        self._enqueue(job)
        self._dispatch()
        answer = await job.outcome
        if isinstance(answer, WorkerLost):
            answer = AdapterResult(self.adapter, **fields_of(failure(str(answer))), attempts=0)
        result = replace(
            answer,
            attempts=answer.attempts + job.lost_attempts,
            latency_s=time.monotonic() - job.asked_at,
            queue_s=job.queue_s + answer.queue_s,
        )
        self.stats.add(result)
        return result

    async def post_process(
        self, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult]
    ) -> list[AdapterResult]:
        """The group's results after the adapter has looked at all of them; FAILED, all of them, if it could not."""
        job = Job(next(self._tickets), "post_process", samples, results)
        self._enqueue(job)
        self._dispatch()
        answer = await job.outcome
        if isinstance(answer, WorkerLost):
            lost = failure(str(answer))
            answer = [replace(result, **fields_of(lost | {"extra": result.extra})) for result in results]
        for before, after in zip(results, answer, strict=True):
            self.stats.revise(before, after)
        return answer

    async def close(self) -> None:
        """Cancel what runs, fail what waits, close the workers; takes a few `grace_s` at most."""
        self._closed = True
        self._break(f"the queue of verifier {self.adapter!r} was closed")
        for job in self._given:
            job.end(WorkerLost(self._broken_reason))
        for make in self._makes:
            make.cancel()
        if running := self._calls | self._makes:
            await asyncio.wait(running, timeout=2 * self._timeouts.grace_s)
        await asyncio.gather(*(self._close_worker(slot.worker) for slot in self._slots))

    def _enqueue(self, job: Job) -> None:
        job.queued_at = time.monotonic()
        if self._broken_reason:
            job.end(WorkerLost(self._broken_reason))
        elif not self._slots and not self._makes:
            raise RuntimeError(f"the queue of verifier {self.adapter!r} was used before its start")
        elif not job.outcome.done():
            heapq.heappush(self._waiting, (job.ticket, job))

    def _dispatch(self) -> None:
        """Give what waits to the workers that have room. One that is to be served alone holds up those behind it."""
        while self._waiting:
            _, job = self._waiting[0]
            if not job.outcome.done():  # else its caller has gone
                free = (slot for slot in self._slots if slot.has_room_for(job))
                if (slot := min(free, key=lambda slot: len(slot.calls), default=None)) is None:
                    return
                slot.calls.append(job)
                self._given.add(job)
                method, timeout_s = getattr(slot.worker, job.method), self._timeouts.timeout_s
                call = asyncio.ensure_future(method(*job.arguments, timeout_s))
                _run(self._served(slot, job, call), self._calls)
            heapq.heappop(self._waiting)

    async def _served(self, *given: Any) -> None:
        with waiting("call", self.adapter, "its worker"):
            await self._serve(*given)

    async def _serve(self, slot: WorkerSlot, job: Job, call: asyncio.Future[Any]) -> None:
        """See a call of the slot's worker to its end, and what follows from that."""
        worker, given_at, limits = slot.worker, time.monotonic(), self._timeouts
        was_lost = getattr(worker, "is_lost", False)  # with others of its actor: it never had the job
        job.queue_s += given_at - job.queued_at
        answer_s = limits.answer_s + getattr(worker, "max_queue_s", 0.0)
        if slot.is_ahead(job):
            await _either(call, job.outcome, TAKE_BACK_S)
        taken_back = slot.is_ahead(job) and not (call.done() or job.outcome.done())
        if taken_back:
            job.queue_s += time.monotonic() - given_at
        else:
            await _either(call, job.outcome, answer_s)
        lost = ""
        if not call.done():
            if not taken_back and not job.outcome.done():
                lost = f"no answer within {answer_s:g} s"
            call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # whoever it reaches
            call.cancel()
            await asyncio.wait({call}, timeout=limits.grace_s)
        slot.calls.remove(job)
        self._given.discard(job)
        self.stats.sums["busy_s"] += time.monotonic() - given_at
        try:
            if not call.done():
                lost = lost or f"it went on for {limits.grace_s:g} s after the call was cancelled"
            elif not lost:
                job.end(call.result())
                slot.served(given_at)
        except ProcessDied as error:
            job.alone = True
            self._retry(job, str(error))
        except (CallInterrupted, asyncio.CancelledError) as interrupted:
            if isinstance(interrupted, CallInterrupted) or taken_back:
                slot.service_s = math.inf  # or it would be given the same one again
                self._enqueue(job)
            elif not job.outcome.done():
                lost = "it cancelled its own call"
        except Exception as error:
            lost = f"{type(error).__name__}: {error}"
        if lost and not self._closed:
            if slot in self._slots:  # no other of its calls has said so
                self._slots.remove(slot)
                _run(self._replace(worker, lost), self._makes)
            job.lost_attempts -= was_lost
            self._retry(job, f"{ATTEMPTS} workers of {self.adapter!r} were lost over it, the last: {lost}")
        self._dispatch()

    def _retry(self, job: Job, reason: str) -> None:
        job.lost_attempts += 1
        if job.lost_attempts >= ATTEMPTS:
            job.end(WorkerLost(self._broken_reason or reason))
        else:
            self._enqueue(job)

    def _break(self, reason: str) -> None:
        """From now on every sample fails with the reason, those that wait included."""
        self._broken_reason = self._broken_reason or reason
        for _, job in self._waiting:
            job.end(WorkerLost(self._broken_reason))
        self._waiting.clear()

    async def _replace(self, worker: VerifierWorker, reason: str) -> None:
        """Make another worker, however long it takes: what broke them may pass."""
        logger.warning("a verifier worker of %r is replaced: %s", self.adapter, reason)
        self.stats.sums["workers_lost"] += 1
        await self._close_worker(worker)
        while True:
            try:
                return await self._make()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                logger.error("a verifier of %r less, %d left: %s", self.adapter, len(self._slots), said)
                if not self._slots:
                    self._break(f"no worker of {self.adapter!r} can be made any more: {said}")
                await asyncio.sleep(self._timeouts.regrow_s)

    async def _make(self) -> None:
        """Make a worker; it is tried a few times. Raises what the last attempt raised; a ConfigurationError at once."""
        error: Exception = WorkerLost(f"no attempt was made to make a worker of {self.adapter!r}")
        limit_s = self._timeouts.make_timeout_s
        for delay_s in self._timeouts.backoff_s:
            await asyncio.sleep(delay_s)
            try:
                async with asyncio.timeout(limit_s):
                    worker = await self._make_worker(self.adapter)
            except ConfigurationError:
                raise
            except TimeoutError:
                error = WorkerLost(f"no worker of {self.adapter!r} was ready within {limit_s:g} s")
            except Exception as latest:  # whatever the transport raises
                error = latest
            else:
                self._slots.append(WorkerSlot(worker))
                self.inline = worker if isinstance(worker, InlineReward) else None
                self.stats.has_hook |= getattr(worker, "has_post_process", False)
                if not self._closed:
                    self._broken_reason = ""
                return self._dispatch()
        raise error

    async def _close_worker(self, worker: VerifierWorker) -> None:
        """One that cannot be closed in time is given up."""
        try:
            async with asyncio.timeout(self._timeouts.grace_s):
                await worker.close()
        except Exception as error:  # it is broken anyway, and nothing is given to it any more
            logger.warning("closing a worker of %r: %s: %s", self.adapter, type(error).__name__, error)


async def _either(call: asyncio.Future[Any], outcome: asyncio.Future[Any], timeout_s: float) -> None:
    await asyncio.wait({call, outcome}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _run(work: Coroutine[Any, Any, Any], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
