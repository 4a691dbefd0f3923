"""`KindTable`: results of each reward for each kind of rows, such as the rows of one source or of one bug report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.bench.completions import LABEL, CompletionRow
from async_grpo.types import AdapterResult

DEFAULT_COLUMN = "kind"
NO_KIND = "-"  # kind of the rows that have no value in the column
MAX_KINDS = 100  # maximum number of kinds to print
MAX_KIND_CHARACTERS = 48


def kind_column(rows: Sequence[CompletionRow], column: str | None) -> str | None:
    """Return the column that names the kinds of rows: `column`, or else `kind` if rows have this column, or else None.

    Raises:
        ConfigurationError: No row has the given column.
    """
    name = DEFAULT_COLUMN if column is None else column
    if any(name in row.columns for row in rows):
        return name
    if column is not None:
        columns = sorted({name for row in rows for name in row.columns})
        raise ConfigurationError(f"--by {column}: no row has this column, only {', '.join(columns)}")
    return None


@dataclass
class _Cell:
    """Results of one reward for the rows of one kind."""

    num_rows: int = 0
    num_unscored: int = 0  # rows without a reward
    rewards: list[float] = field(default_factory=list)
    num_labels: int = 0  # rows with a reward and a label
    # number of rows whose reward and label disagree about whether the completion is right
    num_differing: int = 0


class KindTable:
    """Counts for each kind of rows and each reward.

    Args:
        column: Column that names the kind of a row.
        adapters: Names of the rewards.
        threshold: Lowest reward that counts as right.
    """

    def __init__(self, column: str, adapters: Sequence[str], threshold: float) -> None:
        self._column = column
        self._adapters = adapters
        self._threshold = threshold
        self.cells: dict[str, dict[str, _Cell]] = {}  # by kind, in the order of the file, and by reward

    def add(self, row: CompletionRow, results: Mapping[str, AdapterResult]) -> None:
        """Add the first result of each reward for a row."""
        kind = _shown_kind(row.columns.get(self._column))
        cells = self.cells.setdefault(kind, {name: _Cell() for name in self._adapters})
        for name, result in results.items():
            cell = cells[name]
            cell.num_rows += 1
            if result.reward is None:
                cell.num_unscored += 1
                continue
            cell.rewards.append(result.reward)
            if row.label is not None:
                is_right = result.reward >= self._threshold
                cell.num_labels += 1
                cell.num_differing += int(is_right != (row.label >= self._threshold))

    def print(self, console: Console, table: Table) -> None:
        """Print a line for each kind and each reward.

        Args:
            console: The output.
            table: An empty table, with the columns of `headers`.
        """
        console.print(f"\nby {self._column}")
        for kind, cells in list(self.cells.items())[:MAX_KINDS]:
            for name, cell in cells.items():
                mean = f"{math.fsum(cell.rewards) / len(cell.rewards):.4g}" if cell.rewards else "-"
                differing = str(cell.num_differing) if cell.num_labels else "-"
                table.add_row(kind, name, str(cell.num_rows), str(cell.num_unscored), mean, differing)
        console.print(table)
        if len(self.cells) > MAX_KINDS:
            console.print(f"and {len(self.cells) - MAX_KINDS} kinds more")

    @property
    def headers(self) -> list[str]:
        """Return the headers of the table."""
        return [self._column, "reward", "rows", "unscored", "mean", f"differ from {LABEL}"]


def _shown_kind(value: Any) -> str:
    """Return the kind that a row names as one line, without control characters, which could change the terminal."""
    if value is None:
        return NO_KIND
    text = " ".join(repr(str(value))[1:-1].split())
    return text if len(text) <= MAX_KIND_CHARACTERS else text[: MAX_KIND_CHARACTERS - 3] + "..."
