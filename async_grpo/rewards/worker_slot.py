"""`WorkerSlot`: a place for a worker in a lane, and how much it is given at a time."""

import math
import time

from async_grpo.rewards.jobs import Job
from async_grpo.rewards.verifier_worker import VerifierWorker

PREFETCH_S, MAX_PREFETCH = (
    0.02,
    8,
)  # longer, and samples would wait behind others while another worker is idle


class WorkerSlot:
    """A place for a worker: who has it, and how much that one is given."""

    def __init__(self, worker: VerifierWorker) -> None:
        self.worker = worker
        self.vacant = False  # while the worker is replaced
        self.jobs: list[Job] = []  # that it was given, in that order
        self._service_s = math.inf  # that one sample took of late
        self._free_at = 0.0  # when the last one was done

    @property
    def _capacity(self) -> int:
        return getattr(self.worker, "capacity", 1)

    def is_ahead(self, job: Job) -> bool:
        """Whether the job waits for those before it: they are served in order."""
        return job not in self.jobs[: self._capacity]

    @property
    def has_room(self) -> bool:
        """Whether it may be given another sample now."""
        ahead = 0
        if getattr(self.worker, "prefetch", False):
            ahead = min(MAX_PREFETCH, int(PREFETCH_S / max(self._service_s, 1e-9)))
        return not self.vacant and len(self.jobs) < self._capacity + ahead

    def stop_prefetch(self) -> None:
        """Not before it has served a sample."""
        self._service_s = math.inf

    def served(self, taken_at: float) -> None:
        """It has served a sample that it was given at `taken_at`."""
        now = time.monotonic()
        took_s = now - max(taken_at, self._free_at)
        known = self._service_s < math.inf
        self._service_s = 0.8 * self._service_s + 0.2 * took_s if known else took_s
        self._free_at = now

    def mark_lost(self, worker: VerifierWorker) -> bool:
        """Give that worker nothing more; False if it was said before, by another of its samples."""
        if self.worker is not worker or self.vacant:
            return False
        self.vacant = True
        return True

    def take(self, worker: VerifierWorker) -> None:
        """Here is the worker that replaces the last one."""
        self.worker, self.vacant, self._service_s = worker, False, math.inf
