"""`LimitedWorker`: a worker that asks the run's rate limiter before each sample."""

import asyncio
import time
from dataclasses import replace
from typing import Any

from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.http.rate_limiter import RateLimiter
from async_grpo.rewards.verifier_worker import QUEUE_S, GroupWorker
from async_grpo.types import AdapterResult, RewardStatus


class LimitedWorker:
    """Each call of `score` starts with a permit; the wait for it is not on the sample's time.

    Args:
        key: of the permits: workers of the same key share the limits.
        phase: "train" or "eval": they share them fairly.
    """

    max_queue_s = QUEUE_S

    def __init__(
        self, worker: GroupWorker, rate_limiter: RateLimiter, key: str, limits: Limits, phase: str
    ) -> None:
        self._worker, self._rate_limiter = worker, rate_limiter
        self._key, self._limits, self._phase = key, limits, phase
        self.capacity = worker.capacity
        self.has_post_process = getattr(worker, "has_post_process", False)  # a worker need not say

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """As the worker's; TIMED_OUT if no permit comes."""
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(self.max_queue_s):
                permit = await self._rate_limiter.acquire(self._key, self._limits, phase=self._phase)
        except TimeoutError:
            reason = f"no permit within {self.max_queue_s:g} s, by {self._limits}"
            return AdapterResult(self._key, RewardStatus.TIMED_OUT, reason=reason)
        queue_s = time.monotonic() - asked_at
        try:
            return replace(await self._worker.score(sample, timeout_s), queue_s=queue_s)
        finally:
            await self._rate_limiter.release(self._key, permit)

    async def close(self) -> None:
        await self._worker.close()
