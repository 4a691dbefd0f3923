"""`JudgeWorker`: a remote judge as a worker of a queue. No process: it only waits for the network."""

import contextlib
import inspect
import time
from typing import Any

from async_grpo.rewards.adapter.decorators import JUDGE_CAPACITY
from async_grpo.rewards.adapter.result import describe, failure, read_answer
from async_grpo.rewards.http.endpoint import Deadline, Endpoint, JudgeError, JudgeTimeout, after
from async_grpo.rewards.http.http_client import EndpointClient
from async_grpo.rewards.http.rate_limiter import RateLimiter
from async_grpo.rewards.judges.idle_sleep import IdleSleep
from async_grpo.rewards.verifier_worker import QUEUE_S
from async_grpo.types import AdapterResult, RewardStatus


class JudgeWorker:
    """Scores up to `capacity` samples at once; what may really be in flight is the business of the judge's limits.

    Args:
        judge: see `judges`.
        endpoint: the judge's own, or with the run's limits in it.
        phase: "train" or "eval": they share the judge's limits fairly.
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
        self._name, self._judge, self._idle_sleep = name, judge, idle_sleep
        # A judge of the user's own may still take the phase under its old name, `lane`, for one release
        old = "phase" not in (known := inspect.signature(judge.score).parameters) and "lane" in known
        self._options = {"lane" if old else "phase": phase}
        self._taken: dict[str, int] = {}
        self._client = EndpointClient(name, endpoint, rate_limiter)
        # More would only wait inside, where no statistics show the queue
        self.capacity = min(JUDGE_CAPACITY, endpoint.limits.concurrency or JUDGE_CAPACITY)

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """The judge's result; FAILED with the reason for whatever it or the network does."""
        started, deadline = time.monotonic(), after(timeout_s, QUEUE_S)
        spent: dict[str, float] = {}
        try:
            answer = read_answer(await self._ask(sample, deadline), sample, False)
        except JudgeError as error:
            timed_out = isinstance(error, JudgeTimeout)
            answer = failure(
                str(error), RewardStatus.TIMED_OUT.value if timed_out else RewardStatus.FAILED.value
            )
            spent = getattr(error, "spent", {})  # a call that failed has cost something all the same
        except (
            Exception
        ) as error:  # a judge is asked by code of many hands; no error of it may cost the phase
            answer = failure(describe(error))
        return AdapterResult(
            self._name,
            RewardStatus(answer["status"]),
            answer["reward"],
            extra={**answer["extra"], **spent},
            reason=answer["reason"],
            latency_s=time.monotonic() - started,
            queue_s=deadline.queue_s,
        )

    async def _ask(self, sample: dict[str, Any], deadline: Deadline) -> Any:
        async with self._idle_sleep.keep_awake(deadline) if self._idle_sleep else contextlib.nullcontext():
            return await self._judge.score(dict(sample), self._client, deadline=deadline, **self._options)

    def take_stats(self) -> dict[str, int]:
        """Since the last call: requests, those that were sent again, hedges, time-outs, and how often a replica went out of
        service; and how many are out of service now."""
        stats = self._client.stats()
        counts = {name: stats[name] for name in ("requests", "hedges", "breakers_opened")}
        counts |= {"request_retries": stats["retries"], "request_timeouts": stats["outcomes"]["timeout"]}
        taken = {name: count - self._taken.get(name, 0) for name, count in counts.items()}
        self._taken = counts
        return taken | {"breakers_open": sum(state != "closed" for state in stats["breakers"].values())}

    async def close(self) -> None:
        await self._client.close()
