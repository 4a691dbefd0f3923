"""`RayEngineLink`: weight packages through Ray's object store to every registered worker, and their receipts back."""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from async_grpo.cluster.controller import GENERATION
from async_grpo.errors import WorkerLost
from async_grpo.protocols import EngineControl, EngineLink, Receipt, WeightPackage
from async_grpo.weights.package import SELF_TEST

log = logging.getLogger(__name__)


class RayEngineLink:
    """`EngineLink` over Ray. A worker that fails to load is fenced, not waited for; the others go on.

    Args:
        controller: the run's, which knows the workers.
        timeout_s: longest time a worker may take to load one package.
    """

    def __init__(self, controller: Any, timeout_s: float) -> None:
        self._controller, self._timeout_s = controller, timeout_s

    def put(self, chunk: np.ndarray) -> Any:
        return ray.put(chunk)

    def deliver(self, package: WeightPackage) -> dict[str, Receipt]:
        """Load `package` into all workers at once.

        Raises:
            WorkerLost: no generation worker is left.
        """
        receipts: dict[str, Receipt] = {}
        losses, generates = [], False
        members = ray.get(self._controller.begin_sync.remote(), timeout=self._timeout_s)
        loading = [(info, handle, handle.update_weights.remote(package)) for info, handle in members]
        answers = [answer for _, _, answer in loading]
        ray.wait(answers, num_returns=len(answers), timeout=self._timeout_s) if answers else None
        for info, handle, answer in loading:
            try:
                receipts[info.worker_id] = ray.get(answer, timeout=0)
                generates |= info.kind == GENERATION
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                losses.append(f"{info.worker_id}: {_cause(error)}")
                ray.kill(handle)  # its open requests fail now, and its dispatcher notices
                log.error(
                    "worker %s did not load version %s and is fenced: %s",
                    info.worker_id,
                    package.version,
                    losses[-1],
                )
                fenced = self._controller.deregister.remote(info.kind, info.worker_id, losses[-1])
                ray.get(fenced, timeout=self._timeout_s)
        if not generates:
            raise WorkerLost(
                f"no generation worker took the weights of version {package.version}: {'; '.join(losses)}"
            )
        return receipts

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        """Tell the controller that the package is proven: its weights generate now (not those of a self-test)."""
        if package.version == SELF_TEST:
            told = self._controller.keep_self_test.remote(package)
        else:
            told = self._controller.end_sync.remote(package, landed)
        ray.get(told, timeout=self._timeout_s)


class RayEngineControl:
    """`EngineControl` over Ray: the generation workers, driven step by step by vLLM's trainer engine.

    Args:
        controller: the run's, which knows the workers.
        timeout_s: longest time that one step may take.
    """

    def __init__(self, controller: Any, timeout_s: float) -> None:
        self._controller, self._timeout_s = controller, timeout_s
        self.address = ray.util.get_node_ip_address()
        self._handles: dict[str, Any] = {}
        self._world_sizes: dict[str, int] = {}

    def begin(self) -> dict[str, int]:
        members = [m for m in self._get(self._controller.begin_sync.remote()) if m[0].kind == GENERATION]
        self._handles = {info.worker_id: handle for info, handle in members}
        self._world_sizes = {info.worker_id: info.world_size for info, _ in members}
        return self._world_sizes

    def pause(self, version: int) -> None:
        self._each("pause", version)

    def resume(self, version: int) -> None:
        self._each("resume", version)

    def receipts(self, package: WeightPackage) -> dict[str, Receipt]:
        return self._each("receipt", package.canary_ids)

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        self._get(self._controller.end_sync.remote(package, landed))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every engine joins the group after the ones before it: rank 0 is the trainer."""
        answers, offset = [], init_info["rank_offset"]
        for worker_id, handle in self._handles.items():
            answers.append(
                handle.transfer.remote("init_weight_transfer", {**init_info, "rank_offset": offset})
            )
            offset += self._world_sizes[worker_id]
        self._get(answers)

    def start_weight_update(self) -> None:
        self._each("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._each("receive_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each("finish_weight_update")

    def _each(self, method: str, *args: Any) -> dict[str, Any]:
        answers = self._get([handle.transfer.remote(method, *args) for handle in self._handles.values()])
        return dict(zip(self._handles, answers, strict=True))

    def _get(self, references: Any) -> Any:
        try:
            return ray.get(references, timeout=self._timeout_s)
        except (RayActorError, RayTaskError, GetTimeoutError) as error:
            raise WorkerLost(
                f"a generation worker was lost in an NCCL weight sync: {_cause(error)}"
            ) from error


@dataclass(frozen=True)
class RayEngines:
    """`Engines` over Ray; see `RayEngineLink` for the fields."""

    controller: Any
    timeout_s: float

    def link(self) -> EngineLink:
        return RayEngineLink(self.controller, self.timeout_s)

    def control(self) -> EngineControl:
        return RayEngineControl(self.controller, self.timeout_s)


def _cause(error: Exception) -> str:
    """The worker's own error, without Ray's pages around it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"
