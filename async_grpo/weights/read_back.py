"""Whether a network computes with the weights that it was given: its layers are asked for columns of them.

A linear layer whose input is 1 at one place and 0 elsewhere answers with one column of its weight, to the bit, through
whatever packed or fused copy serves requests. Columns are compared by a sum over their values, in which neither the order
nor the number of tensors counts: an engine may have fused, split over processes or padded what it received.
"""

from functools import cache

import torch
from torch import Tensor

# Of each matrix: at learning rate 1e-6 one in a hundred bfloat16 values of size 0.02 changes per step
COLUMNS = 8
_TINY = 1e-30  # below: some kernels flush these to zero
_MIX = (-7046029254386353131, 32), (-4658895280553007687, 29)  # of splitmix64: odd multiplier, shift


@cache
def sampled_columns(width: int) -> Tensor:
    """(at most COLUMNS,) int64, ascending: which columns of a matrix of that width are compared; always the same."""
    chosen = torch.randperm(width, generator=torch.Generator().manual_seed(width))[:COLUMNS]
    return chosen.sort().values


def sampled(weight: Tensor) -> Tensor:
    """Return what is compared of a weight: the sampled columns of a matrix (out, in), all of a vector.

    Of the matrices of many experts (experts, out, in) the same columns of each: hashing them all would need more memory
    than they take themselves.
    """
    if weight.ndim < 2:
        return weight
    return weight[..., sampled_columns(weight.shape[-1]).to(weight.device)]


def fingerprint(values: Tensor) -> int:
    """A sum modulo 2**64 over the values, each hashed: the same in any order and any dtype that holds them; zeros add
    nothing.

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
    """Return where a weight is compared, together with its neighbors: engines fuse some of them under other names.

    The experts of a layer are one place, apart from their router: some engines pack experts, and these cannot be read.

    >>> place_of("model.layers.0.self_attn.q_proj.weight"), place_of("model.layers.0.self_attn.qkv_proj.bias")
    ('model.layers.0.self_attn', 'model.layers.0.self_attn')
    >>> place_of("model.layers.0.mlp.experts.gate_up_proj"), place_of("model.layers.0.mlp.experts.7.down_proj.weight")
    ('model.layers.0.mlp.experts', 'model.layers.0.mlp.experts')
    >>> place_of("model.layers.0.mlp.gate.weight")
    'model.layers.0.mlp'
    """
    before, experts, _ = name.partition(".experts.")
    return before + ".experts" if experts else name.rsplit(".", 2)[0]
