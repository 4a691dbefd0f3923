"""Make ratios, tables and a picture from the lines of measurements."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.against_trl.cases import CASES, ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
DATA, PICTURE = ROOT / "docs" / "data" / "against-trl.jsonl", ROOT / "docs" / "data" / "against-trl.svg"
BEGIN, END = "<!-- against-trl: made by scripts/bench --report -->", "<!-- against-trl: end -->"
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key(row: Row) -> tuple[str, str, str, int]:
    return row["label"], row["case"], row["arm"], row["repetition"]


def spread(values: list[float], digits: int = 2) -> str:
    """Return the median, and the minimum and maximum in brackets.

    >>> spread([3.0, 1.0, 2.0])
    '2.00 (1.00 to 3.00)'
    """
    if not values:
        return "-"
    median = f"{statistics.median(values):.{digits}f}"
    return f"{median} ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else median


def ratios(rows: list[Row], case: str, arm: str) -> list[float]:
    """Return (samples per second of `arm`) / (samples per second of TRL) for each repetition that has both."""
    rates = {(row["arm"], row["repetition"]): row["samples_per_s"] for row in rows if row["case"] == case}
    return [
        rate / rates["TRL", repetition]
        for (who, repetition), rate in sorted(rates.items())
        if who == arm and ("TRL", repetition) in rates
    ]


def goal(row: Row) -> float:
    """Return the fraction of held-out tasks at which the goal of the case is reached."""
    case = CASES[row["case"]]
    if case.gain is not None:
        return float(row["accuracy"]["0"] + case.gain)
    assert case.accuracy is not None
    return case.accuracy


def seconds_to(row: Row, accuracy: float) -> float | None:
    """Return the seconds from the command until this accuracy on the held-out tasks is reached; None if it is not.

    Between two checkpoints, the accuracy is interpolated linearly.

    >>> row = {"accuracy": {"0": 0.2, "2": 0.3, "4": 0.5}, "ends_s": [7.0, 8.0, 9.0, 10.0]}
    >>> seconds_to(row, 0.4), seconds_to(row, 0.6)
    (9.0, None)
    """
    before_s = 0.0
    before = 0.0
    for step, solved in sorted((int(step), solved) for step, solved in row["accuracy"].items()):
        now_s = float(row["ends_s"][step - 1]) if step else 0.0
        if solved >= accuracy:
            return before_s + (now_s - before_s) * (accuracy - before) / (solved - before)
        before_s = now_s
        before = solved
    return None


def step_s(row: Row) -> float:
    """Return the mean seconds of a step over all measured steps.

    The median time between the ends of two steps would say little, because asynchronous steps end in bursts.
    """
    return float(row["samples_per_step"] / row["samples_per_s"])


def one_line(row: Row) -> str:
    cpu = ", ".join(f"{kind} {spent:.1f}" for kind, spent in sorted(row["cpu_ms_per_sample"].items()))
    text = (
        f"{row['samples_per_s']:.1f} samples/s, {row['tokens_per_s']:.0f} tokens/s, "
        f"{step_s(row):.2f} s a step, "
        f"first after {row['first_step_s']:.0f} s, ms of CPU per sample: {cpu}"
    )
    return text + (f"; solved by step: {row['accuracy']}" if "accuracy" in row else "")


def grouped(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the measurements by (case, arm), in the order of the cases."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for name, case in CASES.items():
        for arm in case.arms:
            if chosen := [row for row in rows if (row["case"], row["arm"]) == (name, arm)]:
                found[name, arm] = chosen
    return found


def table(rows: list[Row]) -> str:
    """Return a table with medians over the repetitions, and minimum and maximum in brackets."""
    columns: dict[str, Callable[[list[Row]], str]] = {
        "samples/s": lambda of: spread([row["samples_per_s"] for row in of], 1),
        "times TRL": lambda of: (
            spread(ratios(rows, of[0]["case"], of[0]["arm"])) if of[0]["arm"] != "TRL" else ""
        ),
        "tokens/s": lambda of: spread([row["tokens_per_s"] for row in of], 0),
        "s a step": lambda of: spread([step_s(row) for row in of]),
        "ms of CPU a sample": lambda of: spread([sum(row["cpu_ms_per_sample"].values()) for row in of], 1),
        "first step after, s": lambda of: spread([row["first_step_s"] for row in of], 0),
        "staleness": lambda of: spread([row["staleness_mean"] for row in of if "staleness_mean" in row]),
    }
    lines = ["| case | | " + " | ".join(columns) + " | n |", "|---|---|" + "---|" * (len(columns) + 1)]
    for (name, arm), of in grouped(rows).items():
        cells = " | ".join(column(of) for column in columns.values())
        lines.append(f"| {name} | {arm} | {cells} | {len(of)} |")
    return "\n".join([*learning(rows), "", *lines, "", cpu_table(rows)]).strip()


def cpu_table(rows: list[Row]) -> str:
    """Return a table of CPU time per sample for each kind of process."""
    lines = ["| case | | ms of CPU per sample, median |", "|---|---|---|"]
    for (name, arm), of in grouped(rows).items():
        kinds = {kind for row in of for kind in row["cpu_ms_per_sample"]}
        medians = {
            kind: statistics.median(row["cpu_ms_per_sample"].get(kind, 0.0) for row in of) for kind in kinds
        }
        ordered = sorted(medians.items(), key=lambda item: -item[1])
        lines.append(f"| {name} | {arm} | " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in ordered) + " |")
    return "\n".join(lines)


def learning(rows: list[Row]) -> list[str]:
    """Return tables of the cases that have a goal: seconds from the command to the goal by seed, and accuracies."""
    cases = dict.fromkeys(row["case"] for row in rows if "accuracy" in row)
    tables = [_learning([row for row in rows if row["case"] == name]) for name in cases]
    return "\n\n".join("\n".join(table) for table in tables).split("\n")


def _learning(rows: list[Row]) -> list[str]:
    name = rows[0]["case"]
    of_arm = {arm: of for (_, arm), of in grouped(rows).items()}
    case = CASES[name]
    what = f"{case.gain:.2f} more" if case.gain is not None else f"{case.accuracy:.2f}"
    lines = [
        f"| {name} | " + " | ".join(of_arm) + " |",
        "|---|" + "---|" * len(of_arm),
        f"| **seconds from the command to {what}, by seed** | "
        + " | ".join(_seconds_by_seed(of) for of in of_arm.values())
        + " |",
        "| times TRL's, median | "
        + " | ".join(_times_trl(of, of_arm.get("TRL", [])) for of in of_arm.values())
        + " |",
    ]
    for step in sorted({int(step) for of in of_arm.values() for row in of for step in row["accuracy"]}):
        found = [
            spread([solved for row in of for at, solved in row["accuracy"].items() if int(at) == step], 3)
            for of in of_arm.values()
        ]
        lines.append(
            f"| accuracy after {step * rows[0]['samples_per_step']} samples | " + " | ".join(found) + " |"
        )
    return lines


def _seconds_by_seed(rows: list[Row]) -> str:
    reached = [seconds_to(row, goal(row)) for row in rows]
    return ", ".join("never" if seconds is None else f"{seconds:.0f}" for seconds in reached)


def _times_trl(rows: list[Row], trl: list[Row]) -> str:
    """Return the median over the seeds of (seconds to the goal) / (TRL's seconds to the goal with the same seed)."""
    seconds = {row["repetition"]: seconds_to(row, goal(row)) for row in trl}
    found = []
    for row in rows:
        ours, theirs = seconds_to(row, goal(row)), seconds.get(row["repetition"])
        if ours is not None and theirs is not None:
            found.append(ours / theirs)
    return spread(found)


def write(rows: list[Row]) -> None:
    """Write the table into docs/benchmarks.md, and lines and picture into docs/data. Use only runs with default options."""
    rows = [row for row in rows if not row["label"]]
    DATA.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw(rows)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{made(rows)}\n{END}{rest.split(END)[1]}")
    print(f"written: {PAGE}, {DATA}, {PICTURE}")


def made(rows: list[Row]) -> str:
    """Return the part of the page that this program writes."""
    commits, machines = sorted({row["commit"] for row in rows}), sorted({row["machine"] for row in rows})
    load = spread([row["load_before"] for row in rows], 1)
    return (
        f"Commit {', '.join(commits)}; {'; '.join(machines)}; load before each run {load}. "
        f"Lines: `{DATA.relative_to(ROOT)}`.\n\n"
        f"![samples per second against TRL]({PICTURE.relative_to(PAGE.parent)})\n\n{table(rows)}"
    )


def draw(rows: list[Row]) -> None:
    """Draw the ratios to TRL's samples per second: a bar for each arm, with a line from the minimum to the maximum."""
    from matplotlib.figure import Figure

    bars = {
        f"{name}, {arm.removeprefix('ours ')}": found
        for name, arm in grouped(rows)
        if arm != "TRL" and (found := ratios(rows, name, arm))
    }
    medians = [statistics.median(found) for found in bars.values()]
    whiskers = [
        [median - min(found) for median, found in zip(medians, bars.values(), strict=True)],
        [max(found) - median for median, found in zip(medians, bars.values(), strict=True)],
    ]
    figure = Figure(figsize=(8, 0.45 * len(bars) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(bars), medians, xerr=whiskers, capsize=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("samples per second, times TRL's")
    figure.savefig(PICTURE)
