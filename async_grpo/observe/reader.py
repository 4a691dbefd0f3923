"""Reads `training_metrics.jsonl` files, here or on another machine.

A *key* names one value of a line, with dots for those of nested objects. Names ending in `_T`: (steps,), float64.
"""

import logging
import math
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.metrics.lines import is_count
from async_grpo.metrics.writer import METRICS_FILE, PARAMS_FILE
from async_grpo.options.fields import refuse
from async_grpo.processes.untrusted_files import (
    MAX_LINE_BYTES,
    bounded_lines,
    open_regular,
    parse_json,
    read_json,
)

DEFAULT_X_KEY = "total_samples_accumulated"
UNITS = ("steps", "samples", "tokens", "seconds", "gpu-hours")
CONNECT_TIMEOUT_S = 10
FETCH_TIMEOUT_S = 120
MAX_FILE_BYTES = 2 << 30  # of metrics: some 300,000 steps

# A host that begins with "-" would be an option to scp.
_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_REMOTE = re.compile(rf"({_WORD}@)?({_WORD}|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\])")
_REMOTE_PATH = re.compile(r"[\w ./~@%+=:,-]+")  # scp of before OpenSSH 9 hands the path to a shell

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunMetrics:
    """One metrics file."""

    source: str  # names it in messages
    name: str  # in the legend
    steps: list[dict[str, object]]  # flat
    folder: Path = Path(os.devnull)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Of the run, flat: `training_params.json` beside the file; {} where there is none."""
        params = self.folder / PARAMS_FILE
        if not params.exists():
            return {}
        try:
            options = read_json(params)
        except ValueError as error:
            raise ConfigurationError(f"{params}: not valid JSON ({error})") from error
        except OSError as error:
            raise ConfigurationError(f"{params} cannot be read: {error.strerror}") from error
        refuse(not isinstance(options, dict), f"{params}: it holds no table of options")
        return _flat(options)

    @cached_property
    def keys(self) -> list[str]:
        """All keys, in order of first appearance."""
        return list(dict.fromkeys(key for step in self.steps for key in step))

    @cached_property
    def plottable_keys(self) -> list[str]:
        """The keys that hold a finite number in at least one step."""
        return [key for key in self.keys if np.isfinite(self.column(key)).any()]

    def column(self, key: str) -> np.ndarray:
        """Return the values of `key`, shape (T,), NaN where a step has no finite number of that name."""
        return np.array([_number(step.get(key)) for step in self.steps])

    def series(self, *keys: str) -> np.ndarray:
        """Return the values of K keys, shape (K, T), over the steps that have all; NaN where one is no finite number."""
        wanted = set(keys)
        steps = [step for step in self.steps if step.keys() >= wanted]
        return np.array([[_number(step[key]) for step in steps] for key in keys])


def _number(value: object) -> float:
    # Beyond 1e300 matplotlib's axis arithmetic overflows; such a number counts as infinite.
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return math.nan


def _flat(step: dict[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in step.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def read_run(path: Path, name: str | None = None, source: str | None = None) -> RunMetrics:
    """Read a metrics file, or that of a run's folder; the last line may be unfinished: the run is still writing it.

    Raises ConfigurationError for an unreadable or empty file and for a malformed line.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    source, steps = source or str(file), []
    try:
        # A file that the user has named may be a link; that of a run's folder is its own
        with open_regular(file, follow_links=file == path) as metrics:
            num_bytes = os.fstat(metrics.fileno()).st_size
            refuse(
                num_bytes > MAX_FILE_BYTES,
                f"{source} is larger than {MAX_FILE_BYTES >> 20} MB: cut it into pieces",
            )
            for number, line in enumerate(bounded_lines(metrics, MAX_LINE_BYTES), 1):
                if step := _step(line, source, number):
                    steps.append(step)
    except OSError as error:
        raise ConfigurationError(f"cannot read {source}: {error.strerror}") from error
    refuse(not steps, f"{source} holds no finished step; has the run logged its first step yet?")
    return RunMetrics(source, name or path.name, steps, file.parent)


def _step(line: bytes | None, source: str, number: int) -> dict[str, object]:
    """Return the values of a line; {} for an empty one, and for an unfinished one at the end of the file."""
    where = f"{source}, line {number}"
    refuse(line is None, f"{where}: it is longer than {MAX_LINE_BYTES >> 20} MB, so it is no line of metrics")
    if not line or not line.strip():
        return {}
    try:
        step = parse_json(line)
    except ValueError as error:
        if line.endswith(b"\n"):
            raise ConfigurationError(f"{where}: not valid JSON ({error})") from error
        log.warning("%s: the last line (%d) is unfinished and was skipped", source, number)
        return {}
    kind = type(step).__name__
    refuse(not isinstance(step, dict), f"{where}: expected a JSON object, found {kind}")
    return _flat(step)


