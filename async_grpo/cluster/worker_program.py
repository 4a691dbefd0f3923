"""What `worker_dispatcher.py` does: find the run, start one worker for it, and stay until either of them ends."""

import contextlib
import dataclasses
import logging
import os
import uuid
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from async_grpo.cluster.actors import zero_cpu_actor
from async_grpo.cluster.controller import GENERATION
from async_grpo.cluster.ray_session import connect, find_controller, forwarded_environment
from async_grpo.cluster.worker_actors import GenerationActor, LogprobActor
from async_grpo.config.run import WorkerConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
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
    controller = find_controller(config.run_name, config.start_timeout_s)
    closed = controller.closed.remote()
    try:
        settings: SharedRunSettings = _unless_closed(controller.settings.remote(), closed, 60)
        kind = GENERATION if config.mode == "generation" else config.role
        try:
            check_model(config.model_path, settings)
        except ConfigurationError as refusal:
            _unless_closed(controller.refuse.remote(str(refusal)), closed, 60)
            raise
        if kind not in (GENERATION, *settings.logprob_roles):
            raise ConfigurationError(
                f"the loss of run {settings.run_name!r} uses no {kind} log-probs: this worker would have nothing to do "
                "(a reference is used with --kl-coef above 0, a proximal one with --old-policy proximal)"
            )
        _work(config, settings, kind, controller, closed)
    except _RunIsOver as over:
        log.info("the run is over: %s", over)


def _work(config: WorkerConfig, settings: SharedRunSettings, kind: str, controller: Any, closed: Any) -> None:
    """Load a worker, let it join, and wait for the end of the run or for a death."""
    worker_id, doing, reason = f"{kind}-{uuid.uuid4().hex[:6]}", "could not start", "the run is over"
    log.info("starting worker %s on %s", worker_id, config.model_path)
    actor, loading, max_sequences = _start(config, settings)
    try:
        max_tokens = _unless_closed(loading, closed, config.start_timeout_s)
        info = WorkerInfo(worker_id, kind, max_sequences, max_tokens, world_size=config.tensor_parallel_size)
        joining = actor.enlist.remote(controller, info, config.reward_fns)
        _unless_closed(joining, closed, config.start_timeout_s)
        log.info("worker %s is at work", worker_id)
        doing = "died"
        reason = str(_unless_closed(actor.until_failure.remote(), closed, None))
        raise WorkerLost(f"worker {worker_id} died: {reason}")
    except (RayError, DeadlineExceeded) as error:
        reason = _cause(error)
        raise WorkerLost(f"worker {worker_id} {doing}: {reason}") from error
    finally:
        # Also where it failed while it joined: else it would count as a member for ever. It may be gone already.
        with contextlib.suppress(RayError):
            ray.get(controller.deregister.remote(kind, worker_id, reason), timeout=60)
        _close(actor, is_loaded=doing == "died")


class _RunIsOver(Exception):
    """The run ended in order; carries its reason."""


def _unless_closed(answer: Any, closed: Any, timeout_s: float | None) -> Any:
    """`answer`, unless the run ends first.

    Raises:
        _RunIsOver: it did.
        DeadlineExceeded: neither came in time.
        WorkerLost: the trainer, and with it the run's controller, died.
        RayError: the answer is an error.
    """
    ready, _ = ray.wait([answer, closed], timeout=timeout_s)
    if not ready:
        raise DeadlineExceeded(f"it was not ready within {timeout_s:.0f} s (--start-timeout-s)")
    try:
        if closed in ray.wait([closed], timeout=0)[0]:
            raise _RunIsOver(ray.get(closed))
    except RayActorError as error:
        raise WorkerLost("the trainer is gone: the run's controller died without closing the run") from error
    return ray.get(answer)


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


def _start(config: WorkerConfig, settings: SharedRunSettings) -> tuple[Any, Any, int]:
    """The worker's actor, what it answers once it has loaded (its tokens), and the sequences that it takes at once."""
    options: dict[str, Any] = {"runtime_env": {"env_vars": worker_environment()}}
    config = dataclasses.replace(config, model_path=os.path.abspath(config.model_path))
    if config.mode == "generation":
        options["num_gpus"] = config.tensor_parallel_size if ray.cluster_resources().get("GPU") else 0
        actor = zero_cpu_actor(GenerationActor, **options).remote()
        return actor, actor.start.remote(config, settings), config.max_sequences
    options["num_gpus"] = 1 if ray.cluster_resources().get("GPU") else 0
    actor = zero_cpu_actor(LogprobActor, **options).remote()
    loading = actor.start.remote(config.model_path, settings, config.max_tokens_per_gpu, config.max_wait_s)
    return actor, loading, UNLIMITED


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


def _cause(error: Exception) -> str:
    """The worker's own error, without Ray's pages around it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"


def _close(worker: Any, *, is_loaded: bool) -> None:
    """End the worker; one that still loads answers nothing, and is killed at once."""
    try:
        if is_loaded:
            ray.get(worker.close.remote(), timeout=20)
    except RayError as error:
        log.warning("the worker did not close by itself: %s", " ".join(str(error).split())[:200])
    ray.kill(worker)
