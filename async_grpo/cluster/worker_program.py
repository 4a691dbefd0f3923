"""What `worker_dispatcher.py` does: find the run, start one worker for it, and stay until either of them ends."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import time
import uuid
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError

from async_grpo.cluster.channel import ChannelServer
from async_grpo.cluster.ray_session import (
    CONTROL_TIMEOUT_S,
    cause_of,
    connect,
    find_controller,
    forwarded_environment,
    on_this_node,
    zero_cpu_actor,
)
from async_grpo.config.run import WorkerConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WeightsDidNotLand, WorkerLost
from async_grpo.generation.config import UNLIMITED, engine_class
from async_grpo.options.command_line import log_to_own_file
from async_grpo.options.source_file import library_version
from async_grpo.processes.process_tree import descendants
from async_grpo.protocols import Receipt, WeightPackage, answer_canary
from async_grpo.types import GENERATION, SharedRunSettings, WorkerInfo

log = logging.getLogger(__name__)
RESTART_PAUSE_S = 5.0  # before the first restart; its square before the second, and so on
HEALTHY_S = 600.0  # a worker that lived for so long has its restarts again
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

    async def warm_up(self, config: WorkerConfig) -> None:
        """Import what `start` needs, while the trainer, which alone knows the settings, still starts itself."""
        _worker_class(config)

    async def start(self, config: WorkerConfig, settings: SharedRunSettings) -> tuple[int, int]:
        """Load the model; returns how many sequences and tokens it holds. ConfigurationError: it is not the trainer's."""
        # Not in the dispatcher, which can do without these libraries, and may be on another node
        check_library(settings)
        check_model(config.model_path, settings)
        generates = config.mode == GENERATION
        config = config.with_sequences(settings) if generates else config
        self._engine = _worker_class(config).start(config, settings)
        self.serve({name: getattr(self._engine, name) for name in self.served})
        return config.max_sequences if generates else UNLIMITED, self._engine.kv_cache_tokens

    async def update_weights(self, package: WeightPackage) -> Receipt:
        """Load a package and answer its canary. WeightsDidNotLand: newer weights are loaded already."""
        async with self._loading:
            if self._version is not None and 0 <= package.version < self._version:
                raise WeightsDidNotLand(f"version {package.version} came after {self._version}")
            chunks = [(await chunk).data for chunk in package.chunks]
            manifest = await self._engine.update(package.version, chunks)
            self._version = package.version
            return manifest, await answer_canary(self._engine, package.canary_texts)

    async def processes(self) -> list[int]:
        """The ids of this one and of all below it."""
        return [os.getpid(), *descendants(os.getpid())]

    async def until_failure(self) -> str:
        return await self._engine.until_failure()

    async def close(self) -> None:
        self._engine.close()


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


def dispatch(config: WorkerConfig) -> None:
    """Run one worker until the run is over; one that has joined and dies is started again, `--engine-restarts` times.

    ConfigurationError: the worker's model is not the trainer's, or there is no cluster.
    DeadlineExceeded: no trainer opened the run.
    WorkerLost: the worker died too often, or the trainer did.
    """
    connect(config.run_name, config.logging_level)
    config = dataclasses.replace(config, model_path=os.path.abspath(config.model_path))
    actor = _make_actor(config)
    try:
        controller = find_controller(config.run_name, config.start_timeout_s)
        closed = controller.closed.remote()
        settings = _unless_closed(controller.settings.remote(), closed, CONTROL_TIMEOUT_S)
        kind = GENERATION if config.mode == GENERATION else config.role
        if kind not in (GENERATION, *settings.logprob_roles):
            raise ConfigurationError(
                f"the loss of run {settings.run_name!r} uses no {kind} log-probs (a reference is used with --kl-coef "
                "above 0, a proximal one with --old-policy proximal)"
            )
        restarts = 0
        while True:
            begun = time.monotonic()
            try:
                _work(config, settings, kind, actor, controller, closed)
            except _WorkerDied as died:
                if closed in ray.wait([closed], timeout=1)[0]:  # with the run
                    _unless_closed(closed, closed, 0)
                restarts = restarts + 1 if time.monotonic() - begun < HEALTHY_S else 1
                if restarts > config.engine_restarts or (restarts == 1 and not died.loading_s):
                    raise  # also if it never worked, as on a node that lacks something
                pause_s = RESTART_PAUSE_S**restarts
                again = f"{restarts} of --engine-restarts {config.engine_restarts}"
                log.error("%s; it is started again in %.0f s (%s)", died, pause_s, again)
                expected_s = min(config.start_timeout_s, pause_s + 2 * died.loading_s + 30)
                _unless_closed(controller.expect.remote(kind, expected_s), closed, CONTROL_TIMEOUT_S)
                ray.wait([closed], timeout=pause_s)
            actor = _make_actor(config)
    except _RunIsOver as over:
        log.info("the run is over: %s", over)
    finally:
        ray.kill(actor)


