"""`VerifierWorker`, the interface of workers, and the parts of a queue: deadlines, jobs, worker slots and counts."""

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

# Seconds of work that a worker with `prefetch` gets in addition to the calls that it serves. With a larger value, samples
# could wait at a busy worker while another worker is idle
PREFETCH_S = 0.1
MAX_PREFETCH = 64  # maximum number of samples that a worker gets in addition to those that it serves
MAX_LATENCIES = 10_000  # number of recent latencies kept for the quantiles, which bounds the memory
# Longest wait of a call inside a judge's worker, for example for a permit of the rate limiter
QUEUE_S = 1800.0
SERVICE_SMOOTHING = 0.8  # weight of the earlier calls in the moving average of a call's duration
MIN_SERVICE_S = 1e-9  # lower bound of a call's duration, so that a division by it stays finite


class ProcessDied(WorkerLost):
    """The worker's process died while it served this call, which may be the cause. The worker can still be used."""


class CallInterrupted(WorkerLost):
    """The worker's process was ended because of another call. The worker can still be used."""


class VerifierWorker(Protocol):
    """Scores samples with one reward. A worker never retries a call, because its queue does that.

    - `capacity` is the number of calls that the worker serves at a time, counting both `score` and `post_process` (see
      below). It is known once the worker is made. A worker whose attribute `prefetch` is true may get more calls, which
      it serves in order.
    - A call ends within `Timeouts.answer_s`. If the worker has an attribute `max_queue_s`, a call may wait this much
      longer, and reports the wait as `queue_s`.
    - A worker whose attribute `has_post_process` is true also applies the reward's group hook:
      `await worker.post_process(samples, results, timeout_s)` returns the new list of results.
    - A problem with a sample is not raised. It is returned as a FAILED or TIMED_OUT result of this sample, or of all
      samples of its batch.
    - After ProcessDied or CallInterrupted, the worker can still be used. After any other error it is closed, which ends
      its other calls.
    - A cancelled call ends once the worker can serve another call in its place, or at once if it was not served yet.
    """

    @property
    def capacity(self) -> int: ...

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult: ...

    async def close(self) -> None: ...


MakeWorker = Callable[[str], Awaitable[VerifierWorker]]


@dataclass(frozen=True)
class Timeouts:
    """Deadlines of a queue, in seconds."""

    timeout_s: float = 30.0  # maximum time to score one sample, without the time in queues
    grace_s: float = 10.0  # maximum time for a worker to report a time-out, to cancel a call, or to close
    make_timeout_s: float = 120.0  # maximum time to make one worker
    backoff_s: tuple[float, ...] = (0.0, 1.0, 5.0)  # pause before each attempt to make a worker
    regrow_s: float = 30.0  # pause after all these attempts have failed, before they are repeated

    @property
    def answer_s(self) -> float:
        """Return the maximum time of one call. A call may have to wait for an earlier call and for a process to start."""
        return 2 * self.timeout_s + self.make_timeout_s + self.grace_s


class Job:
    """A call of a `VerifierWorker`: a sample to score, or the results of a group for the group hook.

    Its outcome is the worker's answer or a WorkerLost error. The error is a value and is not raised, because asyncio
    would log an error that nobody retrieves if the caller was cancelled.

    Args:
        ticket: Number that decides the job's place in the queue. Jobs with lower numbers come first.
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
        # Number of attempts that ended with the loss of a process or worker, which this job may have caused
        self.lost_attempts = 0
        # Whether the job must not share a process with other jobs, because it may have crashed one
        self.is_served_alone = False

    def end(self, outcome: Any) -> None:
        """Set the outcome, unless the job already has one or its caller was cancelled."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class WorkerSlot:
    """A worker and its unfinished jobs."""

    def __init__(self, worker: VerifierWorker) -> None:
        self.worker = worker
        self.jobs: list[Job] = []  # unfinished jobs, in the order in which the worker received them
        # Moving average of a call's duration. While it is infinite, the worker prefetches no jobs.
        self.service_s = math.inf
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
        """Return whether the job waits in the worker for earlier jobs, which the worker serves in order."""
        return job not in self.jobs[: self.worker.capacity]

    def note_duration(self, given_at: float) -> None:
        """Update the average duration of a call, after a call has ended.

        Args:
            given_at: Time at which the worker received the call (`time.monotonic`).
        """
        now = time.monotonic()
        duration_s = now - max(given_at, self._last_end_at)
        if math.isinf(self.service_s):
            self.service_s = duration_s
        else:
            self.service_s = SERVICE_SMOOTHING * self.service_s + (1 - SERVICE_SMOOTHING) * duration_s
        self._last_end_at = now


def fields_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a reward's answer, as plain JSON values (see `read_answer`), into fields of an AdapterResult.

    All answers pass through this function: those of processes, judges, inline rewards and the verdict cache. Secrets of
    this process are removed from the reason and from the names of the extra numbers. An implausible reward becomes a
    failure.
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


# quantile(values, q): the smallest of the values such that at least a fraction q of them is less than or equal to it
quantile = partial(np.quantile, method="inverted_cdf")


class QueueStats:
    """Counts of a queue since the last reset.

    It also notes, over the whole run, whether the adapter always gives the same reward.
    """

    def __init__(self) -> None:
        self.has_hook = False  # whether the adapter has a group hook, which may still change the rewards
        self._distinct_rewards: set[float] = set()  # at most two, which show that the rewards differ
        self._num_rewards = 0
        self.reset()

    def reset(self) -> None:
        """Set the counts since the last reset to zero."""
        self._statuses: Counter[RewardStatus] = Counter()
        self._latencies_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._queue_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self.sums = {"retries": 0, "workers_lost": 0, "busy_s": 0.0}
        self._first_reason = ""  # reason of the first failure or time-out

    def add(self, result: AdapterResult) -> None:
        """Count a result."""
        self._statuses[result.status] += 1
        self._latencies_s.append(result.latency_s)
        self._queue_s.append(result.queue_s)
        self.sums["retries"] += max(0, result.attempts - 1)
        self._note_reward(result, is_final=not self.has_hook)

    def revise(self, before: AdapterResult, after: AdapterResult) -> None:
        """Count a result again after a group hook has changed it.

        One result moves from the status `before` to the status `after`, if any result with the status `before` was
        counted since the last reset. Results from the cache (`attempts` is 0) do not move, because `add` never counted
        them.
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
        """Return all counts, and quantiles of latencies and queue times in seconds. A latency includes the queue time."""
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
