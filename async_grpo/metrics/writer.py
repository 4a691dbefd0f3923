"""What a run writes: a folder of its own, one JSON object per optimizer step, and a line on the console for each."""

import fcntl
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import psutil
from rich.console import Console
from rich.progress import Progress

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse

METRICS_FILE = "training_metrics.jsonl"
PARAMS_FILE = "training_params.json"
EVAL_FILE = "eval_metrics.jsonl"
LOCK_FILE = ".lock"

log = logging.getLogger(__name__)
_CONSOLE = Console()  # one for all: a line of the log must not break the progress bar
_held: list[IO[str]] = []  # a lock lasts as long as its file is open: until this process ends


def claim(folder: Path, mark: str | None = None) -> None:
    """Make the folder, and keep other runs out of it until this process ends; programs that it starts may claim it too.

    `mark`: a file's name; a folder that holds this file is emptied, one that holds anything else refused.
    ConfigurationError: it cannot be written to, another run writes there, or it holds what is not to be replaced.
    """
    flag = f"--output-dir {folder}"

    def look() -> None:
        has_run = (folder / METRICS_FILE).exists()
        refuse(
            has_run and mark is None, f"{flag} already holds a run ({METRICS_FILE}): choose another folder"
        )
        foreign = mark is not None and _contents(folder) and not (folder / mark).exists()
        refuse(bool(foreign), f"{flag} is not empty and not an earlier demo: choose another folder")

    refuse(folder.is_file(), f"{flag} is a file: choose another name")
    look()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        look()  # again: another run may have begun and ended meanwhile
        if mark is not None:
            for path in _contents(folder):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            (folder / mark).touch()
    except OSError as error:
        raise ConfigurationError(f"{flag} cannot be written to: {error.strerror}") from error


def _contents(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != LOCK_FILE] if folder.exists() else []


def _lock(folder: Path) -> None:
    lock = (folder / LOCK_FILE).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        holder, me = (folder / LOCK_FILE).read_text(), psutil.Process()
        refuse(
            holder not in {str(process.pid) for process in (me, *me.parents())},
            f"another run (process {holder}) is writing to --output-dir {folder}: wait for it or choose another folder",
        )
    except OSError as error:  # a file system without locks, as some network mounts are
        log.warning("%s cannot be locked (%s): see that no other run writes there", folder, error.strerror)
    else:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        _held.append(lock)


class MetricsWriter:
    """Appends the lines of a run to its metrics file and its samples to theirs, flushed at once; tells the console."""

    def __init__(self, folder: Path, num_steps: int, samples_file: Path | None = None) -> None:
        self._metrics, self._samples, self._num_steps = folder / METRICS_FILE, samples_file, num_steps
        self._progress = Progress(console=_CONSOLE, disable=not _CONSOLE.is_terminal)
        self._bar = self._progress.add_task("training", total=num_steps)
        self._intervals: list[tuple[float, float]] = []
        self._alarms = set[str]()  # of the step before, without their numbers: each is shown when it begins
        self._metrics.touch()
        self._progress.start()

    def write(self, line: dict[str, Any]) -> None:
        """Write one step; raw timelines become sums, samples go to a file of their own."""
        line = dict(line)
        timeline, intervals = line.pop("token_timeline", []), line.pop("compute_intervals", [])
        # A step's tokens may have been generated while earlier steps trained
        began = timeline[0][0] if timeline else 0.0
        self._intervals = [kept for kept in [*self._intervals, *intervals] if kept[1] >= began]
        line["tokens_generated"] = sum(tokens for _, tokens in timeline)
        busy = [
            tokens for at, tokens in timeline if any(start <= at <= end for start, end in self._intervals)
        ]
        line["tokens_generated_while_training"] = sum(busy)
        samples = line.pop("samples", [])
        if self._samples:
            _append(self._samples, [{"step": line["step"], **sample} for sample in samples])
        _append(self._metrics, [line])
        alarms = {alarm: re.sub(r"\d[\d.,]*", "#", alarm) for alarm in line.get("alarms", [])}
        new = [alarm for alarm, kind in alarms.items() if kind not in self._alarms]
        num_known, self._alarms = len(alarms) - len(new), set(alarms.values())
        said = line | {"alarms": new + [f"({num_known} as before)"] * bool(num_known)}
        _CONSOLE.print(console_line(_finite(said), self._num_steps), highlight=False, soft_wrap=True)
        self._progress.update(self._bar, completed=line["step"])

    def close(self) -> None:
        self._progress.stop()


def _append(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    with file.open("a", encoding="utf-8") as end:
        end.write("".join(map(as_json, lines)))


class ConsoleHandler(logging.Handler):
    """Shows the log beside the steps, where the log itself goes to a file."""

    def emit(self, record: logging.LogRecord) -> None:
        _CONSOLE.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def as_json(line: dict[str, Any]) -> str:
    """One line of strict JSON: NaN and infinities become null, at any depth.

    >>> as_json({"a": {"b": [float("nan"), 1.5]}})
    '{"a": {"b": [null, 1.5]}}\\n'
    """
    return json.dumps(_finite(line), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def console_line(line: dict[str, Any], num_steps: int) -> str:
    """The step in one readable line.

    >>> console_line({"step": 3, "avg_reward": 0.25, "time_per_batch": 1.5}, 100)
    'step 3/100 | reward 0.250 | 1.5 s'
    """
    parts = [f"step {line['step']}/{num_steps}"]
    for label, key, form in (
        ("reward", "avg_reward", ".3f"),
        ("tokens", "avg_output_tokens", ".1f"),
        ("truncated", "perc_truncated_samples", ".1%"),
        ("staleness", "staleness_mean", ".2f"),
        ("loss", "avg_loss", ".4f"),
        ("grad", "grad_norm", ".3f"),
        ("mismatch KL", "mismatch_kl", ".1e"),
    ):
        if isinstance(line.get(key), int | float):
            parts.append(f"{label} {line[key]:{form}}")
    failed = sum(line.get(f"num_reward_{status}", 0) for status in ("failed", "timed_out", "abstained"))
    if failed:
        parts.append(f"NOT SCORED {failed} of {line['samples_in_batch']}")
    if "samples_per_second" in line:
        parts.append(f"{line['samples_per_second']:.0f} samples/s")
    parts.append(f"{line['time_per_batch']:.1f} s")
    return " | ".join(parts + [f"ALARM {alarm}" for alarm in line.get("alarms", [])])
