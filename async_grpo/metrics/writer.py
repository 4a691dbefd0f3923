"""What a run writes: a folder of its own, one JSON object per optimizer step, and a line on the console for each."""

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
from async_grpo.metrics.spans import condensed
from async_grpo.metrics.tail import last_records
from async_grpo.options.fields import refuse
from async_grpo.processes.untrusted_files import is_regular, read_bytes, read_json

METRICS_FILE = "training_metrics.jsonl"
PARAMS_FILE = "training_params.json"
EVAL_FILE = "eval_metrics.jsonl"
TIMELINE_FILE = "timeline.jsonl"
SET_ASIDE_FILE = "prompts_set_aside.jsonl"
LOCK_FILE = ".lock"
MAX_LOCK_BYTES = 1000  # it holds the number of a process

Track = Callable[[dict[str, Any]], None]  # takes each line as it is written
log = logging.getLogger(__name__)
_CONSOLE = Console()  # one for all: a line of the log must not break the progress bar
_held: list[IO[str]] = []  # a lock lasts as long as its file is open: until this process ends


def claim(folder: Path, mark: str | None = None, *, again: bool = False) -> None:
    """Make the folder, and keep other runs out of it until this process ends; programs that it starts may claim it too.

    `mark`: a file's name; a folder that holds this file is emptied, one that holds anything else refused. `again`: the
    folder may hold a run, which goes on.
    ConfigurationError: it cannot be written to, another run writes there, or it holds what is not to be replaced.
    """
    flag = f"--output-dir {folder}"

    def look() -> None:
        has_run = mark is None and not again and (folder / METRICS_FILE).exists()
        cure = "choose another folder, or --resume auto to go on with it"
        refuse(has_run, f"{flag} already holds a run ({METRICS_FILE}): {cure}")
        is_foreign = mark is not None and bool(_contents(folder)) and not (folder / mark).exists()
        refuse(is_foreign, f"{flag} is not empty and not an earlier demo: choose another folder")

    refuse(folder.is_file(), f"{flag} is a file: choose another name")
    for name in (METRICS_FILE, PARAMS_FILE, EVAL_FILE, TIMELINE_FILE, SET_ASIDE_FILE, LOCK_FILE):
        is_special = os.path.lexists(folder / name) and not is_regular(folder / name)
        # A run would write through a link, wherever it leads
        refuse(is_special, f"{folder / name} is no regular file: remove it, or choose another --output-dir")
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
        is_ours = holder in {str(process.pid) for process in (me, *me.parents())}
        other = f"another run (process {holder}) is writing to --output-dir {folder}"
        refuse(not is_ours, f"{other}: wait for it or choose another folder")
    except OSError as error:  # a file system without locks, as some network mounts are
        log.warning("%s cannot be locked (%s): see that no other run writes there", folder, error.strerror)
    else:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        _held.append(lock)


def release(folder: Path) -> None:
    """Let other processes claim the folder again, though this one goes on. Harmless where it is not claimed."""
    for lock in [lock for lock in _held if Path(lock.name) == folder / LOCK_FILE]:
        lock.close()
        _held.remove(lock)


