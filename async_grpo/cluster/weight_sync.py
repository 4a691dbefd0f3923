"""`RayEngines`: sends weights to all registered workers and collects their receipts.

There are two ways: packages of weights are sent to the workers, or (with NCCL) the trainer calls each step of the
update on all workers.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from async_grpo.cluster.ray_session import answer, cause_of
from async_grpo.errors import WorkerLost
from async_grpo.messages import WorkerInfo
from async_grpo.options.fields import refuse
from async_grpo.processes.waits import waiting
from async_grpo.protocols import Receipt, WeightPackage
from async_grpo.types import GENERATION, REFERENCE

log = logging.getLogger(__name__)
LOST = (RayActorError, RayTaskError, GetTimeoutError)
# Seconds that the other engines have to answer after one engine was lost in a collective step. An engine that has not
# answered by then still waits for the lost engine, so it is fenced, too
OTHERS_S = 10.0
# Minimum size of Ray's object store, as a multiple of the size of the weights. The store must hold one version of the
# weights and the beginning of the next version
OBJECT_STORE_VERSIONS = 1.3


def check_object_store(num_bytes: int) -> None:
    """Check that Ray's object store has room for the weights on every node.

    Without enough room, Ray would write objects to disk at every sync.

    Args:
        num_bytes: Size of one version of the weights.

    Raises:
        ConfigurationError: The object store of a node is too small.
    """
    needed_bytes = int(OBJECT_STORE_VERSIONS * num_bytes)
    for node in ray.nodes():
        room_bytes = int(node["Resources"].get("object_store_memory", needed_bytes))
        refuse(
            node["Alive"] and room_bytes < needed_bytes,
            f"Ray's object store on {node['NodeManagerAddress']} has {room_bytes / 1e9:.2f} GB, weights on their way need "
            f"{needed_bytes / 1e9:.2f}: start Ray on that node with a larger --object-store-memory (in Docker, also "
            "with a larger --shm-size)",
        )


@dataclass
class RayEngines:
    """`Engines` that calls the workers through Ray."""

    controller: Any  # the run's controller, which knows the workers
    timeout_s: float  # maximum time that a worker may take to load one package or to do one step
    # Whether the workers are the reference workers, which get the weights of a moving reference
    of_reference: bool = False

    def __post_init__(self) -> None:
        self.address = ray.util.get_node_ip_address()
        # Workers of the current sync with their handles, by worker id
        self._members: dict[str, tuple[WorkerInfo, Any]] = {}

    def reference_workers(self) -> "RayEngines":
        """Return a connection to the reference workers; see `Engines`."""
        return RayEngines(self.controller, self.timeout_s, of_reference=True)

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        """Tell the controller which workers have proven that they use the package's weights; see `Engines`."""
        answer(self.controller.end_sync.remote(package, landed, self.of_reference), self.timeout_s)

    def abort(self, error: BaseException) -> None:
        """End the run because a sync failed; see `Engines`."""
        answer(self.controller.fail.remote(error))

    def put(self, chunk: np.ndarray) -> Any:
        """Store one chunk in Ray's object store, and return its reference."""
        return ray.put(chunk)

    def deliver(self, package: WeightPackage) -> dict[str, Receipt]:
        """Begin a sync, and load the package into all workers of the sync in parallel.

        A worker that fails to load the package is fenced, and the others continue. If all engines are lost during a
        run, the run waits for a new one for `--worker-grace-s` seconds.

        Returns:
            Receipts by worker id. A receipt contains a manifest of what the worker received, and the log-probs that it
            computes.

        Raises:
            WorkerLost: No generation worker could load the first weights.
        """
        receipts: dict[str, Receipt] = {}
        losses = []
        has_engine = False
        self.begin(package.for_late)
        members = dict(self._members)
        loads = [handle.update_weights.remote(package) for _, handle in members.values()]
        if loads:
            with waiting("weights", f"policy version {package.version}", ", ".join(members)):
                ray.wait(loads, num_returns=len(loads), timeout=self.timeout_s)
        for (worker_id, (info, _)), load in zip(members.items(), loads, strict=True):
            try:
                receipts[worker_id] = ray.get(load, timeout=0)
            except LOST as error:
                losses.append(f"{worker_id}: {cause_of(error)}")
                self.fence(worker_id, error)
            else:
                has_engine = has_engine or info.kind == (REFERENCE if self.of_reference else GENERATION)
        # The first weights have version 0. A self-test, which comes before them, has a negative version
        is_first = package.version <= 0
        if is_first and not has_engine and not package.for_late:
            raise WorkerLost(f"no engine took the weights of version {package.version}: {'; '.join(losses)}")
        return receipts

    def fence(self, worker_id: str, error: Exception) -> None:
        """Kill and remove a worker that could not prove its weights; see `Engines`."""
        info, handle = self._members.pop(worker_id)
        # After the kill, open requests to the worker fail at once, and its dispatcher notices the death
        ray.kill(handle)
        log.error("worker %s did not take the weights and is fenced: %s", worker_id, cause_of(error))
        answer(self.controller.deregister.remote(info.kind, worker_id, cause_of(error)))

    def begin(self, for_late: bool) -> None:
        """Begin a sync, during which no worker joins; see `Engines`."""
        members = answer(self.controller.begin_sync.remote(for_late, self.of_reference), self.timeout_s)
        self._members = {info.worker_id: (info, handle) for info, handle in members}

    @property
    def members(self) -> dict[str, int]:
        """Return the number of processes of each worker of the sync, by worker id; see `Engines`."""
        return {worker_id: info.world_size for worker_id, (info, _) in self._members.items()}

    def each(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of each worker of the sync, and return the answers by worker id; see `Engines`."""
        args_by_worker = dict.fromkeys(self._members, args)
        return self._call(method, args_by_worker, others_s=self.timeout_s)

    def together(self, method: str, *args: Any) -> None:
        """Call a method of all workers of the sync at the same time; see `Engines`.

        The method exchanges data between the workers, so it finishes only if all of them run it.

        For `init_weight_transfer`, each engine also gets its first rank in the transfer group. Rank 0 is the trainer.
        """
        args_by_worker = dict.fromkeys(self._members, args)
        if method == "init_weight_transfer":
            rank = args[0]["rank_offset"]
            for worker_id, world_size in self.members.items():
                args_by_worker[worker_id] = ({**args[0], "rank_offset": rank},)
                rank += world_size
        answers = self._call(method, args_by_worker, others_s=OTHERS_S)
        lost_workers = args_by_worker.keys() - answers.keys()
        if lost_workers:
            raise WorkerLost(f"{', '.join(sorted(lost_workers))}: lost in an NCCL weight sync, by {method}")

    def _call(
        self, method: str, args_by_worker: dict[str, tuple[Any, ...]], others_s: float
    ) -> dict[str, Any]:
        """Call a method of several workers, and fence the workers that fail or do not answer.

        Args:
            method: Name of the method.
            args_by_worker: The method's arguments, by worker id.
            others_s: Seconds that the other workers have to answer after one was lost, limited by `timeout_s`.

        Returns:
            The answers, by worker id.
        """
        worker_by_call = {}
        for worker_id, args in args_by_worker.items():
            _, handle = self._members[worker_id]
            worker_by_call[handle.transfer.remote(method, *args)] = worker_id
        answers: dict[str, Any] = {}
        calls = list(worker_by_call)
        deadline = time.monotonic() + self.timeout_s
        with waiting("weights", f"a policy (NCCL: {method})", ", ".join(args_by_worker)):
            while calls:
                ready, calls = ray.wait(calls, timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    # The deadline has passed. For each worker without an answer, `ray.get` below raises, and the worker
                    # is fenced
                    ready = calls
                    calls = []
                for call in ready:
                    worker_id = worker_by_call[call]
                    try:
                        answers[worker_id] = ray.get(call, timeout=0)
                    except LOST as error:
                        deadline = min(deadline, time.monotonic() + others_s)
                        self.fence(worker_id, error)
        return answers
