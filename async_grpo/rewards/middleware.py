"""What stands around every call of a reward: the cache is asked first, then the budget. (Limits are kept by the workers.)

A call starts only while what was spent, what the calls in flight have reserved and its own estimate fit the limit
together: the limit is exceeded by no more than those calls cost beyond their estimates.
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

PRICE = "price_per_million_tokens"  # of a judge: (prompt, completion), or one price for both
OF_THE_CALL = ("attempts", "latency_s", "queue_s")
POLL_INTERVAL_S = 2.0  # between two looks for a higher limit of a call that waits
ROUNDING = 1e-9  # of the limit: sums of fractions are not exact
_LINE = b'{"judge": '  # how every line of a record begins
log = logging.getLogger(__name__)

Score = Callable[[dict[str, Any]], Awaitable[AdapterResult]]


class BudgetExhausted(AsyncGrpoError, RuntimeError):
    """The call would cost more than what is left."""


class Budget:
    """Plain asyncio: use it from one event loop. Costs are in units of currency; a ValueError refuses what can be none.

    Args:
        limit: over all judges; None: only count.
        policy: of a call that the rest of the limit cannot pay: `pause`, it waits until the limit is raised, and all behind
            it, or `fallback`, it raises BudgetExhausted. Under both, one waits that only others must be settled for.
        path: a file that remembers what was spent, for a run that is resumed; made if missing. A number in a file of the
            same name that ends in `.limit` raises the limit: it is read at the start, and before a pause or a refusal.

    ConfigurationError: a file that is no record of spending.
    """

    def __init__(self, limit: float | None, *, policy: str = "pause", path: str | Path | None = None) -> None:
        self._policy, self._limit = policy, math.inf if limit is None else limit
        self._spent: defaultdict[str, float] = defaultdict(float)  # by judge
        self._calls: Counter[str] = Counter()
        self._reserved, self._waiting, self._refused = 0.0, 0, 0
        self._paused = self._unrecorded = False
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()
        self._path = Path(path) if path else None
        if self._path:
            self._read_record(self._path)
            self._rest()

    @property
    def spent(self) -> float:
        """Over all judges."""
        return math.fsum(self._spent.values())

    async def reserve(self, judge: str, estimated_cost: float) -> None:
        """Before a call: wait until it may be made, first come, first served. BudgetExhausted: see `policy`."""
        cost = _checked(estimated_cost)
        self._waiting += 1
        try:
            async with self._turn:  # or a stream of small calls would starve a large one
                await self._until_it_fits(judge, cost)
                self._reserved += cost
        finally:
            self._waiting -= 1

    def settle(self, judge: str, estimated_cost: float, real_cost: float) -> None:
        """After a call that was reserved, also one that failed: what it really cost."""
        cost = _checked(real_cost)
        self._reserved -= estimated_cost
        self._spent[judge] += cost
        self._calls[judge] += 1
        self._record(judge, cost)
        self._changed.set()

    def set_limit(self, limit: float | None) -> None:
        """Another limit; the calls that wait for money go on as far as it reaches."""
        self._limit = math.inf if limit is None else limit
        self._changed.set()

    def stats(self) -> dict[str, Any]:
        """What was spent and is reserved; calls that wait, or were refused for want of money."""
        return {
            "spent": self.spent,
            "reserved": max(self._reserved, 0.0),
            "limit": None if math.isinf(self._limit) else self._limit,
            "waiting": self._waiting,
            "paused": self._paused,
            "refused": self._refused,
            "spent_by_judge": dict(self._spent),
            "calls_by_judge": dict(self._calls),
        }

    def _rest(self, needed: float = math.inf) -> float:
        """What is left; of a higher limit, if this does not suffice and the file beside the record has one."""
        rest = self._limit * (1 + ROUNDING) - self.spent
        if needed <= rest or self._path is None:
            return rest
        path = self._path.with_suffix(".limit")
        with suppress(OSError, ValueError):  # it is not there, or no number: the limit stays as it is
            raised = _checked(float(path.read_text(errors="replace")))
            if raised > self._limit:
                log.warning("%s raises the limit of the judges from %g to %g", path, self._limit, raised)
                self.set_limit(raised)
        return self._limit * (1 + ROUNDING) - self.spent

    async def _until_it_fits(self, judge: str, cost: float) -> None:
        try:
            while self._reserved + cost > (rest := self._rest(cost)):
                self._changed.clear()
                if cost > rest:  # whatever those in flight will cost
                    self._refuse_or_pause(judge, cost)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), POLL_INTERVAL_S)
        finally:
            if self._paused:
                self._paused = False
                log.warning("the judges go on (%g is spent)", self.spent)

    def _refuse_or_pause(self, judge: str, cost: float) -> None:
        path = self._path and self._path.with_suffix(".limit")
        way = f"write a number to {path}" if path else "see Budget.set_limit"
        spent = f"{self.spent:g} of {self._limit:g} is spent"
        reason = f"a call of {judge} needs {cost:g} and {spent}. To raise the limit: {way}"
        if self._policy == "fallback":
            self._refused += 1
            if self._refused == 1:
                log.warning("the budget of the judges is used up: %s", reason)
            raise BudgetExhausted(reason)
        if not self._paused:
            self._paused = True
            log.warning("the judges are paused until the limit is raised: %s", reason)

    def _record(self, judge: str, cost: float) -> None:
        """One line per call: a killed run loses at most the calls that it had in flight."""
        if self._path is None or self._unrecorded:
            return
        try:
            with self._path.open("ab") as file:
                file.write(json.dumps({"judge": judge, "cost": cost}).encode() + b"\n")
        except OSError as error:  # a full disk is no reason to stop
            log.error("%s cannot be written, a resumed run will not know of it: %s", self._path, error)
            self._unrecorded = True

    def _read_record(self, path: Path) -> None:
        """The file is made if it is missing; half a line at its end (a killed run) is cut off."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                file.seek(0)
                lines = file.read().splitlines(keepends=True)
                if lines and not lines[-1].endswith(b"\n") and lines[-1].startswith(_LINE[: len(lines[-1])]):
                    file.truncate(file.tell() - len(lines.pop()))
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
        took_s = time.monotonic() - asked_at
        return AdapterResult(name, **fields_of(answer), attempts=0, latency_s=took_s)

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
        cache = self._cache.counts if self._cache is not None else {}
        budget = self._budget.stats() if self._budget is not None else {}
        return {f"verdict_cache_{name}": value for name, value in cache.items()} | {
            f"judge_budget_{name}": value for name, value in budget.items()
        }


def most_it_costs(judge: Any, sample: dict[str, Any]) -> float:
    """What the judge may cost for a sample, if every reply is as long as it may be."""
    price = getattr(judge, PRICE)
    if hasattr(judge, "token_estimate"):
        prompt, completion = judge.token_estimate(sample)
    else:
        prompt, completion = len(sample.get("sample_text", sample["completion"])) / CHARACTERS_PER_TOKEN, 0.0
    price_in, price_out = price if isinstance(price, tuple | list) else (price, price)
    return (prompt * price_in + completion * price_out) / 1e6


def _checked(cost: float) -> float:
    if not (math.isfinite(cost) and cost >= 0):
        raise ValueError(f"a cost must be finite and not negative, not {cost}")
    return cost
