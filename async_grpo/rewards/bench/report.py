"""What trying rewards on a file shows of each reward, and of each two of them: counted row by row, and printed."""

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
from async_grpo.rewards.verifier_worker import quantile
from async_grpo.types import AdapterResult, RewardStatus, Verdict

MAX_EXAMPLES = 3  # of each thing that is told by its lines
MAX_RIGHT_ROWS = 2
BAR_WIDTH = 30
MAX_EXCERPT = 60


@dataclass
class Scorecard:
    """One reward's calls."""

    statuses: Counter[RewardStatus] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of scoring, without the wait for a worker
    failures: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # status and reason -> lines
    unsteady: dict[int, list[str]] = field(default_factory=dict)  # line -> what was said, where runs differ
    right_rows: list[CompletionRow] = field(default_factory=list)  # the first, that no label calls wrong

    @property
    def num_unscored(self) -> int:
        """Calls that failed or timed out; who abstains has answered."""
        return self.statuses[RewardStatus.FAILED] + self.statuses[RewardStatus.TIMED_OUT]

    @property
    def mean(self) -> float | None:
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    def add(self, line: int, runs: Sequence[AdapterResult]) -> None:
        """Count the results of all runs over one row."""
        for result in runs:
            self.statuses[result.status] += 1
            self.seconds.append(max(0.0, result.latency_s - result.queue_s))
            if result.reward is not None:
                self.rewards.append(result.reward)
            else:
                self.failures.setdefault((result.status.value, result.reason), []).append(line)
        if len({(result.status, result.reward, result.steps) for result in runs}) > 1:
            given = ((one.status.value, one.reward) for one in runs)
            self.unsteady[line] = [said if reward is None else f"{reward:.6g}" for said, reward in given]

    def lines(self) -> Iterator[str]:
        """For the terminal: how often it gave which reward, why none, and where runs differ."""
        bars = histogram(self.rewards)
        width = max((len(label) for label, _ in bars), default=0)
        most = max((count for _, count in bars), default=0)
        for label, count in bars:
            bar = "█" * round(BAR_WIDTH * count / most) or "▏" * (count > 0)
            yield f"  {label.rjust(width)}  {bar} {count}"
        failures = []
        for (status, reason), lines in self.failures.items():
            times = f", {len(lines)} in all" if len(lines) > 1 else ""
            failures.append(f"{status}, line {lines[0]}{times}: {one_line(reason)}")
        unsteady = [f"not steady, line {at}: {', then '.join(said)}" for at, said in self.unsteady.items()]
        for found in (failures, unsteady):
            yield from (f"  {text}" for text in found[:MAX_EXAMPLES])
            if len(found) > MAX_EXAMPLES:
                yield f"  and {len(found) - MAX_EXAMPLES} more"


class Report:
    """Results of trying rewards on a file.

    `compared` and `differing` count rows by the names of two rewards, or of one and LABEL, that both have an opinion. They
    differ where one says right (a reward of `threshold` or more) and the other wrong. `examples` has the opinions and the
    completion of some rows that differ, by their line.
    """

    def __init__(self, adapters: Sequence[str], threshold: float, with_label: bool) -> None:
        self.threshold = threshold
        self.scorecards = {name: Scorecard() for name in adapters}
        pairs = [*combinations(adapters, 2), *((name, LABEL) for name in adapters if with_label)]
        self.compared, self.differing = dict.fromkeys(pairs, 0), dict.fromkeys(pairs, 0)
        self.examples: dict[int, tuple[dict[str, float | None], str]] = {}
        self.seconds = 0.0  # of all rows, without the start of the workers

    def add(self, row: CompletionRow, verdicts: Sequence[Verdict]) -> None:
        """Count one row, in the order of the file: a verdict for each run over it. The first run is compared."""
        opinions = {result.adapter: result.reward for result in verdicts[0].results} | {LABEL: row.label}
        says_right = {name: one >= self.threshold for name, one in opinions.items() if one is not None}
        for name, card in self.scorecards.items():
            runs = [result for verdict in verdicts for result in verdict.results if result.adapter == name]
            card.add(row.line, runs)
            is_right = says_right.get(name, False) and says_right.get(LABEL, True)
            if is_right and len(card.right_rows) < MAX_RIGHT_ROWS:
                card.right_rows.append(row)
        for pair in self.compared:
            said = [says_right[name] for name in pair if name in says_right]
            self.compared[pair] += len(said) == 2
            self.differing[pair] += len(set(said)) == 2
            if len(set(said)) == 2 and self.differing[pair] <= MAX_EXAMPLES:
                self.examples[row.line] = opinions, row.columns["completion"]

    def print(self, console: Console, rows: Sequence[CompletionRow], repeat: int) -> None:
        """Print results, failures, and which rewards disagree, with examples by their line in the file."""
        calls, per_s = len(rows) * repeat * len(self.scorecards), len(rows) / max(self.seconds, 1e-9)
        console.print(f"{len(rows)} rows, {calls} calls in {self.seconds:.1f} s: {per_s:.1f} rows/s")
        if without_tokens := sum(row.columns.get("completion_token_ids") is None for row in rows):
            console.print(f"rows without completion_token_ids, where characters count: {without_tokens}")
        statuses = (status.value.replace("_", "\n") for status in RewardStatus)
        table = _table("reward", *statuses, "mean", "p50\nms", "p95\nms", "max\nms", "steady")
        for name, card in self.scorecards.items():
            counts = [str(card.statuses[status]) for status in RewardStatus]
            latencies = [f"{1000 * quantile(card.seconds, q):.1f}" for q in (0.5, 0.95, 1.0)]
            steady = "?" if repeat < 2 else f"no: {len(card.unsteady)}" if card.unsteady else "yes"
            table.add_row(name, *counts, _number(card.mean), *latencies, steady)
        console.print(table)
        if repeat < 2:
            console.print("steady: --repeat 2 would tell")
        for name, card in self.scorecards.items():
            console.print("", name, *card.lines(), sep="\n", soft_wrap=True)
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
            said = ", ".join(f"{name} {_number(reward)}" for name, reward in opinions.items())
            cut = "..." if len(completion) > MAX_EXCERPT else ""  # answers are at the end
            console.print(f"  line {line}: {said}: {cut}{completion[-MAX_EXCERPT:]!r}", soft_wrap=True)


def one_line(text: str) -> str:
    """Return a text that may hold anything in a form that is safe for the terminal."""
    return " ".join(repr(text)[1:-1].split())


def histogram(values: Sequence[float], max_bars: int = 8) -> list[tuple[str, int]]:
    """Bars (label, count): one for each value, or for each of `max_bars` equal ranges if there are too many."""
    counts = Counter(values)
    if len(counts) <= max_bars:
        return [(f"{value:.6g}", counts[value]) for value in sorted(counts)]
    low, high = min(counts), max(counts)
    width = high / max_bars - low / max_bars  # the difference alone might be too large for a float
    edges = [*(low + width * n for n in range(max_bars)), high]
    bars = Counter(bisect_right(edges, value, 1, max_bars) - 1 for value in values)
    return [(f"{start:.4g} to {end:.4g}", bars[n]) for n, (start, end) in enumerate(pairwise(edges))]


def _table(*columns: str) -> Table:
    """Names on the left, numbers on the right; narrow."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="left" if column in ("reward", "against") else "right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
