"""A whole run on this machine, from one command: Ray, workers and trainer as the programs a user starts by hand."""

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
from async_grpo.launch import plan as quick
from async_grpo.launch import process_variables
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

RAY_START_S, SHUTDOWN_TIMEOUT_S = 90.0, 30.0
REFUSED = re.compile(r"was the first to end, with exit code 2\b")
log = logging.getLogger(__name__)


def run_locally(config: LocalConfig) -> None:
    """Start everything, wait for the end of the training, and leave nothing behind.

    ConfigurationError: before anything is started, if a setting or a file is wrong.
    RunFailed, WorkerLost: a program ended before its time; says which and why.
    """
    prepared = check(config)
    findings, resumed = quick.resources(config, prepared), prepared.resumed
    if config.dry_run:
        quick.show([*quick.plan(config, prepared), *findings])
        return
    if resumed is not None and resumed.step >= config.num_steps:
        if (config.output_path / "hf_format" / f"samples_{resumed.samples}").is_dir():
            log.info("the run in %s is complete: %d steps are done", config.output_path, resumed.step)
            return
        log.warning("%d steps are done, and their model has not been written: it is now", resumed.step)
    for name, level, found, cure in findings:
        refuse(level == quick.ERROR, f"{name}: {found}: {cure}")
        if level == quick.WARNING:
            log.warning("%s: %s: %s", name, found, cure)
    claim(config.output_path, again=goes_on(config))
    try:
        start(config)
    finally:
        show_times(config.output_path)


def check(config: LocalConfig) -> "Prepared":
    """Raise ConfigurationError for all that can be known to be wrong; writes nothing. Returns what was read."""
    cure = "pip install 'async-grpo[gpu]', or 'async-grpo[cpu]' without a GPU (see README.md)"
    refuse(importlib.util.find_spec("vllm") is None, f"vLLM is not installed here: {cure}")
    log.info("checking model, data and rewards")
    os.environ.update(compile_cache())  # before torch, at its import, chooses a folder in /tmp
    from async_grpo.config.preflight import prepare  # torch and transformers

    if is_file(config.engine):
        engine_class(config.engine)
    prepared = prepare(config)
    if config.ray_address:
        process_variables.check_reachable(config.ray_address)
    return prepared


def start(config: LocalConfig, instead: Sequence[str] = ()) -> None:
    """Run everything in a folder that `claim` has made.

    Args:
        config: The run's options.
        instead: Command of a program that takes the trainer's place and has nothing to save.

    Raises:
        AsyncGrpoError: As `run_locally` does.
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
            _run(config, supervisor, scratch, judge_options, instead)
        except KeyboardInterrupt as interrupt:
            what = "ending trainer, workers and Ray, which takes up to half a minute"
            where = f"what was written stays in {config.output_path}"
            log.warning("%s: %s; %s", str(interrupt) or "Ctrl-C", what, where)
            raise
        finally:
            supervisor.stop()


def _interrupt(number: int, _: Any) -> None:
    """SIGTERM and SIGHUP end a run as Ctrl-C does: in order."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _run(
    config: LocalConfig, supervisor: Supervisor, scratch: Path, judge: dict[str, str], instead: Sequence[str]
) -> None:
    ray_is_up, logs = scratch / "ray-is-up", config.output_path / "logs"
    variables = process_variables.run_environment(config.ray_address, config.nproc_per_node, ray_is_up, logs)
    name = "evaluator" if instead else "trainer"
    log.info("starting Ray, workers and %s; their output is in %s", name, logs)
    ray = None
    if not config.ray_address:
        command = process_variables.ray_command(variables["RAY_ADDRESS"], scratch)
        for_ray = process_variables.ray_environment(variables, config.nproc_per_node, config.judge_gpus_alone)
        ray = supervisor.start("ray", command, for_ray)
    workers = [
        supervisor.start(f"{command[-1].partition('=')[2]} worker {number}", command, variables)
        for number, command in enumerate(worker_commands(config))
    ]
    command = list(instead or trainer_command(config, scratch))
    command += [f"--{dashed(flag)}={value}" for flag, value in judge.items()]
    variables |= process_variables.torchrun_environment(scratch)
    variables |= process_variables.trainer_threads(config.model_name_or_path, config.nproc_per_node)
    trainer = supervisor.start(name, command, variables, console=True)
    with handling(lambda *_: request_look(trainer.process.pid), signal.SIGUSR1):
        if ray is not None:  # the others import their libraries meanwhile
            with show_waiting("waiting for Ray"):
                supervisor.wait_for_text(ray, "Ray runtime started", RAY_START_S)
            ray_is_up.touch()
        _await_end(config, supervisor, trainer, can_save=not instead)
        log.info("done; waiting for the workers to end")
        supervisor.wait_all(workers, SHUTDOWN_TIMEOUT_S)


def _await_end(config: LocalConfig, supervisor: Supervisor, trainer: Program, *, can_save: bool) -> None:
    """Wait for the trainer to end. `can_save`: on an interrupt it is given the time for a checkpoint."""
    begun, what = time.time(), "waiting for their libraries to load"
    name = trainer.name
    try:
        with show_waiting(what, until=lambda: f"[{name} " in trainer.output.read_text(errors="replace")):
            code = supervisor.wait(trainer)
    except KeyboardInterrupt as interrupt:
        if not can_save:
            raise
        what = "the trainer saves a checkpoint first, for at most %.0f s (--grace-s); again to end at once"
        log.warning(f"%s: {what}", str(interrupt) or "Ctrl-C", config.grace_s)
        trainer.process.terminate()
        supervisor.wait_all([trainer], config.grace_s)
        _tell_if_saved(config, begun)
        raise
    if code != 0:
        _tell_if_saved(config, begun)
        words = log_excerpt(trainer)
        refuse(code == EXIT_USAGE or bool(REFUSED.search(words)), words.strip())
        raise RunFailed(f"{trainer.describe_exit()}{words}")


def _tell_if_saved(config: LocalConfig, since: float) -> None:
    """RunInterrupted if the trainer ended in order, with a checkpoint, before its time."""
    for folder in checkpoints_of(config.output_path)[:1]:
        if folder.stat().st_mtime >= since and (reason := read(folder).ended):
            raise RunInterrupted(f"{reason}: saved in {folder}; the same command goes on from there")


def worker_commands(config: LocalConfig) -> list[list[str]]:
    """Return the command lines of all workers, each of which reads its options from the run's parameters."""
    node = ("gpu" if gpus() else "any") if config.ray_address else "here"  # the GPUs here are the trainer's
    worker = [sys.executable, "-m", "async_grpo.launch.worker", parameters(config), f"--node={node}"]
    engines = [[*worker, "--mode=generation"]] * config.generation_workers
    return engines + [[*worker, f"--role={role}", "--mode=logprob"] for role in config.logprob_roles]


def trainer_command(config: LocalConfig, scratch: Path) -> list[str]:
    """Return the command line of the trainer's ranks, whose files of the moment lie in `scratch`."""
    torchrun = process_variables.torchrun_command(config.nproc_per_node, scratch)
    torchrun.append(f"--shutdown-timeout={math.ceil(config.grace_s)}")
    return [*torchrun, "-m", "async_grpo.launch.trainer", parameters(config)]


def parameters(config: LocalConfig) -> str:
    """Return the option that names the file of the run's parameters."""
    return f"--config={(config.output_path / PARAMS_FILE).resolve()}"
