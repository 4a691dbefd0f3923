"""Write the files of a run's folder, with one JSON object per optimizer step, and print each step to the console."""

import errno
import fcntl
import json
import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
from rich.console import Console
from rich.progress import Progress

from async_grpo.errors import ConfigurationError
from async_grpo.metrics.alarms import KEPT, alarm_kind, hacking_alarms
from async_grpo.metrics.spans import Interval, Span, condensed
from async_grpo.metrics.tail import last_records
from async_grpo.options.fields import refuse
from async_grpo.processes.untrusted_files import is_regular, read_bytes, read_json

METRICS_FILE = "training_metrics.jsonl"
PARAMS_FILE = "training_params.json"
EVAL_FILE = "eval_metrics.jsonl"
TIMELINE_FILE = "timeline.jsonl"
SET_ASIDE_FILE = "prompts_set_aside.jsonl"
LOCK_FILE = ".lock"
MAX_LOCK_BYTES = 1000  # maximum size of a lock file that is read; a lock file contains a process id

Track = Callable[[dict[str, Any]], None]  # called with each metrics line when it is written
log = logging.getLogger(__name__)
# The console on which the lines of the steps, the log and the progress bar are all printed. If the log had another console,
# its lines would break the progress bar
_CONSOLE = Console()
# The lock files that are open. A lock lasts as long as its file is open, usually until this process ends
_lock_files: list[IO[str]] = []


def claim(folder: Path, mark: str | None = None, *, may_hold_run: bool = False) -> None:
    """Create the folder if necessary, and lock it against other runs until this process ends.

    Child processes of this process may also claim the folder.

    Args:
        folder: The folder.
        mark: Name of a marker file. A folder with this file is emptied, and any other folder that is not empty is
            refused.
        may_hold_run: Whether the folder may already contain a run, which then continues.

    Raises:
        ConfigurationError: The folder cannot be written to, another run writes to it, or it contains something that must
            not be replaced.
    """
    flag = f"--output-dir {folder}"

    def refuse_contents() -> None:
        has_run = mark is None and not may_hold_run and (folder / METRICS_FILE).exists()
        refuse(
            has_run,
            f"{flag} already holds a run ({METRICS_FILE}): choose another folder, or --resume auto to go on with it",
        )
        is_foreign = mark is not None and bool(_contents(folder)) and not (folder / mark).exists()
        refuse(is_foreign, f"{flag} is not empty and not an earlier demo: choose another folder")

    refuse(folder.is_file(), f"{flag} is a file: choose another name")
    for name in (METRICS_FILE, PARAMS_FILE, EVAL_FILE, TIMELINE_FILE, SET_ASIDE_FILE, LOCK_FILE):
        is_special = os.path.lexists(folder / name) and not is_regular(folder / name)
        # A run would follow a link and overwrite its target
        refuse(is_special, f"{folder / name} is no regular file: remove it, or choose another --output-dir")
    refuse_contents()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        # Check again, because another run may have begun and ended before the lock was acquired
        refuse_contents()
        if mark is not None:
            _empty(folder)
            (folder / mark).touch()
    except OSError as error:
        raise ConfigurationError(f"{flag} cannot be written to: {error.strerror}") from error


