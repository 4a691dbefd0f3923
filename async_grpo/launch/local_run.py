"""`async-grpo run`: start Ray, workers and trainer on this machine, and wait for the end of the run."""

import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from async_grpo.algorithm.teacher_config import worker_flags
from async_grpo.config.resume import goes_on
from async_grpo.config.run import write_params
from async_grpo.errors import EXIT_USAGE, RunFailed, RunInterrupted
from async_grpo.inference.config import is_eager
from async_grpo.launch import plan, process_variables
from async_grpo.launch.check import check, read_inputs, refuse_at_once
from async_grpo.launch.early_start import EarlyStart, early_start
from async_grpo.launch.judge_servers import serving
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.process_variables import gpus
from async_grpo.metrics.console import show_times, show_waiting
from async_grpo.metrics.writer import PARAMS_FILE, claim
from async_grpo.options.fields import dashed, refuse
from async_grpo.processes.hub import local_model
from async_grpo.processes.look import request_look
from async_grpo.processes.supervisor import Program, Supervisor, handling, log_excerpt
from async_grpo.processes.warm_client import DIES_WITH_STARTER
from async_grpo.training.checkpoint_folder import checkpoints_of, read

RAY_START_S = 90.0
# Name of the module in the command line of every rank. `request_look` finds a rank by it, and asks the rank for its
# stacks
TRAINER = "async_grpo.launch.trainer"
SHUTDOWN_TIMEOUT_S = 30.0  # seconds that workers may take to end after the trainer has ended
# Matches torchrun's report of a rank that refused an option or an input
REFUSED = re.compile(r"was the first to end, with exit code 2\b")
log = logging.getLogger(__name__)


def run_locally(config: LocalConfig) -> None:
    """Start all programs of the run, wait for the end of the training, and stop the programs that are still running.

    Raises:
        ConfigurationError: An option or a file is wrong. Nothing was written.
        RunFailed: A program ended unexpectedly. The message names the program and the reason.
        WorkerLost: A worker ended unexpectedly. The message names the worker and the reason.
        RunInterrupted: The trainer saved a checkpoint and ended before the last step.
        KeyboardInterrupt: The run was interrupted, and no checkpoint was saved.
    """
    config = replace(config, model_name_or_path=local_model(config.model_name_or_path))
    config = replace(config, teacher=config.with_folders(local_model))
    if config.dry_run:
        prepared = read_inputs(config)
        plan.show([*plan.plan(config, prepared), *plan.resources(config, prepared)])
        return
    refuse_at_once(config)
    with early_start(config) as early:
        checked = check(config, early)
        if checked.resumed_step is not None and checked.resumed_step >= config.num_steps:
            if (config.output_path / "hf_format" / f"samples_{checked.resumed_samples}").is_dir():
                log.info(
                    "the run in %s is complete: %d steps are done", config.output_path, checked.resumed_step
                )
                return
            log.warning(
                "%d steps are done, but their model was not written: it is written now", checked.resumed_step
            )
        for finding in checked.findings:
            refuse(finding.level == plan.ERROR, f"{finding.name}: {finding.found}: {finding.cure}")
            if finding.level == plan.WARNING:
                log.warning("%s: %s: %s", finding.name, finding.found, finding.cure)
        claim(config.output_path, may_hold_run=goes_on(config))
        try:
            start(config, early)
        finally:
            show_times(config.output_path)


def start(config: LocalConfig, early: EarlyStart, evaluator: Sequence[str] = ()) -> None:
    """Start all programs of a run, and wait for the end of the run. The output folder must have been claimed (`claim`).

    Args:
        config: The run's options.
        early: The programs that were already started.
        evaluator: Command of a program that runs instead of the trainer and saves no checkpoints. () runs the trainer.

    Raises:
        AsyncGrpoError: The run failed; see `run_locally`.
    """
    write_params(config.output_path / PARAMS_FILE, config, {})
    logs = config.output_path / "logs"
    early.supervisor.move_outputs(logs)
    with serving(config, gpus(), logs, is_eager(config, bool(gpus()))) as judge_options:
        _run(config, early, judge_options, evaluator)


