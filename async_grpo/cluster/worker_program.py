"""The program of `worker_dispatcher.py`: find the run, start one worker for it, and stay until the run is over."""

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
import uuid
from typing import Any, NoReturn

import psutil
import ray
from ray.exceptions import RayActorError, RayError

from async_grpo.cluster.ray_session import (
    CONTROL_TIMEOUT_S,
    cause_of,
    connect,
    find_controller,
    forwarded_environment,
    on_this_node,
    warm_python,
    zero_cpu_actor,
)
from async_grpo.cluster.worker_actors import ENGINE_ENVIRONMENT, GenerationActor, LogprobActor
from async_grpo.config.run import WorkerConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.inference.config import may_import_vllm
from async_grpo.inference.engine_python import check_environment, engine_executable, engine_variables
from async_grpo.messages import SharedRunSettings, WorkerInfo
from async_grpo.processes.supervisor import handling
from async_grpo.types import GENERATION

log = logging.getLogger(__name__)
RESTART_PAUSE_S = 5.0  # seconds before the first restart; before restart n, this number to the power of n
HEALTHY_S = 600.0  # seconds that a worker must have lived so that its restarts are counted from 0 again
CLOSE_TIMEOUT_S = 20.0  # seconds that a worker that answers calls has to close
# Seconds to wait, after a worker died, for the message that the run has ended. The end of a run ends its workers as
# well, and the message may arrive after the death of the worker
RUN_END_NEWS_S = 1.0
# The run waits for a restarted worker for: the pause, plus twice the last loading time, plus this margin
RESTART_MARGIN_S = 30.0


def dispatch(config: WorkerConfig) -> None:
    """Run one worker until the run is over, or until SIGTERM drains the worker.

    A worker that dies after it was loaded is restarted up to `--engine-restarts` times. If the trainer dies, the worker
    waits `--rejoin-s` seconds for it to be restarted.

    Raises:
        ConfigurationError: The worker's model differs from the trainer's, there is no cluster, or the engine's Python
            environment is not compatible with this process.
        DeadlineExceeded: No trainer opened the run.
        WorkerLost: The worker died too often, or the trainer died.
    """
    if config.mode == GENERATION and config.engine_python:
        engines = check_environment(config.engine_python)
        log.info("the engine runs in another environment: %s, %s", config.engine_python, engines)
    connect(config.run_name, config.logging_level)
    config = dataclasses.replace(config, model_path=os.path.abspath(config.model_path))
    worker = Worker(config)
    patience_s = config.start_timeout_s
    try:
        while True:
            try:
                _work_for(RunHandle.find(config, patience_s), worker)
            except _TrainerDied as death:
                if not config.rejoin_s:
                    raise
                log.error("%s; the worker waits %.0f s for it (--rejoin-s)", death, config.rejoin_s)
                worker.leave_run()
                patience_s = config.rejoin_s
    except _Ended as end:
        log.info("%s", end)
    finally:
        worker.end()


class RunHandle:
    """The worker's view of a run, from one start of the trainer until the run is closed or the trainer dies."""

    def __init__(self, controller: Any, kind: str) -> None:
        self.controller = controller
        self.kind = kind
        self.closed = controller.closed.remote()
        self.settings: SharedRunSettings = self.unless_closed(controller.settings.remote())

    @classmethod
    def find(cls, config: WorkerConfig, patience_s: float) -> "RunHandle":
        """Wait until a trainer has opened the run that the worker joins.

        Raises:
            ConfigurationError: The run needs no worker of this kind.
            DeadlineExceeded: No trainer opened the run within `patience_s`.
        """
        kind = GENERATION if config.mode == GENERATION else config.logprob_kind
        run = cls(find_controller(config.run_name, patience_s), kind)
        if kind not in (GENERATION, *run.settings.logprob_roles):
            raise ConfigurationError(
                f"the loss of run {config.run_name!r} uses no {kind} log-probs (a reference is used with --kl-coef above "
                "0, a proximal one with --old-policy proximal, a teacher with --teacher)"
            )
        return run

    def unless_closed(
        self, result: Any, timeout_s: float | None = CONTROL_TIMEOUT_S, *alternatives: Any
    ) -> Any:
        """Wait for a result, and return its value.

        Args:
            result: Reference to the result of a remote call.
            timeout_s: Seconds to wait; None waits without a limit.
            alternatives: References to other results. The value of the first reference that is ready is returned.

        Raises:
            DeadlineExceeded: No result was ready in time.
            _Ended: The run ended first.
            _TrainerDied: The trainer and its controller died first.
        """
        ready, _ = ray.wait([result, self.closed, *alternatives], timeout=timeout_s)
        if not ready:
            raise DeadlineExceeded(f"there was no answer within {timeout_s:.0f} s (--start-timeout-s)")
        self.check()
        return ray.get(ready[0])

    def check(self, within_s: float = 0) -> None:
        """Raise _Ended or _TrainerDied if the run ends or its trainer dies within `within_s` seconds."""
        try:
            is_closed = bool(ray.wait([self.closed], timeout=within_s)[0])
            if is_closed:
                raise _Ended(f"the run is over: {ray.get(self.closed)}")
        except RayActorError as error:
            raise _TrainerDied("the trainer is gone: the controller died without closing the run") from error


