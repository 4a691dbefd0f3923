"""`RayEngines`: weights to every registered worker, and their receipts back: in packages through Ray's object store, or
driven step by step by vLLM's trainer engine."""

import logging
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from async_grpo.cluster.controller import GENERATION
from async_grpo.cluster.ray_session import answer, cause_of
from async_grpo.errors import WorkerLost
from async_grpo.protocols import Receipt, WeightPackage
from async_grpo.types import WorkerInfo

log = logging.getLogger(__name__)
LOST = (RayActorError, RayTaskError, GetTimeoutError)


class RayEngines:
    """`Engines` over Ray.

    Args:
        controller: the run's, which knows the workers.
        timeout_s: longest time that a worker may take to load one package, or for one step.
    """

    def __init__(self, controller: Any, timeout_s: float) -> None:
        self._controller, self._timeout_s = controller, timeout_s
        self.address = ray.util.get_node_ip_address()
        self._members: list[tuple[WorkerInfo, Any]] = []  # since `begin`

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        """Tell the controller that the package is proven."""
        answer(self._controller.end_sync.remote(package, landed), self._timeout_s)

    def abort(self, error: BaseException) -> None:
        answer(self._controller.fail.remote(error))

    def put(self, chunk: np.ndarray) -> Any:
        return ray.put(chunk)

    def deliver(self, package: WeightPackage) -> dict[str, Receipt]:
        """Load `package` into all workers at once. One that fails to is fenced, not waited for; the others go on.

        Raises:
            WorkerLost: no generation worker is left.
        """
        receipts: dict[str, Receipt] = {}
        losses, generates = [], False
        members = answer(self._controller.begin_sync.remote(), self._timeout_s)
        loading = [handle.update_weights.remote(package) for _, handle in members]
        if loading:
            ray.wait(loading, num_returns=len(loading), timeout=self._timeout_s)
        for (info, handle), receipt in zip(members, loading, strict=True):
            try:
                receipts[info.worker_id] = ray.get(receipt, timeout=0)
                generates |= info.kind == GENERATION
            except LOST as error:
                losses.append(f"{info.worker_id}: {cause_of(error)}")
                ray.kill(handle)  # its open requests fail now, and its dispatcher notices
                log.error("a worker did not load version %s and is fenced: %s", package.version, losses[-1])
                answer(self._controller.deregister.remote(info.kind, info.worker_id, losses[-1]))
        if not generates:
            raise WorkerLost(f"no engine took the weights of version {package.version}: {'; '.join(losses)}")
        return receipts

    def begin(self) -> dict[str, int]:
        members = answer(self._controller.begin_sync.remote(), self._timeout_s)
        self._members = [member for member in members if member[0].kind == GENERATION]
        return {info.worker_id: info.world_size for info, _ in self._members}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every engine joins the group after the ones before it: rank 0 is the trainer."""
        joining, own = [], dict(init_info)
        for info, handle in self._members:
            joining.append(handle.transfer.remote("init_weight_transfer", dict(own)))
            own["rank_offset"] += info.world_size
        self._get(joining)

    def start_weight_update(self) -> None:
        self.each("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.each("receive_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.each("finish_weight_update")

    def each(self, method: str, *args: Any) -> dict[str, Any]:
        answers = self._get([handle.transfer.remote(method, *args) for _, handle in self._members])
        return {info.worker_id: one for (info, _), one in zip(self._members, answers, strict=True)}

    def _get(self, references: list[Any]) -> list[Any]:
        try:
            return ray.get(references, timeout=self._timeout_s)
        except LOST as error:
            raise WorkerLost(f"an engine was lost in an NCCL weight sync: {cause_of(error)}") from error
