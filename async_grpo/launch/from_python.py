"""`async_grpo.train`: start a whole run on this machine from a Python program or a notebook."""

import dataclasses
import enum
import logging
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from async_grpo.config.resume import goes_on
from async_grpo.errors import ConfigurationError, RunInterrupted
from async_grpo.experience.row_columns import ColumnMap
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.local_run import run_locally
from async_grpo.launch.python_files import folder_of_program
from async_grpo.launch.python_rewards import reward_names
from async_grpo.launch.python_rows import row_file
from async_grpo.metrics.tail import last_records
from async_grpo.metrics.writer import EVAL_FILE, METRICS_FILE, claim, release
from async_grpo.options.fields import dashed, field_name, fields_in_order, nearest, refuse
from async_grpo.options.log_setup import set_up_logging
from async_grpo.options.option_file import option_text
from async_grpo.training.checkpoint_folder import checkpoints_of

Rewards = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
Field = dataclasses.Field[Any]
# Options for which `train` has an argument with another name
ARGUMENTS = {"model_name_or_path": "model", "data_path": "dataset", "eval_data_path": "eval_dataset"}
DEFAULT_PICTURE = "training.svg"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The contents of a run's output folder."""

    output_dir: Path
    metrics: list[dict[str, Any]] = dataclasses.field(repr=False)  # one dict per step
    # One dict per evaluation and evaluation file, whose keys begin with `eval_`
    evaluations: list[dict[str, Any]] = dataclasses.field(repr=False)
    checkpoints: list[Path]  # folders from which the run can continue, oldest first
    model: Path | None  # the newest exported model, a Hugging Face folder; None if there is none

    @classmethod
    def read(cls, output_dir: str | Path) -> "TrainResult":
        """Read the output folder of a run. The run may still be in progress. `async-grpo run` may have started it."""
        folder = Path(output_dir)
        models = [path for path in (folder / "hf_format").glob("samples_*") if path.name[8:].isdecimal()]
        return cls(
            output_dir=folder,
            metrics=last_records(folder / METRICS_FILE, sys.maxsize),
            evaluations=last_records(folder / EVAL_FILE, sys.maxsize),
            checkpoints=checkpoints_of(folder)[::-1],
            model=max(models, key=lambda path: int(path.name[8:]), default=None),
        )

    def plot(self, path: str | Path | None = None, keys: Sequence[str] = ()) -> Path:
        """Draw metrics over the samples trained on, as `async-grpo plot` does.

        Args:
            path: Path of the picture (.svg, .png, .pdf, .html). The default is `training.svg` in the output folder.
            keys: Keys of `metrics`, one for each subplot. The default is evaluations, reward, and some
                other keys that change during the run (see `observe.plot`).

        Returns:
            The picture's path.

        Raises:
            ConfigurationError: No step has numbers for these keys, or the file cannot be written.
        """
        # Imported here, because it needs typer, which `train` does not
        from async_grpo.observe.plot import plot

        picture = self.output_dir / DEFAULT_PICTURE if path is None else Path(path)
        plot([self.output_dir / METRICS_FILE], list(keys), smooth=True, output=picture)
        return picture


def train(
    model: str | os.PathLike[str],
    dataset: Any,
    reward_fns: Rewards | None = None,
    *,
    eval_dataset: Any = None,
    output_dir: str | os.PathLike[str] = "outputs/train",
    **options: Any,
) -> TrainResult:
    """Train a model with asynchronous GRPO on this machine, and return the contents of the run's output folder.

    The run is the same as that of `async-grpo run` with the same options. Ray, engines and trainer run as separate
    programs, so the caller may be a notebook, and needs no `if __name__ == "__main__"`. If `output_dir` already holds a
    run, that run continues, unless you pass `resume="never"`. Ctrl-C, or the notebook's stop, ends the run cleanly.

        def brevity(sample):
            return -len(sample["completion"]) / 1000

        result = async_grpo.train("Qwen2.5-0.5B-Instruct", rows, [brevity, "math_verify"], reward_combine="sum")
        print(result.metrics[-1]["avg_reward"], result.model)

    Args:
        model: A Hugging Face folder.
        dataset: The questions: the path of a JSONL file, or anything that yields dicts (a list, a `datasets.Dataset`).
            Each dict has `prompt`, a text or a list of messages, and the columns that the rewards read. Pass
            "environment" if the environment makes the rows.
        reward_fns: Names of the registry ("math_verify"), `FILE.py:NAME`, and functions. A function takes one sample, a
            dict, and returns a number or a dict (docs/rewards.md). A function with an argument `completions` is called
            as TRL calls it, with one sample at a time (see `rewards.adapter.trl_signature`). Functions, including
            closures and lambdas, are pickled and run in separate processes. A run that continues uses the functions of
            this call.
        eval_dataset: Held-out questions, in the same form as `dataset`; or a dict of several data sets by name.
        output_dir: Folder of metrics, logs, checkpoints and models.
        options: Any option of `async-grpo run`, with underscores; lists and dicts as in a TOML file. `ray_address`
            joins an existing Ray cluster.

    Raises:
        ConfigurationError: An option or an input cannot work. Nothing was started.
        RunFailed: A program of the run ended unexpectedly. The message names the program and the reason.
        WorkerLost: A worker of the run ended unexpectedly. The message names the worker and the reason.
        RunInterrupted: `max_hours` have passed, and a checkpoint was saved. The same call continues the run.
        KeyboardInterrupt: The run was interrupted. The message says whether a checkpoint was saved.
    """
    values = _option_values(options)
    with _console_of_a_command(str(values.get("logging_level", "INFO"))):
        config = _claimed_config(
            _as_path(model, "model"), dataset, reward_fns, eval_dataset, Path(output_dir), values
        )
        try:
            run_locally(config)
        except RunInterrupted as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt(str(error)) from error
            raise
        finally:
            release(config.output_path)
    return TrainResult.read(config.output_path)


