"""The report of `async-grpo verify`, for people."""

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from async_grpo.rewards.bench.completions import FileSummary
from async_grpo.rewards.bench.scorecard import Comparison, Report, Scorecard, histogram
from async_grpo.types import RewardStatus

BAR_WIDTH = 30
MAX_REASONS = 3  # named for each reward
MAX_EXCERPT = 60


def print_report(console: Console, report: Report, file: FileSummary, repeat: int) -> None:
    """What came out, what went wrong, and which rewards disagree; examples by their line in the file.

    Args:
        repeat: runs over each row.
    """
    num_rows, without_tokens = file.rows, file.without_tokens
    calls = sum(card.num_calls for card in report.scorecards.values())
    console.print(
        f"{num_rows} rows, {calls} calls in {report.seconds:.1f} s: {num_rows / max(report.seconds, 1e-9):.1f} rows/s"
    )
    if without_tokens:
        rows = "1 row has" if without_tokens == 1 else f"{without_tokens} rows have"
        console.print(f"{rows} no completion_token_ids: there, each character counts as a token")
    console.print(_overview(report.scorecards, repeat))
    if repeat < 2:
        console.print("steady: --repeat 2 would tell")
    for name, card in report.scorecards.items():
        console.print(f"\n{name}")
        for label, bar, count in _bars(card):
            console.print(f"  {label}  {bar} {count}", soft_wrap=True)
        _print_failures(console, card)
        _print_unsteady(console, card, repeat)
    if report.comparisons:
        console.print(f"\nwho disagrees (right is a reward of {report.comparisons[0].threshold:g} or more)")
        console.print(_disagreements(report.comparisons))
        for line, (opinions, completion) in report.examples.items():
            said = ", ".join(f"{name} {_number(reward)}" for name, reward in opinions.items())
            console.print(f"  line {line}: {said}: {excerpt(completion)}", soft_wrap=True)


def excerpt(text: str) -> str:
    r"""The end of a text, where answers are, on one line; control characters spelt out, for it may hold anything.

    >>> excerpt("so\n\x1b[31m42"), excerpt("x" * 100 + "42")[:4]
    ("'so\\n\\x1b[31m42'", "...'")
    """
    return repr(text) if len(text) <= MAX_EXCERPT else f"...{text[-MAX_EXCERPT:]!r}"


def _overview(scorecards: Mapping[str, Scorecard], repeat: int) -> Table:
    statuses = (status.value.replace("_", "\n") for status in RewardStatus)
    table = _table("reward", *statuses, "mean", "p50\nms", "p95\nms", "max\nms", "steady")
    for name, card in scorecards.items():
        counts = [str(card.statuses[status]) for status in RewardStatus]
        latencies = [f"{1000 * card.latency_s(q):.1f}" for q in (0.5, 0.95, 1.0)]
        steady = "?" if repeat < 2 else f"no: {card.num_unsteady}" if card.num_unsteady else "yes"
        table.add_row(name, *counts, _number(card.mean), *latencies, steady)
    return table


def _bars(card: Scorecard) -> list[tuple[str, str, int]]:
    bars = histogram(card.rewards)
    width = max((len(label) for label, _ in bars), default=0)
    most = max((count for _, count in bars), default=1)
    return [
        (label.rjust(width), "█" * round(BAR_WIDTH * count / most) or "▏" * (count > 0), count)
        for label, count in bars
    ]


def _print_failures(console: Console, card: Scorecard) -> None:
    failures = list(card.failures.values())
    for failure in failures[:MAX_REASONS]:
        times = f", {failure.count} in all" if failure.count > 1 else ""
        reason = " ".join(repr(failure.reason)[1:-1].split())
        console.print(f"  {failure.status.value}, line {failure.first_line}{times}: {reason}", soft_wrap=True)
    if len(failures) > MAX_REASONS:
        console.print(f"  and {len(failures) - MAX_REASONS} other reasons")


def _print_unsteady(console: Console, card: Scorecard, repeat: int) -> None:
    for line, opinions in card.unsteady:
        console.print(f"  not steady, line {line}: {', then '.join(opinions)}")
    if card.num_unsteady > len(card.unsteady):
        console.print(
            f"  and {card.num_unsteady - len(card.unsteady)} more rows that {repeat} runs do not agree on"
        )


def _disagreements(comparisons: list[Comparison]) -> Table:
    table = _table("reward", "against", "rows", "differ", "")
    for one in comparisons:
        share = f"{one.num_differing / one.num_compared:.1%}" if one.num_compared else "-"
        table.add_row(*one.names, str(one.num_compared), str(one.num_differing), share)
    return table


def _table(*columns: str) -> Table:
    """Names on the left, numbers on the right; narrow."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="left" if column in ("reward", "against") else "right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
