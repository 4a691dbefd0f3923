"""From the lines of measurements to ratios, a table and a picture."""

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
ACCURACY = 0.4
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key(row: Row) -> tuple[str, str, str, int]:
    return row["label"], row["case"], row["arm"], row["repetition"]


def spread(values: list[float], digits: int = 2) -> str:
    """Median, and between which bounds.

    >>> spread([3.0, 1.0, 2.0])
    '2.00 (1.00 to 3.00)'
    """
    if not values:
        return "-"
    median = f"{statistics.median(values):.{digits}f}"
    return f"{median} ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else median


def ratios(rows: list[Row], case: str, arm: str) -> list[float]:
    """Samples per second of `arm` against TRL's, one ratio for each repetition that has both."""
    rates = {(row["arm"], row["repetition"]): row["samples_per_s"] for row in rows if row["case"] == case}
    return [
        rate / rates["TRL", repetition]
        for (who, repetition), rate in sorted(rates.items())
        if who == arm and ("TRL", repetition) in rates
    ]


def seconds_to(row: Row, accuracy: float = ACCURACY) -> float | None:
    """From the start of the process to the first checkpoint that solves so many of the held-out tasks."""
    for step, solved in sorted((int(step), solved) for step, solved in row["accuracy"].items()):
        if solved >= accuracy:
            return float(row["ends_s"][step - 1])
    return None


def step_s(row: Row) -> float:
    """Of the whole window: asynchronous steps end in bursts, and the median between two ends says little."""
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
    """By case and arm, in the order of the cases."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for name, case in CASES.items():
        for arm in case.arms:
            if chosen := [row for row in rows if (row["case"], row["arm"]) == (name, arm)]:
                found[name, arm] = chosen
    return found


def table(rows: list[Row]) -> str:
    """Medians over the repetitions, lowest and highest in brackets."""
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
    return "\n".join([*lines, "", cpu_table(rows), "", *learning(rows)]).rstrip()


def cpu_table(rows: list[Row]) -> str:
    """Where the CPU goes, by kind of process."""
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
    """Held-out accuracy at equal samples, and the seconds to `ACCURACY`, by seed."""
    of_arm = {arm: of for (_, arm), of in grouped([row for row in rows if "accuracy" in row]).items()}
    if not of_arm:
        return []
    steps = sorted({int(step) for of in of_arm.values() for row in of for step in row["accuracy"]})
    lines = [
        "| accuracy after samples | " + " | ".join(of_arm) + " |",
        "|---|" + "---|" * len(of_arm),
    ]
    for step in steps:
        found = [
            spread([solved for row in of for at, solved in row["accuracy"].items() if int(at) == step], 3)
            for of in of_arm.values()
        ]
        lines.append(
            f"| {step * next(iter(of_arm.values()))[0]['samples_per_step']} | " + " | ".join(found) + " |"
        )
    reached = [
        ", ".join("never" if (s := seconds_to(row)) is None else f"{s:.0f}" for row in of)
        for of in of_arm.values()
    ]
    return [*lines, f"| seconds to {ACCURACY:.2f}, by seed | " + " | ".join(reached) + " |"]


def write(rows: list[Row]) -> None:
    """Table into docs/benchmarks.md, lines and picture into docs/data. Only measurements with the defaults."""
    rows = [row for row in rows if not row["label"]]
    DATA.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw(rows)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{made(rows)}\n{END}{rest.split(END)[1]}")
    print(f"written: {PAGE}, {DATA}, {PICTURE}")


def made(rows: list[Row]) -> str:
    """The part of the page that is made."""
    commits, machines = sorted({row["commit"] for row in rows}), sorted({row["machine"] for row in rows})
    load = spread([row["load_before"] for row in rows], 1)
    return (
        f"Commit {', '.join(commits)}; {'; '.join(machines)}; load before each run {load}. "
        f"Lines: `{DATA.relative_to(ROOT)}`.\n\n"
        f"![samples per second against TRL]({PICTURE.relative_to(PAGE.parent)})\n\n{table(rows)}"
    )


def draw(rows: list[Row]) -> None:
    """Times TRL's samples per second, a bar for each arm of ours, its whisker from the lowest to the highest."""
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
