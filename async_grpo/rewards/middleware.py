"""`CallMiddleware`: every call of a reward asks the cache first, then the budget. (Limits are kept by the workers.)"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from async_grpo.rewards.adapter.result import describe
from async_grpo.rewards.budget import Budget, BudgetExhausted
from async_grpo.rewards.cache.verdicts import VerdictCache, key_of
from async_grpo.types import AdapterResult, RewardStatus

COST = "judge_cost"  # of a judge's extras: what the call cost
PRICE = "price_per_million_tokens"  # of a judge: (prompt, completion), or one price for both
OF_THE_CALL = ("attempts", "latency_s", "queue_s")
CHARACTERS_PER_TOKEN = 4

Score = Callable[[dict[str, Any]], Awaitable[AdapterResult]]


class CallMiddleware:
    """`middleware` of a VerifierPool. What costs nothing is never paid, and what may not be paid is never asked.

    Args:
        versions: of the adapters whose answers the cache keeps, as it tells them apart.
        estimates: what a call of a paid judge costs at most, by adapter, for a sample.
    """

    def __init__(
        self,
        *,
        versions: Mapping[str, str],
        cache: VerdictCache | None = None,
        budget: Budget | None = None,
        estimates: Mapping[str, Callable[[dict[str, Any]], float]] | None = None,
    ) -> None:
        self._versions, self._cache, self._budget = versions, cache, budget
        self._estimates = dict(estimates or {})

    async def __call__(self, name: str, sample: dict[str, Any], phase: str, score: Score) -> AdapterResult:
        if self._cache is None or name not in self._versions:
            return await self._paid(name, sample, score)

        paid: list[AdapterResult] = []

        async def call() -> dict[str, Any]:
            paid.append(await self._paid(name, sample, score))
            answer = asdict(paid[0]) | {"status": paid[0].status.value}
            return {key: value for key, value in answer.items() if key not in OF_THE_CALL}

        asked_at = time.monotonic()
        answer = await self._cache.get_or_call(key_of(name, self._versions[name], sample), call)
        if paid:
            return paid[0]
        steps = tuple((int(token), float(reward)) for token, reward in answer["steps"])
        kept = {**answer, "adapter": name, "status": RewardStatus(answer["status"]), "steps": steps}
        return AdapterResult(**kept, attempts=0, latency_s=time.monotonic() - asked_at)

    async def _paid(self, name: str, sample: dict[str, Any], score: Score) -> AdapterResult:
        if self._budget is None or name not in self._estimates:
            return await score(sample)
        try:
            estimate = self._estimates[name](sample)
            await self._budget.reserve(name, estimate)
        except Exception as error:  # a judge of the user's own; a sample that lacks what its template names
            reason = str(error) if isinstance(error, BudgetExhausted) else describe(error)
            return AdapterResult(name, RewardStatus.FAILED, reason=reason, attempts=0)
        cost = estimate  # also of a call that is cancelled, or whose server does not count: it may have been all of it
        try:
            result = await score(sample)
            cost = result.extra.get(COST, estimate)
        finally:
            self._budget.settle(name, estimate, cost)
        return result

    def stats(self) -> dict[str, Any]:
        """Of the cache and the budget, where there are any."""
        parts = {"verdict_cache": self._cache, "judge_budget": self._budget}
        return {
            f"{part}_{name}": value
            for part, owner in parts.items()
            if owner is not None
            for name, value in owner.stats().items()
        }

    async def close(self) -> None:
        if self._cache is not None:
            await self._cache.close()


def most_it_costs(judge: Any, sample: dict[str, Any]) -> float:
    """What the judge may cost for a sample, if every reply is as long as it may be."""
    price = getattr(judge, PRICE)
    if hasattr(judge, "token_estimate"):
        prompt, completion = judge.token_estimate(sample)
    else:
        prompt, completion = len(sample.get("sample_text", sample["completion"])) / CHARACTERS_PER_TOKEN, 0.0
    price_in, price_out = price if isinstance(price, tuple | list) else (price, price)
    return (prompt * price_in + completion * price_out) / 1e6
