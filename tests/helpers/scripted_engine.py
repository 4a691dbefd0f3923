"""A publisher of weights and, in place of vLLM, an engine of two layers that can lose or ignore a tensor."""

import numpy as np
import torch
from torch import nn

from async_grpo.weights.canary import Canary
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.package import unpack
from async_grpo.weights.publisher import Publisher


class TwoLayers(nn.Module):
    """A language model of two layers, always with the same random weights at first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(nn.functional.one_hot(ids.long() % 8, 8).float())))


def logprobs(model: nn.Module, ids: np.ndarray) -> np.ndarray:
    """Return the canary's log-probs by a model, as the trainer and the engine compute them."""
    with torch.no_grad():
        rows = model(torch.tensor(ids)).log_softmax(-1)
    return rows[torch.arange(len(ids)), torch.tensor(ids).long() % 5].numpy()


def named(model: nn.Module):
    """Yield a model's weights by the names that the engine knows them by."""
    yield from model.named_parameters()


CANARY = Canary([Canary.text(40, 32)], logprobs)


class FakeLink:
    """`Engines` of a single engine, which may lose one tensor on the way or silently not use it."""

    def __init__(self, loses=None, ignores=None, blind=False):
        self.engine, self.loses, self.ignores, self.blind, self.log = TwoLayers(), loses, ignores, blind, []

    def put(self, chunk):
        return chunk.copy()

    def deliver(self, package):
        self.log.append(("deliver", package.version, len(package.chunks)))
        tensors, receipt = unpack(package.chunks)
        if self.loses:
            del tensors[self.loses], receipt[self.loses]
        used = {name: tensor for name, tensor in tensors.items() if name != self.ignores}
        self.engine.load_state_dict(used, strict=False)
        answer = logprobs(self.engine, *package.canary_texts)
        return {"g0": (receipt, answer * np.nan if self.blind else answer)}

    def commit(self, package, landed):
        self.log.append(("commit", package.version, landed))

    def abort(self, error):
        self.log.append(("abort", str(error)))

    def fence(self, worker_id, error):
        self.log.append(("fence", worker_id))


def publisher(link, named=named, kind=Publisher, config=WeightConfig()) -> Publisher:  # noqa: B008
    """Return a publisher to that link; without a link, that of another rank than the first."""
    return kind(link, named, CANARY, torch.float32, int(link is None), config)
