"""Budget: what the paid judges of a run may cost together.

    budget = Budget(limit=20.0, prices={"judge": Price(input=0.15, output=0.6)})
    reservation = await budget.reserve("judge", budget.cost("judge", 900, 200))   # before the call
    budget.settle(reservation, budget.cost("judge", 873, 41))                     # after it, also one that failed

A call starts only while what was spent, what the calls in flight have reserved and its own estimate fit the limit
together. So the limit is exceeded by no more than those calls cost beyond their estimates: not at all, if an
estimate is the most that a call can cost.
"""

import asyncio
import errno
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from async_grpo.errors import AsyncGrpoError, ConfigurationError

PAUSE, FALLBACK = "pause", "fallback"
_UNITS = 10**9  # of one unit of currency: whole numbers, so that a million small costs add up exactly
_LINE = b'{"judge": '  # how every line of a record begins
log = logging.getLogger(__name__)


class BudgetExhausted(AsyncGrpoError, RuntimeError):
    """The call would cost more than what is left."""


@dataclass(frozen=True)
class Price:
    """Currency units per million tokens.

    >>> Price(input=0.5, output=2.0).of(input_tokens=1_000_000, output_tokens=250_000)
    1.0
    """

    input: float = 0.0
    output: float = 0.0

    def of(self, input_tokens: float, output_tokens: float) -> float:
        return (self.input * input_tokens + self.output * output_tokens) / 1e6


@dataclass(eq=False)
class Reservation:
    """A call that may be made, to be settled once. Units are billionths of the currency."""

    judge: str
    units: int
    granted: asyncio.Future[None] = field(repr=False)
    settled: bool = False


