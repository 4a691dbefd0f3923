"""The norms of gradients and weights, of which each rank has shards."""

from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from async_grpo.modeling import local_shard


def squared_norms(tensors: Sequence[Tensor]) -> Float64[Tensor, " tensors"]:
    """Return the squared L2 norm of this rank's shard of each tensor.

    >>> squared_norms([torch.tensor([3.0, 4.0]), torch.tensor([2.0])])
    tensor([25.,  4.], dtype=torch.float64)
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    norms = torch._foreach_norm([local_shard(tensor) for tensor in tensors], 2, dtype=torch.float32)
    return torch.stack(norms).double().square()
