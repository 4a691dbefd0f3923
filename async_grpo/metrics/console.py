"""Console output of a run: what it waits for, evaluation results, and a final table of how the time was spent."""

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_grpo.metrics.lines import metrics_lines
from async_grpo.metrics.writer import METRICS_FILE
from async_grpo.options.fields import is_number
from async_grpo.processes.untrusted_files import printable

# Activity of the trainer, as the table names it -> key of a metrics line with the seconds that it took
TRAINER = {
    "trainer waits": "seconds_waiting_for_experience",
    "computes": "seconds_computing",
    "publishes": "seconds_publishing_weights",
    "evaluates": "seconds_evaluating",
    "saves": "seconds_checkpointing",
}
CAUSES = TRAINER | {
    "engines busy": "engine_busy_s",
    "of allowed": "engine_allowed_s",
    "paused for weights": "wait_generation_weights_s",
}
MAX_STEPS_SHOWN = 10_000
REPORT_EVERY_S = 5.0  # seconds between two messages about a wait, if they are shown on a terminal
REPORT_TO_FILE_EVERY_S = 15.0  # seconds between two messages about a wait, if they are written to a file
log = logging.getLogger(__name__)


@contextmanager
def show_waiting(
    wait: str, every_s: float | None = None, until: Callable[[], bool] = lambda: False
) -> Iterator[Callable[[], None]]:
    """Log that the `with` block waits, and log at intervals how long it has waited.

    Args:
        wait: Description of the wait.
        every_s: Seconds between two messages; None uses a default.
        until: Returns True once the wait is over, which may be before the `with` block ends.

    Yields:
        A function that stops the messages before the `with` block ends.
    """
    begin = time.monotonic()
    is_over = threading.Event()
    interval_s = every_s or (REPORT_EVERY_S if os.isatty(1) else REPORT_TO_FILE_EVERY_S)

    def report() -> None:
        while not is_over.wait(interval_s) and not until():
            log.info("%s (%.0f s so far)", wait, time.monotonic() - begin)

    log.info("%s", wait)
    threading.Thread(target=report, name="waiting", daemon=True).start()
    try:
        yield is_over.set
    finally:
        is_over.set()


def means_of(line: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the means of an evaluation as text, each with the half width of its 95 % confidence interval.

    Args:
        line: The numbers of the evaluation.
        prefix: Prefix of the keys, which is removed from the names in the result.

    >>> means_of({"eval_avg@4": 0.25, "eval_avg@4_ci": 0.125, "eval_num_samples": 8}, "eval_")
    {'avg@4': '0.250 +- 0.125'}
    """
    means = {}
    for key, mean in line.items():
        if f"{key}_ci" not in line or not is_number(mean):
            continue
        name = key.removeprefix(prefix).replace("avg_reward", "mean reward")
        half_interval = line[f"{key}_ci"]
        if half_interval is None:
            means[name] = f"{mean:.3f}"
        elif is_number(half_interval):
            means[name] = f"{mean:.3f} +- {half_interval:.3f}"
    return means


def show_times(folder: Path) -> None:
    """Print a table of how a run spent its time, over its last MAX_STEPS_SHOWN steps. Print nothing without steps."""
    lines = metrics_lines(folder / METRICS_FILE, MAX_STEPS_SHOWN)
    if not lines:
        return
    seconds_by_key: dict[str, float] = defaultdict(float)
    seconds_by_reward: dict[str, float] = defaultdict(float)
    for line in lines:
        for key in (*CAUSES.values(), "eval_seconds"):
            seconds_by_key[key] += line.get(key) or 0.0
        for name, stats in (line.get("verifiers") or {}).items():
            seconds_by_reward[name] += stats.get("busy_s", 0.0)
    table = Table("", title=f"the time of {len(lines)} steps", title_justify="left")
    for column in ("seconds", "a step", "share"):
        table.add_column(column, justify="right")

    def add_row(name: str, seconds: float, whole_s: float = 0.0) -> None:
        share = f"{seconds / whole_s:.0%}" if whole_s else ""
        table.add_row(Text(printable(name)), f"{seconds:.1f}", f"{seconds / len(lines):.2f}", share)

    trainer_s = sum(seconds_by_key[key] for key in TRAINER.values())
    for name, key in TRAINER.items():
        add_row(name, seconds_by_key[key], trainer_s)
    add_row(
        "engines busy, of what staleness allows",
        seconds_by_key["engine_busy_s"],
        seconds_by_key["engine_allowed_s"],
    )
    add_row("engines paused for weights", seconds_by_key["wait_generation_weights_s"])
    add_row("evaluations, beside the steps", seconds_by_key["eval_seconds"])
    for name, seconds in seconds_by_reward.items():
        add_row(f"reward {name}, all its calls", seconds)
    Console().print(table)
