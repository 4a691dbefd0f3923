"""`RayEngines`: weights to every registered worker, and their receipts back: in packages through Ray's object store, or
driven step by step by vLLM's trainer engine."""

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
from async_grpo.types import GENERATION

log = logging.getLogger(__name__)
LOST = (RayActorError, RayTaskError, GetTimeoutError)
OTHERS_S = 10.0  # after an engine was lost: who does not answer either by then waits for it


def check_object_store(num_bytes: int) -> None:
    """ConfigurationError: on some node Ray's object store does not hold a version of the weights, and the begin of the
    next: Ray would write the rest to a disk, at every sync."""
    needed = int(1.3 * num_bytes)
    for node in ray.nodes():
        room = int(node["Resources"].get("object_store_memory", needed))
        refuse(
            node["Alive"] and room < needed,
            f"Ray's object store on {node['NodeManagerAddress']} has {room / 1e9:.2f} GB, weights on their way need "
            f"{needed / 1e9:.2f}: start Ray there with a larger --object-store-memory (and /dev/shm: docker --shm-size)",
        )


@dataclass
class RayEngines:
    """`Engines` over Ray."""

    controller: Any  # the run's, which knows the workers
    timeout_s: float  # longest time that a worker may take to load one package, or for one step

    def __post_init__(self) -> None:
        self.address = ray.util.get_node_ip_address()
        self._members: dict[str, tuple[WorkerInfo, Any]] = {}  # whom the sync is for, with their handles

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        """Tell the controller that the package is proven."""
        answer(self.controller.end_sync.remote(package, landed), self.timeout_s)

    def abort(self, error: BaseException) -> None:
        answer(self.controller.fail.remote(error))

    def put(self, chunk: np.ndarray) -> Any:
        return ray.put(chunk)

    def deliver(self, package: WeightPackage) -> dict[str, Receipt]:
        """Load `package` into all workers that it is for at once. One that fails to is fenced, not waited for; the others
        go on. Without an engine a run under way waits for a late one, as long as `--worker-grace-s` says.

        WorkerLost: no generation worker took the first weights.
        """
        receipts: dict[str, Receipt] = {}
        losses, generates = [], False
        self.begin(package.for_late)
        loading = [handle.update_weights.remote(package) for _, handle in self._members.values()]
        if loading:
            with waiting("weights", f"policy version {package.version}", ", ".join(self._members)):
                ray.wait(loading, num_returns=len(loading), timeout=self.timeout_s)
        for (worker_id, (info, _)), receipt in zip(tuple(self._members.items()), loading, strict=True):
            try:
                receipts[worker_id] = ray.get(receipt, timeout=0)
                generates |= info.kind == GENERATION
            except LOST as error:
                losses.append(f"{worker_id}: {cause_of(error)}")
                self.fence(worker_id, error)
        if not generates and not package.for_late and package.version <= 0:
            raise WorkerLost(f"no engine took the weights of version {package.version}: {'; '.join(losses)}")
        return receipts

    def fence(self, worker_id: str, error: Exception) -> None:
        info, handle = self._members.pop(worker_id)
        ray.kill(handle)  # its open requests fail now, and its dispatcher notices
        log.error("worker %s did not take the weights and is fenced: %s", worker_id, cause_of(error))
        answer(self.controller.deregister.remote(info.kind, worker_id, cause_of(error)))

    def begin(self, for_late: bool) -> None:
        members = answer(self.controller.begin_sync.remote(for_late), self.timeout_s)
        self._members = {info.worker_id: (info, handle) for info, handle in members}

    @property
    def members(self) -> dict[str, int]:
        return {worker_id: info.world_size for worker_id, (info, _) in self._members.items()}

    def each(self, method: str, *args: Any) -> dict[str, Any]:
        return self._ask(method, dict.fromkeys(self._members, args), self.timeout_s)

    def together(self, method: str, *args: Any) -> None:
        """`init_weight_transfer` tells each engine its place in the group: rank 0 is the trainer."""
        of_each = dict.fromkeys(self._members, args)
        if method == "init_weight_transfer":
            place = args[0]["rank_offset"]
            for worker_id, size in self.members.items():
                of_each[worker_id] = ({**args[0], "rank_offset": place},)
                place += size
        if lost := of_each.keys() - self._ask(method, of_each, OTHERS_S).keys():
            raise WorkerLost(f"{', '.join(sorted(lost))}: lost in an NCCL weight sync, by {method}")

    def _ask(self, method: str, of_each: dict[str, tuple[Any, ...]], others_s: float) -> dict[str, Any]:
        """The answers by worker. Who has none is fenced: by its own death, after `--sync-timeout-s`, or when so many
        seconds have passed since another was lost."""
        actors = {name: self._members[name][1] for name in of_each}
        asked = {actors[name].transfer.remote(method, *args): name for name, args in of_each.items()}
        answers, waiting_for, give_up = dict[str, Any](), list(asked), time.monotonic() + self.timeout_s
        with waiting("weights", f"a policy (NCCL: {method})", ", ".join(of_each)):
            while waiting_for:
                ready, waiting_for = ray.wait(waiting_for, timeout=max(0.0, give_up - time.monotonic()))
                late = [] if ready else waiting_for
                for reference in ready or late:
                    try:
                        answers[asked[reference]] = ray.get(reference, timeout=0)
                    except LOST as error:
                        give_up = min(give_up, time.monotonic() + others_s)
                        self.fence(asked[reference], error)
                waiting_for = [] if late else waiting_for
        return answers
