"""`AdapterQueue`: the queue and the workers of one adapter.

    score -> queue (first come, first served) -> the least busy worker -> result

A worker serves `capacity` samples at a time. A worker with `prefetch` also gets the next samples in advance, as many as it
can score within `PREFETCH_S`. If such a sample still waits after `TAKE_BACK_S`, the queue takes it back.

Workers never repeat a call. Only this module gives a sample to a worker a second time: see "The way of one verdict" in
docs/rewards.md. A lost worker is closed before another worker replaces it, so that a late answer can never reach the
wrong sample. If there is no worker and none can be made, every sample fails at once, with the reason.
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

ATTEMPTS = 2  # a sample fails after this many processes or workers were lost while they scored it
# Time after which a prefetched sample is taken back, because the sample before it is clearly slower than usual
TAKE_BACK_S = 2 * PREFETCH_S


class AdapterQueue:
    """The queue of one adapter. Use it from one event loop.

    Call `start` before the first `score`, and `close` at the end.

    Args:
        adapter: Name of the adapter, as `make_worker` understands it.
        make_worker: Makes and starts one worker.
        num_workers: Number of workers to make.
        timeouts: Deadlines of calls and workers.
    """

    def __init__(self, adapter: str, make_worker: MakeWorker, num_workers: int, timeouts: Timeouts) -> None:
        self.adapter = adapter
        self.stats = QueueStats()
        self.inline: InlineReward | None = None  # the worker, if it computes rewards in this process
        self._make_worker = make_worker
        self._num_workers = num_workers
        self._timeouts = timeouts
        # Heap of (ticket, job). A job that is enqueued again keeps its ticket, and so its place in the queue.
        self._waiting: list[tuple[int, Job]] = []
        self._tickets = itertools.count()
        self._slots: list[WorkerSlot] = []  # the live workers
        self._jobs_at_workers: set[Job] = set()
        self._serve_tasks: set[asyncio.Task[None]] = set()
        self._make_tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._broken_reason = ""  # why all samples fail at once; "" while samples can be scored

    def counts(self) -> dict[str, Any]:
        """Return counts and times since the last `take_counts`, and the numbers of waiting jobs and workers now."""
        return self.stats.as_dict() | {"queue_depth": len(self._waiting), "workers": len(self._slots)}

    def take_counts(self) -> dict[str, Any]:
        """Return `counts` and the summed counts of the workers (`JudgeWorker.take_stats`), and reset all counts."""
        counts = self.counts()
        self.stats.reset()
        judge_counts = Counter[str]()
        for slot in self._slots:
            take_stats = getattr(slot.worker, "take_stats", None)
            if take_stats is not None:
                judge_counts.update(take_stats())
        return {**counts, **judge_counts}

    async def start(self) -> None:
        """Make the missing workers. Once the queue is closed, do nothing.

        Raises:
            Exception: A worker cannot be made. The error is that of the last attempt.
        """
        if self._is_closed:
            return
        num_missing = self._num_workers - len(self._slots)
        makes = [_run(self._make(), self._make_tasks) for _ in range(num_missing)]
        for error in await asyncio.gather(*makes, return_exceptions=True):
            if error is not None and not self._is_closed:
                raise error

    async def score(self, sample: dict[str, Any]) -> AdapterResult:
        """Return the adapter's result, or a FAILED result if the queue is closed or has no workers.

        Cancelling the call frees its worker.
        """
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
            latency_s=time.monotonic() - job.created_at,
            queue_s=job.queue_s + answer.queue_s,
        )
        self.stats.add(result)
        return result

    async def post_process(
        self, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult]
    ) -> list[AdapterResult]:
        """Apply the adapter's group hook to the results of a group. If the hook cannot run, return FAILED results."""
        job = Job(next(self._tickets), "post_process", samples, results)
        self._enqueue(job)
        self._dispatch()
        answer = await job.outcome
        if isinstance(answer, WorkerLost):
            failed_fields = failure(str(answer))
            answer = [
                replace(result, **fields_of(failed_fields | {"extra": result.extra})) for result in results
            ]
        for before, after in zip(results, answer, strict=True):
            self.stats.revise(before, after)
        return answer

    async def close(self) -> None:
        """Cancel running calls, fail waiting jobs and close the workers.

        This takes at most a few times `Timeouts.grace_s`.
        """
        self._is_closed = True
        self._break(f"the queue of verifier {self.adapter!r} was closed")
        for job in self._jobs_at_workers:
            job.end(WorkerLost(self._broken_reason))
        for task in self._make_tasks:
            task.cancel()
        running_tasks = self._serve_tasks | self._make_tasks
        if running_tasks:
            await asyncio.wait(running_tasks, timeout=2 * self._timeouts.grace_s)
        await asyncio.gather(*(self._close_worker(slot.worker) for slot in self._slots))

    def _enqueue(self, job: Job) -> None:
        job.queued_at = time.monotonic()
        if self._broken_reason:
            job.end(WorkerLost(self._broken_reason))
        elif not self._slots and not self._make_tasks:
            raise RuntimeError(f"the queue of verifier {self.adapter!r} was used before its start")
        elif not job.outcome.done():
            heapq.heappush(self._waiting, (job.ticket, job))

    def _dispatch(self) -> None:
        """Give waiting jobs to workers with room, in their order. If no worker has room for a job, later jobs wait, too."""
        while self._waiting:
            _, job = self._waiting[0]
            if not job.outcome.done():  # drop a job whose call was cancelled
                slot = self._least_busy_slot(job)
                if slot is None:
                    return
                slot.jobs.append(job)
                self._jobs_at_workers.add(job)
                method = getattr(slot.worker, job.method)
                call = asyncio.ensure_future(method(*job.arguments, self._timeouts.timeout_s))
                _run(self._serve_and_note_wait(slot, job, call), self._serve_tasks)
            heapq.heappop(self._waiting)

    def _least_busy_slot(self, job: Job) -> WorkerSlot | None:
        """Return the worker with the fewest jobs among those with room for this job, or None if no worker has room."""
        slots_with_room = [slot for slot in self._slots if slot.has_room_for(job)]
        return min(slots_with_room, key=lambda slot: len(slot.jobs), default=None)

    async def _serve_and_note_wait(self, slot: WorkerSlot, job: Job, call: asyncio.Future[Any]) -> None:
        with waiting("call", self.adapter, "its worker"):
            await self._serve(slot, job, call)

    async def _serve(self, slot: WorkerSlot, job: Job, call: asyncio.Future[Any]) -> None:
        """Wait for a call, and act on its outcome.

        The job ends or is enqueued again. The worker is replaced if it is lost.
        """
        given_at = time.monotonic()
        # The worker's actor may have been lost before this call. Then the job did not cause the loss.
        was_lost_before = getattr(slot.worker, "is_lost", False)
        job.queue_s += given_at - job.queued_at
        answer_s = self._timeouts.answer_s + getattr(slot.worker, "max_queue_s", 0.0)

        is_taken_back = await self._is_to_be_taken_back(slot, job, call)
        if is_taken_back:
            job.queue_s += time.monotonic() - given_at
        else:
            await _first_of(call, job.outcome, answer_s)

        loss_reason = ""
        if not call.done():
            is_late = not is_taken_back and not job.outcome.done()
            if is_late:
                loss_reason = f"no answer within {answer_s:g} s"
            await self._cancel(call)
        slot.jobs.remove(job)
        self._jobs_at_workers.discard(job)
        self.stats.sums["busy_s"] += time.monotonic() - given_at
        if not loss_reason:
            loss_reason = self._settle(slot, job, call, given_at, is_taken_back)

        if loss_reason and not self._is_closed:
            # If the slot is gone, another call of this worker has already reported the loss
            is_first_report = slot in self._slots
            if is_first_report:
                self._slots.remove(slot)
                _run(self._replace(slot.worker, loss_reason), self._make_tasks)
            reason = f"{ATTEMPTS} workers of {self.adapter!r} were lost over it, the last: {loss_reason}"
            self._retry(job, reason, is_attempt=not was_lost_before)
        self._dispatch()

    async def _is_to_be_taken_back(self, slot: WorkerSlot, job: Job, call: asyncio.Future[Any]) -> bool:
        """Wait up to `TAKE_BACK_S` for the worker to begin a prefetched job. Return True if it has not begun by then."""
        if not slot.is_ahead(job):
            return False
        await _first_of(call, job.outcome, TAKE_BACK_S)
        return slot.is_ahead(job) and not call.done() and not job.outcome.done()

    async def _cancel(self, call: asyncio.Future[Any]) -> None:
        """Cancel a call, and give it `grace_s` to end."""
        # asyncio logs an error that nobody retrieves, so this callback retrieves it
        call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        call.cancel()
        await asyncio.wait({call}, timeout=self._timeouts.grace_s)

    def _settle(
        self,
        slot: WorkerSlot,
        job: Job,
        call: asyncio.Future[Any],
        given_at: float,
        is_taken_back: bool,
    ) -> str:
        """Act on the outcome of a call, and return why its worker is lost; "" if the worker is not lost."""
        if not call.done():
            return f"it went on for {self._timeouts.grace_s:g} s after the call was cancelled"
        try:
            job.end(call.result())
            slot.note_duration(given_at)
        except ProcessDied as error:
            job.is_served_alone = True
            self._retry(job, str(error))
        except CallInterrupted:
            self._enqueue_again(slot, job)
        except asyncio.CancelledError:
            if is_taken_back:
                self._enqueue_again(slot, job)
            elif not job.outcome.done():
                return "it cancelled its own call"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _enqueue_again(self, slot: WorkerSlot, job: Job) -> None:
        # With an infinite mean duration, the worker prefetches no jobs. Otherwise, it would get this job again at once.
        slot.service_s = math.inf
        self._enqueue(job)

    def _retry(self, job: Job, reason: str, *, is_attempt: bool = True) -> None:
        """Enqueue a job again after its worker or process was lost, or fail it after `ATTEMPTS` losses.

        Args:
            job: The job.
            reason: Why the job fails if this was its last attempt.
            is_attempt: Whether this loss counts as an attempt. False if the worker was lost before it received the job.
        """
        if is_attempt:
            job.lost_attempts += 1
        if job.lost_attempts >= ATTEMPTS:
            job.end(WorkerLost(self._broken_reason or reason))
        else:
            self._enqueue(job)

    def _break(self, reason: str) -> None:
        """Fail all waiting jobs with this reason, and also all later jobs until a new worker is made."""
        self._broken_reason = self._broken_reason or reason
        for _, job in self._waiting:
            job.end(WorkerLost(self._broken_reason))
        self._waiting.clear()

    async def _replace(self, worker: VerifierWorker, reason: str) -> None:
        """Close a lost worker, and try to make another one until that succeeds, because the cause may be temporary."""
        logger.warning("a verifier worker of %r is replaced: %s", self.adapter, reason)
        self.stats.sums["workers_lost"] += 1
        await self._close_worker(worker)
        while True:
            try:
                await self._make()
                return
            except Exception as error:
                description = f"{type(error).__name__}: {error}"
                logger.error(
                    "a lost verifier of %r cannot be replaced now, %d are left: %s",
                    self.adapter,
                    len(self._slots),
                    description,
                )
                if not self._slots:
                    self._break(f"no worker of {self.adapter!r} can be made any more: {description}")
                await asyncio.sleep(self._timeouts.regrow_s)

    async def _make(self) -> None:
        """Make a worker and add it to the queue, in several attempts.

        Raises:
            ConfigurationError: The configuration is wrong, so that a second attempt would fail, too.
            Exception: The error of the last attempt.
        """
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
            except Exception as latest:  # `make_worker` may raise anything
                error = latest
            else:
                self._add(worker)
                return
        raise error

    def _add(self, worker: VerifierWorker) -> None:
        """Add a new worker, and give it waiting jobs."""
        self._slots.append(WorkerSlot(worker))
        self.inline = worker if isinstance(worker, InlineReward) else None
        if getattr(worker, "has_post_process", False):
            self.stats.has_hook = True
        if not self._is_closed:
            self._broken_reason = ""
        self._dispatch()

    async def _close_worker(self, worker: VerifierWorker) -> None:
        """Close a worker. If this fails or takes longer than `grace_s`, log it and continue."""
        try:
            async with asyncio.timeout(self._timeouts.grace_s):
                await worker.close()
        except Exception as error:  # not fatal, because the worker gets no more jobs
            logger.warning("closing a worker of %r: %s: %s", self.adapter, type(error).__name__, error)


async def _first_of(call: asyncio.Future[Any], outcome: asyncio.Future[Any], timeout_s: float) -> None:
    """Wait until the call has ended or the job has an outcome, for at most `timeout_s`."""
    await asyncio.wait({call, outcome}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _run(work: Coroutine[Any, Any, Any], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[Any]:
    """Run the coroutine in a task, and keep the task in `tasks` until it ends."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
