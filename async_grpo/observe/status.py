"""`async-grpo status RUN`: what a run does now, from its files alone; also after its end."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from async_grpo.errors import CheckpointBroken
from async_grpo.metrics.console import CAUSES, means_of
from async_grpo.metrics.lines import duration
from async_grpo.metrics.writer import console_line
from async_grpo.observe.run_view import Line, RunView
from async_grpo.options.fields import POSITIVE, Section, is_number, option, required
from async_grpo.processes.untrusted_files import printable

RECENT = 20  # steps, for the pace


@dataclass(frozen=True, kw_only=True)
class StatusConfig(Section):
    """Which run, and how often it is looked at."""

    path: str = required("Folder of the run.", "Status", argument=True)
    every_s: float = option(
        1.0, "Seconds between two looks at the run, on a terminal.", "Status", range=POSITIVE
    )
    once: bool = option(False, "Look at the run once.", "Status")


def status(config: StatusConfig) -> None:
    """Show it, until the run ends or Ctrl-C. ConfigurationError: the folder holds no run."""
    run, console = RunView(Path(config.path)), Console()
    if config.once or not console.is_terminal:
        console.print(view(run))
        return
    with Live(view(run), console=console, auto_refresh=False) as live:
        while run.writer_process() is not None:
            time.sleep(config.every_s)
            run = RunView(run.folder)  # a run that goes on writes its options anew
            live.update(view(run), refresh=True)


def view(run: RunView) -> RenderableType:
    """Everything on one screen."""
    lines = run.metrics(RECENT)
    parts: list[RenderableType] = [headline(run, lines)]
    for line in lines[-1:]:
        parts += [_times(lines), Text(console_line({**line, "alarms": []}, run.total_steps))]
        if (spent := line.get("judge_budget_spent")) is not None:
            parts.append(Text(f"spent on judges: {spent:.4g}"))
        if line.get("verifiers"):
            parts.append(_verifiers(lines))
        parts += [Text(printable(f"ALARM {alarm}"), style="bold red") for alarm in line.get("alarms") or ()]
    parts += [Text(printable(line)) for line in _evaluations(run)]
    for place, text in list(run.stalls().items())[:1]:
        first_line = printable(text.partition("\n")[0])
        parts.append(Text(f"STALL {place.name}: {first_line}", style="bold yellow"))
    if not lines:
        for log_lines in run.log_lines(3).values():
            parts += [Text(printable(line), style="dim") for line in log_lines]
    return Group(*parts)


def headline(run: RunView, lines: Sequence[Line]) -> Text:
    """Step, state, pace, and how long it will take; `lines`: the last ones of the metrics."""
    total = run.total_steps
    step = lines[-1]["step"] if lines else 0
    state = _state(run, step)
    text = f"{run.folder}: step {step} of {total}, {state}"
    # Not from end to end: it may have lain dead between
    if paces := [line["time_per_batch"] for line in lines if is_number(line.get("time_per_batch"))]:
        pace = statistics.fmean(paces)
        left = duration(pace * (total - step))
        text += f"; {pace:.2f} s a step" + (f", {left} left" if state == "running" else "")
    if lines and state == "running" and is_number(lines[-1].get("timestamp")):
        ago = duration(time.time() - lines[-1]["timestamp"])
        text += f"; the last one {ago} ago"
    return Text(text, style="bold")


def _state(run: RunView, step: int) -> str:
    if run.writer_process() is not None:
        return "running"
    if step >= run.total_steps:
        return "complete"
    try:
        manifest = run.newest_manifest()
    except CheckpointBroken as error:
        return f"ended; {error}"
    if manifest is None:
        return "ended, without a checkpoint"
    why = f"told to end ({printable(manifest.ended)})" if manifest.ended else "died"
    return f"{why}; goes on after step {manifest.step}"


def _times(lines: Sequence[Line]) -> Text:
    """Of the last steps, by whom and what for."""
    found = {name: [line[key] for line in lines if is_number(line.get(key))] for name, key in CAUSES.items()}
    means = (f"{name} {statistics.fmean(values):.2f}" for name, values in found.items() if values)
    return Text(f"seconds of a step, mean of {len(lines)}: {', '.join(means)}")


def _verifiers(lines: Sequence[Line]) -> Table:
    """Return a table of the reward calls of the last steps; one that ends early is in the line of the step before."""
    look: Any = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    table = Table("", title=f"rewards of {len(lines)} steps", title_justify="left", **look)
    counts, told = ("ok", "failed", "timed_out", "abstained"), [line.get("verifiers") or {} for line in lines]
    for title in (*counts, "p50, s", "queue"):
        table.add_column(title.replace("_", " "), justify="right")
    for name in dict.fromkeys(name for of_line in told for name in of_line):
        found = [of_line[name] for of_line in told if name in of_line]
        sums = (str(sum(stats.get(count, 0) for stats in found)) for count in counts)
        p50_s = max(stats.get("latency_p50_s") or 0.0 for stats in found)
        table.add_row(Text(printable(name)), *sums, f"{p50_s:.1e}", str(found[-1].get("queue_depth", "-")))
    return table


def _evaluations(run: RunView) -> list[str]:
    said = []
    for line in run.evaluations(3):
        found = ", ".join(f"{mean} {value}" for mean, value in means_of(line, "eval_").items()) or "-"
        name = f"held-out {line.get('file', '')}".rstrip()
        said.append(f"{name} at step {line['step']}: {found}")
    return said
