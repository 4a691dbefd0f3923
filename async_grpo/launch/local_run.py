"""`async-grpo run`: start Ray, workers and trainer on this machine, and wait for the end of the run."""

import importlib.util
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.config.resume import goes_on
from async_grpo.config.run import write_params
from async_grpo.errors import EXIT_USAGE, RunFailed, RunInterrupted
from async_grpo.inference.config import engine_class
from async_grpo.launch import plan, process_variables
from async_grpo.launch.judge_servers import serving
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.process_variables import gpus
from async_grpo.metrics.console import show_times, show_waiting
from async_grpo.metrics.writer import PARAMS_FILE, claim
from async_grpo.options.fields import dashed, refuse
from async_grpo.options.source_file import is_file
from async_grpo.processes.look import request_look
from async_grpo.processes.private_folder import compile_cache, private_folder
from async_grpo.processes.supervisor import Program, Supervisor, handling, log_excerpt
from async_grpo.training.checkpoint_folder import checkpoints_of, read

if TYPE_CHECKING:
    from async_grpo.config.preflight import Prepared

RAY_START_S = 90.0
SHUTDOWN_TIMEOUT_S = 30.0  # seconds that workers may take to end after the trainer
# Matches torchrun's report of a rank that refused an option or an input
REFUSED = re.compile(r"was the first to end, with exit code 2\b")
log = logging.getLogger(__name__)


def run_locally(config: LocalConfig) -> None:
    """Start all programs of the run, wait for the end of the training, and stop the programs that are still running.

    Raises:
        ConfigurationError: An option or a file is wrong. Nothing was started.
        RunFailed: A program ended unexpectedly. The message names the program and the reason.
        WorkerLost: A worker ended unexpectedly. The message names the worker and the reason.
        RunInterrupted: The trainer saved a checkpoint and ended before the last step.
        KeyboardInterrupt: The run was interrupted, and no checkpoint was saved.
    """
    prepared = check(config)
    findings = plan.resources(config, prepared)
    resumed = prepared.resumed
    if config.dry_run:
        plan.show([*plan.plan(config, prepared), *findings])
        return
    if resumed is not None and resumed.step >= config.num_steps:
        if (config.output_path / "hf_format" / f"samples_{resumed.samples}").is_dir():
            log.info("the run in %s is complete: %d steps are done", config.output_path, resumed.step)
            return
        log.warning("%d steps are done, and their model has not been written: it is now", resumed.step)
    for finding in findings:
        refuse(finding.level == plan.ERROR, f"{finding.name}: {finding.found}: {finding.cure}")
        if finding.level == plan.WARNING:
            log.warning("%s: %s: %s", finding.name, finding.found, finding.cure)
    claim(config.output_path, may_hold_run=goes_on(config))
    try:
        start(config)
    finally:
        show_times(config.output_path)


def check(config: LocalConfig) -> "Prepared":
    """Check the run's options and inputs without writing anything, and return the inputs.

    Raises:
        ConfigurationError: An option or an input cannot work.
    """
    cure = "pip install 'async-grpo[gpu]', or 'async-grpo[cpu]' without a GPU (see README.md)"
    refuse(importlib.util.find_spec("vllm") is None, f"vLLM is not installed here: {cure}")
    log.info("checking model, data and rewards")
    # Set before torch is imported, because torch would choose a folder in /tmp
    os.environ.update(compile_cache())
    from async_grpo.config.preflight import prepare  # imports torch and transformers

    if is_file(config.engine):
        engine_class(config.engine)
    prepared = prepare(config)
    if config.ray_address:
        process_variables.check_reachable(config.ray_address)
    return prepared


def start(config: LocalConfig, evaluator: Sequence[str] = ()) -> None:
    """Start all programs of a run, and wait for the end of the run. The output folder must have been claimed (`claim`).

    Args:
        config: The run's options.
        evaluator: Command of a program that runs instead of the trainer, without saving checkpoints. () runs the
            trainer.

    Raises:
        AsyncGrpoError: The run failed; see `run_locally`.
    """
    write_params(config.output_path / PARAMS_FILE, config, {})
    logs = config.output_path / "logs"
    supervisor = Supervisor(logs)
    judge = serving(config, gpus(), logs, config.enforce_eager)
    with (
        handling(_interrupt, signal.SIGTERM, signal.SIGHUP),
        private_folder() as scratch,
        judge as judge_options,
    ):
        try:
            process_variables.check_socket_names(scratch)
            _run(config, supervisor, scratch, judge_options, evaluator)
        except KeyboardInterrupt as interrupt:
            log.warning(
                "%s: ending trainer, workers and Ray, which takes up to half a minute; what was written stays in %s",
                str(interrupt) or "Ctrl-C",
                config.output_path,
            )
            raise
        finally:
            supervisor.stop()


