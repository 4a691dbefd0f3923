"""`VerifierWorker`, the interface of workers, and what a queue keeps of them: deadlines, jobs, slots and counts."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from async_grpo.errors import WorkerLost
from async_grpo.options.redaction import redacted
from async_grpo.rewards.adapter.result import PLAUSIBLE_REWARD, failure, is_plausible, shown
from async_grpo.types import AdapterResult, RewardStatus

PREFETCH_S = 0.1  # a worker's work given ahead; with more, samples would wait while another worker is idle
MAX_PREFETCH = 64  # samples given ahead
MAX_LATENCIES = 10_000  # latencies kept for the quantiles; all of them would cost ever more memory
QUEUE_S = 1800.0  # longest wait of a call inside a worker with `max_queue_s`, for permits and the like
SERVICE_SMOOTHING = 0.8  # weight of the earlier calls in the moving average of a call's duration
MIN_SERVICE_S = 1e-9  # keeps the quotient finite if a call takes no measurable time


class ProcessDied(WorkerLost):
    """The worker's process died while it served this call, which may be the reason. The worker itself goes on."""


class CallInterrupted(WorkerLost):
    """The worker's process was ended for another call. This call is not to blame, and the worker goes on."""


class VerifierWorker(Protocol):
    """Scores samples with one reward. A worker repeats nothing: its queue does.

    - `capacity` is known once the worker is made: the number of calls, of both methods together, that it serves at a time.
      Only a worker with a true `prefetch` gets more calls; it serves them in the order in which they are made.
    - A call ends within `Timeouts.answer_s`. A call of a worker with `max_queue_s` may take that much longer, and reports
      the wait as `queue_s`.
    - A worker with a true `has_post_process` also gets the results of whole groups:
      `await worker.post_process(samples, results, timeout_s)` returns the changed list of results.
    - Whatever goes wrong with a sample is a result, FAILED or TIMED_OUT, and costs that sample alone, or its batch.
    - ProcessDied and CallInterrupted leave the worker usable. After any other error it is closed, which ends its other
      calls.
    - A cancelled call ends when its place is free again, or at once if its turn has not come yet.
    """

    @property
    def capacity(self) -> int: ...

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult: ...

    async def close(self) -> None: ...


MakeWorker = Callable[[str], Awaitable[VerifierWorker]]


@dataclass(frozen=True)
class Timeouts:
    """Deadlines of a queue, in seconds."""

    timeout_s: float = 30.0  # for scoring one sample, once its turn has come
    grace_s: float = 10.0  # for a worker to report a time-out, to obey a cancellation, or to close
    make_timeout_s: float = 120.0  # for making one worker
    backoff_s: tuple[float, ...] = (0.0, 1.0, 5.0)  # pause before each attempt to make a worker
    regrow_s: float = 30.0  # pause after all attempts to replace a worker have failed

    @property
    def answer_s(self) -> float:
        """Return the limit of one answer: another sample or batch may have to end first, and a process to start."""
        return 2 * self.timeout_s + self.make_timeout_s + self.grace_s


