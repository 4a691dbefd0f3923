"""The policy as a network: loading a Hugging Face causal LM, its packed forward, its log-probs, its sharded weights."""

from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(weight: Tensor) -> Tensor:
    """Return this rank's shard of a weight, or the weight itself if it is not sharded.

    The result is a view: writing to it changes the weight.
    """
    return weight.to_local() if isinstance(weight, DTensor) else weight


def full_tensor(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole weight, cast to `dtype`. A sharded weight is cast and then gathered, which is a collective."""
    shard = weight.detach().to(compute_device(weight), dtype or weight.dtype)
    return shard.full_tensor() if isinstance(shard, DTensor) else shard


def compute_device(weight: Tensor) -> torch.device:
    """Return the device that computes with a (possibly sharded) weight.

    It may differ from the device that stores the weight: with CPU offload, shards are in main memory, which NCCL cannot
    reach.
    """
    return torch.device(weight.device_mesh.device_type) if isinstance(weight, DTensor) else weight.device


def copies(weight: Tensor) -> int:
    """Return the number of ranks that hold the same shard of a weight; 1 if the weight is not sharded."""
    if not isinstance(weight, DTensor):
        return 1
    mesh = weight.device_mesh
    return prod(mesh.size(dim) for dim, placement in enumerate(weight.placements) if placement.is_replicate())
