"""A whole run on this machine, from one command: Ray, workers and trainer as the programs a user starts by hand."""

import dataclasses
import importlib.util
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.config.params import write_params
from async_grpo.config.preflight import prepare
from async_grpo.config.recipes import RECIPES
from async_grpo.config.run import RunConfig, WorkerConfig
from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.generation.config import EngineOptions
from async_grpo.launch.environment import (
    check_reachable,
    free_port,
    gpus,
    ray_command,
    ray_environment,
    run_environment,
    signals_as_exceptions,
    temporary_folder,
)
from async_grpo.launch.judge_servers import LocalJudge, serving
from async_grpo.metrics.run_folder import claim
from async_grpo.metrics.writer import PARAMS_FILE
from async_grpo.options.fields import POSITIVE, option
from async_grpo.options.files import as_arguments as one_option
from async_grpo.processes.supervisor import Supervisor, log_excerpt

RAY_START_S, SHUTDOWN_TIMEOUT_S = 90.0, 30.0
REFUSED = re.compile(r"was the first to end, with exit code 2\b")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LocalConfig(LocalJudge, EngineOptions, RunConfig):
    """A `RunConfig` and what the workers beside it need."""

    announces_recipe = False  # its trainer does

    nproc_per_node: int = option(1, "Trainer ranks.", "Local", range=POSITIVE, everyday=True)
    generation_workers: int = option(1, "Generation workers.", "Local", range=POSITIVE, everyday=True)
    ray_address: str = option("", "Join this cluster instead of starting one.", "Local")

    def __post_init__(self) -> None:
        super().__post_init__()
        capacity = self.max_sequences
        if self.samples_per_question > capacity:
            raise ConfigurationError(
                f"a group of {self.samples_per_question} (--samples-per-question) does not fit an engine of {capacity} "
                "sequences (--max-num-seqs + --overhead-seqs)"
            )
        self.check_judge(gpus())
        engines = self.generation_workers * self.tensor_parallel_size
        needed = self.nproc_per_node + engines + len(self.logprob_roles) + self.judge_gpus_alone
        if gpus() and len(gpus()) < needed:
            raise ConfigurationError(
                f"{needed} GPUs are needed (ranks {self.nproc_per_node}, engines {engines}, and "
                f"logprob workers and judges), "
                f"{len(gpus())} are here: use fewer, or CUDA_VISIBLE_DEVICES= for the CPU"
            )
        if not self.reward_fns:
            raise ConfigurationError(
                "name the rewards of the run: --reward-fns countdown,format (see reward_registry.py)"
            )


def run_locally(config: LocalConfig) -> None:
    """Start everything, wait for the end of the training, and leave nothing behind.

    Raises:
        ConfigurationError: before anything is started, if a setting or a file is wrong.
        RunFailed, WorkerLost: a program ended before its time; says which and why.
    """
    check(config)
    claim(config.output_path)
    start(config)


def check(config: LocalConfig) -> None:
    """Raise ConfigurationError for all that can be known to be wrong; writes nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigurationError(
            "vLLM is not installed here: pip install 'async-grpo[gpu]', or 'async-grpo[cpu]' without a GPU (see README.md)"
        )
    prepare(config)
    if config.ray_address:
        check_reachable(config.ray_address)


def start(config: LocalConfig) -> None:
    """The run itself, in a folder that `claim` has made; raises what `run_locally` does."""
    write_params(config.output_path / PARAMS_FILE, config, {})
    supervisor = Supervisor(config.output_path / "logs")
    judge = serving(config, gpus(), config.output_path / "logs", config.enforce_eager)
    with signals_as_exceptions(), temporary_folder() as scratch, judge as found:
        try:
            _run(config, supervisor, scratch, found)
        except KeyboardInterrupt as interrupt:
            log.warning(
                "%s: ending trainer, workers and Ray, which takes up to half a minute; what was written stays in %s",
                *(str(interrupt) or "Ctrl-C", config.output_path),
            )
            raise
        finally:
            supervisor.stop()


def _run(config: LocalConfig, supervisor: Supervisor, scratch: Path, judge: dict[str, str]) -> None:
    environment = run_environment(config.ray_address, config.nproc_per_node)
    if not config.ray_address:
        log.info("starting a private Ray")
        command = ray_command(environment["RAY_ADDRESS"], scratch)
        for_ray = ray_environment(environment, config.nproc_per_node, config.judge_gpus_alone)
        supervisor.wait_for_text(
            supervisor.start("ray", command, for_ray), "Ray runtime started", RAY_START_S
        )
    log.info("starting workers and trainer; their output is in %s", config.output_path / "logs")
    workers = [
        supervisor.start(
            f"{worker.mode} worker {number}", program("async_grpo.programs.worker", worker), environment
        )
        for number, worker in enumerate(_workers(config))
    ]
    found = [f"--{name.replace('_', '-')}={value}" for name, value in judge.items()]
    trainer = supervisor.start("trainer", [*_trainer_command(config), *found], environment, console=True)
    code = supervisor.wait(trainer)
    if code != 0:
        if REFUSED.search(log_excerpt(trainer)):
            raise ConfigurationError(log_excerpt(trainer).strip())
        raise RunFailed(f"{trainer.describe_exit()}{log_excerpt(trainer)}")
    log.info("done; waiting for the workers to end")
    supervisor.wait_all(workers, SHUTDOWN_TIMEOUT_S)


def _workers(config: LocalConfig) -> list[WorkerConfig]:
    shared: dict[str, Any] = {
        "model_path": config.model_name_or_path,
        "run_name": config.run_name,
        "start_timeout_s": config.start_timeout_s,
        "logging_level": config.logging_level,
    }
    generation = WorkerConfig(
        mode="generation",
        reward_fns=config.reward_fns,
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(EngineOptions)},
        **shared,
    )
    logprob = [
        WorkerConfig(mode="logprob", role=role, max_tokens_per_gpu=config.max_tokens_per_gpu, **shared)
        for role in config.logprob_roles
    ]
    return [generation] * config.generation_workers + logprob


def program(module: str, config: Any) -> list[str]:
    """The command line of a program with every setting that differs from its default."""
    return [sys.executable, "-m", module, *as_arguments(config, type(config))]


def _trainer_command(config: LocalConfig) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={config.nproc_per_node}"]
    rendezvous = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [*torchrun, *rendezvous, "-m", "async_grpo.programs.trainer", *as_arguments(config, RunConfig)]


def as_arguments(config: Any, fields_of: type) -> list[str]:
    """The options, of those that are fields of `fields_of`, in which a configuration differs from its defaults.

    >>> sorted(as_arguments(WorkerConfig(mode="logprob", model_path=".", enforce_eager=True), WorkerConfig))
    ['--enforce-eager', '--mode=logprob', '--model-path=.']
    """
    arguments = []
    # A value may differ from the recipe's by being the default
    preset = RECIPES.get(getattr(config, "recipe", None) or "", {})
    for field in dataclasses.fields(fields_of):
        value = getattr(config, field.name)
        if value is None or (value == field.default and field.name not in preset):
            continue
        arguments += one_option(field.name, value)
    return arguments