def _empty(folder: Path) -> None:
    for path in _contents(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _contents(folder: Path) -> list[Path]:
    if not folder.exists():
        return []
    return [path for path in folder.iterdir() if path.name != LOCK_FILE]


def _lock(folder: Path) -> None:
    lock = (folder / LOCK_FILE).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        holder_pid = (folder / LOCK_FILE).read_text()
        process = psutil.Process()
        own_pids = {str(ancestor.pid) for ancestor in (process, *process.parents())}
        refuse(
            holder_pid not in own_pids,
            f"another run (process {holder_pid}) is writing to --output-dir {folder}: wait for it or choose another folder",
        )
    except OSError as error:
        # Some network file systems do not support locks
        log.warning("%s cannot be locked (%s): let no other run write to it", folder, error.strerror)
    else:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        _lock_files.append(lock)


def release(folder: Path) -> None:
    """Release this process's lock on the folder, if it has one, so that other processes can claim the folder."""
    for lock in list(_lock_files):
        if Path(lock.name) == folder / LOCK_FILE:
            lock.close()
            _lock_files.remove(lock)


def holder(folder: Path) -> int | None:
    """Return the id of the process that claimed the folder, or None if it does not run on this machine."""
    try:
        text = read_bytes(folder / LOCK_FILE, MAX_LOCK_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    is_pid = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_pid and psutil.pid_exists(int(text)) else None


def rewind(folder: Path, step: int, samples_file: Path | None) -> None:
    """Move all lines of later steps to files named `undone_...`, so that the run can continue after `step`.

    Args:
        folder: The run's folder.
        step: The last step whose lines are kept; -1 keeps none.
        samples_file: The file of samples, or None if the run writes none.
    """
    paths = [folder / name for name in (METRICS_FILE, EVAL_FILE, TIMELINE_FILE, SET_ASIDE_FILE)]
    if samples_file is not None:
        paths.append(samples_file)
    for path in paths:
        if path.exists():
            _rewind_file(path, step)


def _rewind_file(path: Path, step: int) -> None:
    kept_lines = []
    undone_lines = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            # The last line may be incomplete
            is_whole = line.endswith("\n")
            if is_whole and json.loads(line)["step"] <= step:
                kept_lines.append(line)
            else:
                undone_lines.append(line)
    if not undone_lines:
        return
    with path.with_name(f"undone_{path.name}").open("a", encoding="utf-8") as file:
        file.writelines(undone_lines)
    new_path = path.with_suffix(".new")
    new_path.write_text("".join(kept_lines), encoding="utf-8", newline="\n")
    new_path.replace(path)


def options_of(folder: Path) -> dict[str, Any]:
    """Return the parameters of the run in a folder: its options, and the facts that `config.run.FACTS` names.

    Raises:
        ConfigurationError: The folder contains no run, or its parameters cannot be read.
    """
    path = folder / PARAMS_FILE
    refuse(not path.exists(), f"{folder} holds no run ({PARAMS_FILE})")
    try:
        options = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    refuse(not isinstance(options, dict), f"{path} cannot be read: it contains no JSON object of options")
    return options


class MetricsWriter:
    """Appends the metrics, spans and samples of each step to the run's files, and prints each step.

    Lines are written immediately. Lines that cannot be written, for example because the disk is full, are kept and
    written together with later lines.

    Args:
        folder: The run's folder.
        num_steps: Number of steps of the whole run.
        samples_file: File for the samples; None writes no samples.
        track: Called with each metrics line.
    """

    def __init__(
        self, folder: Path, num_steps: int, samples_file: Path | None = None, track: Track = lambda line: None
    ) -> None:
        self._metrics = folder / METRICS_FILE
        self._timeline = folder / TIMELINE_FILE
        self._set_aside = folder / SET_ASIDE_FILE
        self._samples = samples_file
        self._num_steps = num_steps
        self._track = track
        self._progress = Progress(console=_CONSOLE, disable=not _CONSOLE.is_terminal)
        self._bar = self._progress.add_task("training", total=num_steps)
        self._waiting: dict[Path, bytes] = {}  # content that could not be written yet, by file
        self._train_intervals: list[Interval] = []
        # Kinds of the alarms of the previous step. Alarms of these kinds are not printed again
        self._alarm_kinds: set[str] = set()
        self._metrics.touch()
        # In a resumed run, alarms also compare with the steps before the interruption
        self._recent_lines = deque(last_records(self._metrics, KEPT), maxlen=KEPT)
        self._progress.start()

    def write(self, line: dict[str, Any]) -> None:
        """Write one step.

        The values of `token_timeline`, `spans`, `samples` and `prompts_set_aside` do not go into the metrics line.
        """
        line = dict(line)
        step = line["step"]
        timeline = line.pop("token_timeline", [])
        spans = line.pop("spans", [])
        samples = line.pop("samples", [])
        set_aside = line.pop("prompts_set_aside", [])
        line |= self._token_counts(timeline, spans)
        self._recent_lines.append(line)
        alarms = [*line.get("alarms", []), *hacking_alarms(list(self._recent_lines))]
        if self._samples:
            self._append(self._samples, [{"step": step, **sample} for sample in samples])
        if set_aside:
            self._append(self._set_aside, [{"step": step, **prompt} for prompt in set_aside])
            alarms.append(
                f"{len(set_aside)} prompts were set aside, because several engines were lost while they processed each "
                f"of them: see {self._set_aside}"
            )
        if alarms:
            line["alarms"] = alarms
        self._append(self._timeline, [{"step": step, **_span(*span)} for span in condensed(spans)])
        self._append(self._metrics, [line])
        self._track(line)
        console_values = {**line, "alarms": self._new_alarms(line.get("alarms", []))}
        _CONSOLE.print(
            console_line(_finite(console_values), self._num_steps), highlight=False, soft_wrap=True
        )
        self._progress.update(self._bar, completed=step)

    def _token_counts(self, timeline: Sequence[tuple[float, int]], spans: Sequence[Span]) -> dict[str, int]:
        """Count the generated tokens, and how many of them were generated while the trainer trained.

        Args:
            timeline: Pairs of Unix time and number of generated tokens, in time order.
            spans: The spans of this step.
        """
        # Intervals of earlier steps are kept, because tokens of this step may have been generated during them
        self._train_intervals += [(begin, end) for _, activity, begin, end in spans if activity == "train"]
        first_time = timeline[0][0] if timeline else 0.0
        self._train_intervals = [interval for interval in self._train_intervals if interval[1] >= first_time]
        num_while_training = 0
        for time, num_tokens in timeline:
            if any(begin <= time <= end for begin, end in self._train_intervals):
                num_while_training += num_tokens
        return {
            "tokens_generated": sum(num_tokens for _, num_tokens in timeline),
            "tokens_generated_while_training": num_while_training,
        }

    def _new_alarms(self, alarms: Sequence[str]) -> list[str]:
        """Return the alarms whose kind is new in this step, and a text with the number of all other alarms."""
        kind_by_alarm = {alarm: alarm_kind(alarm) for alarm in alarms}
        new_alarms = [alarm for alarm, kind in kind_by_alarm.items() if kind not in self._alarm_kinds]
        self._alarm_kinds = set(kind_by_alarm.values())
        num_known = len(kind_by_alarm) - len(new_alarms)
        if num_known:
            new_alarms.append(f"({num_known} as before)")
        return new_alarms

    def _append(self, path: Path, lines: Sequence[dict[str, Any]]) -> None:
        content = self._waiting.pop(path, b"") + "".join(map(as_json, lines)).encode()
        try:
            with path.open("ab", buffering=0) as file:
                begin = file.tell()
                if file.write(content) != len(content):
                    # Remove the incomplete line from the file
                    file.truncate(begin)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            log.error("%s cannot be written: %s; its lines are kept and written later", path, error.strerror)
            self._waiting[path] = content

    def close(self) -> None:
        """Try again to write the lines that could not be written, and end the progress bar."""
        for path in list(self._waiting):
            self._append(path, [])
        self._progress.stop()


def _span(lane: str, activity: str, begin: float, end: float) -> dict[str, Any]:
    return {"lane": lane, "what": activity, "begin": round(begin, 3), "end": round(end, 3)}


class ConsoleHandler(logging.Handler):
    """Prints log messages on the console between the lines of the steps, for programs whose log goes elsewhere."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        _CONSOLE.print(_unicode(self.format(record)), markup=False, highlight=False, soft_wrap=True)


def as_json(line: dict[str, Any]) -> str:
    r"""Return one line of strict JSON. NaN and infinities become null, also in nested values.

    >>> as_json({"a": {"b": [float("nan"), 1.5]}})
    '{"a": {"b": [null, 1.5]}}\n'
    """
    try:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        # This raises an error for an unpaired surrogate
        text.encode()
    except ValueError:
        # Values are checked one by one only after an error, because the check takes seconds for a page of samples
        text = json.dumps(_finite(line), allow_nan=False)
    return text + "\n"


def _unicode(text: str) -> str:
    return text.encode(errors="replace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def console_line(line: dict[str, Any], num_steps: int) -> str:
    """Return the metrics of a step as one line for the console.

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
    failed = sum(line.get(f"num_reward_{status}") or 0 for status in ("failed", "timed_out", "abstained"))
    if failed:
        parts.append(f"NOT SCORED {failed} of {line.get('samples_in_batch')}")
    if isinstance(line.get("samples_per_second"), int | float):
        parts.append(f"{line['samples_per_second']:.0f} samples/s")
    if isinstance(line.get("time_per_batch"), int | float):
        parts.append(f"{line['time_per_batch']:.1f} s")
    parts += [f"ALARM {alarm}" for alarm in line.get("alarms", [])]
    return _unicode(" | ".join(parts))
