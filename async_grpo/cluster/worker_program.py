"""What `worker_dispatcher.py` does: find the run, start one worker for it, and stay until either of them ends."""

import contextlib
import logging
import os
import uuid
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from async_grpo.cluster.actors import zero_cpu_actor
from async_grpo.cluster.ray_session import (
    GENERATION,
    connect,
    find_actor,
    forwarded_environment,
    registry_name,
)
from async_grpo.cluster.worker_actors import GenerationActor, LogprobActor
from async_grpo.config.run import WorkerConfig
from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.modeling.load import context_length, model_fingerprint
from async_grpo.types import SharedRunSettings, WorkerInfo

log = logging.getLogger(__name__)
UNLIMITED = 2**31 - 1


def dispatch(config: WorkerConfig) -> None:
    """Run one worker until the run is over.

    Raises:
        ConfigurationError: the worker's model is not the trainer's, or there is no cluster.
        DeadlineExceeded: no trainer opened the run.
        WorkerLost: the worker, or the trainer, died.
    """
    connect(config.run_name, config.logging_level)
    generation = _registry(GENERATION, config)
    settings: SharedRunSettings = _ask(generation.settings.remote())
    kind = GENERATION if config.mode == "generation" else config.role
    try:
        check_model(config.model_path, settings)
    except ConfigurationError as refusal:
        _ask(generation.refuse.remote(str(refusal)))
        raise
    if kind not in (GENERATION, *settings.logprob_roles):
        raise ConfigurationError(
            f"the loss of run {settings.run_name!r} uses no {kind} log-probs: this worker would have nothing to do "
            "(a reference is used with --kl-coef above 0, a proximal one with --old-policy proximal)"
        )
    registry = _registry(kind, config)
    worker_id = f"{kind}-{uuid.uuid4().hex[:6]}"
    log.info("starting worker %s on %s", worker_id, config.model_path)
    worker = _start(config, settings, registry, kind, worker_id)
    log.info("worker %s is at work", worker_id)
    _stay(worker, registry, worker_id)


def _registry(kind: str, config: WorkerConfig) -> Any:
    what = f"waiting for a trainer to open the run {config.run_name!r}"
    return find_actor(registry_name(kind), config.start_timeout_s, what)


def _ask(reference: Any) -> Any:
    """An answer of the run's registry; WorkerLost if it is gone."""
    try:
        return ray.get(reference, timeout=60)
    except RayActorError as error:
        raise WorkerLost("the trainer is gone: its registry died while this worker was starting") from error


def check_model(model_path: str, settings: SharedRunSettings) -> None:
    """Refuse a model other than the trainer's: log-probs and token ids would silently mean something else."""
    if model_fingerprint(model_path) != settings.model_fingerprint:
        raise ConfigurationError(
            f"--model_path {model_path} has another architecture or vocabulary than the model that the trainer of run "
            f"{settings.run_name!r} trains: start the worker with the trainer's --model-name-or-path"
        )
    if context_length(model_path) < settings.max_total_tokens:
        raise ConfigurationError(
            f"--model_path {model_path} reaches {context_length(model_path)} tokens, the run needs "
            f"{settings.max_total_tokens}"
        )


def _start(
    config: WorkerConfig, settings: SharedRunSettings, registry: Any, kind: str, worker_id: str
) -> Any:
    """The worker's actor, loaded and registered."""
    options: dict[str, Any] = {"runtime_env": {"env_vars": worker_environment()}}
    if config.mode == "generation":
        from async_grpo.generation.options import EngineConfig

        options["num_gpus"] = config.tensor_parallel_size if ray.cluster_resources().get("GPU") else 0
        actor = zero_cpu_actor(GenerationActor, **options).remote()
        engine = EngineConfig(
            model_path=os.path.abspath(config.model_path),
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_prefix_caching=config.enable_prefix_caching,
            enforce_eager=config.enforce_eager,
        )
        loading = actor.start.remote(engine, settings)
        max_sequences = config.max_num_seqs + config.overhead_seqs
    else:
        options["num_gpus"] = 1 if ray.cluster_resources().get("GPU") else 0
        actor = zero_cpu_actor(LogprobActor, **options).remote()
        loading = actor.start.remote(
            os.path.abspath(config.model_path), settings, config.max_tokens_per_gpu, config.max_wait_s
        )
        max_sequences = UNLIMITED
    max_tokens = _await_worker(loading, config.start_timeout_s, worker_id)
    info = WorkerInfo(worker_id, kind, max_sequences, max_tokens, world_size=config.tensor_parallel_size)
    _await_worker(actor.enlist.remote(registry, info, config.reward_fns), config.start_timeout_s, worker_id)
    return actor


def worker_environment() -> dict[str, str]:
    """The allow-listed environment, with defaults that let several engines share a machine without a GPU."""
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine pins itself to the same core
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**defaults, **forwarded_environment()}


def _await_worker(reference: Any, timeout_s: float, worker_id: str) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        raise WorkerLost(f"worker {worker_id} could not start: {type(cause).__name__}: {cause}") from error


def _stay(worker: Any, registry: Any, worker_id: str) -> None:
    """Wait for the end of the run, or for a death."""
    closed, failure = registry.closed.remote(), worker.until_failure.remote()
    while not (ended := ray.wait([closed, failure], timeout=5.0)[0]):
        pass
    if failure in ended:
        reason = _reason(failure)
        with contextlib.suppress(RayError):  # the registry may be gone as well
            ray.get(registry.deregister.remote(worker_id, reason), timeout=60)
        raise WorkerLost(f"worker {worker_id} died: {reason}")
    try:
        log.info("the run is over: %s", ray.get(closed))
        ray.get(registry.deregister.remote(worker_id, "the run is over"), timeout=60)
    except RayActorError as error:
        raise WorkerLost("the trainer is gone: its registry died without closing the run") from error
    finally:
        _close(worker)


def _reason(failure: Any) -> str:
    try:
        return str(ray.get(failure))
    except RayError as error:
        return " ".join(str(error).split())[:300]


def _close(worker: Any) -> None:
    try:
        ray.get(worker.close.remote(), timeout=20)
    except RayError as error:
        log.warning("the worker did not close by itself: %s", " ".join(str(error).split())[:200])
    ray.kill(worker)