def load_runs(
    files: list[Path], names: list[str] | None = None, remote: str | None = None
) -> list[RunMetrics]:
    """Read all files, from the machine `remote` ("[user@]host") if given. `names`: one per file, or none."""
    if not names:
        places = [file.absolute() for file in files]
        above = os.path.commonpath([place.parent for place in places])
        names = [str(place.relative_to(above)) for place in places]
    refuse(len(names) != len(files), f"{len(names)} names for {len(files)} files; give one per file or none")
    if remote is None:
        return list(map(read_run, files, names))
    with tempfile.TemporaryDirectory() as folder:
        copies = [fetch(remote, str(file), Path(folder) / f"{i}.jsonl") for i, file in enumerate(files)]
        return list(map(read_run, copies, names, [f"{remote}:{file}" for file in files]))


def fetch(remote: str, path: str, target: Path) -> Path:
    """Copy `path` of `remote` ("[user@]host", IPv6 in brackets) to `target`. RunFailed has scp's own words."""
    host_fits, path_fits = _REMOTE.fullmatch(remote), _REMOTE_PATH.fullmatch(path)
    refuse(not host_fits, f"--remote {remote!r} is not [user@]host (an IPv6 address goes in brackets)")
    refuse(not path_fits, f"remote path {path!r} has characters that a shell interprets; rename it")
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"]
    command = ["scp", *options, "--", f"{remote}:{path}", str(target)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=FETCH_TIMEOUT_S)
        if done.returncode == 0 and target.is_file():
            return target
        words = done.stderr.decode(errors="replace").strip() or "it said nothing"
        why = f"(exit code {done.returncode}): {words}"
    except OSError as error:
        why = f": the program scp did not start ({error.strerror})"
    except subprocess.TimeoutExpired:
        why = f"within {FETCH_TIMEOUT_S} s"
    raise RunFailed(f"scp could not fetch {remote}:{path} {why}")


def curve(run: RunMetrics, unit: str, key: str, gpus: int | None = None) -> np.ndarray:
    """(2, T): `progress`, rising, and `key`, where both are finite numbers. An evaluation stands where it began."""
    x_T, y_T = progress(run, unit, gpus), run.column(key)
    if key.startswith("eval_"):  # its line is that of the step in which it ended
        step_T, began_T = run.column("step"), run.column("eval_step")
        x_T = np.interp(np.where(np.isfinite(began_T), began_T, step_T), [0, *step_T], [0, *x_T])
    found_2T = np.stack([x_T, y_T])[:, np.isfinite(x_T) & np.isfinite(y_T)]
    known = ", ".join(run.plottable_keys)
    refuse(not found_2T.size, f"{run.source}: no step has {unit} and a number {key!r}; --y may name: {known}")
    return found_2T[:, np.argsort(found_2T[0], kind="stable")]


def progress(run: RunMetrics, unit: str, gpus: int | None = None) -> np.ndarray:
    """(T,): how far the run had come after each step, in one of `UNITS`.

    Tokens: that the engines generated. Seconds: without the time that the run lay dead between two steps. `gpus`: default
    `gpus_of`.
    """
    refuse(unit not in UNITS, f"--x {unit!r} is unknown; known: {', '.join(UNITS)}")
    if unit in ("steps", "samples"):
        return run.column("step" if unit == "steps" else "total_samples_accumulated")
    if unit == "tokens":
        return np.cumsum(run.column("tokens_generated"))
    after_T = np.nan_to_num([run.column("seconds_evaluating"), run.column("seconds_checkpointing")]).sum(0)
    # Less has passed if it saved within the step, more if it died and went on later
    passed_T = np.diff(run.column("timestamp"), prepend=np.nan)
    seconds_T = np.cumsum(np.fmin(run.column("time_per_batch") + after_T, passed_T))
    return seconds_T if unit == "seconds" else seconds_T / 3600 * (gpus or gpus_of(run))


def gpus_of(run: RunMetrics) -> int:
    """Return the GPUs that the run was given for ranks, engines, logprob workers and judges."""
    told, needed = run.options, ("WORLD_SIZE", "generation_workers", "settings.logprob_roles")
    silent = any(key not in told for key in needed)
    refuse(silent, f"{run.source} does not say how many GPUs it was given: add --gpus, or choose another --x")
    ranks, engines, roles = (told[key] for key in needed)
    judges = told.get("judge_replicas") if told.get("judge_model") and not told.get("judge_gpus") else 0
    numbers = (ranks, engines, told.get("tensor_parallel_size", 1), judges)
    is_wrong = not all(map(is_count, numbers)) or not isinstance(roles, list)
    refuse(is_wrong, f"{run.source} says no number of GPUs: add --gpus, or choose another --x")
    return int(ranks + engines * numbers[2] + len(roles) + numbers[3])
