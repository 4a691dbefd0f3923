"""What trying rewards on a file shows of each reward, and of each two of them.

`add` is called once per row, in the order of the file; memory grows by some bytes per row.
"""

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from async_grpo.rewards.bench.completions import LABEL
from async_grpo.rewards.queue_stats import quantile
from async_grpo.types import AdapterResult, RewardStatus

MAX_EXAMPLES = 3
MAX_REASONS = 1000  # different ones that are told apart


@dataclass
class FailureExample:
    """A reason for which rows were not scored, and the first of them."""

    status: RewardStatus
    reason: str
    first_line: int
    count: int = 0


@dataclass
class Scorecard:
    """One reward's calls. `unsteady`: lines whose runs differ in status, reward or steps, with the rewards seen."""

    statuses: Counter[RewardStatus] = field(default_factory=Counter)
    rewards: array = field(default_factory=lambda: array("d"))
    seconds: array = field(default_factory=lambda: array("d"))  # of scoring, without the wait for a worker
    failures: dict[tuple[RewardStatus, str], FailureExample] = field(default_factory=dict)
    num_unsteady: int = 0
    unsteady: list[tuple[int, list[str]]] = field(default_factory=list)

    @property
    def num_calls(self) -> int:
        return self.statuses.total()

    @property
    def num_unscored(self) -> int:
        """Calls that failed or timed out; who abstains has answered."""
        return self.statuses[RewardStatus.FAILED] + self.statuses[RewardStatus.TIMED_OUT]

    @property
    def mean(self) -> float | None:
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    def latency_s(self, q: float) -> float:
        """A quantile of the seconds of scoring."""
        return quantile(self.seconds, q)

    def add(self, line: int, runs: Sequence[AdapterResult]) -> None:
        """Count the results of all runs over one row."""
        for result in runs:
            self.statuses[result.status] += 1
            self.seconds.append(max(0.0, result.latency_s - result.queue_s))
            if result.status is RewardStatus.OK:
                self.rewards.append(result.reward)
            else:
                self._failure(result, line).count += 1
        if len({(result.status, result.reward, result.steps) for result in runs}) > 1:
            self.num_unsteady += 1
            if len(self.unsteady) < MAX_EXAMPLES:
                self.unsteady.append((line, [said(result) for result in runs]))

    def _failure(self, result: AdapterResult, line: int) -> FailureExample:
        reason = result.reason if len(self.failures) < MAX_REASONS else "other reasons"
        return self.failures.setdefault((result.status, reason), FailureExample(result.status, reason, line))


@dataclass
class Comparison:
    """Two opinions on the same rows: the names of two rewards, or of one and LABEL.

    They differ where one says right (a reward of `threshold` or more) and the other says wrong.
    """

    names: tuple[str, str]
    threshold: float
    num_compared: int = 0
    num_differing: int = 0

    def add(self, opinions: Mapping[str, float | None]) -> bool:
        """Compare the two rewards of a row, where both exist. Whether the row is among the first that differ."""
        first, second = (opinions.get(name) for name in self.names)
        if first is None or second is None:
            return False
        self.num_compared += 1
        differ = (first >= self.threshold) != (second >= self.threshold)
        self.num_differing += differ
        return differ and self.num_differing <= MAX_EXAMPLES


class Report:
    """Everything that was found out. `examples`: line -> opinions and completion, of some that differ.

    >>> report = Report(["loud"], threshold=0.5, with_label=True)
    >>> report.add(1, "HI", 1.0, [[AdapterResult("loud", RewardStatus.OK, 0.0)]])
    >>> report.scorecards["loud"].mean, report.comparisons[0].num_differing
    (0.0, 1)
    """

    def __init__(self, adapters: Sequence[str], threshold: float, with_label: bool) -> None:
        self.scorecards = {name: Scorecard() for name in adapters}
        pairs = [*combinations(adapters, 2), *((name, LABEL) for name in adapters if with_label)]
        self.comparisons = [Comparison(pair, threshold) for pair in pairs]
        self.examples: dict[int, tuple[dict[str, float | None], str]] = {}
        self.seconds = 0.0  # of all rows, without the start of the workers

    def add(
        self, line: int, completion: str, label: float | None, runs: Sequence[Sequence[AdapterResult]]
    ) -> None:
        """Count one row: for each run over it, the results of all rewards. The first run is compared."""
        for name, card in self.scorecards.items():
            card.add(line, [result for run in runs for result in run if result.adapter == name])
        opinions = {result.adapter: result.reward for result in runs[0]} | {LABEL: label}
        differing = [comparison for comparison in self.comparisons if comparison.add(opinions)]
        if differing:
            self.examples[line] = opinions, completion


def said(result: AdapterResult) -> str:
    """A result in one word.

    >>> said(AdapterResult("a", RewardStatus.OK, 0.25)), said(AdapterResult("a", RewardStatus.ABSTAINED))
    ('0.25', 'abstained')
    """
    return result.status.value if result.reward is None else f"{result.reward:.6g}"


def histogram(values: Sequence[float], max_bars: int = 8) -> list[tuple[str, int]]:
    """Bars (label, count): one for each value, or for each of `max_bars` equal ranges if there are too many.

    >>> histogram([0.0, 1.0, 1.0])
    [('0', 1), ('1', 2)]
    >>> histogram([number / 100 for number in range(100)], max_bars=2)
    [('0 to 0.495', 50), ('0.495 to 0.99', 50)]
    """
    counts = Counter(values)
    if len(counts) <= max_bars:
        return [(f"{value:.6g}", counts[value]) for value in sorted(counts)]
    low, high = min(counts), max(counts)
    width = high / max_bars - low / max_bars  # the difference alone might be too large for a float
    edges = [*(low + width * n for n in range(max_bars)), high]
    bars = [0] * max_bars
    for value, count in counts.items():
        bars[bisect_right(edges, value, 1, max_bars) - 1] += count
    return [
        (f"{start:.4g} to {end:.4g}", count)
        for (start, end), count in zip(pairwise(edges), bars, strict=True)
    ]
