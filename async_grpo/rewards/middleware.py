"""`CallMiddleware`: looks into the verdict cache and asks the budget before every call of a reward.

(The workers keep the rate limits.) A call starts only if three amounts together fit the budget's limit: the money spent so
far, the estimates of the calls in flight, and the estimate of this call. So spending exceeds the limit by no more than what
these calls cost beyond their estimates.
"""

import asyncio
import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.rewards.adapter.result import describe
from async_grpo.rewards.cache.verdicts import COST, VerdictCache, key_of
from async_grpo.rewards.http.endpoint import CHARACTERS_PER_TOKEN
from async_grpo.rewards.verifier_worker import fields_of
from async_grpo.types import AdapterResult, RewardStatus

PRICE = "price_per_million_tokens"  # attribute of a judge: (prompt, completion), or one price for both
CALL_FIELDS = (
    "attempts",
    "latency_s",
    "queue_s",
)  # fields of a result that concern one call and are not cached
POLL_INTERVAL_S = 2.0  # how often a waiting call looks for a higher limit
ROUNDING = 1e-9  # tolerance as a share of the limit, because sums of fractions are not exact
_LINE_BEGIN = b'{"judge": '  # beginning of every line of a record
log = logging.getLogger(__name__)

Score = Callable[[dict[str, Any]], Awaitable[AdapterResult]]


class BudgetExhausted(AsyncGrpoError, RuntimeError):
    """The call may cost more than is left of the budget."""


