"""The Ray actors around the workers: an engine, or a logprob server, that joins a run and follows its weights."""

import asyncio
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.cluster.channel import ChannelServer
from async_grpo.config.run import WorkerConfig
from async_grpo.errors import ConfigurationError, WeightsDidNotLand
from async_grpo.inference.config import UNLIMITED, engine_class
from async_grpo.messages import SharedRunSettings
from async_grpo.options.command_line import log_to_own_file
from async_grpo.options.source_file import library_version
from async_grpo.processes.private_folder import compile_cache, make_private_folder, temporary_files_in
from async_grpo.processes.process_tree import descendants
from async_grpo.protocols import Receipt, WeightPackage, answer_canary
from async_grpo.types import GENERATION

# So that several engines can share a machine without a GPU; the forwarded environment goes before these
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine pins itself to the same core
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class WorkerActor(ChannelServer):
    """A worker that joins a run and follows its weights. One package is loaded at a time, never an older one."""

    served: tuple[str, ...]  # the engine's methods that a link calls

    def __init__(self) -> None:
        log_to_own_file(type(self).__name__.removesuffix("Actor").lower())
        self._loading = asyncio.Lock()
        self._version: int | None = None
        self._settings: SharedRunSettings | None = None

    async def warm_up(self, config: WorkerConfig) -> None:
        """Import what `start` needs, while the trainer, which alone knows the settings, still starts itself."""
        os.environ.update(compile_cache())  # before torch, at its import, chooses a folder in /tmp
        _worker_class(config)

    async def start(self, config: WorkerConfig, settings: SharedRunSettings) -> tuple[int, int]:
        """Load the model; returns how many sequences and tokens it holds. ConfigurationError: it is not the trainer's."""
        # Not in the dispatcher, which can do without these libraries, and may be on another node
        check_library(settings)
        check_model(config.model_path, settings)
        generates = config.mode == GENERATION
        config = config.with_sequences(settings) if generates else config
        self._settings = settings
        # vLLM keeps sockets and stores of its processes among the temporary files, readable for all users
        os.environ.update(compile_cache())
        self._folder = make_private_folder()
        with temporary_files_in(self._folder):
            self._engine = _worker_class(config).start(config, settings)
        self.serve({name: getattr(self._engine, name) for name in self.served})
        return config.max_sequences if generates else UNLIMITED, self._engine.kv_cache_tokens

    async def update_weights(self, package: WeightPackage) -> Receipt:
        """Load a package and answer its canary. WeightsDidNotLand: newer weights are loaded already."""
        async with self._loading:
            if self._version is not None and 0 <= package.version < self._version:
                raise WeightsDidNotLand(f"version {package.version} came after {self._version}")
            chunks = [_mapped(one) if isinstance(one, Path) else (await one).data for one in package.chunks]
            manifest = await self._engine.update(package.version, chunks)
            self._version = package.version
            return manifest, await answer_canary(self._engine, package.canary_texts)

    async def leave_run(self) -> None:
        """The run's trainer is gone: its requests are cancelled."""
        if self._settings is not None:
            self.forget_callers()

    async def begin_anew(self, settings: SharedRunSettings) -> bool:
        """Serve the next start of a run, without loading the model again; False: it must be loaded again."""
        check_library(settings)
        earlier = self._settings
        fits = earlier is not None and earlier == replace(settings, checkpoint=earlier.checkpoint)
        if not fits or self._loading.locked() or not hasattr(self._engine, "begin_anew"):
            return False
        self._settings, self._version = settings, None
        return await self._engine.begin_anew()

    async def processes(self) -> list[int]:
        """The ids of this one and of all below it."""
        return [os.getpid(), *descendants(os.getpid())]

    async def until_failure(self) -> str:
        return await self._engine.until_failure()

    async def close(self) -> None:
        self._engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class GenerationActor(WorkerActor):
    """An `Engine` of whichever class the run names."""

    served = ("complete", "progress")

    async def transfer(self, method: str, *args: Any) -> Any:
        """One step of an update that the trainer drives (NCCL). ConfigurationError: the engine has no such steps."""
        if not hasattr(self._engine, method):
            raise ConfigurationError(
                f"{type(self._engine).__name__} can only be given weights in packages: choose another "
                "--weight-transport, or an --engine with the steps that GenerationWorker has"
            )
        return await getattr(self._engine, method)(*args)


class LogprobActor(WorkerActor):
    """A `LogprobWorker`; of the proximal ones the weights change."""

    served = ("logprobs",)


def _worker_class(config: WorkerConfig) -> Any:
    if config.mode == GENERATION:
        return engine_class(config.engine)
    from async_grpo.inference.logprob_worker import LogprobWorker

    return LogprobWorker


def check_library(settings: SharedRunSettings) -> None:
    """Refuse another version of the library: its messages might silently mean something else."""
    if library_version() != settings.library:
        raise ConfigurationError(
            f"this node ({socket.gethostname()}) has version {library_version()} of async-grpo, the trainer of run "
            f"{settings.run_name!r} {settings.library}: install the same one on every node"
        )


def check_model(model_path: str, settings: SharedRunSettings) -> None:
    """Refuse a model other than the trainer's: log-probs and token ids would silently mean something else."""
    from async_grpo.modeling.load import context_length, model_fingerprint

    if model_fingerprint(model_path) != settings.model_fingerprint:
        raise ConfigurationError(
            f"--model_path {model_path} has another architecture or vocabulary than the model that the trainer of run "
            f"{settings.run_name!r} trains: start the worker with the trainer's --model-name-or-path"
        )
    if (reach := context_length(model_path)) < (needed := settings.max_total_tokens):
        raise ConfigurationError(f"--model_path {model_path} reaches {reach} tokens, the run needs {needed}")


def _mapped(path: Path) -> memoryview:
    """The bytes of a chunk, read as they are needed; WeightsDidNotLand: this node does not see the file."""
    try:
        return np.memmap(path, np.uint8, "r").data
    except OSError as error:
        raise WeightsDidNotLand(
            f"{path} cannot be read on {socket.gethostname()} ({error.strerror}): give --weight-folder a folder that all "
            "nodes share"
        ) from error
