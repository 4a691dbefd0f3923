"""One adapter's queue and workers.

    score -> queue (first come, first served) -> the worker that has least to do -> result

Prefetch. A worker is given as many samples at a time as it serves (`capacity`). One that would be idle between two quick
samples, while an answer and the next question travel, is given a few more (`prefetch`): `PREFETCH_S` worth of its work.
Those that still wait for their turn `TAKE_BACK_S` later are taken back, for another worker may be idle.

Retries. This is the only place that gives a sample to a worker again. A sample whose process died is tried once more,
alone: where several were served, any of them may be guilty. One whose call was interrupted for another sample was
never tried. A worker that is lost (it raises, is silent, or does not obey) is closed and replaced before anything else is
given to it, so that a late answer can never reach the wrong sample; its samples are tried once more.

When the last worker cannot be replaced, the queue is broken: every sample fails with the reason, at once. Every
`regrow_s` it is tried again to make the workers that are missing.
"""

import asyncio
import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from async_grpo.rewards.jobs import Job, PostProcessing, Scoring
from async_grpo.rewards.queue_stats import QueueStats
from async_grpo.rewards.verifier_worker import (
    CallInterrupted,
    MakeWorker,
    ProcessDied,
    Timeouts,
    VerifierWorker,
)
from async_grpo.rewards.worker_slot import PREFETCH_S, Call, WorkerMaker, WorkerSlot
from async_grpo.types import AdapterResult

logger = logging.getLogger(__name__)

ATTEMPTS = 2  # at a sample, by processes that die over it or workers that are lost
TAKE_BACK_S = 10 * PREFETCH_S  # by then the sample before it clearly takes longer than the others did


