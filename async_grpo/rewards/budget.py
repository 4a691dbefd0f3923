"""Budget: what the paid judges of a run may cost together.

    budget = Budget(limit=20.0)
    reservation = await budget.reserve("judge", 0.00026)   # before the call: what it may cost
    budget.settle(reservation, 0.00016)                    # after it, also one that failed: what it did cost

A call starts only while what was spent, what the calls in flight have reserved and its own estimate fit the limit
together. So the limit is exceeded by no more than those calls cost beyond their estimates: not at all, if an
estimate is the most that a call can cost.
"""

import asyncio
import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.errors import AsyncGrpoError, ConfigurationError

PAUSE, FALLBACK = "pause", "fallback"
POLL_INTERVAL_S = 2.0  # between two looks for a higher limit
ROUNDING = 1e-9  # of the limit: sums of fractions are not exact
_LINE = b'{"judge": '  # how every line of a record begins
log = logging.getLogger(__name__)


class BudgetExhausted(AsyncGrpoError, RuntimeError):
    """The call would cost more than what is left."""


@dataclass(eq=False)
class Reservation:
    """A call that may be made, to be settled once; the cost is in units of currency."""

    judge: str
    cost: float
    granted: asyncio.Future[None] = field(repr=False)
    settled: bool = False


class Budget:
    """Plain asyncio: use it from one event loop.

    Args:
        limit: in units of currency, over all judges; None: only count.
        policy: what becomes of a call that the rest of the limit cannot pay: `pause`, it waits until the limit is
            raised, or `fallback`, it raises BudgetExhausted. Under both, one that has only to wait for others to be
            settled waits.
        path: a file that remembers what was spent, for a run that is resumed; made if missing. A number in a file of the
            same name that ends in `.limit` raises the limit: it is read at the start, and every two seconds at most
            while calls wait for a higher one or are refused.

    Raises:
        ConfigurationError: a limit below 0, an unknown policy, or a file that is no record of spending.
    """

    def __init__(self, limit: float | None, *, policy: str = PAUSE, path: str | Path | None = None) -> None:
        if policy not in (PAUSE, FALLBACK):
            raise ConfigurationError(f"unknown budget policy {policy!r}: choose {PAUSE} or {FALLBACK}")
        if limit is not None and not 0 <= limit < math.inf:
            raise ConfigurationError(f"the limit of the budget must be a number of 0 or more, not {limit}")
        self._policy, self._limit = policy, math.inf if limit is None else limit
        self._reserved = 0.0
        self._spent: defaultdict[str, float] = defaultdict(float)  # by judge, in units of currency
        self._calls: Counter[str] = Counter()
        self._refused = 0
        self._paused = self._unrecorded = False
        self._looked_at = -math.inf
        self._waiting: list[Reservation] = []  # in the order of their arrival
        self._path = Path(path) if path else None
        for judge, cost in _read_record(self._path) if self._path else ():
            self._spent[judge] += cost
            self._calls[judge] += 1
        self._is_raised()

    @property
    def spent(self) -> float:
        """In units of currency, over all judges."""
        return math.fsum(self._spent.values())

    async def reserve(self, judge: str, estimated_cost: float) -> Reservation:
        """Wait until the call may be made, first come, first served; a wait that is cancelled takes nothing.

        Raises:
            BudgetExhausted: under the policy `fallback`, if the rest cannot pay it.
            ValueError: the estimate is negative or not finite.
        """
        granted = asyncio.get_running_loop().create_future()
        reservation = Reservation(judge, _checked(estimated_cost), granted)
        self._waiting.append(reservation)
        self._serve()
        try:
            while not granted.done():
                await asyncio.wait({granted}, timeout=POLL_INTERVAL_S)
                if self._paused and self._is_raised():
                    self._serve()
        except asyncio.CancelledError:
            if not granted.done():
                granted.cancel()
            elif granted.exception() is None:  # it was granted in the very moment
                self._reserved -= reservation.cost
            self._serve()
            raise
        granted.result()
        return reservation

    def settle(self, reservation: Reservation, real_cost: float) -> None:
        """Record what the call really cost; 0 if it was not made.

        Raises:
            ValueError: it is settled already, or the cost is negative or not finite.
        """
        cost = _checked(real_cost)
        if reservation.settled:
            raise ValueError(f"{reservation} is settled already")
        reservation.settled = True
        self._reserved -= reservation.cost
        self._spent[reservation.judge] += cost
        self._calls[reservation.judge] += 1
        self._record(reservation.judge, cost)
        self._serve()

    def set_limit(self, limit: float | None) -> None:
        """Another limit; the calls that wait for money go on as far as it reaches."""
        self._limit = math.inf if limit is None else limit
        self._serve()

    def stats(self) -> dict[str, Any]:
        """In units of currency what was spent and is reserved; calls that wait, or were refused for want of money."""
        return {
            "spent": self.spent,
            "reserved": max(self._reserved, 0.0),
            "limit": None if math.isinf(self._limit) else self._limit,
            "waiting": len(self._waiting),
            "paused": self._paused,
            "refused": self._refused,
            "spent_by_judge": dict(self._spent),
            "calls_by_judge": dict(self._calls),
        }

    def _serve(self) -> None:
        """Grant, refuse or keep waiting: whatever can be decided now."""
        rest = self._limit * (1 + ROUNDING) - self.spent
        waiting, in_turn, paused = [], True, ""
        for reservation in self._waiting:
            if reservation.granted.done():  # cancelled
                continue
            if reservation.cost > rest:  # whatever those in flight will cost
                if self._policy == FALLBACK:
                    if self._is_raised():
                        return self._serve()
                    if not self._refused:
                        log.warning("the budget of the judges is used up: %s", self._explain(reservation))
                    self._refused += 1
                    reservation.granted.set_exception(BudgetExhausted(self._explain(reservation)))
                    continue
                paused = paused or self._explain(reservation)
            elif in_turn and self._reserved + reservation.cost <= rest:
                self._reserved += reservation.cost
                reservation.granted.set_result(None)
                continue
            else:
                in_turn = False  # or a stream of small calls would starve a large one
            waiting.append(reservation)
        self._waiting = waiting
        if bool(paused) != self._paused:
            self._paused = bool(paused)
            said = f"are paused until the limit is raised: {paused}" if paused else "go on"
            log.warning("the judges %s (%g is spent)", said, self.spent)

    def _explain(self, reservation: Reservation) -> str:
        limit = "no limit" if math.isinf(self._limit) else f"{self._limit:g}"
        door = f"write a number to {self._limit_path}" if self._path else "see Budget.set_limit"
        return (
            f"a call of {reservation.judge} needs {reservation.cost:g} and {self.spent:g} of {limit} is spent. "
            f"To raise the limit: {door}"
        )

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

    @property
    def _limit_path(self) -> Path:
        assert self._path is not None
        return self._path.with_suffix(".limit")

    def _is_raised(self) -> bool:
        """Whether the file beside the record holds a higher limit; it holds from now on."""
        now = time.monotonic()
        if self._path is None or now - self._looked_at < POLL_INTERVAL_S:
            return False
        self._looked_at = now
        try:
            raised = _checked(float(self._limit_path.read_text(errors="replace")))
        except (OSError, ValueError):  # it is not there, or no number: the limit stays as it is
            return False
        if raised <= self._limit:
            return False
        log.warning("%s raises the limit of the judges from %g to %g", self._limit_path, self._limit, raised)
        self._limit = raised
        return True


def _checked(cost: float) -> float:
    if not (math.isfinite(cost) and cost >= 0):
        raise ValueError(f"a cost must be finite and not negative, not {cost}")
    return cost


def _read_record(path: Path) -> Iterator[tuple[str, float]]:
    """The lines of the file, which is made if it is missing; half a line at its end (a killed run) is cut off."""
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
            yield str(row["judge"]), _checked(float(row["cost"]))
        except (ValueError, TypeError, KeyError) as error:
            message = f"{path}, line {number}: not a line of spending ({error}): name another file"
            raise ConfigurationError(message) from error