def _run(
    config: LocalConfig, early: EarlyStart, judge_options: dict[str, str], evaluator: Sequence[str]
) -> None:
    supervisor = early.supervisor
    variables = early.variables
    logs = config.output_path / "logs"
    python = str(early.warm.torch) if early.warm is not None else sys.executable
    trainer_name = "evaluator" if evaluator else "trainer"
    log.info("starting workers and %s; their output is in %s", trainer_name, logs)
    workers = []
    for number, arguments in enumerate(worker_arguments(config)):
        mode = arguments[-1].removeprefix("--mode=")
        workers.append(supervisor.start(f"{mode} worker {number}", [python, *arguments], variables))
    trainer_command = [python, *(evaluator or trainer_arguments(config, early.scratch))]
    trainer_command += [f"--{dashed(name)}={value}" for name, value in judge_options.items()]
    trainer = supervisor.start(
        trainer_name, trainer_command, variables | _trainer_variables(config, early.scratch), console=True
    )
    with handling(lambda *_: request_look(os.getpid(), TRAINER), signal.SIGUSR1):
        if early.ray is not None:
            # Do not wait for Ray earlier: workers and trainer import their libraries while it starts
            with show_waiting("waiting for Ray"):
                supervisor.wait_for_text(early.ray, "Ray runtime started", RAY_START_S)
        early.ray_is_up.touch()
        _await_end(config, supervisor, trainer, can_save=not evaluator)
        log.info("done; waiting for the workers to end")
        supervisor.wait_all(workers, SHUTDOWN_TIMEOUT_S)


def _trainer_variables(config: LocalConfig, scratch: Path) -> dict[str, str]:
    """Return the environment variables that only the trainer gets."""
    threads = process_variables.trainer_threads(
        config.model_name_or_path, config.nproc_per_node, updates_on_cpu=config.cpu_offload
    )
    memory = process_variables.trainer_memory(config.trainer_peak_share)
    # With this variable, the ranks end when torchrun ends, and torchrun ends when this process ends
    death = {DIES_WITH_STARTER: "1"}
    return process_variables.torchrun_environment(scratch) | memory | threads | death


def _await_end(config: LocalConfig, supervisor: Supervisor, trainer: Program, *, can_save: bool) -> None:
    """Wait for the trainer to end.

    Args:
        config: The run's options.
        supervisor: The supervisor of the run's programs.
        trainer: The trainer, or the program that runs instead of it.
        can_save: Whether the program has `--grace-s` seconds to save a checkpoint after an interrupt.

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
            "%s: the trainer saves a checkpoint first, for at most %.0f s (--grace-s); a second signal ends it at once",
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
    """Raise RunInterrupted if the trainer ended early and saved a checkpoint after `start_time`, which gives the reason."""
    for folder in checkpoints_of(config.output_path)[:1]:
        if folder.stat().st_mtime >= start_time and (reason := read(folder).ended):
            raise RunInterrupted(f"{reason}: saved in {folder}; the same command goes on from there")


def worker_arguments(config: LocalConfig) -> list[list[str]]:
    """Return the arguments with which Python starts each worker.

    Workers read their options from the run's parameters file.
    """
    node = "here"
    if config.ray_address:
        # In a cluster, the GPUs of this machine belong to the trainer, so workers use those of other nodes
        node = "gpu" if gpus() else "any"
    worker = ["-m", "async_grpo.launch.worker", parameters(config), f"--node={node}"]
    generation_workers = [[*worker, "--mode=generation"]] * config.generation_workers
    logprob_workers = []
    for kind in config.logprob_roles:
        folder = config.teacher_folders.get(kind)
        model = [f"--model-path={folder}"] if folder else []
        logprob_workers.append([*worker, *model, *worker_flags(kind), "--mode=logprob"])
    return generation_workers + logprob_workers


def trainer_arguments(config: LocalConfig, scratch: Path) -> list[str]:
    """Return the arguments with which Python starts torchrun and the trainer's ranks.

    Args:
        config: The run's options.
        scratch: Private folder for the temporary files of torchrun.
    """
    torchrun = process_variables.torchrun_arguments(config.nproc_per_node, scratch)
    torchrun.append(f"--shutdown-timeout={math.ceil(config.grace_s)}")
    return [*torchrun, "-m", "async_grpo.launch.trainer", parameters(config)]


def parameters(config: LocalConfig) -> str:
    """Return the option `--config` with the path of the run's parameters file."""
    return f"--config={(config.output_path / PARAMS_FILE).resolve()}"
