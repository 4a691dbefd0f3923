"""Statistics of each reward and of each pair of rewards on a file of completions, and a report that prints them."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from rich import box
from rich.console import Console
from rich.table import Table

from async_grpo.rewards.bench.completions import LABEL, CompletionRow
from async_grpo.rewards.bench.kinds import KindTable
from async_grpo.rewards.verifier_worker import quantile
from async_grpo.types import AdapterResult, RewardStatus, Verdict

MAX_EXAMPLES = 10  # default maximum number of examples to print for each kind of event
MAX_RIGHT_ROWS = 2
BAR_WIDTH = 30  # maximum length of a histogram's bar, in characters
MAX_EXCERPT = 60  # maximum number of characters to print of a completion


@dataclass
class Scorecard:
    """Results of the calls of one reward."""

    statuses: Counter[RewardStatus] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # time of each call, without the wait for a worker
    # line numbers of the failures, by (status, reason)
    failures: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    # results of the rows whose result was not always the same, by line number
    unsteady: dict[int, list[str]] = field(default_factory=dict)
    # The first rows that the reward scores as right and whose label, if there is one, agrees
    right_rows: list[CompletionRow] = field(default_factory=list)

    @property
    def num_unscored(self) -> int:
        """The number of calls that failed or timed out. A reward that abstains has not failed."""
        return self.statuses[RewardStatus.FAILED] + self.statuses[RewardStatus.TIMED_OUT]

    @property
    def mean(self) -> float | None:
        """The mean reward, or None if there are no rewards."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    def add(self, line: int, runs: Sequence[AdapterResult]) -> None:
        """Add the results of one row.

        Args:
            line: Number of the row's line.
            runs: A result for each time that the row was scored.
        """
        for result in runs:
            self.statuses[result.status] += 1
            self.seconds.append(max(0.0, result.latency_s - result.queue_s))
            if result.reward is not None:
                self.rewards.append(result.reward)
            else:
                self.failures.setdefault((result.status.value, result.reason), []).append(line)
        distinct_results = {(result.status, result.reward, result.steps) for result in runs}
        if len(distinct_results) > 1:
            self.unsteady[line] = [
                result.status.value if result.reward is None else f"{result.reward:.6g}" for result in runs
            ]

    def lines(self, max_examples: int = MAX_EXAMPLES) -> Iterator[str]:
        """Yield lines to print: a histogram of the rewards, failures, and results that changed on repetition."""
        bars = histogram(self.rewards)
        label_width = max((len(label) for label, _ in bars), default=0)
        max_count = max((count for _, count in bars), default=0)
        for label, count in bars:
            bar = ""
            if count > 0:
                bar = "█" * round(BAR_WIDTH * count / max_count) or "▏"
            yield f"  {label.rjust(label_width)}  {bar} {count}"
        failures = []
        for (status, reason), lines in self.failures.items():
            total = f", {len(lines)} in all" if len(lines) > 1 else ""
            failures.append(f"{status}, line {lines[0]}{total}: {one_line(reason)}")
        changes = []
        for line, results in self.unsteady.items():
            changes.append(f"not steady, line {line}: {', then '.join(results)}")
        yield from _examples_of(failures, max_examples)
        yield from _examples_of(changes, max_examples)


def _examples_of(texts: Sequence[str], max_examples: int) -> Iterator[str]:
    """Yield the first texts, and a line with the number of the others."""
    for text in texts[:max_examples]:
        yield f"  {text}"
    if len(texts) > max_examples:
        yield f"  and {len(texts) - max_examples} more (--examples {len(texts)} shows them)"


