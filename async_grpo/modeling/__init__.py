"""The policy as a network: loading a Hugging Face causal LM, its packed forward, its log-probs, its sharded weights."""

from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(weight: Tensor) -> Tensor:
    """Return this rank's part of a (possibly sharded) weight, as a view: writing to it writes to the weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def full_tensor(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole weight in a dtype; a sharded weight is cast, then gathered (a collective)."""
    shard = weight.detach().to(compute_device(weight), dtype or weight.dtype)
    return shard.full_tensor() if isinstance(shard, DTensor) else shard


def compute_device(weight: Tensor) -> torch.device:
    """Return the device that computes with a (possibly sharded) weight.

    The weight itself may be kept in main memory, which NCCL cannot reach.
    """
    return torch.device(weight.device_mesh.device_type) if isinstance(weight, DTensor) else weight.device


def copies(weight: Tensor) -> int:
    """Return how many ranks hold the same part of a (possibly sharded) weight."""
    if not isinstance(weight, DTensor):
        return 1
    mesh = weight.device_mesh
    return prod(mesh.size(dim) for dim, placement in enumerate(weight.placements) if placement.is_replicate())
