"""What `worker_dispatcher.py` does: find the run, start one worker for it, and stay until either of them ends."""

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
import uuid
from typing import Any

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
    zero_cpu_actor,
)
from async_grpo.cluster.worker_actors import ENGINE_ENVIRONMENT, GenerationActor, LogprobActor
from async_grpo.config.run import WorkerConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.messages import SharedRunSettings, WorkerInfo
from async_grpo.processes.supervisor import handling
from async_grpo.types import GENERATION

log = logging.getLogger(__name__)
RESTART_PAUSE_S = 5.0  # before the first restart; its square before the second, and so on
HEALTHY_S = 600.0  # a worker that lived for so long has its restarts again


def dispatch(config: WorkerConfig) -> None:
    """Run one worker until the run is over, or SIGTERM drains it. One that has joined and dies is started again,
    `--engine-restarts` times; if the trainer dies, the worker waits for it `--rejoin-s` long.

    ConfigurationError: the worker's model is not the trainer's, or there is no cluster.
    DeadlineExceeded: no trainer opened the run.
    WorkerLost: the worker died too often, or the trainer did.
    """
    connect(config.run_name, config.logging_level)
    config = dataclasses.replace(config, model_path=os.path.abspath(config.model_path))
    worker, patience_s = Worker(config), config.start_timeout_s
    try:
        while True:
            try:
                _work_for(RunHandle.find(config, patience_s), worker)
            except _TrainerDied as died:
                if not config.rejoin_s:
                    raise
                log.error("%s; the worker waits %.0f s for it (--rejoin-s)", died, config.rejoin_s)
                worker.leave_run()
                patience_s = config.rejoin_s
    except _Ended as ended:
        log.info("%s", ended)
    finally:
        worker.end()


class RunHandle:
    """A run as one start of its trainer opened it, for a worker of that kind."""

    def __init__(self, controller: Any, kind: str) -> None:
        self.controller, self.kind = controller, kind
        self.closed = controller.closed.remote()
        self.settings: SharedRunSettings = self.unless_closed(controller.settings.remote())

    @classmethod
    def find(cls, config: WorkerConfig, patience_s: float) -> "RunHandle":
        """The run of the worker's name, once a trainer has opened it; ConfigurationError: it needs no such worker."""
        kind = GENERATION if config.mode == GENERATION else config.role
        run = cls(find_controller(config.run_name, patience_s), kind)
        if kind not in (GENERATION, *run.settings.logprob_roles):
            raise ConfigurationError(
                f"the loss of run {config.run_name!r} uses no {kind} log-probs (a reference is used with --kl-coef above "
                "0, a proximal one with --old-policy proximal)"
            )
        return run

    def unless_closed(self, answer: Any, timeout_s: float | None = CONTROL_TIMEOUT_S, *others: Any) -> Any:
        """`answer`, or the first of `others`, unless the run ends before (_Ended), or its trainer and with it the
        controller dies (_TrainerDied)."""
        ready, _ = ray.wait([answer, self.closed, *others], timeout=timeout_s)
        if not ready:
            raise DeadlineExceeded(f"it was not ready within {timeout_s:.0f} s (--start-timeout-s)")
        self.check()
        return ray.get(ready[0])

    def check(self, within_s: float = 0) -> None:
        """Raises as `unless_closed` does."""
        try:
            if ray.wait([self.closed], timeout=within_s)[0]:
                raise _Ended(f"the run is over: {ray.get(self.closed)}")
        except RayActorError as error:
            raise _TrainerDied("the trainer is gone: the controller died without closing the run") from error


