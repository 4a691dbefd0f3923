"""Read `training_metrics.jsonl` files, on this machine or another one.

A *key* names one value of a line. Dots join the keys of nested objects. Variables whose names end in `_T` are float64
arrays with one value per step.
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
MAX_FILE_BYTES = 2 << 30  # enough for some 300,000 steps
# Larger numbers count as NaN, because matplotlib's arithmetic on the axes would overflow
MAX_NUMBER = 1e300

# A host may not begin with "-", because scp would take it for an option
_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_REMOTE = re.compile(rf"({_WORD}@)?({_WORD}|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\])")
_REMOTE_PATH = re.compile(r"[\w ./~@%+=:,-]+")  # scp before OpenSSH 9 passes the path to a shell

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunMetrics:
    """The content of one metrics file, and of the parameters file in its folder."""

    source: str  # name of the file in messages
    name: str  # name of the run in legends
    steps: list[dict[str, object]]  # for each step, the values by key
    folder: Path = Path(os.devnull)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Return the run's options by key, from `training_params.json` in the same folder; {} if there is no such file.

        Raises:
            ConfigurationError: The file cannot be read.
        """
        params = self.folder / PARAMS_FILE
        if not params.exists():
            return {}
        try:
            options = read_json(params)
        except ValueError as error:
            raise ConfigurationError(f"{params}: not valid JSON ({error})") from error
        except OSError as error:
            raise ConfigurationError(f"{params} cannot be read: {error.strerror}") from error
        refuse(not isinstance(options, dict), f"{params}: expected a JSON object with the run's options")
        return _flat(options)

    @cached_property
    def keys(self) -> list[str]:
        """All keys, in the order of their first appearance."""
        return list(dict.fromkeys(key for step in self.steps for key in step))

    @cached_property
    def plottable_keys(self) -> list[str]:
        """Return the keys that have a finite number in at least one step."""
        return [key for key in self.keys if np.isfinite(self.column(key)).any()]

    def column(self, key: str) -> np.ndarray:
        """Return the values of a key, shape (T,), with NaN for steps without a finite number."""
        return np.array([_number(step.get(key)) for step in self.steps])

    def series(self, *keys: str) -> np.ndarray:
        """Return the values of K keys, shape (K, T), at the steps that have all keys; NaN stands for non-finite values."""
        steps = [step for step in self.steps if step.keys() >= set(keys)]
        return np.array([[_number(step[key]) for step in steps] for key in keys])