class Report:
    """Results of trying rewards on a file.

    An opinion is the score that a reward, or the file's label, gives to a completion. An opinion of `threshold` or more
    calls the completion right. A pair consists of two rewards, or of a reward and LABEL.

    Attributes:
        scorecards: The results of each reward's calls, by name.
        compared: For each pair, the number of rows on which both have an opinion.
        differing: For each pair, the number of rows that one calls right and the other wrong.
        examples: For some rows on which a pair differs, all opinions and the completion, by the row's line.
        num_differing_rows: Number of rows on which any pair differs.
        seconds: Time in which all rows were scored, not counting the start of the workers.

    Args:
        adapters: Names of the rewards.
        threshold: Lowest reward that counts as right.
        with_label: The file has labels.
        max_examples: Maximum number of examples to print for each kind of event and each pair.
        kind_column: Column that names the kind of a row, for a table by kind. None prints no such table.
    """

    def __init__(
        self,
        adapters: Sequence[str],
        threshold: float,
        with_label: bool,
        max_examples: int = MAX_EXAMPLES,
        kind_column: str | None = None,
    ) -> None:
        self.threshold = threshold
        self.kinds = None if kind_column is None else KindTable(kind_column, adapters, threshold)
        self.num_differing_rows = 0
        self._max_examples = max_examples
        self.scorecards = {name: Scorecard() for name in adapters}
        pairs = [*combinations(adapters, 2), *((name, LABEL) for name in adapters if with_label)]
        self.compared = dict.fromkeys(pairs, 0)
        self.differing = dict.fromkeys(pairs, 0)
        self.examples: dict[int, tuple[dict[str, float | None], str]] = {}
        self.seconds = 0.0

    def add(self, row: CompletionRow, verdicts: Sequence[Verdict]) -> None:
        """Add the results of one row. Add the rows in the order of the file.

        Args:
            row: The row.
            verdicts: A verdict for each time that the row was scored. Only the first one is used to compare rewards.
        """
        opinions = {result.adapter: result.reward for result in verdicts[0].results} | {LABEL: row.label}
        is_right_by_name = {
            name: score >= self.threshold for name, score in opinions.items() if score is not None
        }
        for name, card in self.scorecards.items():
            runs = [result for verdict in verdicts for result in verdict.results if result.adapter == name]
            card.add(row.line, runs)
            is_right_row = is_right_by_name.get(name, False) and is_right_by_name.get(LABEL, True)
            if is_right_row and len(card.right_rows) < MAX_RIGHT_ROWS:
                card.right_rows.append(row)
        if self.kinds is not None:
            self.kinds.add(row, {result.adapter: result for result in verdicts[0].results})
        has_differing_pair = False
        for pair in self.compared:
            first_name, second_name = pair
            if first_name not in is_right_by_name or second_name not in is_right_by_name:
                continue
            self.compared[pair] += 1
            if is_right_by_name[first_name] != is_right_by_name[second_name]:
                has_differing_pair = True
                self.differing[pair] += 1
                if self.differing[pair] <= self._max_examples:
                    self.examples[row.line] = (opinions, row.columns["completion"])
        self.num_differing_rows += int(has_differing_pair)

    def print(self, console: Console, rows: Sequence[CompletionRow], repeat: int) -> None:
        """Print results, failures, and which rewards disagree, with examples by their line in the file.

        Args:
            console: The output.
            rows: All rows of the file.
            repeat: How often each row was scored.
        """
        num_calls = len(rows) * repeat * len(self.scorecards)
        rows_per_s = len(rows) / max(self.seconds, 1e-9)
        console.print(f"{len(rows)} rows, {num_calls} calls in {self.seconds:.1f} s: {rows_per_s:.1f} rows/s")
        num_without_tokens = sum(row.columns.get("completion_token_ids") is None for row in rows)
        if num_without_tokens:
            console.print(f"rows without completion_token_ids, where characters count: {num_without_tokens}")
        status_titles = [status.value.replace("_", "\n") for status in RewardStatus]
        table = _table("reward", *status_titles, "mean", "p50\nms", "p95\nms", "max\nms", "steady")
        for name, card in self.scorecards.items():
            counts = [str(card.statuses[status]) for status in RewardStatus]
            latencies = [f"{1000 * quantile(card.seconds, q):.1f}" for q in (0.5, 0.95, 1.0)]
            steady = "?"  # unknown after a single call
            if repeat >= 2:
                steady = f"no: {len(card.unsteady)}" if card.unsteady else "yes"
            table.add_row(name, *counts, _number(card.mean), *latencies, steady)
        console.print(table)
        if repeat < 2:
            console.print("steady: --repeat 2 would tell")
        for name, card in self.scorecards.items():
            console.print("", name, *card.lines(self._max_examples), sep="\n", soft_wrap=True)
        if self.kinds is not None:
            self.kinds.print(console, _table(*self.kinds.headers))
        if self.compared:
            self._print_disagreements(console)

    def _print_disagreements(self, console: Console) -> None:
        console.print(f"\nwho disagrees (right is a reward of {self.threshold:g} or more)")
        table = _table("reward", "against", "rows", "differ", "")
        for pair, compared in self.compared.items():
            share = f"{self.differing[pair] / compared:.1%}" if compared else "-"
            table.add_row(*pair, str(compared), str(self.differing[pair]), share)
        console.print(table)
        for line, (opinions, completion) in self.examples.items():
            scores = ", ".join(f"{name} {_number(reward)}" for name, reward in opinions.items())
            ellipsis = "..." if len(completion) > MAX_EXCERPT else ""
            excerpt = completion[-MAX_EXCERPT:]  # answers stand at the end
            console.print(f"  line {line}: {scores}: {ellipsis}{excerpt!r}", soft_wrap=True)
        num_more = self.num_differing_rows - len(self.examples)
        if num_more > 0:
            console.print(
                f"  and {num_more} more rows (--examples {self.num_differing_rows} shows them, --output FILE has all)"
            )


def one_line(text: str) -> str:
    """Return an untrusted text as one line, without control characters, which could change the terminal."""
    return " ".join(repr(text)[1:-1].split())


def histogram(values: Sequence[float], max_bars: int = 8) -> list[tuple[str, int]]:
    """Return the label and the count of each bar of a histogram.

    Each distinct value has a bar. If there are more than `max_bars` distinct values, the range is divided into
    `max_bars` equal parts, each with a bar.
    """
    counts = Counter(values)
    if len(counts) <= max_bars:
        return [(f"{value:.6g}", counts[value]) for value in sorted(counts)]
    low = min(counts)
    high = max(counts)
    width = high / max_bars - low / max_bars  # `high - low` might be too large for a float
    edges = [*(low + width * n for n in range(max_bars)), high]
    bars = Counter(bisect_right(edges, value, 1, max_bars) - 1 for value in values)
    return [(f"{start:.4g} to {end:.4g}", bars[n]) for n, (start, end) in enumerate(pairwise(edges))]


def _table(*columns: str) -> Table:
    """Return a compact table with left-aligned names and right-aligned numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        is_name = column in ("reward", "against") or not table.columns
        table.add_column(column, justify="left" if is_name else "right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