class Worker:
    """The worker's actor, and what it offers once it has loaded; `end` leaves nothing of it."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config, self.loading_s = config, 0.0
        self.begin()

    def begin(self) -> None:
        """Make an actor, which begins to import at once."""
        self.actor = _make_actor(self.config)
        self.offers: tuple[int, int] | None = None  # sequences and tokens at once
        self.answers = False  # and will close in order
        self._processes: list[psutil.Process] = []

    def load(self, run: RunHandle) -> tuple[int, int]:
        """Load the model, unless it is loaded and serves this run, too; returns what it offers.

        ConfigurationError: it is not the trainer's.
        """
        begun = time.monotonic()
        try:
            if self.offers and run.unless_closed(self.actor.begin_anew.remote(run.settings)):
                return self.offers
            if self.offers:
                log.info("its settings changed, or an update did not end: the worker loads the model again")
                self.end()
                self.begin()
            starting = self.actor.start.remote(self.config, run.settings)
            self.offers = offers = run.unless_closed(starting, self.config.start_timeout_s)
        except ConfigurationError as refusal:
            told = str(getattr(refusal, "cause", refusal))  # without Ray's wrapping
            run.unless_closed(run.controller.refuse.remote(told))
            raise ConfigurationError(told) from None
        self.loading_s = time.monotonic() - begun
        if self.config.node == "here":
            own = ray.get(self.actor.processes.remote(), timeout=CONTROL_TIMEOUT_S)
            self._processes = list(map(psutil.Process, own))
        return offers

    def leave_run(self) -> None:
        """Cancel what the run of a dead trainer had asked for. One that was loading is made anew."""
        if self.offers:
            self.actor.leave_run.remote()
        else:
            self.end()
            self.begin()

    def end(self) -> None:
        with contextlib.suppress(RayError):  # one that still loads answers nothing
            ray.get(self.actor.close.remote(), timeout=20 if self.answers else 0)
        ray.kill(self.actor)
        for process in self._processes:  # an engine's own, stopped or stuck, would keep its GPU
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _make_actor(config: WorkerConfig) -> Any:
    """An actor for the worker, where `--node` says; it begins to import at once."""
    generates = config.mode == GENERATION
    gpus = config.tensor_parallel_size if generates else 1
    here = ray.get_runtime_context().get_node_id()
    elsewhere = config.node != "here"
    nodes = [node for node in ray.nodes() if node["NodeID"] == here or (elsewhere and node["Alive"])]
    has_gpus = config.node == "gpu" or any(node["Resources"].get("GPU") for node in nodes)
    actor = zero_cpu_actor(
        GenerationActor if generates else LogprobActor,
        num_gpus=gpus if has_gpus else 0,
        **(on_this_node() if config.node == "here" else {}),  # model and engine are read from its disk
        runtime_env={"env_vars": {**ENGINE_ENVIRONMENT, **forwarded_environment()}},
    ).remote()
    actor.warm_up.remote(config)  # if it fails, `start` does so again, and is heard
    return actor


def _work_for(run: RunHandle, worker: Worker) -> None:
    """Until the run ends or its trainer dies; a worker that dies is started again."""
    config, restarts = worker.config, 0
    while True:
        begun = time.monotonic()
        try:
            _be_member(run, worker)
        except _WorkerDied as died:
            run.check(within_s=1)  # or was it the run? What died with it may be heard of before
            worker.end()
            restarts = restarts + 1 if time.monotonic() - begun < HEALTHY_S else 1
            if restarts > config.engine_restarts or (restarts == 1 and not worker.loading_s):
                raise  # also if it never worked, as on a node that lacks something
            pause_s = RESTART_PAUSE_S**restarts
            again = f"{restarts} of --engine-restarts {config.engine_restarts}"
            log.error("%s; it is started again in %.0f s (%s)", died, pause_s, again)
            expected_s = min(config.start_timeout_s, pause_s + 2 * worker.loading_s + 30)
            run.unless_closed(run.controller.expect.remote(run.kind, expected_s))
            ray.wait([run.closed], timeout=pause_s)
            worker.begin()


def _be_member(run: RunHandle, worker: Worker) -> None:
    """Load the worker, let it join, and wait for the end of the run, for a death (_WorkerDied), or until it is drained."""
    config, worker_id = worker.config, f"{run.kind}-{uuid.uuid4().hex[:6]}"
    doing, reason = "could not start", "the run is over"
    log.info("starting worker %s on %s", worker_id, config.model_path)
    try:
        offers = worker.load(run)
        info = WorkerInfo(worker_id, run.kind, *offers, config.tensor_parallel_size, config.reward_fns)
        run.unless_closed(run.controller.register.remote(info, worker.actor), config.start_timeout_s)
        log.info("worker %s has joined, with up to %d sequences at once", worker_id, info.max_sequences)
        gone, doing = run.controller.until_gone.remote(run.kind, worker_id), "died"
        told = _Drain(run, worker_id, config.drain_s)
        try:
            with handling(told.handle, signal.SIGTERM):
                reason = str(run.unless_closed(gone, None, worker.actor.until_failure.remote()))
        except (RayError, WorkerLost) as error:
            if not told.came:
                raise
            reason = cause_of(error)
        if told.came:  # however that ended
            raise _Ended(f"worker {worker_id} has drained: {reason}")
        doing = "was lost" if ray.wait([gone], timeout=0)[0] else doing  # then it answers nothing any more
        raise _WorkerDied(f"worker {worker_id} {doing}: {reason}")
    except (RayError, DeadlineExceeded) as error:
        reason = cause_of(error)
        raise _WorkerDied(f"worker {worker_id} {doing}: {reason}") from error
    finally:
        worker.answers = doing == "died"
        # Also where it failed while it joined: else it would count as a member for ever. It may be gone already.
        with contextlib.suppress(RayError):
            left = run.controller.deregister.remote(run.kind, worker_id, reason)
            ray.get(left, timeout=CONTROL_TIMEOUT_S)


class _Drain:
    """Handles SIGTERM: the first has the worker drained, the next one ends this program."""

    def __init__(self, run: RunHandle, worker_id: str, within_s: float) -> None:
        self.came = False
        self._run, self._asked = run, (run.kind, worker_id, within_s)

    def handle(self, *_: Any) -> None:
        if self.came:
            raise SystemExit(128 + signal.SIGTERM)
        self.came = True
        log.warning(
            "SIGTERM: no more work, %.0f s for what is begun (--drain-s); again to end at once",
            self._asked[2],
        )
        # In a thread: the signal may have come in the middle of a call to Ray
        threading.Thread(target=lambda: self._run.controller.drain.remote(*self._asked), daemon=True).start()


class _WorkerDied(WorkerLost):
    """The worker did, not the run."""


class _TrainerDied(WorkerLost):
    """The trainer did, and the run's controller with it."""


class _Ended(Exception):
    """The run ended in order, or this worker's part in it; carries the reason."""