def _claimed_config(
    model: str, dataset: Any, reward_fns: Any, eval_dataset: Any, output_dir: Path, values: dict[str, Any]
) -> LocalConfig:
    """Write the run's inputs into its output folder, and return the run's configuration.

    The output folder is claimed: until `release`, no other process can start a run in it.
    """
    # Check all options before anything is written. The input files do not exist yet, so their options have placeholders
    values = {**values, "model_name_or_path": model, "data_path": "dataset", "output_dir": str(output_dir)}
    placeholders = {"reward_fns": "countdown"}
    if eval_dataset is not None:
        placeholders["eval_data_path"] = "eval_dataset"
    config = _config({**values, **placeholders})
    claim(config.output_path, may_hold_run=goes_on(config))
    try:
        folder = folder_of_program(config.output_path)
        rows = row_file(dataset, folder, "dataset", config.column_map)
        values["data_path"] = rows.path
        if eval_dataset is not None:
            values["eval_data_path"] = _held_out(eval_dataset, folder, config.column_map)
        values["reward_fns"] = reward_names(reward_fns, folder, rows.columns)
        return _config(values)
    except BaseException:
        release(config.output_path)
        raise


def _held_out(eval_dataset: Any, folder: Path, column_map: ColumnMap) -> str:
    if not isinstance(eval_dataset, Mapping):
        return row_file(eval_dataset, folder, "eval_dataset", column_map).path
    files = {}
    for name, rows in eval_dataset.items():
        files[name] = row_file(rows, folder, f"eval_dataset_{name}", column_map).path
    return option_text(files)


def _as_path(value: Any, name: str) -> str:
    is_path = isinstance(value, str | os.PathLike)
    way_out = "write it by save_pretrained, tokenizer included, and give the folder"
    refuse(
        not is_path, f"{name} is a {type(value).__name__}, not the path of a Hugging Face folder: {way_out}"
    )
    return os.fspath(value)


def with_defaults(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, completed by the defaults of those that are not given in any spelling."""
    fields = fields_in_order(LocalConfig)
    names = {field_name(spelling, fields) for spelling in options}
    missing = {name: value for name, value in defaults.items() if name not in names}
    return {**missing, **options}


def _option_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options by field name, converted to the types of the fields.

    Raises:
        ConfigurationError: An option is unknown, is given twice, or has a value of a wrong type.
    """
    fields = fields_in_order(LocalConfig)
    by_name = {field.name: field for field in fields}
    values: dict[str, Any] = {}
    for spelling, value in options.items():
        name = field_name(spelling, fields)
        if name in ARGUMENTS:
            raise ConfigurationError(
                f"{spelling} is given as the argument {ARGUMENTS[name]} of async_grpo.train"
            )
        if name not in by_name:
            raise ConfigurationError(
                f"{spelling} is no option{nearest(spelling, sorted({*by_name} - {*ARGUMENTS}))}"
            )
        refuse(name in values, f"{name} is given twice, once as {spelling}")
        values[name] = _converted(by_name[name], value)
    return values


def _converted(field: Field, value: Any) -> Any:
    """Convert a text or a Python value to the type of an option's field.

    Raises:
        ConfigurationError: The value has a wrong type.
    """
    kind, *alternatives = get_args(field.type) or (field.type,)
    if value is None and alternatives:  # the field's type is `kind | None`
        return None
    if isinstance(value, enum.Enum):
        value = value.value
    try:
        if kind is bool:
            return _truth(value)
        if kind is str:
            return _text(value)
        if isinstance(value, bool):
            raise TypeError
        if kind is int and not isinstance(value, str):
            return operator.index(value)  # this accepts integers of numpy, and refuses fractions
        return kind(value)
    except (TypeError, ValueError):
        form = {
            bool: "True or False",
            str: "a text, a list or a dict",
            int: "a whole number",
            float: "a number",
        }[kind]
        raise ConfigurationError(f"--{dashed(field.name)} {value!r}: {form} is needed") from None


def _truth(value: Any) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # "bool_" is numpy's type
        raise TypeError
    return bool(value)


def _text(value: Any) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return option_text(dict(value))
    if isinstance(value, list | tuple):
        return option_text(value)
    raise TypeError


def _config(values: Mapping[str, Any]) -> LocalConfig:
    defaults = {field.name: field.default for field in dataclasses.fields(LocalConfig)}
    return LocalConfig.from_options({**defaults, **values}, values.keys())


@contextmanager
def _console_of_a_command(level: str) -> Iterator[None]:
    """During the block, log as the commands do, with secrets hidden. Then restore the logging and hooks of the program."""
    log = logging.getLogger("async_grpo")
    handlers = log.handlers
    propagates = log.propagate
    program_level = log.level
    make_record = logging.getLogRecordFactory()
    report_exception = sys.excepthook
    report_thread_exception = threading.excepthook
    set_up_logging(level)
    try:
        yield
    finally:
        log.handlers = handlers
        log.propagate = propagates
        log.setLevel(program_level)
        logging.setLogRecordFactory(make_record)
        sys.excepthook = report_exception
        threading.excepthook = report_thread_exception
