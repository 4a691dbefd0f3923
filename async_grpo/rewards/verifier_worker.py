"""What a queue asks of a worker, how long it waits for it, what it has given to each, and counts of what came of it."""

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

PREFETCH_S, MAX_PREFETCH = 0.1, 64  # longer, and samples would wait while another worker is idle
MAX_LATENCIES = 10_000  # of the most recent samples: quantiles must not cost ever more memory
QUEUE_S = 1800.0  # that a call may wait inside a worker with `max_queue_s`, for permits and the like


class ProcessDied(WorkerLost):
    """The worker's process died while it served this call, which may be the reason. The worker itself goes on."""


class CallInterrupted(WorkerLost):
    """The worker's process was ended for another call. This one is not to blame, and the worker goes on."""


class VerifierWorker(Protocol):
    """Scores samples with one reward, one or several at a time. It tries nothing again: its queue does.

    - `capacity`, known once it is made: so many calls, of both kinds together, are served at a time. Only a worker with a
      true `prefetch` is given more: its calls are served in the order in which they are made.
    - A call ends within `Timeouts.answer_s`; one of a worker with `max_queue_s` so much later, told as `queue_s`.
    - With a true `has_post_process` it is given the results of whole groups: `await worker.post_process(samples, results,
      timeout_s)` is the list of results after that.
    - What goes wrong with a sample is a result, FAILED or TIMED_OUT, and costs that sample alone, or its batch.
    - ProcessDied and CallInterrupted leave it usable. After any other error it is closed, which ends its other calls.
    - A cancelled call ends when its place is free again, or at once while it is ahead of its turn.
    """

    @property
    def capacity(self) -> int: ...

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult: ...

    async def close(self) -> None: ...


MakeWorker = Callable[[str], Awaitable[VerifierWorker]]


@dataclass(frozen=True)
class Timeouts:
    """The deadlines of a queue, in seconds."""

    timeout_s: float = 30.0  # for scoring one sample, from when its turn comes
    grace_s: float = 10.0  # for the worker to say so, to obey a cancellation, or to close
    make_timeout_s: float = 120.0  # for making one worker
    backoff_s: tuple[float, ...] = (0.0, 1.0, 5.0)  # before each attempt to make one
    regrow_s: float = 30.0  # between attempts to make one that could not be made

    @property
    def answer_s(self) -> float:
        """For one answer: another sample or batch may have to end first, and a process to be started."""
        return 2 * self.timeout_s + self.make_timeout_s + self.grace_s


class Job:
    """A sample to score, or the results of a group to be looked at: a call of a `VerifierWorker`.

    Its outcome is the worker's answer; or a WorkerLost, that is not raised: nobody may be waiting.
    """

    def __init__(self, ticket: int, method: str, *arguments: Any) -> None:
        self.ticket, self.method, self.arguments = ticket, method, arguments
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked_at, self.queued_at, self.queue_s = time.monotonic(), 0.0, 0.0
        self.lost_attempts = 0  # that ended without a result, perhaps by its fault
        self.alone = False  # to be served while nothing else is: it may have crashed its process

    def end(self, outcome: Any) -> None:
        """Tell the caller, if it still waits."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class WorkerSlot:
    """A worker, and what it is given."""

    def __init__(self, worker: VerifierWorker) -> None:
        self.worker = worker
        self.calls: list[Job] = []  # in the order in which they were given
        self.service_s = math.inf  # recent mean of one sample; so long, and nothing is given ahead
        self._free_at = 0.0  # when the last call ended

    def has_room_for(self, job: Job) -> bool:
        if job.alone or any(other.alone for other in self.calls[:1]):
            return not self.calls
        prefetch = 0
        if getattr(self.worker, "prefetch", False):
            prefetch = min(MAX_PREFETCH, int(PREFETCH_S / max(self.service_s, 1e-9)))
        return len(self.calls) < self.worker.capacity + prefetch

    def is_ahead(self, job: Job) -> bool:
        """Whether the job waits for those before it: they are served in order."""
        return job not in self.calls[: self.worker.capacity]

    def served(self, given_at: float) -> None:
        """Note how long the call took."""
        now = time.monotonic()
        took_s = now - max(given_at, self._free_at)
        self.service_s = took_s if math.isinf(self.service_s) else 0.8 * self.service_s + 0.2 * took_s
        self._free_at = now


def fields_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an AdapterResult that a reward decides on, from an answer as JSON keeps it (see `read_answer`).

    Every answer enters the run here: of processes, judges, inline rewards and the verdict cache. Its reason and the names
    of its numbers are redacted with the secrets of this process, and a reward that cannot be meant becomes a failure.
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
    """Counters since the last reset, and what an adapter that says always the same gives itself away by."""

    def __init__(self) -> None:
        self.has_hook = False  # rewards are what a group hook makes of them, and not before
        self._values: set[float] = set()  # different rewards ever seen, two at most: more is not asked
        self._rewards = 0
        self.reset()

    def reset(self) -> None:
        self._statuses: Counter[RewardStatus] = Counter()
        self._latencies_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._queue_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self.sums = {"retries": 0, "workers_lost": 0, "busy_s": 0.0}
        self._first_reason = ""  # of a failure or a time-out

    def add(self, result: AdapterResult) -> None:
        """A worker's result, or that there is none."""
        self._statuses[result.status] += 1
        self._latencies_s.append(result.latency_s)
        self._queue_s.append(result.queue_s)
        self.sums["retries"] += max(0, result.attempts - 1)
        self._note(result, is_final=not self.has_hook)

    def revise(self, before: AdapterResult, after: AdapterResult) -> None:
        """What a group hook made of a result. One that was not counted since the last reset, or never (it comes from a
        cache, without an attempt), moves no count."""
        if before.attempts > 0 and self._statuses[before.status] > 0:
            self._statuses[before.status] -= 1
            self._statuses[after.status] += 1
        self._note(after, is_final=True)

    def _note(self, result: AdapterResult, is_final: bool) -> None:
        if result.status.is_lost:
            self._first_reason = self._first_reason or result.reason
        if is_final and result.reward is not None:
            self._rewards += 1
            if len(self._values) < 2:
                self._values.add(result.reward)

    def as_dict(self) -> dict[str, Any]:
        """Counts by status; latency from request to answer and the queueing in it, both in seconds."""
        latencies_s, queue_s = self._latencies_s or [0.0], self._queue_s or [0.0]
        return {
            **{status.value: self._statuses[status] for status in RewardStatus},
            **self.sums,
            "first_reason": self._first_reason,
            "rewards_so_far": self._rewards,
            "only_reward_so_far": next(iter(self._values)) if len(self._values) == 1 else None,
            "latency_p50_s": float(quantile(latencies_s, 0.5)),
            "latency_p95_s": float(quantile(latencies_s, 0.95)),
            "latency_max_s": max(latencies_s),
            "queue_p50_s": float(quantile(queue_s, 0.5)),
            "queue_p95_s": float(quantile(queue_s, 0.95)),
        }