class Job:
    """A call of a `VerifierWorker`: a sample to score, or a group's results to show to the hook.

    Its outcome is the worker's answer or a WorkerLost, as a value: raised, it would be an error that nobody retrieves when
    the caller has gone.

    Args:
        ticket: Place in the queue.
        method: Name of the worker's method.
        arguments: Arguments of the method, without the time limit.
    """

    def __init__(self, ticket: int, method: str, *arguments: Any) -> None:
        self.ticket = ticket
        self.method = method
        self.arguments = arguments
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.created_at = time.monotonic()
        self.queued_at = 0.0
        self.queue_s = 0.0  # time in the queue so far
        self.lost_attempts = 0  # attempts that ended without a result, perhaps because of this job
        self.is_served_alone = False  # it may have crashed its process, and must not take other jobs with it

    def end(self, outcome: Any) -> None:
        """Set the outcome, unless the caller has gone."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class WorkerSlot:
    """A worker and the jobs that were given to it."""

    def __init__(self, worker: VerifierWorker) -> None:
        self.worker = worker
        self.jobs: list[Job] = []  # unfinished, in the order in which they were given
        self.service_s = math.inf  # moving average of a call's duration; infinite, nothing is given ahead
        self._last_end_at = 0.0

    def has_room_for(self, job: Job) -> bool:
        """Return whether the job may be given to the worker now."""
        is_serving_alone = bool(self.jobs) and self.jobs[0].is_served_alone
        if job.is_served_alone or is_serving_alone:
            return not self.jobs
        prefetch = 0
        if getattr(self.worker, "prefetch", False):
            prefetch = min(MAX_PREFETCH, int(PREFETCH_S / max(self.service_s, MIN_SERVICE_S)))
        return len(self.jobs) < self.worker.capacity + prefetch

    def is_ahead(self, job: Job) -> bool:
        """Return whether the job still waits for earlier jobs of this worker, which serves them in order."""
        return job not in self.jobs[: self.worker.capacity]

    def note_duration(self, given_at: float) -> None:
        """Note that a call has ended, which was given at `given_at` (`time.monotonic`)."""
        now = time.monotonic()
        duration_s = now - max(given_at, self._last_end_at)
        if math.isinf(self.service_s):
            self.service_s = duration_s
        else:
            self.service_s = SERVICE_SMOOTHING * self.service_s + (1 - SERVICE_SMOOTHING) * duration_s
        self._last_end_at = now


def fields_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an AdapterResult that a reward decides on, from an answer as JSON keeps it (see `read_answer`).

    Every answer enters the run here: of processes, judges, inline rewards and the verdict cache. Its reason and the names
    of its numbers are redacted with the secrets of this process, and an implausible reward becomes a failure.
    """
    reward = answer["reward"]
    if reward is not None and not is_plausible(reward):
        answer = failure(f"the reward is {shown(reward)}: {PLAUSIBLE_REWARD}")
    steps = tuple((int(token), float(step_reward)) for token, step_reward in answer["steps"])
    return {
        "status": RewardStatus(answer["status"]),
        "reward": answer["reward"],
        "extra": {redacted(name): number for name, number in answer["extra"].items()},
        "steps": steps,
        "reason": redacted(answer["reason"]),
    }


# quantile(values, q): the smallest value that at least a share q of the values does not exceed
quantile = partial(np.quantile, method="inverted_cdf")


class QueueStats:
    """Counts of a queue since the last reset; and, over the whole run, whether an adapter always gives the same reward."""

    def __init__(self) -> None:
        self.has_hook = False  # rewards are final only after the group hook
        self._distinct_rewards: set[float] = set()  # at most two: more than one is all that matters
        self._num_rewards = 0
        self.reset()

    def reset(self) -> None:
        """Set all counts since the last reset to zero."""
        self._statuses: Counter[RewardStatus] = Counter()
        self._latencies_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._queue_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self.sums = {"retries": 0, "workers_lost": 0, "busy_s": 0.0}
        self._first_reason = ""  # of a failure or a time-out

    def add(self, result: AdapterResult) -> None:
        """Count a result."""
        self._statuses[result.status] += 1
        self._latencies_s.append(result.latency_s)
        self._queue_s.append(result.queue_s)
        self.sums["retries"] += max(0, result.attempts - 1)
        self._note_reward(result, is_final=not self.has_hook)

    def revise(self, before: AdapterResult, after: AdapterResult) -> None:
        """Count what a group hook made of a result.

        The counts by status do not change for a result that was counted before the last reset, or never counted: a result
        from a cache has no attempts.
        """
        if before.attempts > 0 and self._statuses[before.status] > 0:
            self._statuses[before.status] -= 1
            self._statuses[after.status] += 1
        self._note_reward(after, is_final=True)

    def _note_reward(self, result: AdapterResult, is_final: bool) -> None:
        if result.status.is_lost:
            self._first_reason = self._first_reason or result.reason
        if is_final and result.reward is not None:
            self._num_rewards += 1
            if len(self._distinct_rewards) < 2:
                self._distinct_rewards.add(result.reward)

    def as_dict(self) -> dict[str, Any]:
        """Return counts by status, and quantiles of the latency and of the queueing time in it, in seconds."""
        latencies_s = self._latencies_s or [0.0]
        queue_s = self._queue_s or [0.0]
        is_constant = len(self._distinct_rewards) == 1
        return {
            **{status.value: self._statuses[status] for status in RewardStatus},
            **self.sums,
            "first_reason": self._first_reason,
            "rewards_so_far": self._num_rewards,
            "only_reward_so_far": next(iter(self._distinct_rewards)) if is_constant else None,
            "latency_p50_s": float(quantile(latencies_s, 0.5)),
            "latency_p95_s": float(quantile(latencies_s, 0.95)),
            "latency_max_s": max(latencies_s),
            "queue_p50_s": float(quantile(queue_s, 0.5)),
            "queue_p95_s": float(quantile(queue_s, 0.95)),
        }
