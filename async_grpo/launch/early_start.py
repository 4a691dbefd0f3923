"""Start the programs that every run on this machine needs, while its inputs are still being checked.

Ray and the warm servers take the longest to start (`benchmarks/start_up.py`). They do not depend on the run's inputs,
and do not write to the output folder.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.inference.config import is_eager, may_import_vllm
from async_grpo.launch import process_variables
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.process_variables import gpus
from async_grpo.launch.temporary_directory import short_temporary_directory
from async_grpo.launch.warm_start import WarmPythons, preloaded_libraries, warm_pythons
from async_grpo.processes.private_folder import private_folder
from async_grpo.processes.supervisor import Program, Supervisor, handling

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EarlyStart:
    """The programs of a run that are started first.

    Attributes:
        scratch: Private folder of the run's temporary files.
        supervisor: Watches and ends all programs of the run.
        variables: Environment variables of every program of the run.
        ray: Ray's head node; None if the run joins a cluster.
        ray_is_up: A file. The run's programs wait until it exists before they connect to the run's own Ray.
        warm: Files that are called instead of `python` and start processes with imported libraries; None if all
            processes start as usual.
    """

    scratch: Path
    supervisor: Supervisor
    variables: dict[str, str]
    ray: Program | None
    ray_is_up: Path
    warm: WarmPythons | None


@contextmanager
def early_start(config: LocalConfig) -> Iterator[EarlyStart]:
    """Start Ray and the warm servers. At the end of the block, end all programs of the run.

    Raises:
        ConfigurationError: In every directory for temporary files, the names of sockets would be too long.
        KeyboardInterrupt: SIGTERM or SIGHUP arrived while the block ran.
    """
    with (
        handling(_interrupt, signal.SIGTERM, signal.SIGHUP),
        short_temporary_directory(),
        private_folder() as scratch,
    ):
        process_variables.check_socket_names(scratch)
        supervisor = Supervisor(scratch / "logs")
        logs = config.output_path / "logs"
        ray_is_up = scratch / "ray-is-up"
        variables = process_variables.run_environment(
            config.ray_address, config.nproc_per_node, ray_is_up, logs
        )
        try:
            warm = None
            if _may_start_warm(config):
                forks_engines = _forks_engines(config)
                warm = warm_pythons(scratch, is_eager(config, bool(gpus())), forks_engines)
                preloaded = {"LD_PRELOAD": preloaded_libraries()} if forks_engines else {}
                supervisor.start(
                    "warm servers", warm.command, variables | preloaded, inherited=warm.listeners
                )
                for listener in warm.listeners:
                    listener.close()
                variables |= warm.variables
            ray = _start_ray(config, supervisor, variables, scratch)
            yield EarlyStart(scratch, supervisor, variables, ray, ray_is_up, warm)
        except KeyboardInterrupt as interrupt:
            log.warning(
                "%s: ending trainer, workers and Ray, which takes up to half a minute; what was written stays in %s",
                str(interrupt) or "Ctrl-C",
                config.output_path,
            )
            raise
        finally:
            # Before Ray is up, no program of the run has done anything yet, so all can be killed at once
            supervisor.stop(at_once=not ray_is_up.exists())


def _may_start_warm(config: LocalConfig) -> bool:
    """Return whether the run's processes are forked from warm servers. Warm servers are not tested with GPUs."""
    if config.ray_address:
        # In an existing cluster, actors are started by a Ray node. Another user may have started this node, and its
        # processes cannot reach this user's warm servers
        return False
    if config.warm_start == "auto":
        return not gpus()
    return config.warm_start == "yes"


def _forks_engines(config: LocalConfig) -> bool:
    """Return whether engines are forked from a warm server. That server also imports vLLM, which takes seconds."""
    return not config.engine_python and may_import_vllm(config.engine)


def _start_ray(
    config: LocalConfig, supervisor: Supervisor, variables: dict[str, str], scratch: Path
) -> Program | None:
    if config.ray_address:
        return None
    num_gpus = max(0, len(gpus()) - config.trainer_gpus_alone - config.judge_gpus_alone)
    return supervisor.start(
        "ray",
        process_variables.ray_command(variables["RAY_ADDRESS"], scratch, num_gpus),
        process_variables.ray_environment(variables, config.trainer_gpus_alone, config.judge_gpus_alone),
    )


def _interrupt(number: int, _: Any) -> None:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP, as Python does on Ctrl-C, so that the run saves a checkpoint."""
    raise KeyboardInterrupt(signal.Signals(number).name)