def _interrupt(number: int, _: Any) -> None:
    """Handle SIGTERM and SIGHUP as Python handles Ctrl-C, so that the run saves a checkpoint before it ends."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _run(
    config: LocalConfig,
    supervisor: Supervisor,
    scratch: Path,
    judge_options: dict[str, str],
    evaluator: Sequence[str],
) -> None:
    ray_is_up = scratch / "ray-is-up"
    logs = config.output_path / "logs"
    variables = process_variables.run_environment(config.ray_address, config.nproc_per_node, ray_is_up, logs)
    trainer_name = "evaluator" if evaluator else "trainer"
    log.info("starting Ray, workers and %s; their output is in %s", trainer_name, logs)
    ray = None
    if not config.ray_address:
        num_gpus = max(0, len(gpus()) - config.trainer_gpus_alone - config.judge_gpus_alone)
        ray = supervisor.start(
            "ray",
            process_variables.ray_command(variables["RAY_ADDRESS"], scratch, num_gpus),
            process_variables.ray_environment(variables, config.trainer_gpus_alone, config.judge_gpus_alone),
        )
    workers = []
    for number, command in enumerate(worker_commands(config)):
        mode = command[-1].removeprefix("--mode=")
        workers.append(supervisor.start(f"{mode} worker {number}", command, variables))
    trainer_arguments = list(evaluator or trainer_command(config, scratch))
    trainer_arguments += [f"--{dashed(name)}={value}" for name, value in judge_options.items()]
    variables |= process_variables.torchrun_environment(scratch)
    variables |= process_variables.trainer_memory(config.trainer_gpu_share)
    variables |= process_variables.trainer_threads(
        config.model_name_or_path, config.nproc_per_node, updates_on_cpu=config.cpu_offload
    )
    trainer = supervisor.start(trainer_name, trainer_arguments, variables, console=True)
    with handling(lambda *_: request_look(trainer.process.pid), signal.SIGUSR1):
        if ray is not None:  # workers and trainer import their libraries while Ray starts
            with show_waiting("waiting for Ray"):
                supervisor.wait_for_text(ray, "Ray runtime started", RAY_START_S)
            ray_is_up.touch()
        _await_end(config, supervisor, trainer, can_save=not evaluator)
        log.info("done; waiting for the workers to end")
        supervisor.wait_all(workers, SHUTDOWN_TIMEOUT_S)


def _await_end(config: LocalConfig, supervisor: Supervisor, trainer: Program, *, can_save: bool) -> None:
    """Wait for the trainer to end.

    Args:
        config: The run's options.
        supervisor: The supervisor of the run's programs.
        trainer: The trainer, or the program that runs instead of it.
        can_save: Whether an interrupt gives the program `--grace-s` seconds to save a checkpoint.

    Raises:
        ConfigurationError: The trainer refused an option or an input.
        RunFailed: The trainer failed.
        RunInterrupted: The trainer saved a checkpoint and ended before the last step.
    """
    start_time = time.time()

    def has_output() -> bool:
        return f"[{trainer.name} " in trainer.output.read_text(errors="replace")

    try:
        with show_waiting("waiting for their libraries to load", until=has_output):
            exit_code = supervisor.wait(trainer)
    except KeyboardInterrupt as interrupt:
        if not can_save:
            raise
        log.warning(
            "%s: the trainer saves a checkpoint first, for at most %.0f s (--grace-s); again to end at once",
            str(interrupt) or "Ctrl-C",
            config.grace_s,
        )
        trainer.process.terminate()
        supervisor.wait_all([trainer], config.grace_s)
        _raise_if_saved(config, start_time)
        raise
    if exit_code != 0:
        _raise_if_saved(config, start_time)
        excerpt = log_excerpt(trainer)
        refuse(exit_code == EXIT_USAGE or bool(REFUSED.search(excerpt)), excerpt.strip())
        raise RunFailed(f"{trainer.describe_exit()}{excerpt}")


def _raise_if_saved(config: LocalConfig, start_time: float) -> None:
    """Raise RunInterrupted if a checkpoint was saved after `start_time` that tells why the trainer ended early."""
    for folder in checkpoints_of(config.output_path)[:1]:
        if folder.stat().st_mtime >= start_time and (reason := read(folder).ended):
            raise RunInterrupted(f"{reason}: saved in {folder}; the same command goes on from there")


def worker_commands(config: LocalConfig) -> list[list[str]]:
    """Return the command lines of all workers. Workers read their options from the run's parameters file."""
    node = "here"
    if config.ray_address:
        # Workers use GPUs of other nodes, because the GPUs of this machine belong to the trainer
        node = "gpu" if gpus() else "any"
    worker = [sys.executable, "-m", "async_grpo.launch.worker", parameters(config), f"--node={node}"]
    generation_commands = [[*worker, "--mode=generation"]] * config.generation_workers
    logprob_commands = [[*worker, f"--role={role}", "--mode=logprob"] for role in config.logprob_roles]
    return generation_commands + logprob_commands


def trainer_command(config: LocalConfig, scratch: Path) -> list[str]:
    """Return the command line of the trainer's ranks.

    Args:
        config: The run's options.
        scratch: Private folder for the temporary files of torchrun.
    """
    torchrun = process_variables.torchrun_command(config.nproc_per_node, scratch)
    torchrun.append(f"--shutdown-timeout={math.ceil(config.grace_s)}")
    return [*torchrun, "-m", "async_grpo.launch.trainer", parameters(config)]


def parameters(config: LocalConfig) -> str:
    """Return the option `--config` with the path of the run's parameters file."""
    return f"--config={(config.output_path / PARAMS_FILE).resolve()}"
