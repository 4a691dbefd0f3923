"""`async-grpo eval`: what a checkpoint or a model can do, by a run's engines and rewards, without a trainer.

The folder may be somebody else's. Of its run only options that are portable are taken over (`options/portable.py`).
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from async_grpo.config.run import RunConfig
from async_grpo.config.run_options import MemberConfig
from async_grpo.environments.config import EnvironmentConfig
from async_grpo.errors import CheckpointBroken
from async_grpo.experience.config import EvaluationTask
from async_grpo.inference.config import EngineOptions
from async_grpo.launch.export import ExportConfig, export
from async_grpo.launch.judge_servers import LocalJudge
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.local_run import check, parameters, start
from async_grpo.launch.process_variables import gpus
from async_grpo.metrics.console import means_of, show_waiting
from async_grpo.metrics.writer import ConsoleHandler, claim
from async_grpo.options.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    choices_of,
    dashed,
    names_in,
    option,
    refuse,
    required,
)
from async_grpo.options.log_setup import set_up_logging
from async_grpo.options.portable import portable_options, refuse_named
from async_grpo.processes.private_folder import private_folder
from async_grpo.processes.untrusted_files import printable
from async_grpo.training.checkpoint_folder import MANIFEST, checkpoints_of, read

AT_ONCE = 1024  # completions, if the engines hold so many
DAYS_S = 7 * 86_400.0
RESULTS_FILE = "eval_results.jsonl"
# Of a checkpoint's run, beside what is an option here
OF_THE_RUN = (
    *("temperature", "max_generation_tokens", "infinite_sampler_seed", "dtype", "float32_head"),
    "advantage_estimator",
)
# Options of this machine. The stored value is ignored, without an error.
OF_THIS_START = (
    *("path", "output_dir", "run_name", "logging_level", "verifiers", "verdict_cache", "judge_model_id"),
    "endpoint_host",
)
# Who gets rows, and what the policy answers to them, if the user names it
ASKED_ELSEWHERE = {"judge_urls", "http_scorer_urls"}
# Options of rewards and environments are taken over only if all of them ship with this library. A folder must not pass
# arguments to the user's code.
SPOKEN_OF = {"reward_options": "reward_fns", "environment_options": "environment"}


@dataclass(frozen=True, kw_only=True)
class EvalConfig(EvaluationTask, EnvironmentConfig, LocalJudge, EngineOptions, MemberConfig):
    """What is evaluated, on what. Of a checkpoint, what is not given is as in its run."""

    path: str = required(
        "Folder of a checkpoint, of a run (its newest checkpoint), or of a model.", argument=True
    )
    eval_data_path: str | None = option(
        None,
        "JSONL file of questions; several files are written NAME=FILE,NAME=FILE.",
        everyday=True,
        also=("data",),
        portable=True,  # it is read as rows, and nothing else; see ASKED_ELSEWHERE
    )
    output_dir: str = option("runs/eval", "Folder for results, samples and logs.", everyday=True)
    generation_workers: int = option(1, "Number of generation workers.", "Local", range=POSITIVE)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], given: Collection[str]) -> "EvalConfig":
        """Return the configuration of a command line, on which these options were `given`.

        Raises:
            ConfigurationError: the folder's run was given something that only the user may name.
        """
        folder = Path(options["path"])
        wanted = {field.name for field in fields(cls)} - {*OF_THIS_START, *given}
        if "judge_model" in given:  # it will not be where the run's own judge was
            wanted -= {"judge_urls"}
        earlier = portable_options(cls, _options_of(folder), wanted, folder)
        for name, owner in SPOKEN_OF.items():
            is_shipped = _names_shipped_ones(owner, {**options, **earlier}[owner])
            if earlier.get(name) and not is_shipped:
                refuse_named({name: earlier[name]}, folder)
        if earlier.get("eval_data_path"):
            # Rows of a file that somebody else has named must not leave the machine
            if judges := sorted(ASKED_ELSEWHERE & {*given}):
                print(
                    f"--{dashed(judges[0])} would be sent the rows of a file that the folder names",
                    flush=True,
                )
                refuse_named({"eval_data_path": earlier["eval_data_path"]}, folder)
            print(
                f"questions, as the run of {folder} says: {printable(earlier['eval_data_path'])}", flush=True
            )
        texts = [f"{name}={value}" for name, value in earlier.items() if isinstance(value, str) and value]
        if texts:
            print(f"taken over from the run of {folder}: {printable(' '.join(texts))}", flush=True)
        return cls(**{**options, **earlier})

    def as_run(self, model: Path) -> LocalConfig:
        """Return the evaluation of a model's folder as a run that never takes a step."""
        files, size = self.eval_files, max(2, self.eval_samples)
        refuse(not files, "say on what: --data FILE, or --data NAME=FILE,NAME=FILE")
        told = _of_the_run(Path(self.path))
        told |= {field.name: getattr(self, field.name) for field in fields(self) if field.name != "path"}
        if told.get("dtype", "auto") == "auto":  # the program that asks the engines sees no GPU
            told["dtype"] = "bfloat16" if gpus() else "float32"
        told |= {"model_name_or_path": str(model), "data_path": next(iter(files.values()))}
        told |= {"samples_per_question": size, "batch_size": max(1, AT_ONCE // size), "max_staleness": 0}
        told["evaluation_verifiers"] = max(self.evaluation_verifiers, self.verifiers_per_reward)
        if self.eval_max_tokens is not None:
            told["max_generation_tokens"] = self.eval_max_tokens
        told |= {"max_tokens_per_gpu": 1 << 30, "experience_timeout_s": DAYS_S, "eval_pinned": True}
        return Untrained(**told, resume="never")


@dataclass(frozen=True, kw_only=True)
class Untrained(LocalConfig):
    """A run without trainer ranks: the engines have all GPUs."""

    nproc_per_node: int = option(0, "Number of trainer ranks.", "Local", range=NOT_NEGATIVE)


def evaluate(config: EvalConfig) -> None:
    """Have engines answer and rewards score; results are shown, and written to `output_dir`. Raises as `run_locally`."""
    model, step = Path(config.path), 0
    known = any((model / name).exists() for name in ("config.json", "checkpoints", MANIFEST))
    refuse(not known, f"{model} holds no model (config.json), no run and no checkpoint")
    with private_folder("grpo-eval-") as scratch:
        if not (model / "config.json").exists():
            model = scratch / "model"
            to = {"output_dir": str(model), "dtype": config.as_run(model).dtype}
            step = export(ExportConfig(path=config.path, **to)).step
        run = config.as_run(model)
        check(run)
        claim(run.output_path)
        program = [sys.executable, "-m", "async_grpo.launch.evaluate", parameters(run)]
        start(run, [*program, f"--evaluated={config.path}", f"--step={step}"])


def _options_of(folder: Path) -> dict[str, Any]:
    """Return the options of the run that wrote a checkpoint.

    They are {} for a model's folder, whatever else lies in it, and where the export will refuse the checkpoint.
    """
    if (folder / "config.json").exists():
        return {}
    try:
        stored = read(next(iter(checkpoints_of(folder)), folder)).options
    except CheckpointBroken:
        return {}
    names = stored.get("reward_fns")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        stored = stored | {"reward_fns": ",".join(names)}  # kept as a list
    return stored


def _of_the_run(folder: Path) -> dict[str, Any]:
    """Return what an evaluation needs of a checkpoint's run and has no option for."""
    stored = _options_of(folder)
    known = choices_of(RunConfig.__dataclass_fields__["advantage_estimator"])
    if stored.get("advantage_estimator") not in known:
        stored.pop("advantage_estimator", None)  # the run's own code; an evaluation computes no advantages
    return portable_options(RunConfig, stored, OF_THE_RUN, folder)


def _names_shipped_ones(name: str, value: Any) -> bool:
    """Return whether the user's value of an option names nothing but what this library ships."""
    portable = EvalConfig.__dataclass_fields__[name].metadata["portable"]
    return not value or {part.strip() for part in str(value).split(",")} <= {*names_in(portable)}


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig(RunConfig):
    """Options of the evaluation program: a run's options; those that concern training are ignored."""

    evaluated: str = option("", "What the results name as the evaluated model.")
    step: int = option(0, "Policy version of the evaluated weights.")


def ask_and_score(config: EvaluatorConfig) -> None:
    """Evaluate on every file; show what was found, and write it down."""
    set_up_logging(config.logging_level, "[evaluator] ", ConsoleHandler())
    # Heavy imports only once the options are known to be good
    from async_grpo.cluster.ray_session import answer, connect
    from async_grpo.cluster.remote_experience import start_batcher, write_evaluation
    from async_grpo.cluster.trainer_rank import await_workers, close_run, open_run
    from async_grpo.config.preflight import prepare

    prepared = prepare(config)
    questions, path = prepared.eval_questions, config.output_path / RESULTS_FILE
    connect(config.run_name, config.logging_level)
    controller = open_run(config, replace(prepared.settings, trains=False))
    answer(start_batcher(controller, prepared), config.start_timeout_s)
    await_workers(controller, config)
    with show_waiting(f"{config.eval_samples} x {sum(map(len, questions.values()))} completions"):
        found = answer(controller.evaluate.remote(questions, config), config.experience_timeout_s)
    columns = []
    for name, result in found.items():
        result |= {"version_min": config.step, "version_max": config.step}
        for sample in result["samples"]:
            sample["oldest_version"] = config.step
        means = means_of(write_evaluation(path, config.step, name, result, evaluated=config.evaluated))
        scored = f"{result['num_reward_ok']} of {result['num_samples']}"
        columns.append({**means, "scored": scored, "seconds": f"{result['seconds']:.1f}"})
    close_run(controller, "the evaluation is done")
    table = Table("", *(name or "held-out" for name in found), title=config.evaluated, title_justify="left")
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(column.get(label, "-") for column in columns))
    Console().print(table)
    Console().print(f"results: {path}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    from async_grpo.launch.commands import foreign_keys
    from async_grpo.options.command_line import run_command

    run_command(EvaluatorConfig, ask_and_score, help="See `async-grpo eval`.", foreign=foreign_keys)
