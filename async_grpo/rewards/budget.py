"""Budget: what the paid judges of a run may cost together.

    budget = Budget(limit=20.0)
    reservation = await budget.reserve("judge", 0.00026)   # before the call: what it may cost
    budget.settle(reservation, 0.00016)                    # after it, also one that failed: what it did cost

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
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from async_grpo.errors import AsyncGrpoError, ConfigurationError

PAUSE, FALLBACK = "pause", "fallback"
LOOK_S, REMIND_S = (
    2.0,
    60.0,
)  # of a pause: between two looks for a higher limit, and between two words about it
_UNITS = 10**9  # of one unit of currency: whole numbers, so that a million small costs add up exactly
_LINE = b'{"judge": '  # how every line of a record begins
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
        self._record = _Record(Path(path)) if path else None
        if self._record:
            for judge, cost in self._record.read():
                self._spent[judge] += _units(cost)
                self._calls[judge] += 1
            self._is_raised()

    @property
    def spent(self) -> float:
        return self._spent.total() / _UNITS

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
        self._hush()
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
                    if time.monotonic() - self._looked_at >= LOOK_S and self._is_raised():
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
            self._hush()

    def _refuse(self, reservation: Reservation) -> None:
        if not self._refused:
            log.warning("the budget of the judges is used up: %s", self._message(reservation))
        self._refused += 1
        reservation.granted.set_exception(BudgetExhausted(self._needs(reservation)))

    def _message(self, reservation: Reservation) -> str:
        door = f"write a number to {self._record.limit_path}" if self._record else "see Budget.set_limit"
        return f"{self._needs(reservation)}. To raise the limit: {door}"

    def _needs(self, reservation: Reservation) -> str:
        return f"a call of {reservation.judge} needs {reservation.units / _UNITS:g} and {self._standing()}"

    def _remind(self, message: str) -> None:
        """While it is paused: look for a higher limit, and say once a minute what everybody waits for."""
        now = asyncio.get_running_loop().time()
        if now - self._said_at >= REMIND_S:
            log.warning("the judges are paused until the limit is raised: %s", message)
            self._said_at = now
        self._reminder = asyncio.get_running_loop().call_later(LOOK_S, self._remind, message)
        if self._is_raised():
            self._serve()

    def _hush(self) -> None:
        if self._reminder:
            self._reminder.cancel()
            self._reminder = None

    def _is_raised(self) -> bool:
        """Whether somebody has written a higher limit; it holds from now on."""
        self._looked_at = time.monotonic()
        raised = self._record.read_limit() if self._record else None
        if raised is None or self._limit is None or _units(raised) <= self._limit:
            return False
        log.warning(
            "%s raises the limit of the judges from %g to %g",
            *(self._record.limit_path, self._limit / _UNITS, raised),
        )
        self._limit = _units(raised)
        return True

    def _standing(self) -> str:
        return (
            f"{self.spent:g} of {'no limit' if self._limit is None else f'{self._limit / _UNITS:g}'} is spent"
        )


class _Record:
    """One line per call, appended: a killed run loses at most the calls that it had in flight."""

    def __init__(self, path: Path) -> None:
        self._path, self.limit_path = path, path.with_suffix(".limit")
        self._failed = False
        self._nonsense: str | None = None
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

    def read_limit(self) -> float | None:
        """What somebody wrote who wants to raise the limit, if it is a number."""
        try:
            text = self.limit_path.read_text(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._not_a_limit(str(error))
        try:
            _units(limit := float(text))
        except ValueError:
            return self._not_a_limit(f"{text[:40]!r} is no number of 0 or more") if text else None
        return limit

    def _not_a_limit(self, reason: str) -> None:
        if reason != self._nonsense:
            log.warning("%s says nothing about the limit: %s", self.limit_path, reason)
        self._nonsense = reason

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
