"""`BudgetRecord`: the file that remembers what judges have cost, and the door beside it by which a limit is raised."""

import errno
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from async_grpo.errors import ConfigurationError

UNITS = 10**9  # of one unit of currency: whole numbers, so that a million small costs add up exactly
_LINE = b'{"judge": '  # how every line of a record begins
log = logging.getLogger(__name__)


class BudgetRecord:
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
            units_of(limit := float(text))
        except ValueError:
            return self._not_a_limit(f"{text[:40]!r} is no number of 0 or more") if text else None
        return limit

    def _not_a_limit(self, reason: str) -> None:
        if reason != self._nonsense:
            log.warning("%s says nothing about the limit: %s", self.limit_path, reason)
        self._nonsense = reason

    def close(self) -> None:
        self._file.close()


def units_of(cost: float) -> int:
    """Billionths of a unit of currency. Raises ValueError for what is no cost."""
    if not (math.isfinite(cost) and cost >= 0):
        raise ValueError(f"a cost must be finite and not negative, not {cost}")
    return round(cost * UNITS)