class Budget:
    """Plain asyncio: use it from one event loop.

    Args:
        limit: in units of currency, over all judges; None: only count.
        prices: by judge.
        policy: what becomes of a call that the rest of the limit cannot pay: `pause`, it waits for `set_limit`, or
            `fallback`, it raises BudgetExhausted. Under both, one that has only to wait for others to be settled waits.
        path: a file that remembers what was spent, for a run that is resumed; made if missing.

    Raises:
        ConfigurationError: a limit or price below 0, an unknown policy, or a file that is no record of spending.
    """

    def __init__(
        self,
        limit: float | None,
        prices: Mapping[str, Price],
        *,
        policy: str = PAUSE,
        path: str | Path | None = None,
    ) -> None:
        if policy not in (PAUSE, FALLBACK):
            raise ConfigurationError(f"unknown budget policy {policy!r}: choose {PAUSE} or {FALLBACK}")
        for judge, price in prices.items():
            if not (math.isfinite(price.input + price.output) and min(price.input, price.output) >= 0):
                raise ConfigurationError(f"the price of {judge} must be finite and not negative, not {price}")
        self._prices, self._policy = dict(prices), policy
        self._limit = _limit_units(limit)
        self._reserved = 0
        self._spent: Counter[str] = Counter()  # units by judge
        self._calls: Counter[str] = Counter()
        self._refused = 0
        self._paused = False
        self._waiting: list[Reservation] = []  # in the order of their arrival
        self._record = _Record(Path(path)) if path else None
        for judge, cost in self._record.read() if self._record else ():
            self._spent[judge] += _units(cost)
            self._calls[judge] += 1

    @property
    def spent(self) -> float:
        return self._spent.total() / _UNITS

    def cost(self, judge: str, input_tokens: float, output_tokens: float) -> float:
        """What so many tokens cost. Raises ConfigurationError for a judge without a price."""
        if judge not in self._prices:
            known = ", ".join(self._prices) or "nobody"
            raise ConfigurationError(f"the budget knows no price of {judge}, but of {known}: name its price")
        return self._prices[judge].of(input_tokens, output_tokens)

    async def reserve(self, judge: str, estimated_cost: float) -> Reservation:
        """Wait until the call may be made, first come, first served; a wait that is cancelled takes nothing.

        Raises:
            BudgetExhausted: under the policy `fallback`, if the rest cannot pay it.
            ValueError: the estimate is negative or not finite.
        """
        granted = asyncio.get_running_loop().create_future()
        reservation = Reservation(judge, _units(estimated_cost), granted)
        self._waiting.append(reservation)
        self._serve()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled() and granted.exception() is None:  # granted in the very moment
                self._reserved -= reservation.units
            self._serve()
            raise
        return reservation

    def settle(self, reservation: Reservation, real_cost: float) -> None:
        """Record what the call really cost; 0 if it was not made.

        Raises:
            ValueError: it is settled already, or the cost is negative or not finite.
        """
        units = _units(real_cost)
        if reservation.settled:
            raise ValueError(f"{reservation} is settled already")
        reservation.settled = True
        self._reserved -= reservation.units
        self._spent[reservation.judge] += units
        self._calls[reservation.judge] += 1
        if self._record:
            self._record.write(reservation.judge, units / _UNITS)
        self._serve()

    def set_limit(self, limit: float | None) -> None:
        """Another limit; whoever waits for money goes on as far as it reaches."""
        self._limit = _limit_units(limit)
        self._serve()

    def stats(self) -> dict[str, Any]:
        """In units of currency what was spent and is reserved; calls that wait, or were refused for want of money."""
        return {
            "spent": self.spent,
            "reserved": self._reserved / _UNITS,
            "limit": None if self._limit is None else self._limit / _UNITS,
            "waiting": len(self._waiting),
            "paused": self._paused,
            "refused": self._refused,
            "spent_by_judge": {judge: units / _UNITS for judge, units in self._spent.items()},
            "calls_by_judge": dict(self._calls),
        }

    def close(self) -> None:
        """Let go of the file."""
        if self._record:
            self._record.close()

    def _serve(self) -> None:
        """Grant, refuse or keep waiting: whatever can be decided now."""
        limit = math.inf if self._limit is None else self._limit
        spent, waiting, paused, in_turn = self._spent.total(), [], False, True
        for reservation in self._waiting:
            if reservation.granted.done():  # cancelled
                continue
            if spent + reservation.units > limit:  # whatever those in flight will cost
                if self._policy == FALLBACK:
                    self._refuse(reservation)
                    continue
                self._say_paused(reservation)
                paused = True
            elif in_turn and spent + self._reserved + reservation.units <= limit:
                self._reserved += reservation.units
                reservation.granted.set_result(None)
                continue
            else:
                in_turn = False  # or a stream of small calls would starve a large one
            waiting.append(reservation)
        if self._paused and not paused:
            log.warning("the judges go on: %s", self._standing())
        self._waiting, self._paused = waiting, paused

    def _refuse(self, reservation: Reservation) -> None:
        message = f"a call of {reservation.judge} needs {reservation.units / _UNITS:g} and {self._standing()}"
        if not self._refused:
            log.warning("the budget of the judges is used up: %s", message)
        self._refused += 1
        reservation.granted.set_exception(BudgetExhausted(message))

    def _say_paused(self, reservation: Reservation) -> None:
        if not self._paused:
            self._paused = True
            log.warning(
                "the judges are paused until the limit is raised: a call of %s needs %g and %s",
                *(reservation.judge, reservation.units / _UNITS, self._standing()),
            )

    def _standing(self) -> str:
        return (
            f"{self.spent:g} of {'no limit' if self._limit is None else f'{self._limit / _UNITS:g}'} is spent"
        )


class _Record:
    """One line per call, appended: a killed run loses at most the calls that it had in flight."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigurationError(f"the record of spending {path} cannot be written: {error}") from error

    def read(self) -> Iterator[tuple[str, float]]:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file.read().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n") and line.startswith(_LINE[: len(line)]):
                self._file.truncate(end)  # the run was killed while it wrote
                return
            end += len(line)
            try:
                row = json.loads(line)
                yield str(row["judge"]), float(row["cost"])
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigurationError(
                    f"{self._path}, line {number}: not a line of spending ({error}): name another file"
                ) from error

    def write(self, judge: str, cost: float) -> None:
        line = json.dumps({"judge": judge, "cost": cost}).encode() + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                self._file.truncate(size)  # half a line would spoil the next one
                raise OSError(errno.ENOSPC, "only a part of a line was written")
        except OSError as error:  # a full disk is no reason to stop, but to be said
            if not self._failed:
                log.error("%s cannot be written, a resumed run will not know of it: %s", self._path, error)
            self._failed = True

    def close(self) -> None:
        self._file.close()


def _units(cost: float) -> int:
    if not (math.isfinite(cost) and cost >= 0):
        raise ValueError(f"a cost must be finite and not negative, not {cost}")
    return round(cost * _UNITS)


def _limit_units(limit: float | None) -> int | None:
    if limit is None:
        return None
    try:
        return _units(limit)
    except ValueError as error:
        raise ConfigurationError(
            f"the limit of the budget must be a number of 0 or more, not {limit}"
        ) from error
