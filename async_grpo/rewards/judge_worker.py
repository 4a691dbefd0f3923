"""Workers that wait for permits of the run's rate limiter: remote judges, and any other worker under limits."""

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
    """A remote judge; no process, it only waits for the network. Scores up to `capacity` samples at once: what may
    really be in flight is the business of the judge's limits.

    Args:
        judge: see `judges`.
        endpoint: the judge's own, or with the run's limits in it.
        phase: "train" or "eval" (see `LimitedWorker`).
        idle_sleep: of the judge's servers, if they sleep between calls; shared by all who ask them.
    """

    max_queue_s = QUEUE_S  # for permits, for a server that asked to be left alone, for one to wake up

    def __init__(
        self,
        name: str,
        judge: Any,
        endpoint: Endpoint,
        rate_limiter: RateLimiter,
        phase: str,
        idle_sleep: IdleSleep | None = None,
    ) -> None:
        self._name, self._judge, self._phase, self._idle_sleep = name, judge, phase, idle_sleep
        self._taken: dict[str, int] = {}
        self._client = EndpointClient(name, endpoint, rate_limiter)
        self.close = self._client.close
        # More would only wait inside, where no statistics show the queue
        at_once = endpoint.limits.concurrency or JUDGE_CAPACITY
        if phase == "eval":  # what hangs there must leave permits to the training
            at_once = max(1, at_once // 2)
        self.capacity = min(JUDGE_CAPACITY, at_once)

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """The judge's result; FAILED with the reason for whatever it or the network does."""
        started, deadline = time.monotonic(), Deadline(timeout_s, QUEUE_S)
        awake = self._idle_sleep.keep_awake(deadline) if self._idle_sleep else contextlib.nullcontext()
        try:
            async with awake:
                said = await self._judge.score(
                    dict(sample), self._client, phase=self._phase, deadline=deadline
                )
            answer = read_answer(said, sample, False)
        except JudgeError as error:
            status = RewardStatus.TIMED_OUT if isinstance(error, JudgeTimeout) else RewardStatus.FAILED
            answer = failure(str(error), status.value)
            answer["extra"] = getattr(error, "spent", {})  # it has cost something all the same
        except Exception as error:  # of code of many hands; none may cost the run
            answer = failure(describe(error))
        latency_s = time.monotonic() - started
        return AdapterResult(self._name, **fields_of(answer), latency_s=latency_s, queue_s=deadline.queue_s)

    def take_stats(self) -> dict[str, int]:
        """Since the last call: requests, those that were sent again, hedges, time-outs, and how often a replica went out of
        service; and how many are out of service now."""
        stats = self._client.stats()
        counts = {name: stats[name] for name in ("requests", "hedges", "breakers_opened")}
        counts |= {"request_retries": stats["retries"], "request_timeouts": stats["outcomes"]["timeout"]}
        taken = {name: count - self._taken.get(name, 0) for name, count in counts.items()}
        self._taken = counts
        return taken | {"breakers_open": stats["breakers_open"]}


class LimitedWorker:
    """Each call of `score` of this worker starts with a permit; the wait for it is not on the sample's time. Workers of the
    same key share the limits, and their phases, "train" and "eval", share them fairly."""

    max_queue_s = QUEUE_S

    def __init__(
        self, worker: VerifierWorker, rate_limiter: RateLimiter, key: str, limits: Limits, phase: str
    ) -> None:
        self._worker, self._rate_limiter = worker, rate_limiter
        self._key, self._limits, self._phase = key, limits, phase
        self.capacity, self.close = worker.capacity, worker.close
        self.has_post_process = getattr(worker, "has_post_process", False)  # a worker need not say
        self.post_process = getattr(worker, "post_process", None)

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
