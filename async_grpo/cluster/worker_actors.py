"""The Ray actors that run the workers: an engine or a logprob worker that joins a run and loads its weights."""

import asyncio
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.cluster.channel import ChannelServer
from async_grpo.cluster.worker_memory import WorkerMemory
from async_grpo.config.run import WorkerConfig
from async_grpo.errors import ConfigurationError, WeightsDidNotLand
from async_grpo.inference.config import UNLIMITED, engine_class
from async_grpo.inference.memory_cures import SLEEP_CURE, UPDATE_CURE
from async_grpo.messages import SharedRunSettings
from async_grpo.options.log_setup import log_to_own_file
from async_grpo.options.source_file import library_version
from async_grpo.processes.out_of_memory import naming_out_of_memory
from async_grpo.processes.private_folder import compile_cache, make_private_folder, temporary_files_in
from async_grpo.processes.process_tree import descendants
from async_grpo.protocols import Receipt, WeightPackage, answer_canary
from async_grpo.types import GENERATION
from async_grpo.weights.received_chunks import ReceivedChunks

# Environment variables with which several engines can share a machine without a GPU. Forwarded variables override these
ENGINE_ENVIRONMENT = {
    # by default, every engine would use the same cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class WorkerActor(ChannelServer):
    """A worker that joins a run and loads its weights. It loads one package at a time, and never an older version."""

    served: tuple[str, ...]  # names of the engine's methods that the run may call through a channel

    def __init__(self) -> None:
        log_to_own_file(type(self).__name__.removesuffix("Actor").lower())
        self._loading = asyncio.Lock()
        self._version: int | None = None
        self._received = ReceivedChunks()
        self._settings: SharedRunSettings | None = None

    async def warm_up(self, config: WorkerConfig) -> None:
        """Import the modules that `start` needs. This can be done before the trainer provides the settings."""
        # Set torch.compile's cache folder before torch is imported, because torch would otherwise choose a folder in
        # /tmp
        os.environ.update(compile_cache())
        _worker_class(config)

    async def start(self, config: WorkerConfig, settings: SharedRunSettings) -> tuple[int, int]:
        """Load the model.

        Returns:
            The maximum numbers of sequences and tokens that the worker can process at once.

        Raises:
            ConfigurationError: The model or the version of this library differs from the trainer's, or the engine
                cannot serve the run.
        """
        # Check the versions and the model here. The dispatcher cannot: the actor may run on another node, and the
        # dispatcher may lack the libraries for it
        check_library(settings)
        # Set it before the engine's class imports torch; see `warm_up`
        os.environ.update(compile_cache())
        worker_class = _worker_class(config)
        is_generation = config.mode == GENERATION
        fingerprint = None if is_generation else settings.teacher_fingerprints.get(config.logprob_kind)
        if fingerprint is not None:
            check_model(config.model_path, replace(settings, model_fingerprint=fingerprint), "--teacher")
        else:
            getattr(worker_class, "check_model", check_model)(config.model_path, settings)
        if is_generation:
            config = config.with_sequences(settings)
        self._settings = settings
        # vLLM creates sockets and other files in the folder for temporary files. By default, this folder is open to all
        # users
        self._folder = make_private_folder()
        if is_generation and settings.sleep_level and not hasattr(worker_class, "sleep"):
            raise ConfigurationError(
                f"--engine-sleep {settings.sleep_level}: {worker_class.__name__} has no method `sleep`; leave the option "
                "out"
            )
        self._memory = WorkerMemory(config, settings)
        with temporary_files_in(self._folder), self._memory.naming_start():
            self._engine = worker_class.start(config, settings)
        if hasattr(self._engine, "finish_start"):
            await self._engine.finish_start()
        self.serve(self._handlers_of_engine())
        max_sequences = config.max_sequences if is_generation else UNLIMITED
        return max_sequences, self._engine.kv_cache_tokens

    def _handlers_of_engine(self) -> dict[str, Callable[..., Any]]:
        """Return the engine's methods that are called through a channel, by name."""
        return {name: getattr(self._engine, name) for name in self.served}

    async def update_weights(self, package: WeightPackage) -> Receipt:
        """Load a package, and compute the log-probs of its canary texts, from which the trainer sees that it loaded.

        Raises:
            WeightsDidNotLand: Newer weights are already loaded, this node cannot read the package's files, or the
                package contains changes to weights that this worker does not have.
            OutOfMemory: The new weights do not fit into the memory beside the present ones.
        """
        activity = f"while a worker loaded the weights of policy version {package.version}"
        async with self._loading:
            if self._version is not None and 0 <= package.version < self._version:
                raise WeightsDidNotLand(f"weights {package.version} came after newer weights {self._version}")
            if not package.chunks:
                # The trainer only asks whether this worker already has the trainer's weights, so no weights are loaded
                with naming_out_of_memory("while a worker computed log-probs of fixed texts", UPDATE_CURE):
                    return {}, await answer_canary(self._engine, package.canary_texts)
            chunks = []
            for chunk in package.chunks:
                chunks.append(_mapped(chunk) if isinstance(chunk, Path) else (await chunk).data)
            with naming_out_of_memory(activity, UPDATE_CURE):
                # Large chunks take seconds. Restore them in a thread, so that this process can answer calls meanwhile
                whole_chunks = await asyncio.to_thread(self._received.restore, chunks, package.chunk_digests)
                manifest = await self._engine.update(package.version, whole_chunks)
                self._version = package.version
                return manifest, await answer_canary(self._engine, package.canary_texts)

    async def leave_run(self) -> None:
        """Cancel all requests of the run, because its trainer died."""
        if self._settings is not None:
            self.forget_callers()

    async def begin_anew(self, settings: SharedRunSettings) -> bool:
        """Prepare the worker for a restarted run. Return False if the model must be loaded again."""
        check_library(settings)
        earlier = self._settings
        are_settings_equal = earlier is not None and earlier == replace(
            settings, checkpoint=earlier.checkpoint
        )
        if not are_settings_equal or self._loading.locked() or not hasattr(self._engine, "begin_anew"):
            return False
        self._settings = settings
        self._version = None
        self._received = ReceivedChunks()
        return await self._engine.begin_anew()

    async def processes(self) -> list[int]:
        """Return the ids of this process and of all its descendants."""
        return [os.getpid(), *descendants(os.getpid())]

    async def until_failure(self) -> str:
        """Wait until the engine dies or stalls, and return a description of the failure; see `Engine`."""
        return await self._engine.until_failure()

    async def close(self) -> None:
        """Stop the engine and remove its temporary files."""
        self._engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class GenerationActor(WorkerActor):
    """A worker with an `Engine` of the class that `--engine` names."""

    served = ("complete", "progress")

    async def transfer(self, method: str, *args: Any) -> Any:
        """Do one step of a weight update that is controlled by the trainer (NCCL).

        Raises:
            ConfigurationError: The engine does not support this step.
        """
        if not hasattr(self._engine, method):
            raise ConfigurationError(
                f"{type(self._engine).__name__} can only receive weights in packages: choose another "
                "--weight-transport, or an --engine with the weight transfer methods of GenerationWorker"
            )
        with naming_out_of_memory(f"in {method}, a step of a weight update", UPDATE_CURE):
            return await getattr(self._engine, method)(*args)

    def _handlers_of_engine(self) -> dict[str, Callable[..., Any]]:
        """Return the engine's methods by name, including optional ones if the engine has them.

        The answer of `progress` also contains the memory of the engine.
        """
        handlers = super()._handlers_of_engine()
        handlers["progress"] = self._progress
        if hasattr(self._engine, "sleep"):
            handlers["sleep"] = self._sleep
        return handlers

    async def _sleep(self, level: int) -> None:
        """Make the engine release its GPU memory.

        Raises:
            OutOfMemory: The main memory has no room for the engine's weights.
        """
        with naming_out_of_memory("while an engine moved its weights to main memory, to sleep", SLEEP_CURE):
            await self._engine.sleep(level)

    def _progress(self) -> dict[str, Any]:
        gpu_bytes = getattr(self._engine, "peak_gpu_bytes", 0)
        return {**self._engine.progress(), "memory": self._memory.entry(gpu_bytes)}


class LogprobActor(WorkerActor):
    """A worker with a `LogprobWorker`.

    Reference workers keep their weights, and proximal workers get new ones at each sync.
    """

    served = ("logprobs", "logprobs_with_top")


def _worker_class(config: WorkerConfig) -> Any:
    if config.mode == GENERATION:
        return engine_class(config.engine)
    from async_grpo.inference.logprob_worker import LogprobWorker

    return LogprobWorker


def check_library(settings: SharedRunSettings) -> None:
    """Refuse a run whose trainer has another version of this library: messages could be misread without an error."""
    if library_version() != settings.library:
        raise ConfigurationError(
            f"this node ({socket.gethostname()}) has version {library_version()} of async-grpo, the trainer of run "
            f"{settings.run_name!r} {settings.library}: install the same one on every node"
        )


def check_model(
    model_path: str, settings: SharedRunSettings, option_name: str = "--model-name-or-path"
) -> None:
    """Refuse a model that differs from the trainer's: log-probs and token ids would be wrong without an error.

    Args:
        model_path: Folder of the model.
        settings: The settings of the run, with the fingerprint that the model must have.
        option_name: The trainer's option that names the model.
    """
    from async_grpo.modeling.load import context_length, model_fingerprint

    if model_fingerprint(model_path) != settings.model_fingerprint:
        raise ConfigurationError(
            f"--model_path {model_path} has another architecture or vocabulary than the model of {option_name} of the "
            f"trainer of run {settings.run_name!r}: start the worker with the folder in the trainer's {option_name}"
        )
    model_tokens = context_length(model_path)
    if model_tokens < settings.max_total_tokens:
        raise ConfigurationError(
            f"the model in --model_path {model_path} has a context of {model_tokens} tokens, but the run needs "
            f"{settings.max_total_tokens}"
        )


def _mapped(path: Path) -> memoryview:
    """Return the bytes of a chunk's file, mapped into memory.

    Raises:
        WeightsDidNotLand: This node cannot read the file, or sees only a part of it.
    """
    try:
        payload: memoryview = np.memmap(path, np.uint8, "r").data
    except (OSError, ValueError) as error:
        # ValueError: the file is empty, which cannot be mapped
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightsDidNotLand(
            f"{path} cannot be read on {socket.gethostname()} ({reason}): give --weight-folder a folder that all "
            "nodes share"
        ) from error
    return payload