class Worker:
    """Manages the actor of one worker, which may be created and loaded several times."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.loading_s = 0.0  # seconds that the last load took; 0 if the worker has never loaded
        self.begin()

    def begin(self) -> None:
        """Create a new actor, which immediately starts importing modules."""
        self.actor = _make_actor(self.config)
        # Maximum numbers of sequences and tokens that the actor can process at once; None until it has loaded
        self.capacity: tuple[int, int] | None = None
        self.is_responsive = False  # whether the actor answers calls and can close itself
        self._processes: list[psutil.Process] = []

    def load(self, run: RunHandle) -> tuple[int, int]:
        """Load the model for a run, unless it is already loaded and can serve this run.

        Returns:
            The maximum numbers of sequences and tokens that the worker can process at once.

        Raises:
            ConfigurationError: The model differs from the trainer's.
        """
        begin = time.monotonic()
        try:
            if self.capacity is not None:
                if run.unless_closed(self.actor.begin_anew.remote(run.settings)):
                    return self.capacity
                log.info(
                    "the run's settings changed, or a weight update did not finish: the worker loads the model again"
                )
                self.end()
                self.begin()
            start = self.actor.start.remote(self.config, run.settings)
            capacity: tuple[int, int] = run.unless_closed(start, self.config.start_timeout_s)
        except ConfigurationError as refusal:
            # The attribute `cause` is the original error, without Ray's wrapping
            reason = str(getattr(refusal, "cause", refusal))
            run.unless_closed(run.controller.record_refusal.remote(reason))
            raise ConfigurationError(reason) from None
        self.capacity = capacity
        self.loading_s = time.monotonic() - begin
        if self.config.node == "here":
            process_ids = ray.get(self.actor.processes.remote(), timeout=CONTROL_TIMEOUT_S)
            self._processes = []
            for process_id in process_ids:
                # A compiler that the engine had started, for example, may have ended since it was listed
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._processes.append(psutil.Process(process_id))
        return capacity

    def leave_run(self) -> None:
        """Cancel all requests of a run whose trainer died. If the worker is still loading, replace its actor."""
        if self.capacity is not None:
            self.actor.leave_run.remote()
        else:
            self.end()
            self.begin()

    def end(self) -> None:
        """End the actor and all of its processes."""
        # Do not wait for `close` if the actor is still loading or stuck, because it does not answer
        with contextlib.suppress(RayError):
            ray.get(self.actor.close.remote(), timeout=CLOSE_TIMEOUT_S if self.is_responsive else 0)
        ray.kill(self.actor)
        # A stopped or stuck process of an engine survives its actor and would keep the GPU's memory
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _make_actor(config: WorkerConfig) -> Any:
    """Create the worker's actor on the node that `--node` selects. It immediately starts importing modules."""
    is_generation = config.mode == GENERATION
    must_be_here = config.node == "here"
    num_gpus = config.tensor_parallel_size if is_generation else 1
    variables = {**ENGINE_ENVIRONMENT, **forwarded_environment()}
    library = "vllm" if is_generation and may_import_vllm(config.engine) else "torch"
    python = warm_python(library) if must_be_here else {}
    if is_generation and config.engine_python:
        variables |= engine_variables(config.engine_python)
        python = {"py_executable": engine_executable(config.engine_python)}
    actor = zero_cpu_actor(
        GenerationActor if is_generation else LogprobActor,
        num_gpus=num_gpus if _may_get_gpus(config) else 0,
        # On this node, the actor reads the model and the engine's file from the local disk
        **(on_this_node() if must_be_here else {}),
        runtime_env={"env_vars": variables, **python},
    ).remote()
    # Nothing reads an error of this call: `start` imports the same modules and raises it again
    actor.warm_up.remote(config)
    return actor


def _may_get_gpus(config: WorkerConfig) -> bool:
    """Return whether to request GPUs for the actor.

    This is the case with `--node gpu`, or if a node on which the actor may run has GPUs.
    """
    if config.node == "gpu":
        return True
    this_node = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        may_run_there = node["NodeID"] == this_node or (config.node != "here" and node["Alive"])
        if may_run_there and node["Resources"].get("GPU"):
            return True
    return False


