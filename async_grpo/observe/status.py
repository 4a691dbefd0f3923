"""`async-grpo status RUN`: show the state of a run on the terminal, while it runs or after its end."""

import statistics
import time
from collections.abc import Mapping, Sequence
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
from async_grpo.metrics.memory_report import ADDED, PEAK, PLANNED, checked_memory
from async_grpo.metrics.writer import console_line
from async_grpo.observe.run_view import Line, RunView
from async_grpo.options.fields import POSITIVE, Section, is_number, option, required
from async_grpo.processes.untrusted_files import printable

RECENT = 20  # number of last steps over which times and rewards are averaged
REWARD_STATUSES = ("ok", "failed", "timed_out", "abstained")
RUNNING = "running"  # state of a run whose process is alive on this machine
SHOWN_EVALUATIONS = 3
SHOWN_LOG_LINES = 3


@dataclass(frozen=True, kw_only=True)
class StatusConfig(Section):
    """Options of `async-grpo status`."""

    path: str = required("Folder of the run.", "Status", argument=True)
    every_s: float = option(1.0, "Seconds between two updates on a terminal.", "Status", range=POSITIVE)
    once: bool = option(False, "Print the state once, without updates.", "Status")


def status(config: StatusConfig) -> None:
    """Show the state of a run. On a terminal the state is updated until the run ends.

    Raises:
        ConfigurationError: The folder contains no run.
    """
    run = RunView(Path(config.path))
    console = Console()
    if config.once or not console.is_terminal:
        console.print(view(run))
        return
    with Live(view(run), console=console, auto_refresh=False) as live:
        while run.writer_process() is not None:
            time.sleep(config.every_s)
            # Make a new view, because a view reads the options only once, and a resumed run writes them again
            run = RunView(run.folder)
            live.update(view(run), refresh=True)


def view(run: RunView) -> RenderableType:
    """Return the state of the run: pace, last step, rewards, alarms, evaluations and newest stall."""
    lines = run.metrics(RECENT)
    parts: list[RenderableType] = [headline(run, lines)]
    if lines:
        parts += _last_step(run, lines)
    parts += [Text(printable(line)) for line in _evaluations(run)]
    stall = next(iter(run.stalls().items()), None)
    if stall is not None:
        folder, text = stall
        first_line = printable(text.partition("\n")[0])
        parts.append(Text(f"STALL {folder.name}: {first_line}", style="bold yellow"))
    if not lines:
        for log_lines in run.log_lines(SHOWN_LOG_LINES).values():
            parts += [Text(printable(line), style="dim") for line in log_lines]
    return Group(*parts)


def _last_step(run: RunView, lines: Sequence[Line]) -> list[RenderableType]:
    line = lines[-1]
    parts: list[RenderableType] = [
        _times(lines),
        Text(console_line({**line, "alarms": []}, run.total_steps)),
    ]
    memory = checked_memory(line.get("memory"))
    if memory:
        parts.append(_memory(memory))
    judge_cost = line.get("judge_budget_spent")
    if judge_cost is not None:
        parts.append(Text(f"spent on judges: {judge_cost:.4g}"))
    if line.get("verifiers"):
        parts.append(_verifiers(lines))
    for alarm in line.get("alarms") or ():
        parts.append(Text(printable(f"ALARM {alarm}"), style="bold red"))
    return parts


def headline(run: RunView, lines: Sequence[Line]) -> Text:
    """Return a line with step, state and pace of a run, and the expected time until its end.

    Args:
        run: The run.
        lines: The last lines of the run's metrics.
    """
    step = lines[-1]["step"] if lines else 0
    state = _state(run, step)
    is_running = state == RUNNING
    text = f"{run.folder}: step {step} of {run.total_steps}, {state}"
    # Differences of timestamps would include times during which the run was stopped
    step_times_s = [line["time_per_batch"] for line in lines if is_number(line.get("time_per_batch"))]
    if step_times_s:
        mean_s = statistics.fmean(step_times_s)
        text += f"; {mean_s:.2f} s a step"
        if is_running:
            text += f", {duration(mean_s * (run.total_steps - step))} left"
    if lines and is_running and is_number(lines[-1].get("timestamp")):
        seconds_ago = time.time() - lines[-1]["timestamp"]
        text += f"; the last one {duration(seconds_ago)} ago"
    return Text(text, style="bold")


def _state(run: RunView, step: int) -> str:
    if run.writer_process() is not None:
        return RUNNING
    if step >= run.total_steps:
        return "complete"
    try:
        manifest = run.newest_manifest()
    except CheckpointBroken as error:
        return f"ended; {error}"
    if manifest is None:
        return "ended, without a checkpoint"
    reason = f"told to end ({printable(manifest.ended)})" if manifest.ended else "died"
    return f"{reason}; goes on after step {manifest.step}"


def _times(lines: Sequence[Line]) -> Text:
    """Return a line with the mean seconds that each activity took in a step."""
    means = []
    for name, key in CAUSES.items():
        values = [line[key] for line in lines if is_number(line.get(key))]
        if values:
            means.append(f"{name} {statistics.fmean(values):.2f}")
    return Text(f"seconds of a step, mean of {len(lines)}: {', '.join(means)}")


def _memory(memory: Mapping[str, Mapping[str, float]]) -> Text:
    """Return a line with the peak memory of each process.

    It also has the part that was taken since the process began to load the model, and the planned size of this part.
    """
    texts = []
    for name, entry in memory.items():
        text = f"{name}: {entry[PEAK]:.2f} ({entry[ADDED]:.2f} since it began to load the model"
        if entry[PLANNED]:
            text += f"; planned: {entry[PLANNED]:.2f}"
        texts.append(f"{text})")
    return Text(printable(f"peak memory in GB: {', '.join(texts)}"))


def _verifiers(lines: Sequence[Line]) -> Table:
    """Return a table of the reward calls during the last steps.

    A call is counted in the step during which it ends, which may be earlier than the step that trains on the sample.
    """
    table = Table(
        "",
        title=f"rewards of {len(lines)} steps",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for title in (*REWARD_STATUSES, "p50, s", "queue"):
        table.add_column(title.replace("_", " "), justify="right")
    stats_by_reward: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        for name, stats in (line.get("verifiers") or {}).items():
            stats_by_reward.setdefault(name, []).append(stats)
    for name, stats_of_steps in stats_by_reward.items():
        counts = [str(sum(stats.get(key, 0) for stats in stats_of_steps)) for key in REWARD_STATUSES]
        p50_s = max(stats.get("latency_p50_s") or 0.0 for stats in stats_of_steps)
        queue_depth = stats_of_steps[-1].get("queue_depth", "-")
        table.add_row(Text(printable(name)), *counts, f"{p50_s:.1e}", str(queue_depth))
    return table


def _evaluations(run: RunView) -> list[str]:
    texts = []
    for line in run.evaluations(SHOWN_EVALUATIONS):
        means = [f"{name} {value}" for name, value in means_of(line, "eval_").items()]
        title = f"held-out {line.get('file', '')}".rstrip()
        texts.append(f"{title} at step {line['step']}: {', '.join(means) or '-'}")
    return texts
