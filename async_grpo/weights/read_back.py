"""Read back the weights that a network computes with, by calling its layers with unit vectors.

If the input of a linear layer is 1 at one position and 0 elsewhere, the output is exactly one column of its weight.
This is also true if the layer computes with a packed or fused copy of the weight. Columns are compared by a sum of
hashes of their values. The sum depends neither on the order nor on the number of tensors, because an engine may fuse,
split or pad the tensors that it receives.
"""

from functools import cache

import torch
from torch import Tensor

# Number of columns of each matrix that are compared. A few are enough: at learning rate 1e-6, a training step still
# changes one in a hundred bfloat16 values of size 0.02
COLUMNS = 8
_TINY = 1e-30  # values below this magnitude are treated as zero, because some kernels flush them to zero
# Rounds of the hash splitmix64: (odd multiplier, shift)
_MIX = (-7046029254386353131, 32), (-4658895280553007687, 29)


@cache
def sampled_columns(width: int) -> Tensor:
    """Return the sorted indices of the columns to compare, (COLUMNS or fewer,) int64. They depend only on the width."""
    generator = torch.Generator().manual_seed(width)
    columns = torch.randperm(width, generator=generator)[:COLUMNS]
    return columns.sort().values


def sampled(weight: Tensor) -> Tensor:
    """Return the part of a weight to compare: the sampled columns of a matrix (out, in), or a whole vector.

    For the stacked matrices of experts (experts, out, in), the same columns are sampled from each matrix. Hashing all
    columns would need more memory than the weights themselves.
    """
    if weight.ndim < 2:
        return weight
    return weight[..., sampled_columns(weight.shape[-1]).to(weight.device)]


def fingerprint(values: Tensor) -> int:
    """Return the sum of the values' hashes, modulo 2**64.

    The sum is the same for any order of the values, and for any dtype that represents them exactly. Zeros add nothing.

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
    """Return the place of a weight: the name of the module whose weights share one fingerprint.

    Single weights cannot be compared, because engines fuse some of them under other names. The experts of a layer and
    their router have different places: if an engine packs the experts, the router can still be read back.

    >>> place_of("model.layers.0.self_attn.q_proj.weight"), place_of("model.layers.0.self_attn.qkv_proj.bias")
    ('model.layers.0.self_attn', 'model.layers.0.self_attn')
    >>> place_of("model.layers.0.mlp.experts.gate_up_proj"), place_of("model.layers.0.mlp.experts.7.down_proj.weight")
    ('model.layers.0.mlp.experts', 'model.layers.0.mlp.experts')
    >>> place_of("model.layers.0.mlp.gate.weight")
    'model.layers.0.mlp'
    """
    before, experts, _ = name.partition(".experts.")
    return before + ".experts" if experts else name.rsplit(".", 2)[0]