def _work_for(run: RunHandle, worker: Worker) -> None:
    """Work until the run ends or its trainer dies, and restart the worker if it dies.

    Raises:
        _WorkerDied: The worker died too often, or before it was ever loaded.
        _TrainerDied: The trainer died.
        _Ended: The run ended, or the worker was drained.
    """
    config = worker.config
    num_restarts = 0
    while True:
        begin = time.monotonic()
        try:
            _be_member(run, worker)
        except _WorkerDied as death:
            run.check(within_s=RUN_END_NEWS_S)
            worker.end()
            lived_s = time.monotonic() - begin
            num_restarts = num_restarts + 1 if lived_s < HEALTHY_S else 1
            # If the worker has never loaded, do not restart it: it would probably fail again, for example because the
            # node lacks a library
            has_never_loaded = num_restarts == 1 and not worker.loading_s
            if num_restarts > config.engine_restarts or has_never_loaded:
                raise
            pause_s = RESTART_PAUSE_S**num_restarts
            log.error(
                "%s; it is started again in %.0f s (%d of --engine-restarts %d)",
                death,
                pause_s,
                num_restarts,
                config.engine_restarts,
            )
            expected_s = min(config.start_timeout_s, pause_s + 2 * worker.loading_s + RESTART_MARGIN_S)
            run.unless_closed(run.controller.expect.remote(run.kind, expected_s))
            # Wait for the pause, or until the run ends if that is earlier
            ray.wait([run.closed], timeout=pause_s)
            worker.begin()


def _be_member(run: RunHandle, worker: Worker) -> NoReturn:
    """Load the worker, register it with the run, and wait until it dies or leaves the run.

    Raises:
        _WorkerDied: The worker could not start, died, or was fenced.
        _TrainerDied: The trainer died.
        _Ended: The run ended, or the worker was drained.
    """
    worker_id = f"{run.kind}-{uuid.uuid4().hex[:6]}"
    has_joined = False
    is_fenced = False
    reason = "the run is over"
    try:
        _join(run, worker, worker_id)
        has_joined = True
        departure = run.controller.until_gone.remote(run.kind, worker_id)
        drain = _Drain(run, worker_id, worker.config.drain_s)
        try:
            with handling(drain.handle, signal.SIGTERM):
                reason = str(run.unless_closed(departure, None, worker.actor.until_failure.remote()))
        except (RayError, WorkerLost) as error:
            if not drain.has_begun:
                raise
            reason = cause_of(error)
        if drain.has_begun:
            # If a draining worker dies, this is no error, because its work continues on other workers
            raise _Ended(f"worker {worker_id} has drained: {reason}")
        is_fenced = bool(ray.wait([departure], timeout=0)[0])
        raise _WorkerDied(f"worker {worker_id} {'was lost' if is_fenced else 'died'}: {reason}")
    except (RayError, DeadlineExceeded) as error:
        reason = cause_of(error)
        raise _WorkerDied(
            f"worker {worker_id} {'died' if has_joined else 'could not start'}: {reason}"
        ) from error
    finally:
        worker.is_responsive = has_joined and not is_fenced
        # Joining may have failed after the registration, so always deregister. Deregistering an unknown worker does no
        # harm
        with contextlib.suppress(RayError):
            sign_off = run.controller.deregister.remote(run.kind, worker_id, reason)
            ray.get(sign_off, timeout=CONTROL_TIMEOUT_S)


def _join(run: RunHandle, worker: Worker, worker_id: str) -> None:
    """Load the worker and register it with the run."""
    config = worker.config
    log.info("starting worker %s on %s", worker_id, config.model_path)
    max_sequences, max_tokens = worker.load(run)
    info = WorkerInfo(
        worker_id,
        run.kind,
        max_sequences,
        max_tokens,
        world_size=config.tensor_parallel_size,
        rewards=config.reward_fns,
    )
    run.unless_closed(run.controller.register.remote(info, worker.actor), config.start_timeout_s)
    log.info("worker %s has joined, with up to %d sequences at once", worker_id, max_sequences)


class _Drain:
    """Handles SIGTERM: the first signal drains the worker, and the second one ends this program."""

    def __init__(self, run: RunHandle, worker_id: str, within_s: float) -> None:
        self.has_begun = False
        self._run = run
        self._worker_id = worker_id
        self._within_s = within_s

    def handle(self, *_: Any) -> None:
        """Handle one signal."""
        if self.has_begun:
            raise SystemExit(128 + signal.SIGTERM)
        self.has_begun = True
        log.warning(
            "SIGTERM: this worker gets no more work, and %.0f s to finish (--drain-s); a second signal ends it at once",
            self._within_s,
        )
        # Call Ray in another thread: the signal may have interrupted a call to Ray in this thread
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        self._run.controller.drain.remote(self._run.kind, self._worker_id, self._within_s)


class _WorkerDied(WorkerLost):
    """The worker died, but the run continues."""


class _TrainerDied(WorkerLost):
    """The trainer and its controller died."""


class _Ended(Exception):
    """The run ended, or this worker left it, without an error. The message is the reason."""
