"""`WeightCopy`: a second value of each trained weight, sharded as the policy's, which can change places with the first."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from async_grpo.modeling import local_shard


class WeightCopy:
    """A copy of the weights that a model has when the copy is made, in float32. Weights that LoRA freezes are not copied.

    Args:
        model: The model, sharded or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._followed: dict[str, nn.Parameter] = {}  # the trained weights of the model
        self._weights: dict[str, Tensor] = {}  # the copied values, by the same names
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._followed[name] = parameter
                self._weights[name] = parameter.detach().clone()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the weights, for checkpoints. They are not copies. A sharded model yields shards."""
        yield from self._weights.items()

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Move the copy towards the model: copy <- share * model + (1 - share) * copy."""
        weights = [local_shard(weight) for weight in self._weights.values()]
        followed = [local_shard(parameter.detach()) for parameter in self._followed.values()]
        torch._foreach_lerp_(weights, followed, share)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Let the model compute with the copy within the `with` block. It takes memory for one more tensor."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, weight in self._weights.items():
            kept_shard = local_shard(weight)
            model_shard = local_shard(self._followed[name].detach())
            shard = kept_shard.clone()
            kept_shard.copy_(model_shard)
            model_shard.copy_(shard)
