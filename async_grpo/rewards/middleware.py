"""`CallMiddleware`: checks the verdict cache and the judge budget before every call of a reward.

A call starts only if the sum of three amounts is within the budget's limit: the money spent so far, the estimated costs
of the calls in flight, and the estimated cost of this call. So spending can exceed the limit only by the amount by
which these calls cost more than estimated. Rate limits are not enforced here but by the workers.
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

PRICE = "price_per_million_tokens"  # attribute of a judge: (prompt price, completion price), or one price for both
# Fields of a result that describe one call. The cache does not keep them.
CALL_FIELDS = ("attempts", "latency_s", "queue_s")
POLL_INTERVAL_S = 2.0  # time after which a waiting call checks again for a higher limit
ROUNDING = 1e-9  # tolerance as a fraction of the limit, because sums of floating-point costs are not exact
_LINE_BEGIN = b'{"judge": '  # beginning of every line in the file that records the spending
log = logging.getLogger(__name__)

Score = Callable[[dict[str, Any]], Awaitable[AdapterResult]]


class BudgetExhausted(AsyncGrpoError, RuntimeError):
    """The estimated cost of a call exceeds the rest of the budget."""


class Budget:
    """Limits the money that a run spends on judges. It is plain asyncio: use it from one event loop.

    Costs are in the currency of the judges' prices. A cost that is negative or not finite raises ValueError.

    Args:
        limit: Limit of the total cost of all judges. None means no limit: costs are only counted.
        policy: What happens to a call that costs more than the rest of the limit. With `pause`, this call and all later
            calls wait until the limit is raised. With `fallback`, the call raises BudgetExhausted. With both policies, a
            call waits if the calls in flight may turn out cheaper than estimated, and then leave enough money for it.
        path: File that records the spending, so that a resumed run includes it. A missing file is created. To raise
            the limit, write a number to the file with the same name but the suffix `.limit`. That file is read at the
            start, before a call is paused or refused, and repeatedly while calls are paused. A number that is not
            above the current limit is ignored.

    Raises:
        ConfigurationError: The file at `path` is not a record of spending, or cannot be written.
    """

    def __init__(self, limit: float | None, *, policy: str = "pause", path: str | Path | None = None) -> None:
        self._policy = policy
        self._limit = math.inf if limit is None else limit
        self._spent: defaultdict[str, float] = defaultdict(float)  # money spent, by judge
        self._calls: Counter[str] = Counter()  # number of calls, by judge
        self._reserved = 0.0  # sum of the estimated costs of the calls in flight
        self._num_waiting = 0
        self._num_refused = 0
        self._is_paused = False
        self._is_record_broken = False
        self._turn = asyncio.Lock()  # taken by the first of the waiting calls
        self._changed = asyncio.Event()  # set when a call has ended or the limit has changed
        self._path = Path(path) if path else None
        if self._path:
            self._read_record(self._path)
            self._read_raised_limit(self._path)

    @property
    def spent(self) -> float:
        """Return the money spent so far on all judges."""
        return math.fsum(self._spent.values())

    async def reserve(self, judge: str, estimated_cost: float) -> None:
        """Wait until a call may start, and reserve its estimated cost. Calls start in the order in which they come.

        Raises:
            BudgetExhausted: The call costs more than the rest of the limit, and the policy is `fallback`.
        """
        cost = _checked(estimated_cost)
        self._num_waiting += 1
        try:
            # Only one call at a time waits for money. Otherwise, small calls could always overtake a large one
            async with self._turn:
                await self._until_it_fits(judge, cost)
                self._reserved += cost
        finally:
            self._num_waiting -= 1

    def settle(self, judge: str, estimated_cost: float, real_cost: float) -> None:
        """Replace the reserved cost of a call by its real cost. Call this when a call has ended, even if it failed."""
        cost = _checked(real_cost)
        self._reserved -= estimated_cost
        self._spent[judge] += cost
        self._calls[judge] += 1
        self._record(judge, cost)
        self._changed.set()

    def set_limit(self, limit: float | None) -> None:
        """Change the limit, or remove it (None). Waiting calls start if the new limit leaves money for them."""
        self._limit = math.inf if limit is None else limit
        self._changed.set()

    def stats(self) -> dict[str, Any]:
        """Return the money spent and reserved, the limit, and the numbers of calls that are waiting or were refused."""
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
        """Return the money that is not spent yet, including the reserved money."""
        return self._limit * (1 + ROUNDING) - self.spent

    def _read_raised_limit(self, record_path: Path) -> None:
        """Raise the limit if the `.limit` file in the folder of the record contains a higher number."""
        path = record_path.with_suffix(".limit")
        # If the file is missing or contains no number, the limit does not change
        with suppress(OSError, ValueError):
            limit = _checked(float(path.read_text(errors="replace")))
            if limit > self._limit:
                log.warning("%s raises the limit of the judges from %g to %g", path, self._limit, limit)
                self.set_limit(limit)

    async def _until_it_fits(self, judge: str, cost: float) -> None:
        """Wait until the limit leaves money for this cost, in addition to the calls in flight."""
        try:
            while True:
                if cost > self._rest and self._path is not None:
                    self._read_raised_limit(self._path)
                if self._reserved + cost <= self._rest:
                    return
                self._changed.clear()
                if cost > self._rest:
                    # Even if the calls in flight cost nothing, there would not be enough money for this call
                    self._refuse_or_pause(judge, cost)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), POLL_INTERVAL_S)
        finally:
            if self._is_paused:
                self._is_paused = False
                log.warning("the judges go on (%g is spent)", self.spent)

    def _refuse_or_pause(self, judge: str, cost: float) -> None:
        """Raise BudgetExhausted (policy `fallback`), or log that the judges are paused (policy `pause`)."""
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
        """Append a line to the record. A run that is killed loses at most the costs of the calls in flight."""
        if self._path is None or self._is_record_broken:
            return
        try:
            with self._path.open("ab") as file:
                file.write(json.dumps({"judge": judge, "cost": cost}).encode() + b"\n")
        except OSError as error:  # do not stop the run, for example because a disk is full
            log.error("%s cannot be written, so a resumed run will not know of it: %s", self._path, error)
            self._is_record_broken = True

    def _read_record(self, path: Path) -> None:
        """Read the record, or make it if it is missing. Remove an incomplete last line, which a killed run leaves."""
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
        versions: Current version of each adapter whose answers the cache keeps. Answers of other versions are not used.
        cache: The verdict cache, or None to keep no answers.
        budget: The budget of paid judges, or None for no limit.
        estimates: For each paid judge, by name, a function that returns the highest cost of a call for a sample.
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
        """Return the adapter's result for the sample from the cache, or call `score` if the budget can pay for it."""
        if self._cache is None or name not in self._versions:
            return await self._pay_and_score(name, sample, score)

        # Stays None if the answer comes from the cache or from a concurrent call
        result: AdapterResult | None = None

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
        """Call `score` and return its result, or a FAILED result if the budget cannot pay for the call."""
        if self._budget is None or name not in self._estimates:
            return await score(sample)
        try:
            estimate = self._estimates[name](sample)
            await self._budget.reserve(name, estimate)
        except Exception as error:
            # A user's judge may raise anything, for example if the sample lacks a column
            reason = str(error) if isinstance(error, BudgetExhausted) else describe(error)
            return AdapterResult(name, RewardStatus.FAILED, reason=reason, attempts=0)
        # If the call is cancelled, or the server does not report its usage, the whole estimate counts as spent
        cost = estimate
        try:
            result = await score(sample)
            cost = result.extra.get(COST, estimate)
        finally:
            self._budget.settle(name, estimate, cost)
        return result

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the cache and of the budget, if the run has them."""
        stats: dict[str, Any] = {}
        if self._cache is not None:
            stats |= {f"verdict_cache_{name}": value for name, value in self._cache.counts.items()}
        if self._budget is not None:
            stats |= {f"judge_budget_{name}": value for name, value in self._budget.stats().items()}
        return stats


def most_it_costs(judge: Any, sample: dict[str, Any]) -> float:
    """Return the highest possible cost of judging a sample, with replies of maximum length, in the judge's currency."""
    price = getattr(judge, PRICE)
    if hasattr(judge, "token_estimate"):
        prompt_tokens, completion_tokens = judge.token_estimate(sample)
    else:
        prompt_tokens = len(sample.get("sample_text", sample["completion"])) / CHARACTERS_PER_TOKEN
        completion_tokens = 0.0
    price_in, price_out = price if isinstance(price, tuple | list) else (price, price)
    return (prompt_tokens * price_in + completion_tokens * price_out) / 1e6


def _is_half_a_line(line: bytes) -> bool:
    """Return whether this is the beginning of a line of the spending record, cut off before its newline."""
    return not line.endswith(b"\n") and line.startswith(_LINE_BEGIN[: len(line)])


def _checked(cost: float) -> float:
    """Return the cost, or raise ValueError if it is negative or not finite."""
    if not (math.isfinite(cost) and cost >= 0):
        raise ValueError(f"a cost must be finite and not negative, not {cost}")
    return cost