def _make_actor(config: WorkerConfig) -> Any:
    """An actor for the worker, where `--node` says; it begins to import at once."""
    generates = config.mode == GENERATION
    gpus = config.tensor_parallel_size if generates else 1
    here = ray.get_runtime_context().get_node_id()
    nodes = [
        node for node in ray.nodes() if node["NodeID"] == here or (config.node != "here" and node["Alive"])
    ]
    has_gpus = config.node == "gpu" or any(node["Resources"].get("GPU") for node in nodes)
    actor = zero_cpu_actor(
        GenerationActor if generates else LogprobActor,
        num_gpus=gpus if has_gpus else 0,
        **(on_this_node() if config.node == "here" else {}),  # model and engine are read from its disk
        runtime_env={"env_vars": {**ENGINE_ENVIRONMENT, **forwarded_environment()}},
    ).remote()
    actor.warm_up.remote(config)  # if it fails, `start` does so again, and is heard
    return actor


def _worker_class(config: WorkerConfig) -> Any:
    if config.mode == GENERATION:
        return engine_class(config.engine)
    from async_grpo.logprob.logprob_worker import LogprobWorker

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


def _work(
    config: WorkerConfig, settings: SharedRunSettings, kind: str, actor: Any, controller: Any, closed: Any
) -> None:
    """Load a worker, let it join, and wait for the end of the run or for a death. Nothing of it is left then."""
    worker_id, doing, reason = f"{kind}-{uuid.uuid4().hex[:6]}", "could not start", "the run is over"
    log.info("starting worker %s on %s", worker_id, config.model_path)
    begun, loading_s, processes = time.monotonic(), 0.0, list[psutil.Process]()
    try:
        starting = actor.start.remote(config, settings)
        try:
            places, max_tokens = _unless_closed(starting, closed, config.start_timeout_s)
        except ConfigurationError as refusal:
            told = str(getattr(refusal, "cause", refusal))  # without Ray's wrapping
            _unless_closed(controller.refuse.remote(told), closed, CONTROL_TIMEOUT_S)
            raise ConfigurationError(told) from None
        loading_s = time.monotonic() - begun
        if config.node == "here":
            processes = list(
                map(psutil.Process, ray.get(actor.processes.remote(), timeout=CONTROL_TIMEOUT_S))
            )
        info = WorkerInfo(worker_id, kind, places, max_tokens, config.tensor_parallel_size, config.reward_fns)
        _unless_closed(controller.register.remote(info, actor), closed, config.start_timeout_s)
        log.info("worker %s has joined, with up to %d sequences at once", worker_id, places)
        gone = controller.until_gone.remote(kind, worker_id)
        doing = "died"
        reason = str(_unless_closed(gone, closed, None, actor.until_failure.remote()))
        doing = "was lost" if ray.wait([gone], timeout=0)[0] else doing  # then it answers nothing any more
        raise _WorkerDied(f"worker {worker_id} {doing}: {reason}", loading_s)
    except (RayError, DeadlineExceeded) as error:
        reason = cause_of(error)
        raise _WorkerDied(f"worker {worker_id} {doing}: {reason}", loading_s) from error
    finally:
        # Also where it failed while it joined: else it would count as a member for ever. It may be gone already.
        with contextlib.suppress(RayError):
            ray.get(controller.deregister.remote(kind, worker_id, reason), timeout=CONTROL_TIMEOUT_S)
        with contextlib.suppress(RayError):  # one that still loads answers nothing
            ray.get(actor.close.remote(), timeout=20 if doing == "died" else 0)
        ray.kill(actor)
        for process in processes:  # an engine's own, stopped or stuck, would keep its GPU
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class _WorkerDied(WorkerLost):
    """The worker did, not the run; `loading_s`: how long it took to load, 0 if it did not get so far."""

    def __init__(self, message: str, loading_s: float) -> None:
        super().__init__(message)
        self.loading_s = loading_s


class _RunIsOver(Exception):
    """The run ended in order; carries its reason."""


def _unless_closed(answer: Any, closed: Any, timeout_s: float | None, other: Any = None) -> Any:
    """`answer`, or the `other` if that comes first, unless the run ends before (_RunIsOver), or its trainer and with it
    the controller dies (WorkerLost)."""
    ready, _ = ray.wait([answer, closed, *([other] if other else [])], timeout=timeout_s)
    if not ready:
        raise DeadlineExceeded(f"it was not ready within {timeout_s:.0f} s (--start-timeout-s)")
    try:
        if closed in ray.wait([closed], timeout=0)[0]:
            raise _RunIsOver(ray.get(closed))
    except RayActorError as error:
        raise WorkerLost("the trainer is gone: the run's controller died without closing the run") from error
    return ray.get(ready[0])
