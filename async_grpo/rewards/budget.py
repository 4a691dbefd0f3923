"""Budget: what the paid judges of a run may cost together.

    budget = Budget(limit=20.0)
    reservation = await budget.reserve("judge", 0.00026)   # before the call: what it may cost
    budget.settle(reservation, 0.00016)                    # after it, also one that failed: what it did cost

A call starts only while what was spent, what the calls in flight have reserved and its own estimate fit the limit
together. So the limit is exceeded by no more than those calls cost beyond their estimates: not at all, if an
estimate is the most that a call can cost.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.rewards.budget_record import UNITS, BudgetRecord, units_of

PAUSE, FALLBACK = "pause", "fallback"
POLL_INTERVAL_S, REMINDER_INTERVAL_S = (
    2.0,
    60.0,
)  # of a pause: between two looks for a higher limit, and between two words about it
log = logging.getLogger(__name__)


class BudgetExhausted(AsyncGrpoError, RuntimeError):
    """The call would cost more than what is left."""


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
        policy: what becomes of a call that the rest of the limit cannot pay: `pause`, it waits until the limit is
            raised, and says so every minute, or `fallback`, it raises BudgetExhausted. Under both, one that has only to
            wait for others to be settled waits.
        path: a file that remembers what was spent, for a run that is resumed; made if missing. A number in a file of the
            same name that ends in `.limit` raises the limit: it is read at the start, while calls wait for a higher one,
            and before calls are refused, every two seconds at most.

    Raises:
        ConfigurationError: a limit below 0, an unknown policy, or a file that is no record of spending.
    """

    def __init__(
        self,
        limit: float | None,
        *,
        policy: str = PAUSE,
        path: str | Path | None = None,
    ) -> None:
        if policy not in (PAUSE, FALLBACK):
            raise ConfigurationError(f"unknown budget policy {policy!r}: choose {PAUSE} or {FALLBACK}")
        self._policy = policy
        self._limit = _limit_units(limit)
        self._reserved = 0
        self._spent: Counter[str] = Counter()  # units by judge
        self._calls: Counter[str] = Counter()
        self._refused = 0
        self._paused = False
        self._reminder: asyncio.TimerHandle | None = None  # while it is paused
        self._said_at, self._looked_at = 0.0, -math.inf
        self._waiting: list[Reservation] = []  # in the order of their arrival
        self._record = BudgetRecord(Path(path)) if path else None
        if self._record:
            for judge, cost in self._record.read():
                self._spent[judge] += units_of(cost)
                self._calls[judge] += 1
            self._is_raised()

    @property
    def spent(self) -> float:
        return self._spent.total() / UNITS

    async def reserve(self, judge: str, estimated_cost: float) -> Reservation:
        """Wait until the call may be made, first come, first served; a wait that is cancelled takes nothing.

        Raises:
            BudgetExhausted: under the policy `fallback`, if the rest cannot pay it.
            ValueError: the estimate is negative or not finite.
        """
        granted = asyncio.get_running_loop().create_future()
        reservation = Reservation(judge, units_of(estimated_cost), granted)
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
        units = units_of(real_cost)
        if reservation.settled:
            raise ValueError(f"{reservation} is settled already")
        reservation.settled = True
        self._reserved -= reservation.units
        self._spent[reservation.judge] += units
        self._calls[reservation.judge] += 1
        if self._record:
            self._record.write(reservation.judge, units / UNITS)
        self._serve()

    def set_limit(self, limit: float | None) -> None:
        """Another limit; whoever waits for money goes on as far as it reaches."""
        self._limit = _limit_units(limit)
        self._serve()

    def stats(self) -> dict[str, Any]:
        """In units of currency what was spent and is reserved; calls that wait, or were refused for want of money."""
        return {
            "spent": self.spent,
            "reserved": self._reserved / UNITS,
            "limit": None if self._limit is None else self._limit / UNITS,
            "waiting": len(self._waiting),
            "paused": self._paused,
            "refused": self._refused,
            "spent_by_judge": {judge: units / UNITS for judge, units in self._spent.items()},
            "calls_by_judge": dict(self._calls),
        }

    def close(self) -> None:
        """Let go of the file."""
        self._cancel_reminder()
        if self._record:
            self._record.close()

    def _serve(self) -> None:
        """Grant, refuse or keep waiting: whatever can be decided now."""
        limit = math.inf if self._limit is None else self._limit
        spent, waiting, in_turn = self._spent.total(), [], True
        paused = ""  # why
        for reservation in self._waiting:
            if reservation.granted.done():  # cancelled
                continue
            if spent + reservation.units > limit:  # whatever those in flight will cost
                if self._policy == FALLBACK:
                    if time.monotonic() - self._looked_at >= POLL_INTERVAL_S and self._is_raised():
                        return self._serve()
                    self._refuse(reservation)
                    continue
                paused = paused or self._message(reservation)
            elif in_turn and spent + self._reserved + reservation.units <= limit:
                self._reserved += reservation.units
                reservation.granted.set_result(None)
                continue
            else:
                in_turn = False  # or a stream of small calls would starve a large one
            waiting.append(reservation)
        self._waiting = waiting
        if paused and not self._paused:
            self._said_at = -math.inf
            self._paused = True
            self._remind(paused)
        elif self._paused and not paused:
            log.warning("the judges go on: %s", self._standing())
            self._paused = False
            self._cancel_reminder()

    def _refuse(self, reservation: Reservation) -> None:
        if not self._refused:
            log.warning("the budget of the judges is used up: %s", self._message(reservation))
        self._refused += 1
        reservation.granted.set_exception(BudgetExhausted(self._needs(reservation)))

    def _message(self, reservation: Reservation) -> str:
        door = f"write a number to {self._record.limit_path}" if self._record else "see Budget.set_limit"
        return f"{self._needs(reservation)}. To raise the limit: {door}"

    def _needs(self, reservation: Reservation) -> str:
        return f"a call of {reservation.judge} needs {reservation.units / UNITS:g} and {self._standing()}"

    def _remind(self, message: str) -> None:
        """While it is paused: look for a higher limit, and say once a minute what everybody waits for."""
        now = asyncio.get_running_loop().time()
        if now - self._said_at >= REMINDER_INTERVAL_S:
            log.warning("the judges are paused until the limit is raised: %s", message)
            self._said_at = now
        self._reminder = asyncio.get_running_loop().call_later(POLL_INTERVAL_S, self._remind, message)
        if self._is_raised():
            self._serve()

    def _cancel_reminder(self) -> None:
        if self._reminder:
            self._reminder.cancel()
            self._reminder = None

    def _is_raised(self) -> bool:
        """Whether somebody has written a higher limit; it holds from now on."""
        self._looked_at = time.monotonic()
        raised = self._record.read_limit() if self._record else None
        if raised is None or self._limit is None or units_of(raised) <= self._limit:
            return False
        log.warning(
            "%s raises the limit of the judges from %g to %g",
            *(self._record.limit_path, self._limit / UNITS, raised),
        )
        self._limit = units_of(raised)
        return True

    def _standing(self) -> str:
        return (
            f"{self.spent:g} of {'no limit' if self._limit is None else f'{self._limit / UNITS:g}'} is spent"
        )


def _limit_units(limit: float | None) -> int | None:
    if limit is None:
        return None
    try:
        return units_of(limit)
    except ValueError as error:
        raise ConfigurationError(
            f"the limit of the budget must be a number of 0 or more, not {limit}"
        ) from error
