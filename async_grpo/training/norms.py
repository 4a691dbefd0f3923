"""Norms of sharded tensors: each rank squares what it holds, one all-reduce adds it up."""

from collections.abc import Sequence

import torch
from torch import Tensor

from async_grpo.modeling.shards import local_shard
from async_grpo.training.distributed import Ranks


def tensor_norms(tensors: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """(len(tensors),) float64 on the CPU: the L2 norm of each full tensor; one collective.

    The tensors are sharded without replication, so every element is counted on exactly one rank.
    """
    local = torch._foreach_norm([local_shard(tensor) for tensor in tensors], 2, dtype=torch.float32)
    squares = torch.stack(local).double().square()
    return torch.tensor(ranks.sum(squares.tolist()), dtype=torch.float64).sqrt()


class UpdateStatistics:
    """How far one optimizer step moved the weights; costs a copy of the local shards while the step runs."""

    def __init__(self, parameters: Sequence[Tensor], ranks: Ranks) -> None:
        self._parameters, self._ranks = parameters, ranks
        self._before = [local_shard(parameter.detach()).clone() for parameter in parameters]

    def after_step(self) -> dict[str, float]:
        """model_norm (before the step), model_delta_norm, quantiles over tensors of |delta| / |weight|."""
        after = [local_shard(parameter.detach()) for parameter in self._parameters]
        delta = torch._foreach_sub(after, self._before)
        model_norms, delta_norms = tensor_norms(self._before, self._ranks), tensor_norms(delta, self._ranks)
        moved = model_norms > 0  # a value head begins at zero: nothing to compare its first update with
        ratios = (delta_norms / model_norms)[moved]
        quantiles = torch.quantile(
            ratios, torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
        ).tolist()
        names = ("min", "p25", "p50", "p75", "max")
        return {
            "model_norm": model_norms.norm().item(),
            "model_delta_norm": delta_norms.norm().item(),
            **{f"update_ratio_{name}": value for name, value in zip(names, quantiles, strict=True)},
        }
