"""`RayEngineLink`: weight packages through Ray's object store to every registered worker, and their receipts back."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from async_grpo.errors import WorkerLost
from async_grpo.weights.package import Receipt, WeightPackage

log = logging.getLogger(__name__)


class RayEngineLink:
    """`EngineLink` over Ray. A worker that fails to load is fenced, not waited for; the others go on.

    Args:
        registries: the registry actors whose workers follow the policy.
        timeout_s: longest time a worker may take to load one package.
    """

    def __init__(self, registries: Mapping[str, Any], timeout_s: float) -> None:
        self._registries, self._timeout_s = registries, timeout_s

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
            for worker_id, handle in ray.get(registry.begin_sync.remote(), timeout=self._timeout_s).items():
                loading.append((worker_id, registry, handle.update_weights.remote(package)))
        losses = []
        for worker_id, registry, answer in loading:
            try:
                receipts[worker_id] = ray.get(answer, timeout=self._timeout_s)
                self._owners[worker_id] = registry
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                losses.append(f"{worker_id}: {_cause(error)}")
                log.error("worker %s did not load version %s and is fenced: %s", worker_id, package.version, losses[-1])
                ray.get(registry.deregister.remote(worker_id, losses[-1]), timeout=self._timeout_s)
        if self._registries["generation"] not in self._owners.values():
            raise WorkerLost(f"no generation worker took the weights of version {package.version}: {'; '.join(losses)}")
        return receipts

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        """Tell the registries that the package is the current one."""
        ray.get(
            [
                registry.end_sync.remote(package, [w for w in landed if self._owners[w] is registry])
                for registry in self._registries.values()
            ],
            timeout=self._timeout_s,
        )


def _cause(error: Exception) -> str:
    """The worker's own error, without Ray's pages around it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"
