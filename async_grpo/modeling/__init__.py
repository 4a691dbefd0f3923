"""The policy as a network: loading a Hugging Face causal LM, its packed forward, its log-probs, its sharded weights."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_grpo.modeling.four_bit import FourBitWeight, dequantised


@dataclass(frozen=True)
class MergedWeight:
    """A weight with a LoRA adapter: base + scaling * lora_b @ lora_a (Hu et al. 2021, "LoRA", equation 3).

    `full_tensor` computes this sum only when it is needed, so that only one merged weight is in memory at a time. The
    other functions of this module use the base, which has the shape and the sharding of the merged weight.
    """

    base: "StoredWeight"  # (out, in), frozen
    lora_a: Tensor  # (rank, in)
    lora_b: Tensor  # (out, rank)
    scaling: float

    @property
    def shape(self) -> torch.Size:
        """Return the shape (out, in) of the merged weight."""
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the base."""
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        """Return the device that stores the base."""
        return self.base.device

    def numel(self) -> int:
        """Return the number of values of the merged weight."""
        return self.base.numel()

    def element_size(self) -> int:
        """Return the number of bytes of one value of the base."""
        return self.base.element_size()


StoredWeight = Tensor | FourBitWeight
Weight = StoredWeight | MergedWeight


def is_lora_tensor(name: str) -> bool:
    """Return whether a tensor is a matrix A or B of a LoRA adapter, by its name in peft's files.

    >>> is_lora_tensor("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
    True
    """
    return ".lora_A." in name or ".lora_B." in name


def local_shard(weight: Weight) -> Tensor:
    """Return this rank's shard of a weight, or the weight itself if it is not sharded.

    The result is a view: writing to it changes the weight. Of a weight in 4 bits, it has the scales, in float32.
    """
    kept_weight = stored_weight(weight)
    if isinstance(kept_weight, FourBitWeight):
        return local_shard(kept_weight.scales.detach()).view(torch.float32)
    return kept_weight.to_local() if isinstance(kept_weight, DTensor) else kept_weight


def stored_weight(weight: Weight) -> StoredWeight:
    """Return what the model stores for a weight: the base if the weight has an adapter."""
    return weight.base if isinstance(weight, MergedWeight) else weight


def _stored_tensor(weight: Weight) -> Tensor:
    """Return the tensor that the model stores for a weight: of a weight in 4 bits, the codes."""
    kept_weight = stored_weight(weight)
    return kept_weight.codes if isinstance(kept_weight, FourBitWeight) else kept_weight


def full_tensor(weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole weight, cast to `dtype`. A sharded weight is cast and then gathered, which is a collective.

    An adapter is merged in float32, and the sum is cast. A weight in 4 bits is gathered and then dequantised.
    """
    if isinstance(weight, MergedWeight):
        base = full_tensor(weight.base).float()
        lora_a = full_tensor(weight.lora_a, torch.float32)
        lora_b = full_tensor(weight.lora_b, torch.float32)
        merged = torch.addmm(base, lora_b, lora_a, alpha=weight.scaling)
        return merged.to(dtype or weight.dtype)
    if isinstance(weight, FourBitWeight):
        values = dequantised(full_tensor(weight.codes), full_tensor(weight.scales), weight.dtype)
        return values.to(dtype or weight.dtype)
    shard = weight.detach().to(compute_device(weight), dtype or weight.dtype)
    return shard.full_tensor() if isinstance(shard, DTensor) else shard


def compute_device(weight: Weight) -> torch.device:
    """Return the device on which a (possibly sharded) weight is used for computation.

    With CPU offload, shards are stored in main memory, which NCCL cannot reach, but are used on the GPU.
    """
    tensor = _stored_tensor(weight)
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


def copies(weight: Weight) -> int:
    """Return the number of ranks that hold the same shard of a weight; 1 if the weight is not sharded."""
    tensor = _stored_tensor(weight)
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate())
