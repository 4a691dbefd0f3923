"""Workers that need a permit of the run's rate limiter for each call: remote judges, and rewards with limits."""

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

from async_grpo.rewards.adapter.decorators import JUDGE_CAPACITY
from async_grpo.rewards.adapter.result import describe, failure, read_answer
from async_grpo.rewards.http.endpoint import Deadline, Endpoint, JudgeError, JudgeTimeout, Limits
from async_grpo.rewards.http.http_client import EndpointClient
from async_grpo.rewards.http.rate_limiter import RateLimiter
from async_grpo.rewards.judges.idle_sleep import IdleSleep
from async_grpo.rewards.verifier_worker import QUEUE_S, VerifierWorker, fields_of
from async_grpo.types import AdapterResult, RewardStatus


class JudgeWorker:
    """A worker that calls a remote judge. It has no process, because it only waits for the network.

    It scores up to `capacity` samples at once. The judge's limits may allow fewer requests in flight.

    Args:
        name: The judge's name.
        judge: The judge (see `judges`).
        endpoint: The judge's endpoint, including the run's limits on its calls.
        rate_limiter: Grants a permit for each request.
        phase: "train" or "eval". Both phases share the limits fairly.
        idle_sleep: Wakes the judge's servers if they sleep between calls. All workers of these servers share it.
    """

    # Longest wait of a call for permits, for the end of a server's `Retry-After`, and for a server to wake up
    max_queue_s = QUEUE_S

    def __init__(
        self,
        name: str,
        judge: Any,
        endpoint: Endpoint,
        rate_limiter: RateLimiter,
        phase: str,
        idle_sleep: IdleSleep | None = None,
    ) -> None:
        self._name = name
        self._judge = judge
        self._phase = phase
        self._idle_sleep = idle_sleep
        self._last_counts: dict[str, int] = {}  # totals at the last `take_stats`
        self._client = EndpointClient(name, endpoint, rate_limiter)
        self.close = self._client.close
        # With a larger capacity, samples would wait inside this worker, and the queue's statistics would not count them
        num_permits = endpoint.limits.concurrency or JUDGE_CAPACITY
        if phase == "eval":
            # Calls of an evaluation that hang must not use up the permits that training needs
            num_permits = max(1, num_permits // 2)
        self.capacity = min(JUDGE_CAPACITY, num_permits)

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """Return the judge's result: FAILED or TIMED_OUT, with the reason, if the judge or the network fails."""
        started_at = time.monotonic()
        deadline = Deadline(timeout_s, QUEUE_S)
        awake = self._idle_sleep.keep_awake(deadline) if self._idle_sleep else contextlib.nullcontext()
        try:
            async with awake:
                raw_answer = await self._judge.score(
                    dict(sample), self._client, phase=self._phase, deadline=deadline
                )
            answer = read_answer(raw_answer, sample, False)
        except JudgeError as error:
            status = RewardStatus.TIMED_OUT if isinstance(error, JudgeTimeout) else RewardStatus.FAILED
            answer = failure(str(error), status.value)
            answer["extra"] = getattr(error, "spent", {})  # a failed call may have cost money
        except Exception as error:  # a judge may be a user's class, and its errors must not end the run
            answer = failure(describe(error))
        latency_s = time.monotonic() - started_at
        return AdapterResult(self._name, **fields_of(answer), latency_s=latency_s, queue_s=deadline.queue_s)

    def take_stats(self) -> dict[str, int]:
        """Return counts since the last call of this method.

        They are the numbers of requests, retries, hedged requests, time-outs, and times that a replica went out of
        service. `breakers_open` is the number of replicas that are out of service now.
        """
        stats = self._client.stats()
        counts = {
            "requests": stats["requests"],
            "hedges": stats["hedges"],
            "breakers_opened": stats["breakers_opened"],
            "request_retries": stats["retries"],
            "request_timeouts": stats["outcomes"]["timeout"],
        }
        new_counts = {name: count - self._last_counts.get(name, 0) for name, count in counts.items()}
        self._last_counts = counts
        return new_counts | {"breakers_open": stats["breakers_open"]}


class LimitedWorker:
    """A worker that waits for a permit before each call. The wait does not count against the sample's time-out.

    All workers with the same `key` share the limits. The phases ("train" and "eval") share them fairly.
    """

    max_queue_s = QUEUE_S

    def __init__(
        self, worker: VerifierWorker, rate_limiter: RateLimiter, key: str, limits: Limits, phase: str
    ) -> None:
        self._worker = worker
        self._rate_limiter = rate_limiter
        self._key = key
        self._limits = limits
        self._phase = phase
        self.capacity = worker.capacity
        self.close = worker.close
        self.has_post_process = getattr(worker, "has_post_process", False)
        self.post_process = getattr(worker, "post_process", None)

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """Return the worker's result, which is TIMED_OUT if no permit is granted within `max_queue_s`."""
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(self.max_queue_s):
                permit = await self._rate_limiter.acquire(self._key, self._limits, phase=self._phase)
        except TimeoutError:
            reason = f"no permit within {self.max_queue_s:g} s, because of {self._limits}"
            return AdapterResult(self._key, RewardStatus.TIMED_OUT, reason=reason)
        queue_s = time.monotonic() - started_at
        try:
            return replace(await self._worker.score(sample, timeout_s), queue_s=queue_s)
        finally:
            await self._rate_limiter.release(self._key, permit)
