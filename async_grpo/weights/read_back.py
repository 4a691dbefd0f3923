"""Read back which weights a network computes with, by asking its layers for columns of them.

If the input of a linear layer is 1 at one position and 0 elsewhere, its output is exactly one column of its weight,
whatever packed or fused copy serves requests. Columns are compared by a sum over their values, which does not depend on the
order or the number of tensors: an engine may have fused, split over processes or padded the tensors that it received.
"""

from functools import cache

import torch
from torch import Tensor

# Columns that are compared of each matrix: at learning rate 1e-6 one in a hundred bfloat16 values of size 0.02 changes per
# step
COLUMNS = 8
_TINY = 1e-30  # some kernels flush smaller values to zero
_MIX = (-7046029254386353131, 32), (-4658895280553007687, 29)  # rounds of splitmix64: (odd multiplier, shift)


@cache
def sampled_columns(width: int) -> Tensor:
    """Return the columns that are compared of a matrix of that width, always the same: (COLUMNS or less,) int64, sorted."""
    generator = torch.Generator().manual_seed(width)
    columns = torch.randperm(width, generator=generator)[:COLUMNS]
    return columns.sort().values


def sampled(weight: Tensor) -> Tensor:
    """Return the part of a weight that is compared: the sampled columns of a matrix (out, in), or a whole vector.

    For the matrices of many experts (experts, out, in) these are the same columns of each matrix. To hash all columns would
    need more memory than the weights take.
    """
    if weight.ndim < 2:
        return weight
    return weight[..., sampled_columns(weight.shape[-1]).to(weight.device)]


def fingerprint(values: Tensor) -> int:
    """Return the sum modulo 2**64 of the hashed values.

    It is the same in any order and in any dtype that holds the values exactly. Zeros add nothing.

    >>> a, b = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0])
    >>> fingerprint(torch.cat([b, a.flip(0)]).bfloat16()) == (fingerprint(a) + fingerprint(b)) % 2**64
    True
    """
    wide = values.float()
    words = torch.where(wide.abs() < _TINY, 0.0, wide).contiguous().view(torch.int32).to(torch.int64)
    for multiplier, shift in _MIX:
        words = words * multiplier
        words = words ^ (words >> shift)
    return int(words.sum()) % 2**64


def place_of(name: str) -> str:
    """Return the module under which a weight is compared with its neighbors, because engines fuse some under other names.

    The experts of a layer have a place of their own, apart from their router: some engines pack experts, which then cannot
    be read back.

    >>> place_of("model.layers.0.self_attn.q_proj.weight"), place_of("model.layers.0.self_attn.qkv_proj.bias")
    ('model.layers.0.self_attn', 'model.layers.0.self_attn')
    >>> place_of("model.layers.0.mlp.experts.gate_up_proj"), place_of("model.layers.0.mlp.experts.7.down_proj.weight")
    ('model.layers.0.mlp.experts', 'model.layers.0.mlp.experts')
    >>> place_of("model.layers.0.mlp.gate.weight")
    'model.layers.0.mlp'
    """
    before, experts, _ = name.partition(".experts.")
    return before + ".experts" if experts else name.rsplit(".", 2)[0]
