"""The policy as a network: loading a Hugging Face causal LM, its packed forward, its log-probs, its sharded weights."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(weight: Tensor) -> Tensor:
    """This rank's part of a (possibly sharded) weight: a view, so writing to it writes to the weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def full_tensor(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The whole of a weight, in that dtype: of a sharded one it is gathered (a collective), cast before it travels."""
    shard = weight.detach().to(dtype or weight.dtype)
    return shard.full_tensor() if isinstance(shard, DTensor) else shard
