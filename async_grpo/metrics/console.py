"""What the console says of a run: what it waits for, what evaluations found, and at the end where its time went."""

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

TRAINER = {  # keys of a metrics line, by what the trainer's seconds went into
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
log = logging.getLogger(__name__)


@contextmanager
def show_waiting(
    what: str, every_s: float | None = None, until: Callable[[], bool] = lambda: False
) -> Iterator[Callable[[], None]]:
    """Say what is awaited, and every so often for how long so far: until the block ends, what it yields is called, or
    `until` says so."""
    begun, over = time.monotonic(), threading.Event()
    interval_s = every_s or (5.0 if os.isatty(1) else 15.0)

    def say() -> None:
        while not over.wait(interval_s) and not until():
            log.info("%s (%.0f s so far)", what, time.monotonic() - begun)

    log.info("%s", what)
    threading.Thread(target=say, name="waiting", daemon=True).start()
    try:
        yield over.set
    finally:
        over.set()


def means_of(line: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The means of an evaluation in words, each with half of its 95 % interval.

    >>> means_of({"eval_avg@4": 0.25, "eval_avg@4_ci": 0.125, "eval_num_samples": 8}, "eval_")
    {'avg@4': '0.250 +- 0.125'}
    """
    found = {}
    for key in (key for key in line if f"{key}_ci" in line and line[key] is not None):
        half, name = line[f"{key}_ci"], key.removeprefix(prefix).replace("avg_reward", "mean reward")
        if not is_number(line[key]) or not (half is None or is_number(half)):
            continue
        found[name] = f"{line[key]:.3f}" + ("" if half is None else f" +- {half:.3f}")
    return found


def show_times(folder: Path) -> None:
    """Where the seconds of a run went, by cause, summed over its last 10,000 steps; nothing if it has none."""
    sums, lines = defaultdict[str, float](float), metrics_lines(folder / METRICS_FILE, 10_000)
    if not lines:
        return
    for line in lines:
        for key in (*CAUSES.values(), "eval_seconds"):
            sums[key] += line.get(key) or 0.0
        for name, stats in (line.get("verifiers") or {}).items():
            sums[f"reward {name}, all its workers"] += stats.get("busy_s", 0.0)
    trainer = sum(sums[key] for key in TRAINER.values())
    rows = [(name, sums[key], trainer) for name, key in TRAINER.items()]
    rows.append(("engines busy, of what staleness allows", sums["engine_busy_s"], sums["engine_allowed_s"]))
    rows.append(("engines paused for weights", sums["wait_generation_weights_s"], 0.0))
    rows.append(("evaluations, beside the steps", sums["eval_seconds"], 0.0))
    rows += [(name, seconds, 0.0) for name, seconds in sums.items() if name.startswith("reward ")]
    table = Table("", title=f"the time of {len(lines)} steps", title_justify="left")
    for column in ("seconds", "a step", "share"):
        table.add_column(column, justify="right")
    for name, seconds, of in rows:
        share = f"{seconds / of:.0%}" if of else ""
        table.add_row(Text(printable(name)), f"{seconds:.1f}", f"{seconds / len(lines):.2f}", share)
    Console().print(table)