def holder(folder: Path) -> int | None:
    """The process that holds the run's lock, if it lives here (of a run on another machine nothing is known)."""
    try:
        text = read_bytes(folder / LOCK_FILE, MAX_LOCK_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    is_pid = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_pid and psutil.pid_exists(int(text)) else None


def rewind(folder: Path, step: int, samples_file: Path | None) -> None:
    """Take what was written of later steps out of the files of a run that goes on after `step`, into `undone_...`."""
    of_run = (folder / name for name in (METRICS_FILE, EVAL_FILE, TIMELINE_FILE, SET_ASIDE_FILE))
    for path in filter(None, (*of_run, samples_file)):
        if not path.exists():
            continue
        kept, undone = list[str](), list[str]()
        # The text of a sample may hold other ends of lines
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:  # the last one may have been cut short
                (kept if line.endswith("\n") and json.loads(line)["step"] <= step else undone).append(line)
        if undone:
            with path.with_name(f"undone_{path.name}").open("a", encoding="utf-8") as file:
                file.writelines(undone)
            new = path.with_suffix(".new")
            new.write_text("".join(kept), encoding="utf-8", newline="\n")
            new.replace(path)


def options_of(folder: Path) -> dict[str, Any]:
    """Return the options of the run in a folder, and its facts.

    Raises:
        ConfigurationError: it holds none, or they cannot be read.
    """
    path = folder / PARAMS_FILE
    refuse(not path.exists(), f"{folder} holds no run ({PARAMS_FILE})")
    try:
        options = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    refuse(not isinstance(options, dict), f"{path} cannot be read: it holds no table of options")
    return options


class MetricsWriter:
    """Appends the lines of a run to its metrics file and its samples to theirs, flushed at once; tells the console.

    Lines that cannot be written, as on a full disk, wait for the next ones.
    """

    def __init__(
        self, folder: Path, num_steps: int, samples_file: Path | None = None, track: Track = lambda line: None
    ) -> None:
        self._metrics, self._timeline = folder / METRICS_FILE, folder / TIMELINE_FILE
        self._set_aside = folder / SET_ASIDE_FILE
        self._samples, self._num_steps, self._track = samples_file, num_steps, track
        self._progress = Progress(console=_CONSOLE, disable=not _CONSOLE.is_terminal)
        self._bar = self._progress.add_task("training", total=num_steps)
        self._waiting: dict[Path, bytes] = {}  # what could not be written
        self._intervals: list[tuple[float, float]] = []
        self._alarms = set[str]()  # of the step before, without their numbers: each is shown when it begins
        self._metrics.touch()
        self._recent = deque(last_records(self._metrics, KEPT), maxlen=KEPT)  # also of a run that goes on
        self._progress.start()

    def write(self, line: dict[str, Any]) -> None:
        """Write one step; raw timelines become sums, samples go to a file of their own."""
        line = dict(line)
        timeline, spans, samples = (line.pop(key, []) for key in ("token_timeline", "spans", "samples"))
        # A step's tokens may have been generated while earlier steps trained
        self._intervals += [(begin, end) for _, what, begin, end in spans if what == "train"]
        began = timeline[0][0] if timeline else 0.0
        self._intervals = [kept for kept in self._intervals if kept[1] >= began]
        line["tokens_generated"] = sum(tokens for _, tokens in timeline)
        line["tokens_generated_while_training"] = sum(
            tokens for at, tokens in timeline if any(start <= at <= end for start, end in self._intervals)
        )
        self._recent.append(line)
        if gamed := hacking_alarms(list(self._recent)):
            line["alarms"] = [*line.get("alarms", []), *gamed]
        if self._samples:
            self._append(self._samples, [{"step": line["step"], **sample} for sample in samples])
        if set_aside := line.pop("prompts_set_aside", []):
            self._append(self._set_aside, [{"step": line["step"], **prompt} for prompt in set_aside])
            what = f"{len(set_aside)} prompts cost several engines and were set aside: see {self._set_aside}"
            line["alarms"] = [*line.get("alarms", []), what]
        self._append(self._timeline, [{"step": line["step"], **_span(*span)} for span in condensed(spans)])
        self._append(self._metrics, [line])
        self._track(line)
        alarms = {alarm: alarm_kind(alarm) for alarm in line.get("alarms", [])}
        new = [alarm for alarm, kind in alarms.items() if kind not in self._alarms]
        num_known, self._alarms = len(alarms) - len(new), set(alarms.values())
        said = line | {"alarms": new + [f"({num_known} as before)"] * bool(num_known)}
        _CONSOLE.print(console_line(_finite(said), self._num_steps), highlight=False, soft_wrap=True)
        self._progress.update(self._bar, completed=line["step"])

    def _append(self, path: Path, lines: Sequence[dict[str, Any]]) -> None:
        content = self._waiting.pop(path, b"") + "".join(map(as_json, lines)).encode()
        try:
            with path.open("ab", buffering=0) as file:
                begin = file.tell()
                if file.write(content) != len(content):
                    file.truncate(begin)  # no half lines
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            log.error("%s cannot be written: %s; the run goes on, its lines wait", path, error.strerror)
            self._waiting[path] = content

    def close(self) -> None:
        for path in list(self._waiting):
            self._append(path, [])
        self._progress.stop()


def _span(lane: str, what: str, begin: float, end: float) -> dict[str, Any]:
    return {"lane": lane, "what": what, "begin": round(begin, 3), "end": round(end, 3)}


class ConsoleHandler(logging.Handler):
    """Shows the log beside the steps, where the log itself goes to a file."""

    def emit(self, record: logging.LogRecord) -> None:
        _CONSOLE.print(_unicode(self.format(record)), markup=False, highlight=False, soft_wrap=True)


def as_json(line: dict[str, Any]) -> str:
    """One line of strict JSON, to be written as UTF-8: NaN and infinities become null, at any depth.

    >>> as_json({"a": {"b": [float("nan"), 1.5]}})
    '{"a": {"b": [null, 1.5]}}\\n'
    """
    try:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a pair of surrogates is none
    except ValueError:  # seldom: to look at every number would take a page of samples seconds
        text = json.dumps(_finite(line), allow_nan=False)
    return text + "\n"


def _unicode(text: str) -> str:
    return text.encode(errors="replace").decode()


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
    failed = sum(line.get(f"num_reward_{status}") or 0 for status in ("failed", "timed_out", "abstained"))
    if failed:
        parts.append(f"NOT SCORED {failed} of {line.get('samples_in_batch')}")
    if isinstance(line.get("samples_per_second"), int | float):
        parts.append(f"{line['samples_per_second']:.0f} samples/s")
    if isinstance(line.get("time_per_batch"), int | float):
        parts.append(f"{line['time_per_batch']:.1f} s")
    return _unicode(" | ".join(parts + [f"ALARM {alarm}" for alarm in line.get("alarms", [])]))