class Budget:
    """Limits the money that a run spends on judges. It is plain asyncio: use it from one event loop.

    Costs are in units of the judges' currency; a cost that is negative or not finite raises ValueError.

    Args:
        limit: Limit over all judges; None only counts.
        policy: What happens to a call that the rest of the limit cannot pay. With `pause` it waits until the limit is
            raised, and so do all calls behind it; with `fallback` it raises BudgetExhausted. A call that would fit once
            the calls in flight are settled waits under both policies.
        path: File that records the spending, for a run that is resumed; made if missing. A number in the file of the same
            name with the ending `.limit` raises the limit. That file is read at the start, and before a pause or a refusal.

    Raises:
        ConfigurationError: The file is no record of spending, or cannot be written.
    """

    def __init__(self, limit: float | None, *, policy: str = "pause", path: str | Path | None = None) -> None:
        self._policy = policy
        self._limit = math.inf if limit is None else limit
        self._spent: defaultdict[str, float] = defaultdict(float)  # by judge
        self._calls: Counter[str] = Counter()  # by judge
        self._reserved = 0.0  # sum of the estimates of the calls in flight
        self._num_waiting = 0
        self._num_refused = 0
        self._is_paused = False
        self._is_record_broken = False
        self._turn = asyncio.Lock()  # held by the first call in line
        self._changed = asyncio.Event()  # set when a call was settled or the limit changed
        self._path = Path(path) if path else None
        if self._path:
            self._read_record(self._path)
            self._read_raised_limit(self._path)

    @property
    def spent(self) -> float:
        """Return the money spent so far, over all judges."""
        return math.fsum(self._spent.values())

    async def reserve(self, judge: str, estimated_cost: float) -> None:
        """Wait until a call may start, first come, first served, and reserve its estimated cost.

        Raises:
            BudgetExhausted: The rest of the limit cannot pay the call, and the policy is `fallback`.
        """
        cost = _checked(estimated_cost)
        self._num_waiting += 1
        try:
            # In line, because a stream of small calls could starve a large one
            async with self._turn:
                await self._until_it_fits(judge, cost)
                self._reserved += cost
        finally:
            self._num_waiting -= 1

    def settle(self, judge: str, estimated_cost: float, real_cost: float) -> None:
        """Replace the reserved cost of a call that has ended, even by a failure, by its real cost."""
        cost = _checked(real_cost)
        self._reserved -= estimated_cost
        self._spent[judge] += cost
        self._calls[judge] += 1
        self._record(judge, cost)
        self._changed.set()

    def set_limit(self, limit: float | None) -> None:
        """Change the limit (None removes it). Waiting calls go on as far as it reaches."""
        self._limit = math.inf if limit is None else limit
        self._changed.set()

    def stats(self) -> dict[str, Any]:
        """Return the money spent and reserved, and the numbers of calls that wait or were refused."""
        return {
            "spent": self.spent,
            "reserved": max(self._reserved, 0.0),
            "limit": None if math.isinf(self._limit) else self._limit,
            "waiting": self._num_waiting,
            "paused": self._is_paused,
            "refused": self._num_refused,
            "spent_by_judge": dict(self._spent),
            "calls_by_judge": dict(self._calls),
        }

    @property
    def _rest(self) -> float:
        """Return the money that is left, including that which is reserved."""
        return self._limit * (1 + ROUNDING) - self.spent

    def _read_raised_limit(self, record_path: Path) -> None:
        """Raise the limit if the file beside the record holds a higher one."""
        path = record_path.with_suffix(".limit")
        # A file that is missing or holds no number leaves the limit as it is
        with suppress(OSError, ValueError):
            limit = _checked(float(path.read_text(errors="replace")))
            if limit > self._limit:
                log.warning("%s raises the limit of the judges from %g to %g", path, self._limit, limit)
                self.set_limit(limit)

    async def _until_it_fits(self, judge: str, cost: float) -> None:
        """Wait until the limit can pay the cost beside the calls in flight."""
        try:
            while True:
                if cost > self._rest and self._path is not None:
                    self._read_raised_limit(self._path)
                if self._reserved + cost <= self._rest:
                    return
                self._changed.clear()
                if cost > self._rest:
                    # It will not fit either when the calls in flight turn out to be free
                    self._refuse_or_pause(judge, cost)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), POLL_INTERVAL_S)
        finally:
            if self._is_paused:
                self._is_paused = False
                log.warning("the judges go on (%g is spent)", self.spent)

    def _refuse_or_pause(self, judge: str, cost: float) -> None:
        """Raise BudgetExhausted, or note the pause, by the policy."""
        path = self._path and self._path.with_suffix(".limit")
        remedy = f"write a number to {path}" if path else "see Budget.set_limit"
        spending = f"{self.spent:g} of {self._limit:g} is spent"
        reason = f"a call of {judge} needs {cost:g} and {spending}. To raise the limit: {remedy}"
        if self._policy == "fallback":
            self._num_refused += 1
            if self._num_refused == 1:
                log.warning("the budget of the judges is used up: %s", reason)
            raise BudgetExhausted(reason)
        if not self._is_paused:
            self._is_paused = True
            log.warning("the judges are paused until the limit is raised: %s", reason)

    def _record(self, judge: str, cost: float) -> None:
        """Write one line per call, so that a killed run loses at most the calls that it had in flight."""
        if self._path is None or self._is_record_broken:
            return
        try:
            with self._path.open("ab") as file:
                file.write(json.dumps({"judge": judge, "cost": cost}).encode() + b"\n")
        except OSError as error:  # a full disk is no reason to stop
            log.error("%s cannot be written, so a resumed run will not know of it: %s", self._path, error)
            self._is_record_broken = True

    def _read_record(self, path: Path) -> None:
        """Read the record, or make it if it is missing. Half a line at its end, left by a killed run, is cut off."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                file.seek(0)
                lines = file.read().splitlines(keepends=True)
                if lines and _is_half_a_line(lines[-1]):
                    half_line = lines.pop()
                    file.truncate(file.tell() - len(half_line))
        except OSError as error:
            raise ConfigurationError(f"the record of spending {path} cannot be written: {error}") from error
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                self._spent[str(row["judge"])] += _checked(float(row["cost"]))
                self._calls[str(row["judge"])] += 1
            except (ValueError, TypeError, KeyError) as error:
                message = f"{path}, line {number}: not a line of spending ({error}): name another file"
                raise ConfigurationError(message) from error


class CallMiddleware:
    """The `middleware` of a run's VerifierPool. A call that the cache answers costs nothing and needs no budget.

    Args:
        versions: Versions of the adapters whose answers the cache keeps; answers of another version are not used.
        cache: The verdict cache; None: no answer is kept.
        budget: The budget of paid judges; None: there is no limit.
        estimates: Functions by name of a paid judge that return the highest cost of a call for a sample.
    """

    def __init__(
        self,
        *,
        versions: Mapping[str, str],
        cache: VerdictCache | None = None,
        budget: Budget | None = None,
        estimates: Mapping[str, Callable[[dict[str, Any]], float]] | None = None,
    ) -> None:
        self._versions = versions
        self._cache = cache
        self._budget = budget
        self._estimates = dict(estimates or {})

    async def __call__(self, name: str, sample: dict[str, Any], phase: str, score: Score) -> AdapterResult:
        """Return the kept result of the adapter for the sample, or call `score` if the budget can pay for it."""
        if self._cache is None or name not in self._versions:
            return await self._pay_and_score(name, sample, score)

        result: AdapterResult | None = None  # of a call that is made for this sample

        async def call() -> dict[str, Any]:
            nonlocal result
            result = await self._pay_and_score(name, sample, score)
            answer = asdict(result) | {"status": result.status.value}
            return {key: value for key, value in answer.items() if key not in CALL_FIELDS}

        started_at = time.monotonic()
        answer = await self._cache.get_or_call(key_of(name, self._versions[name], sample), call)
        if result is not None:
            return result
        latency_s = time.monotonic() - started_at
        return AdapterResult(name, **fields_of(answer), attempts=0, latency_s=latency_s)

    async def _pay_and_score(self, name: str, sample: dict[str, Any], score: Score) -> AdapterResult:
        """Return the result of a call; FAILED if the budget cannot pay for it."""
        if self._budget is None or name not in self._estimates:
            return await score(sample)
        try:
            estimate = self._estimates[name](sample)
            await self._budget.reserve(name, estimate)
        except (
            Exception
        ) as error:  # a user's judge may raise anything; a sample may lack a column of its template
            reason = str(error) if isinstance(error, BudgetExhausted) else describe(error)
            return AdapterResult(name, RewardStatus.FAILED, reason=reason, attempts=0)
        # A call that is cancelled, or whose server reports no usage, may have cost the whole estimate
        cost = estimate
        try:
            result = await score(sample)
            cost = result.extra.get(COST, estimate)
        finally:
            self._budget.settle(name, estimate, cost)
        return result

    def stats(self) -> dict[str, Any]:
        """Return the counts of the cache and of the budget, as far as the run has them."""
        stats: dict[str, Any] = {}
        if self._cache is not None:
            stats |= {f"verdict_cache_{name}": value for name, value in self._cache.counts.items()}
        if self._budget is not None:
            stats |= {f"judge_budget_{name}": value for name, value in self._budget.stats().items()}
        return stats


def most_it_costs(judge: Any, sample: dict[str, Any]) -> float:
    """Return the highest cost of the judge for a sample, in its currency: every reply is as long as it may be."""
    price = getattr(judge, PRICE)
    if hasattr(judge, "token_estimate"):
        prompt_tokens, completion_tokens = judge.token_estimate(sample)
    else:
        prompt_tokens = len(sample.get("sample_text", sample["completion"])) / CHARACTERS_PER_TOKEN
        completion_tokens = 0.0
    price_in, price_out = price if isinstance(price, tuple | list) else (price, price)
    return (prompt_tokens * price_in + completion_tokens * price_out) / 1e6


def _is_half_a_line(line: bytes) -> bool:
    """Return whether this is the beginning of a record's line, without its end."""
    return not line.endswith(b"\n") and line.startswith(_LINE_BEGIN[: len(line)])


def _checked(cost: float) -> float:
    """Return the cost; raise ValueError if it is negative or not finite."""
    if not (math.isfinite(cost) and cost >= 0):
        raise ValueError(f"a cost must be finite and not negative, not {cost}")
    return cost
