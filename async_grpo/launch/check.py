"""Check the options and inputs of a run on this machine, in this process or in a fork that has the libraries already."""

import importlib.util
import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.config.rewards import ResolvedRewards
from async_grpo.config.run import write_params
from async_grpo.errors import ConfigurationError, DeadlineExceeded, RunFailed
from async_grpo.inference.config import engine_class
from async_grpo.inference.engine_python import check_environment, own_vllm_version
from async_grpo.launch import plan, process_variables
from async_grpo.launch.early_start import EarlyStart
from async_grpo.launch.end_tokens import answers_without_end
from async_grpo.launch.local_config import LocalConfig, MayHaveNoTrainer
from async_grpo.launch.plan import Finding
from async_grpo.metrics.console import show_waiting
from async_grpo.options.fields import option, refuse
from async_grpo.options.log_setup import set_up_logging
from async_grpo.options.source_file import is_file
from async_grpo.processes.private_folder import compile_cache
from async_grpo.processes.untrusted_files import read_json
from async_grpo.rewards.adapter.decorators import check_options

if TYPE_CHECKING:
    from async_grpo.config.preflight import Prepared


@dataclass(frozen=True)
class Checked:
    """The result of the check of a run's inputs.

    Attributes:
        findings: Comparisons of what the run needs with what the machine has (`plan.resources`).
        resumed_step: Number of finished steps of the checkpoint from which the run continues; None if it is a new run.
        resumed_samples: Number of samples of these steps.
    """

    findings: list[Finding]
    resumed_step: int | None
    resumed_samples: int | None


def check(config: LocalConfig, early: EarlyStart) -> Checked:
    """Check the run's options and inputs without writing to the output folder.

    Args:
        config: The run's options.
        early: The programs that were already started. If they include warm servers, the check runs in a fork of one of
            them.

    Raises:
        ConfigurationError: An option or an input cannot work.
        RunFailed: The process that checks ended unexpectedly.
        WorkerLost: Ray or the warm servers ended first.
        DeadlineExceeded: The check took longer than `--start-timeout-s`.
    """
    with show_waiting("checking model, data and rewards"):
        if early.warm is not None:
            return _check_in_warm_process(config, early)
        return _check_here(config)


def read_inputs(config: LocalConfig) -> "Prepared":
    """Check and read the run's inputs in this process. This imports torch and transformers.

    Raises:
        ConfigurationError: An option or an input cannot work.
    """
    refuse_without_engines(config)
    # Set the variables before torch is imported, because torch would otherwise choose a folder in /tmp
    os.environ.update(compile_cache())
    from async_grpo.config.model_facts import MODEL_KINDS
    from async_grpo.config.preflight import prepare

    # With --engine-python, this process may lack packages that the file imports
    if is_file(config.engine) and not config.engine_python:
        engine_class(config.engine)
    kind = MODEL_KINDS[config.policy]
    kind.refuse_wrong(config.model_name_or_path, trains=config.nproc_per_node > 0)
    prepared = prepare(config)
    if config.ray_address:
        process_variables.check_reachable(config.ray_address)
    return prepared


def refuse_at_once(config: LocalConfig) -> None:
    """Make the checks that need neither torch nor transformers, before anything is started.

    Raises:
        ConfigurationError: vLLM is not installed, the environment of --engine-python cannot be used, a reward is
            unknown or has no such option, or a judge's key is missing.
    """
    refuse_without_engines(config)
    if config.reward_fns:
        rewards = ResolvedRewards.of(config)
        check_options(rewards.everyone, config.options_by_name)
        rewards.secrets()


def refuse_without_engines(config: LocalConfig) -> None:
    """Raise ConfigurationError if vLLM is not installed, or the environment of `--engine-python` cannot be used."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    if not config.engine_python:
        cure = "pip install 'async-grpo[gpu]', or 'async-grpo[cpu]' without a GPU (see README.md)"
        refuse(not has_vllm, f"vLLM is not installed here: {cure}")
        return
    engines = check_environment(config.engine_python)
    vllm_here = own_vllm_version() if has_vllm else ""
    refuse(
        config.weight_transport == "nccl" and vllm_here != engines.vllm_version,
        f"--weight-transport nccl --engine-python {config.engine_python} do not fit: the trainer sends weights by its "
        f"vLLM, {vllm_here or 'which it lacks'}, to engines of {engines.vllm_version}: install the same release here, or "
        "use object_store or shared_files",
    )
    refuse(
        config.judge_model is not None and not has_vllm,
        f"--judge-model {config.judge_model} is served by vLLM in the run's own environment, which has none: install it, "
        "or serve the judge yourself and give --judge-urls",
    )


def _check_here(config: LocalConfig) -> Checked:
    prepared = read_inputs(config)
    resumed = prepared.resumed
    # An evaluation has no trainer, so no memory and disk space is planned for one
    trains = config.nproc_per_node > 0
    findings: list[Finding] = []
    if trains:
        from async_grpo.launch.first_row import try_first_row

        try_first_row(config, prepared)
        findings = [*plan.resources(config, prepared), *answers_without_end(prepared)]
    return Checked(
        findings=findings,
        resumed_step=resumed.step if resumed else None,
        resumed_samples=resumed.samples if resumed else None,
    )


def _check_in_warm_process(config: LocalConfig, early: EarlyStart) -> Checked:
    assert early.warm is not None
    options = early.scratch / "options-to-check.json"
    result = early.scratch / "checked.json"
    write_params(options, config, {})
    command = [
        str(early.warm.torch),
        "-m",
        "async_grpo.launch.check",
        f"--config={options}",
        f"--result-file={result}",
    ]
    deadline = time.monotonic() + config.start_timeout_s
    # Start a new session, so that Ctrl-C reaches only this process, which ends the started one when `early_start` ends
    process = subprocess.Popen(command, env=early.variables, start_new_session=True)
    while process.poll() is None:
        early.supervisor.check()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the inputs were not checked within {config.start_timeout_s:.0f} s (--start-timeout-s)"
            )
        time.sleep(0.02)
    if not result.exists():
        raise RunFailed(f"the check of the inputs ended with exit code {process.returncode}")
    answer = read_json(result)
    if "refused" in answer:
        raise ConfigurationError(answer["refused"])
    return Checked(
        findings=[Finding(*finding) for finding in answer["findings"]],
        resumed_step=answer["resumed_step"],
        resumed_samples=answer["resumed_samples"],
    )


@dataclass(frozen=True, kw_only=True)
class CheckConfig(MayHaveNoTrainer):
    """Options of the checking program: those of a run or an evaluation, and the file for its answer."""

    result_file: str = option("", "File for the result, as JSON.")


def check_for_launcher(config: CheckConfig) -> None:
    """Check the inputs, and write the result to a file for the launcher: the findings, or why the run is refused."""
    set_up_logging(config.logging_level)
    answer: dict[str, Any]
    try:
        checked = _check_here(config)
        answer = vars(checked)
    except ConfigurationError as error:
        answer = {"refused": str(error)}
    Path(config.result_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    from async_grpo.launch.commands import foreign_keys
    from async_grpo.options.command_line import run_command

    run_command(CheckConfig, check_for_launcher, help="See `async-grpo run`.", foreign=foreign_keys)
