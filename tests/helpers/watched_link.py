"""`Engines`: one that passes every self-test, and is asked what it would show if it lost a tensor."""

from collections.abc import Mapping

import numpy as np
import torch
from safetensors.torch import load

from async_grpo.protocols import Receipt, WeightPackage
from async_grpo.weights.package import SELF_TEST, rms
from async_grpo.weights.self_test import self_test_groups


class WatchedLink:
    """In each watched round (None: in all) of a self-test, every tensor that the round changes is lost in turn.

    update: puts tensors into the engine, and returns its receipt. canary: the engine's log-probs of a text.
    weights: of the engine at its start.
    """

    def __init__(self, update, canary, weights: Mapping[str, torch.Tensor], watched=None):
        self._update, self._canary = update, canary
        self._held = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self._groups = self_test_groups(weights)
        self._watched = range(len(self._groups)) if watched is None else watched
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
            self.healthy.append(rms(receipt[1] - package.canary_logprobs) / package.tolerance)
            if number in self._watched:
                changed = {name: tensors[name] for name in self._groups[number]}
                self.lost |= {name: self._missed(changed, name, package) for name in changed}
                self._update(tensors)
        self._held |= tensors
        return {"g0": receipt}

    def _missed(self, changed: dict[str, torch.Tensor], name: str, package: WeightPackage) -> float:
        self._update({**changed, name: self._held[name].to(changed[name].dtype)})
        return rms(self._canary(*package.canary_texts) - package.canary_logprobs) / package.tolerance

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        pass

    def abort(self, error: BaseException) -> None:
        pass
