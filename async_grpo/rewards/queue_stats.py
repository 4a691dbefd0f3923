"""What one queue did: counts, latencies and the seconds that its workers were busy."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from async_grpo.types import AdapterResult, RewardStatus

MAX_LATENCIES = 10_000  # of the most recent samples: quantiles must not cost ever more memory


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that at least a share `q` of the values does not exceed; 0 without values.

    >>> quantile([3.0, 1.0, 2.0, 4.0], 0.5), quantile([3.0, 1.0], 1.0), quantile([], 0.5)
    (2.0, 3.0, 0.0)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0


class QueueStats:
    """Counters since the last reset, and what an adapter that says always the same gives itself away by.

    A result that a group hook still changes is counted when it is there, and its count moves with its status.
    """

    def __init__(self) -> None:
        self.has_hook = False  # rewards are what a group hook makes of them, and not before
        self._values: set[float] = set()  # different rewards ever seen, two at most: more is not asked
        self._rewards = 0
        self.reset()

    def reset(self) -> None:
        self._statuses: Counter[RewardStatus] = Counter()
        self._latencies_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._queue_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self.retries = self.workers_lost = 0
        self.busy_s = 0.0
        self.first_reason = ""  # of a failure or a time-out

    def add(self, result: AdapterResult) -> None:
        """A worker's result, or that there is none."""
        self._statuses[result.status] += 1
        self._latencies_s.append(result.latency_s)
        self._queue_s.append(result.queue_s)
        self.retries += max(0, result.attempts - 1)
        self._note(result, is_final=not self.has_hook)

    def revise(self, before: AdapterResult, after: AdapterResult) -> None:
        """What a group hook made of a result. One that was not counted since the last reset moves no count."""
        # Without an attempt it comes from a cache, and was never counted.
        if before.attempts > 0 and self._statuses[before.status] > 0:
            self._statuses[before.status] -= 1
            self._statuses[after.status] += 1
        self._note(after, is_final=True)

    def _note(self, result: AdapterResult, is_final: bool) -> None:
        if result.status in (RewardStatus.FAILED, RewardStatus.TIMED_OUT):
            self.first_reason = self.first_reason or result.reason
        if is_final and result.reward is not None:
            self._rewards += 1
            if len(self._values) < 2:
                self._values.add(result.reward)

    def as_dict(self) -> dict[str, Any]:
        """Counts by status; latency from request to answer and the queueing in it, both in seconds."""
        shares = {"latency_p50_s": 0.5, "latency_p95_s": 0.95, "latency_max_s": 1.0}
        return {
            **{status.value: self._statuses[status] for status in RewardStatus},
            "retries": self.retries,
            "workers_lost": self.workers_lost,
            "busy_s": self.busy_s,
            "first_reason": self.first_reason,
            "rewards_so_far": self._rewards,
            "only_reward_so_far": next(iter(self._values)) if len(self._values) == 1 else None,
            **{name: quantile(self._latencies_s, share) for name, share in shares.items()},
            "queue_p50_s": quantile(self._queue_s, 0.5),
            "queue_p95_s": quantile(self._queue_s, 0.95),
        }