class AdapterQueue:
    """See the module; `start` before the first `score`, `close` at the end. Bound to one event loop."""

    def __init__(self, adapter: str, make_worker: MakeWorker, num_workers: int, timeouts: Timeouts) -> None:
        self.adapter = adapter
        self.stats = QueueStats()
        self._maker = WorkerMaker(adapter, make_worker, timeouts)
        self._num_workers = num_workers
        self._timeouts = timeouts
        self._queue: list[Job] = []  # a heap
        self._tickets = itertools.count()
        self._slots: list[WorkerSlot] = []
        self._tasks: set[asyncio.Task[Any]] = set()  # that make and replace workers
        self._regrowing: asyncio.Task[None] | None = None
        self._closed = False
        self._broken_reason = ""  # why no sample can be scored any more

    @property
    def queue_depth(self) -> int:
        return len(self._queue)

    @property
    def has_post_process(self) -> bool:
        """Whether its workers look at groups; known once it has been started."""
        return self.stats.has_hook

    @property
    def num_workers(self) -> int:
        return len(self._maker.workers)

    def take_request_counts(self) -> dict[str, int]:
        """Since the last call, of its workers that ask over the network (`JudgeWorker.take_stats`): their sums."""
        counts: Counter[str] = Counter()
        for worker in self._maker.workers:
            if take_stats := getattr(worker, "take_stats", None):
                counts.update(take_stats())
        return dict(counts)

    async def start(self) -> None:
        """Make the workers that are missing; none once it is closed. Raises what the last attempt to make one raised."""
        if self._closed:
            return
        num_missing = self._num_workers - len(self._maker.workers)
        makes = [self._run_in_background(self._maker.make(), "making a verifier") for _ in range(num_missing)]
        made = await asyncio.gather(*makes, return_exceptions=True)
        if self._closed:
            return
        for worker in made:
            if not isinstance(worker, BaseException):
                self._add(worker)
        for error in made:
            if isinstance(error, BaseException):
                raise error

    async def score(self, sample: dict[str, Any]) -> AdapterResult:
        """The adapter's result; FAILED when the queue is broken or closed. Cancelling it frees the worker."""
        job = Scoring(next(self._tickets), self.adapter, sample)
        self._enqueue(job)
        self._dispatch()
        return await job.outcome

    async def post_process(
        self, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult]
    ) -> list[AdapterResult]:
        """The group's results after the adapter has looked at all of them; FAILED, all of them, if it could not."""
        job = PostProcessing(next(self._tickets), self.adapter, samples, results)
        self._enqueue(job)
        self._dispatch()
        return await job.outcome

    async def close(self) -> None:
        """Cancel what runs, fail what waits, close the workers; takes a few `grace_s` at most."""
        self._closed = True
        self._break(f"the queue of verifier {self.adapter!r} was closed")
        calls = [call for slot in self._slots for call in slot.calls]
        for call in calls:
            self._fail(call.job, self._broken_reason)
        for task in self._tasks:
            task.cancel()
        if running := {call.task for call in calls} | self._tasks:
            await asyncio.wait(running, timeout=2 * self._timeouts.grace_s)
        await asyncio.gather(*(self._maker.close(worker) for worker in tuple(self._maker.workers)))

    def _enqueue(self, job: Job) -> None:
        if self._broken_reason:
            self._fail(job, self._broken_reason)
        elif not self._slots:
            raise RuntimeError(f"the queue of verifier {self.adapter!r} was used before its start")
        else:
            heapq.heappush(self._queue, job)

    def _dispatch(self) -> None:
        """Give what waits to the workers that have room."""
        waiting_alone = []
        while self._queue:
            job, slot = self._queue[0], None
            if not job.outcome.done():  # else its caller has gone
                slot = self._slot_alone(job) if job.alone else self._slot_with_room()
                if slot is None and not job.alone:
                    break
            heapq.heappop(self._queue)
            if slot is not None:
                self._give(slot, job)
            elif not job.outcome.done():
                waiting_alone.append(job)  # the others need not wait with it
        for job in waiting_alone:
            heapq.heappush(self._queue, job)

    def _slot_with_room(self) -> WorkerSlot | None:
        return min((slot for slot in self._slots if slot.has_room), key=WorkerSlot.num_calls, default=None)

    def _slot_alone(self, job: Job) -> WorkerSlot | None:
        """A slot that serves nothing; where there is none, one is reserved, and given nothing else until then."""
        reserved = next((slot for slot in self._slots if slot.reserved is job), None)
        if reserved is None:
            free = (slot for slot in self._slots if not slot.vacant and not slot.is_reserved)
            if (reserved := min(free, key=WorkerSlot.num_calls, default=None)) is None:
                return None
            reserved.reserved = job
        return None if reserved.calls or reserved.vacant else reserved

    def _give(self, slot: WorkerSlot, job: Job) -> None:
        loop, call = asyncio.get_running_loop(), Call(job, slot.worker)
        job.queue_s += call.given_at - job.queued_at
        job.queued_at = call.given_at
        slot.calls.append(call)
        method = getattr(slot.worker, job.method)
        call.task = asyncio.ensure_future(method(*job.arguments, self._timeouts.timeout_s))
        call.task.add_done_callback(lambda _: self._ended(slot, call))
        answer_s = self._timeouts.answer_s + getattr(slot.worker, "max_queue_s", 0.0)
        call.deadline = loop.call_later(answer_s, self._stop, slot, call, f"no answer within {answer_s:g} s")
        if slot.is_ahead(call):
            call.take_back = loop.call_later(TAKE_BACK_S, self._take_back, slot, call)
        job.outcome.add_done_callback(lambda _: self._stop(slot, call))

    def _take_back(self, slot: WorkerSlot, call: Call) -> None:
        if slot.is_ahead(call) and not call.job.outcome.done():
            call.taken_back = True
            self._stop(slot, call)

    def _stop(self, slot: WorkerSlot, call: Call, broken_reason: str = "") -> None:
        """Cancel a call that has not ended; a worker that does not obey within `grace_s` is lost."""
        if call.ended or call.task.done():
            return
        call.broken_reason = call.broken_reason or broken_reason
        call.task.cancel()
        call.deadline.cancel()
        call.deadline = asyncio.get_running_loop().call_later(self._timeouts.grace_s, self._ended, slot, call)

    def _ended(self, slot: WorkerSlot, call: Call) -> None:
        """The call has ended, or must count as if it had."""
        error = call.error  # asked for in any case, or the event loop reports it as never retrieved
        if call.ended:
            return
        call.ended = True
        call.deadline.cancel()
        if call.take_back is not None:
            call.take_back.cancel()
        slot.calls.remove(call)
        if slot.reserved is call.job:
            slot.reserved = None
        self.stats.busy_s += time.monotonic() - call.given_at
        if isinstance(error, ProcessDied):
            self._retry_or_fail(call.job, str(error), alone=True)
        elif isinstance(error, CallInterrupted) or (call.taken_back and call.task.cancelled()):
            slot.stop_prefetch()  # or it would be given the same one again
            self._queue_again(call.job)
        else:
            self._deliver_or_replace(slot, call, error)
        self._dispatch()

    def _deliver_or_replace(self, slot: WorkerSlot, call: Call, error: BaseException | None) -> None:
        job, reason = call.job, call.broken_reason
        if not call.task.done():
            reason = reason or f"it went on for {self._timeouts.grace_s:g} s after the call was cancelled"
        elif call.task.cancelled():
            reason = reason or ("" if job.outcome.done() else "it cancelled its own call")
        elif error is None and not job.outcome.done():
            slot.served(call)
            try:
                job.deliver(call.task.result(), self.stats)
            except Exception as strange:  # an answer that is none: the worker may be of another make
                error = strange
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
        if reason and not self._closed:
            if slot.mark_lost(call.worker):
                self._run_in_background(self._replace(slot, call.worker, reason), "replacing a verifier")
            lost = f"{ATTEMPTS} workers of {self.adapter!r} were lost over it, the last: {reason}"
            self._retry_or_fail(job, lost)

    def _retry_or_fail(self, job: Job, reason: str, alone: bool = False) -> None:
        job.lost_attempts += 1
        job.alone |= alone
        if job.lost_attempts >= ATTEMPTS:
            self._fail(job, self._broken_reason or reason)
        else:
            self._queue_again(job)

    def _queue_again(self, job: Job) -> None:
        job.queued_at = time.monotonic()
        if self._broken_reason:
            self._fail(job, self._broken_reason)
        elif not job.outcome.done():
            heapq.heappush(self._queue, job)

    def _break(self, reason: str) -> None:
        """From now on every sample fails with the reason, those in the queue included."""
        self._broken_reason = self._broken_reason or reason
        while self._queue:
            self._fail(heapq.heappop(self._queue), self._broken_reason)

    def _fail(self, job: Job, reason: str) -> None:
        if not job.outcome.done():
            job.fail(reason, self.stats)

    async def _replace(self, slot: WorkerSlot, worker: VerifierWorker, reason: str) -> None:
        logger.warning("a verifier worker of %r is replaced: %s", self.adapter, reason)
        self.stats.workers_lost += 1
        await self._maker.close(worker)
        try:
            slot.assign(await self._maker.make())
        except Exception as error:
            self._slots.remove(slot)
            reason = f"no worker of {self.adapter!r} can be made any more: {type(error).__name__}: {error}"
            logger.error("a verifier of %r less, %d left: %s", self.adapter, len(self._slots), reason)
            if not self._slots:
                self._break(reason)
            if self._regrowing is None or self._regrowing.done():
                self._regrowing = self._run_in_background(self._regrow(), "regrowing verifiers")
        self._dispatch()

    async def _regrow(self) -> None:
        """Make the missing workers, however long it takes: what broke them may pass."""
        while len(self._maker.workers) < self._num_workers:
            await asyncio.sleep(self._timeouts.regrow_s)
            try:
                worker = await self._maker.make()
            except Exception as error:  # it was said why before; the next attempt comes
                logger.warning("still no worker of %r: %s: %s", self.adapter, type(error).__name__, error)
                continue
            logger.warning("a verifier of %r is back", self.adapter)
            self._broken_reason = ""
            self._add(worker)
            self._dispatch()

    def _add(self, worker: VerifierWorker) -> None:
        self.stats.has_hook |= getattr(worker, "has_post_process", False)
        self._slots.append(WorkerSlot(worker))

    def _run_in_background(self, work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=f"{what} of {self.adapter}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
