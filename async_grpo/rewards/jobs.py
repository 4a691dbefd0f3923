"""What waits in a queue for a worker: a sample to score, or the results of a whole group to be looked at."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from async_grpo.rewards.queue_stats import QueueStats
from async_grpo.types import AdapterResult, RewardStatus


class Job:
    """What waits for a worker; the order is that of the tickets, also for one that comes back.

    Args:
        method, arguments: of a `VerifierWorker`, which also gets the time-out in seconds.
    """

    def __init__(self, ticket: int, adapter: str, method: str, *arguments: Any) -> None:
        self.ticket, self.adapter = ticket, adapter
        self.method, self.arguments = method, arguments
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked_at = self.queued_at = time.monotonic()
        self.queue_s = 0.0
        self.lost_attempts = 0  # that ended without a result, perhaps by its fault
        self.alone = False  # to be served while nothing else is: it may have crashed its process

    def __lt__(self, other: "Job") -> bool:
        return self.ticket < other.ticket

    def deliver(self, answer: Any, stats: QueueStats) -> None:
        """Hand over what the worker said."""
        raise NotImplementedError

    def fail(self, reason: str, stats: QueueStats) -> None:
        """No worker could do it."""
        raise NotImplementedError


class Scoring(Job):
    """One sample; its outcome is an AdapterResult, with times and attempts as the caller saw them."""

    def __init__(self, ticket: int, adapter: str, sample: dict[str, Any]) -> None:
        super().__init__(ticket, adapter, "score", sample)
        self.sample = sample

    def deliver(self, answer: AdapterResult, stats: QueueStats) -> None:
        result = replace(
            _checked(answer, self.sample),
            attempts=answer.attempts + self.lost_attempts,
            latency_s=time.monotonic() - self.asked_at,
            queue_s=self.queue_s + answer.queue_s,
        )
        stats.add(result)
        self.outcome.set_result(result)

    def fail(self, reason: str, stats: QueueStats) -> None:
        self.deliver(AdapterResult(self.adapter, RewardStatus.FAILED, reason=reason, attempts=0), stats)


class PostProcessing(Job):
    """The results of a whole group, to be looked at together; if that fails, all of them have failed."""

    def __init__(
        self, ticket: int, adapter: str, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult]
    ) -> None:
        super().__init__(ticket, adapter, "post_process", samples, results)
        self.samples, self.results = samples, results

    def deliver(self, answer: list[AdapterResult], stats: QueueStats) -> None:
        checked = [_checked(result, sample) for result, sample in zip(answer, self.samples, strict=True)]
        self._hand_over(checked, stats)

    def fail(self, reason: str, stats: QueueStats) -> None:
        self._hand_over([_failed(result, reason) for result in self.results], stats)

    def _hand_over(self, results: list[AdapterResult], stats: QueueStats) -> None:
        for before, after in zip(self.results, results, strict=True):
            stats.revise(before, after)
        self.outcome.set_result(results)


def _checked(result: AdapterResult, sample: Mapping[str, Any]) -> AdapterResult:
    """A worker may be remote and of another make: only finite rewards are some, and only on tokens there are."""
    if result.status is not RewardStatus.OK:
        return result
    num_tokens = len(sample.get("completion_token_ids", ()))
    wrong = [
        f"the step that ends in token {token} of {num_tokens} is worth {reward}"
        for token, reward in result.steps
        if not (0 <= token < num_tokens and math.isfinite(reward))
    ]
    if result.reward is None or not math.isfinite(result.reward):
        wrong.append(f"the reward is {result.reward}")
    return _failed(result, wrong[0]) if wrong else result


def _failed(result: AdapterResult, reason: str) -> AdapterResult:
    return replace(result, status=RewardStatus.FAILED, reward=None, steps=(), reason=reason)