def _number(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER:
        return float(value)
    return math.nan


def _flat(step: dict[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in step.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def read_run(path: Path, name: str | None = None, source: str | None = None) -> RunMetrics:
    """Read a metrics file. An unfinished last line is skipped, because the run may be writing it.

    Args:
        path: The file, or the folder of a run.
        name: Name of the run in legends; the default is the name of `path`.
        source: Name of the file in messages; the default is the file's path.

    Raises:
        ConfigurationError: The file is unreadable, too large or empty, or a line is malformed.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    source = source or str(file)
    steps = []
    try:
        # A file that the user names may be a symbolic link. A file in a run's folder may not, because the folder is
        # untrusted
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
    """Return the values of a line by key; {} for an empty line or an unfinished last line."""
    place = f"{source}, line {number}"
    refuse(line is None, f"{place}: it is longer than {MAX_LINE_BYTES >> 20} MB, so it is no line of metrics")
    if not line or not line.strip():
        return {}
    try:
        step = parse_json(line)
    except ValueError as error:
        if line.endswith(b"\n"):
            raise ConfigurationError(f"{place}: not valid JSON ({error})") from error
        log.warning("%s: the last line (%d) is unfinished and was skipped", source, number)
        return {}
    kind = type(step).__name__
    refuse(not isinstance(step, dict), f"{place}: expected a JSON object, found {kind}")
    return _flat(step)


def load_runs(
    files: list[Path], names: list[str] | None = None, remote: str | None = None
) -> list[RunMetrics]:
    """Read several metrics files.

    Args:
        files: Metrics files or folders of runs.
        names: A name for each file. The default is the file's path, relative to the folder that contains all files.
        remote: The machine with the files, as "[user@]host"; None for this machine.

    Raises:
        ConfigurationError: A file cannot be read, or the numbers of names and files differ.
        RunFailed: A file cannot be copied from the other machine.
    """
    if not names:
        paths = [file.absolute() for file in files]
        common_folder = os.path.commonpath([path.parent for path in paths])
        names = [str(path.relative_to(common_folder)) for path in paths]
    refuse(len(names) != len(files), f"{len(names)} names for {len(files)} files; give one per file or none")
    if remote is None:
        return list(map(read_run, files, names))
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        copies = [fetch(remote, str(file), Path(folder) / f"{i}.jsonl") for i, file in enumerate(files)]
        for copy, name, file in zip(copies, names, files, strict=True):
            runs.append(read_run(copy, name, f"{remote}:{file}"))
    return runs


def fetch(remote: str, path: str, target: Path) -> Path:
    """Copy a file from another machine with scp, and return `target`.

    Args:
        remote: The other machine, as "[user@]host". An IPv6 address needs brackets.
        path: Path of the file on the other machine.
        target: Path of the copy.

    Raises:
        ConfigurationError: The machine's name or the path is invalid.
        RunFailed: scp failed. The message contains its output.
    """
    refuse(
        not _REMOTE.fullmatch(remote),
        f"--remote {remote!r} is not [user@]host (an IPv6 address goes in brackets)",
    )
    refuse(
        not _REMOTE_PATH.fullmatch(path),
        f"remote path {path!r} has characters that a shell interprets; rename it",
    )
    command = [
        "scp",
        "-o",
        "BatchMode=yes",
        "-o",
        f"ConnectTimeout={CONNECT_TIMEOUT_S}",
        "--",
        f"{remote}:{path}",
        str(target),
    ]
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=FETCH_TIMEOUT_S
        )
        if process.returncode == 0 and target.is_file():
            return target
        output = process.stderr.decode(errors="replace").strip() or "it said nothing"
        reason = f" (exit code {process.returncode}): {output}"
    except OSError as error:
        reason = f": the program scp did not start ({error.strerror})"
    except subprocess.TimeoutExpired:
        reason = f" within {FETCH_TIMEOUT_S} s"
    raise RunFailed(f"scp could not fetch {remote}:{path}{reason}")


def curve(run: RunMetrics, unit: str, key: str, gpus: int | None = None) -> np.ndarray:
    """Return progress and metric, shape (2, T), at the steps at which both are finite numbers.

    The first row is `progress`, in increasing order. Metrics of an evaluation are placed at the step at which the
    evaluation began.

    Args:
        run: The run.
        unit: Unit of the progress, one of `UNITS`.
        key: Key of the metric.
        gpus: Number of the run's GPUs. The default is the result of `gpus_of`.

    Raises:
        ConfigurationError: The unit is unknown, or no step has both numbers.
    """
    x_T = progress(run, unit, gpus)
    y_T = run.column(key)
    if key.startswith("eval_"):
        # The results of an evaluation are in the line of the step during which it ended. Place them at the x value of the
        # step at which it began
        step_T = run.column("step")
        start_step_T = run.column("eval_step")
        start_step_T = np.where(np.isfinite(start_step_T), start_step_T, step_T)
        x_T = np.interp(start_step_T, [0, *step_T], [0, *x_T])
    curve_2T = np.stack([x_T, y_T])
    curve_2T = curve_2T[:, np.isfinite(curve_2T).all(axis=0)]
    refuse(
        not curve_2T.size,
        f"{run.source}: no step has {unit} and a number {key!r}; --y may name: {', '.join(run.plottable_keys)}",
    )
    return curve_2T[:, np.argsort(curve_2T[0], kind="stable")]


def progress(run: RunMetrics, unit: str, gpus: int | None = None) -> np.ndarray:
    """Return the progress of the run after each step, shape (T,).

    "tokens" counts the tokens that the engines generated. "seconds" and "gpu-hours" leave out times at which
    the run was stopped.

    Args:
        run: The run.
        unit: One of `UNITS`.
        gpus: Number of the run's GPUs. The default is the result of `gpus_of`.

    Raises:
        ConfigurationError: The unit is unknown, or the number of GPUs is needed and not known.
    """
    refuse(unit not in UNITS, f"--x {unit!r} is unknown; known: {', '.join(UNITS)}")
    if unit in ("steps", "samples"):
        return run.column("step" if unit == "steps" else "total_samples_accumulated")
    if unit == "tokens":
        return np.cumsum(run.column("tokens_generated"))
    evaluation_and_saving = [run.column("seconds_evaluating"), run.column("seconds_checkpointing")]
    worked_T = run.column("time_per_batch") + np.nan_to_num(evaluation_and_saving).sum(0)
    # Two measures of a step's duration. `worked_T` is too long if the run saved a checkpoint within the step, because
    # this time is counted twice. `passed_T` is too long if the run was stopped in between. So the smaller one is right
    passed_T = np.diff(run.column("timestamp"), prepend=np.nan)
    seconds_T = np.cumsum(np.fmin(worked_T, passed_T))
    if unit == "seconds":
        return seconds_T
    return seconds_T / 3600 * (gpus or gpus_of(run))


def gpus_of(run: RunMetrics) -> int:
    """Return the number of GPUs that the run used for ranks, engines, logprob workers and judges.

    Raises:
        ConfigurationError: The run's options do not determine the number.
    """
    options = run.options
    needed_keys = ("WORLD_SIZE", "generation_workers", "settings.logprob_roles")
    refuse(
        any(key not in options for key in needed_keys),
        f"{run.source} does not say how many GPUs it was given: add --gpus, or choose another --x",
    )
    num_ranks, num_engines, logprob_roles = (options[key] for key in needed_keys)
    gpus_per_engine = options.get("tensor_parallel_size", 1)
    num_judges: Any = 0
    if options.get("judge_model") and not options.get("judge_gpus"):
        num_judges = options.get("judge_replicas")
    are_counts = all(map(is_count, (num_ranks, num_engines, gpus_per_engine, num_judges)))
    refuse(
        not are_counts or not isinstance(logprob_roles, list),
        f"{run.source} has no valid number of GPUs: add --gpus, or choose another --x",
    )
    num_worker_gpus = num_engines * gpus_per_engine + len(logprob_roles)
    shared = min(num_ranks, num_worker_gpus) if options.get("colocate") else 0
    return int(num_ranks + num_worker_gpus - shared + num_judges)
