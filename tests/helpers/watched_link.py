"""`Engines`: one that passes every self-test, and is asked what it would show if it lost a tensor."""

from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
from safetensors.torch import load

from async_grpo.protocols import Receipt, WeightPackage
from async_grpo.weights.package import SELF_TEST, canary_miss
from async_grpo.weights.self_test import self_test_groups


class WatchedLink:
    """In each watched round (None: in all) of a self-test, every tensor that the round changes is lost in turn.

    Args:
        update: Puts tensors into the engine, and returns its receipt.
        canary: Computes the engine's log-probs of a text.
        weights: Those of the engine at its start.
        watched: Numbers of the rounds to watch.
        is_watched: Whether to lose the tensor of this name (None: each).
    """

    def __init__(
        self,
        update,
        canary,
        weights: Mapping[str, torch.Tensor],
        watched: Collection[int] | None = None,
        is_watched: Callable[[str], bool] | None = None,
    ):
        self._update, self._canary = update, canary
        self._held = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self._groups = self_test_groups(weights)
        self._watched, self._is_watched = watched, is_watched or (lambda name: True)
        self.tolerances: list[float] = []
        self.healthy: list[float] = []  # of each round, the canary's difference in tolerances
        self.lost: dict[str, float] = {}  # the same by tensor, had it been lost

    def put(self, chunk: np.ndarray) -> np.ndarray:
        return chunk.copy()

    def deliver(self, package: WeightPackage) -> Mapping[str, Receipt]:
        tensors = {n: t for chunk in package.chunks for n, t in load(chunk.tobytes()).items()}
        receipt = self._update(tensors), self._canary(*package.canary_texts)
        self.tolerances.append(package.tolerance)
        if package.version == SELF_TEST and len(self.tolerances) > 1:
            number = len(self.healthy)
            self.healthy.append(canary_miss(receipt[1] - package.canary_logprobs) / package.tolerance)
            if self._watched is None or number in self._watched:
                changes_all = tensors.keys() == self._held.keys()
                names = tensors.keys() if changes_all else self._groups[number]
                changed = {name: tensors[name] for name in names}
                for name in filter(self._is_watched, changed):
                    self.lost[name] = self._missed(changed, name, package)
                self._update(tensors)
        self._held |= tensors
        return {"g0": receipt}

    def _missed(self, changed: dict[str, torch.Tensor], name: str, package: WeightPackage) -> float:
        self._update({**changed, name: self._held[name].to(changed[name].dtype)})
        return canary_miss(self._canary(*package.canary_texts) - package.canary_logprobs) / package.tolerance

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        pass

    def abort(self, error: BaseException) -> None:
        pass
