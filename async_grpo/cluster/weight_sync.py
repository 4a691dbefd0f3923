"""`RayEngineLink`: weight packages through Ray's object store to every registered worker, and their receipts back."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from async_grpo.errors import WorkerLost
from async_grpo.weights.package import SELF_TEST, Receipt, WeightPackage

log = logging.getLogger(__name__)


class RayEngineLink:
    """`EngineLink` over Ray. A worker that fails to load is fenced, not waited for; the others go on.

    Args:
        registries: the registry actors whose workers follow the policy.
        timeout_s: longest time a worker may take to load one package.
        on_commit: called with a package once its weights generate.
    """

    def __init__(
        self, registries: Mapping[str, Any], timeout_s: float, on_commit: Callable[[WeightPackage], None]
    ) -> None:
        self._registries, self._timeout_s, self._on_commit = registries, timeout_s, on_commit

    def put(self, chunk: np.ndarray) -> Any:
        return ray.put(chunk)

    def deliver(self, package: WeightPackage) -> dict[str, Receipt]:
        """Load `package` into all workers at once.

        Raises:
            WorkerLost: no generation worker is left.
        """
        receipts: dict[str, Receipt] = {}
        self._owners: dict[str, Any] = {}
        loading = []
        for registry in self._registries.values():
            for info, handle in ray.get(registry.begin_sync.remote(), timeout=self._timeout_s):
                loading.append((info.worker_id, handle, registry, handle.update_weights.remote(package)))
        losses = []
        for worker_id, handle, registry, answer in loading:
            try:
                receipts[worker_id] = ray.get(answer, timeout=self._timeout_s)
                self._owners[worker_id] = registry
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                losses.append(f"{worker_id}: {_cause(error)}")
                ray.kill(handle)  # its open requests fail now, and its dispatcher notices
                log.error(
                    "worker %s did not load version %s and is fenced: %s",
                    worker_id,
                    package.version,
                    losses[-1],
                )
                ray.get(registry.deregister.remote(worker_id, losses[-1]), timeout=self._timeout_s)
        if self._registries["generation"] not in self._owners.values():
            raise WorkerLost(
                f"no generation worker took the weights of version {package.version}: {'; '.join(losses)}"
            )
        return receipts

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        """Tell the registries that the package is proven, and once it generates whoever asked."""
        if package.version == SELF_TEST:
            calls = [registry.keep_self_test.remote(package) for registry in self._registries.values()]
        else:
            calls = [
                registry.end_sync.remote(package, [w for w in landed if self._owners[w] is registry])
                for registry in self._registries.values()
            ]
        ray.get(calls, timeout=self._timeout_s)
        if package.version != SELF_TEST:
            self._on_commit(package)


class RayEngineControl:
    """`EngineControl` over Ray: the generation workers, driven step by step by vLLM's trainer engine.

    Args:
        registry: of the generation workers.
        on_commit: called with the package once its weights generate.
    """

    def __init__(self, registry: Any, timeout_s: float, on_commit: Callable[[WeightPackage], None]) -> None:
        self._registry, self._timeout_s, self._on_commit = registry, timeout_s, on_commit
        self.address = ray.util.get_node_ip_address()
        self._handles: dict[str, Any] = {}
        self._world_sizes: dict[str, int] = {}

    def begin(self) -> dict[str, int]:
        members = self._get(self._registry.begin_sync.remote())
        self._handles = {info.worker_id: handle for info, handle in members}
        self._world_sizes = {info.worker_id: info.world_size for info, _ in members}
        return self._world_sizes

    def pause(self) -> None:
        self._each("pause")

    def resume(self, version: int) -> None:
        self._each("resume", version)

    def receipts(self, package: WeightPackage) -> dict[str, Receipt]:
        return self._each("receipt", package.canary_ids)

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        self._get(self._registry.end_sync.remote(package, landed))
        self._on_commit(package)

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


def _cause(error: Exception) -> str:
    """The worker's own error, without Ray's pages around it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"
