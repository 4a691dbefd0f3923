"""The places for workers in a queue, what each is given at a time, and how workers are made and closed."""

import asyncio
import logging
import math
import time
from typing import Any

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.jobs import Job
from async_grpo.rewards.verifier_worker import MakeWorker, Timeouts, VerifierWorker

logger = logging.getLogger(__name__)

PREFETCH_S, MAX_PREFETCH = 0.02, 8  # longer, and samples would wait while another worker is idle


class Call:
    """A job that a worker was given."""

    def __init__(self, job: Job, worker: VerifierWorker) -> None:
        self.job, self.worker, self.given_at = job, worker, time.monotonic()
        self.task: asyncio.Future[Any]
        self.deadline: asyncio.TimerHandle  # for its answer, later for it to obey a cancellation
        self.take_back: asyncio.TimerHandle | None = None
        self.taken_back = self.ended = False
        self.broken_reason = ""  # why its worker cannot be trusted any more

    @property
    def error(self) -> BaseException | None:
        """What it raised, if it has ended."""
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


class WorkerSlot:
    """A place for a worker: who has it, and how much that one is given."""

    def __init__(self, worker: VerifierWorker) -> None:
        self.calls: list[Call] = []  # in the order in which they were given
        self.reserved: Job | None = None  # for a job that is to be served alone
        self._free_at = 0.0  # when the last call ended
        self.assign(worker)

    def assign(self, worker: VerifierWorker) -> None:
        """The worker that has the place from now on."""
        self.worker, self.vacant = worker, False
        self._service_s = math.inf  # recent mean of one sample

    @property
    def capacity(self) -> int:
        return getattr(self.worker, "capacity", 1)

    @property
    def is_reserved(self) -> bool:
        """Whether a job that is to be served alone waits for the place, or has it."""
        return self.reserved is not None and not self.reserved.outcome.done()

    @property
    def has_room(self) -> bool:
        """Whether it may be given another sample now."""
        prefetch = 0
        if getattr(self.worker, "prefetch", False):
            prefetch = min(MAX_PREFETCH, int(PREFETCH_S / max(self._service_s, 1e-9)))
        return not self.vacant and not self.is_reserved and len(self.calls) < self.capacity + prefetch

    def num_calls(self) -> int:
        return len(self.calls)

    def is_ahead(self, call: Call) -> bool:
        """Whether the call waits for those before it: they are served in order."""
        return call not in self.calls[: self.capacity]

    def stop_prefetch(self) -> None:
        """Give it nothing ahead of its turn before it has served a sample."""
        self._service_s = math.inf

    def served(self, call: Call) -> None:
        """Note how long the call took it."""
        now = time.monotonic()
        took_s = now - max(call.given_at, self._free_at)
        known = self._service_s < math.inf
        self._service_s = 0.8 * self._service_s + 0.2 * took_s if known else took_s
        self._free_at = now

    def mark_lost(self, worker: VerifierWorker) -> bool:
        """Give that worker nothing more; False if it was said before, by another of its calls."""
        if self.worker is not worker or self.vacant:
            return False
        self.vacant = True
        return True


class WorkerMaker:
    """Makes and closes the workers of one adapter, within the deadlines of its queue. `workers`: those that live."""

    def __init__(self, adapter: str, make_worker: MakeWorker, timeouts: Timeouts) -> None:
        self._adapter, self._make_worker, self._timeouts = adapter, make_worker, timeouts
        self.workers: set[VerifierWorker] = set()

    async def make(self) -> VerifierWorker:
        """A new worker; it is tried a few times.

        Raises:
            ConfigurationError: an error in the user's settings, which is not worth a second attempt.
            Exception: what the last attempt raised.
        """
        error: Exception = WorkerLost(f"no attempt was made to make a worker of {self._adapter!r}")
        for delay_s in self._timeouts.backoff_s:
            await asyncio.sleep(delay_s)
            try:
                async with asyncio.timeout(self._timeouts.make_s):
                    worker = await self._make_worker(self._adapter)
            except ConfigurationError:
                raise
            except TimeoutError:
                error = WorkerLost(
                    f"no worker of {self._adapter!r} was ready within {self._timeouts.make_s:g} s"
                )
            except Exception as latest:  # whatever the transport raises
                error = latest
            else:
                self.workers.add(worker)
                return worker
        raise error

    async def close(self, worker: VerifierWorker) -> None:
        """Close a worker; one that cannot be closed in time is given up."""
        self.workers.discard(worker)
        try:
            async with asyncio.timeout(self._timeouts.grace_s):
                await worker.close()
        except Exception as error:  # it is broken anyway, and nothing is given to it any more
            logger.warning("closing a worker of %r: %s: %s", self._adapter, type(error).__name__, error)
