"""What a self-test changes of the weights: which tensors in one round, and by how much."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from async_grpo.modeling import local_shard


def self_test_groups(names: Collection[str]) -> list[frozenset[str]]:
    """`names` by the first number in them (the layer), those without one together; every name in one group.

    Were every tensor changed at once, a key bias of one layer in 48 would move the canary less than bfloat16 rounds it;
    it makes 4 % and more of what all tensors of its own layer do, and rounding 1.6 % at most (docs/log.md, 2026-11-22).

    >>> [sorted(group) for group in self_test_groups(["embed", "layers.0.q", "layers.0.k", "layers.1.q", "head"])]
    [['embed', 'head'], ['layers.0.k', 'layers.0.q'], ['layers.1.q']]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = re.search(r"\.\d+\.", name)
        groups.setdefault(layer[0] if layer else "", []).append(name)
    return [frozenset(group) for group in groups.values()]


@contextmanager
@torch.no_grad()
def perturbed(weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Add noise to each of `weights` (shards included) while the block runs.

    An engine that loses one of the tensors then computes visibly other log-probs, whatever the learning rate would
    have hidden. The originals are kept aside: those of one group, a layer or what lies outside the layers, at a time.
    """
    shards = [local_shard(weight) for weight in weights.values()]
    originals = [shard.clone() for shard in shards]
    generator = torch.Generator().manual_seed(0)
    try:
        for shard in shards:
            noise = torch.randn(shard.shape, generator=generator) * noise_scale(shard)
            shard.add_(noise.to(shard.device, shard.dtype))
        yield
    finally:
        for shard, original in zip(shards, originals, strict=True):
            shard.copy_(original)


def noise_scale(shard: torch.Tensor) -> float:
    """Standard deviation of a tensor's noise: half its own root mean square, and enough for the sum to be seen.

    With the noise a vector is of size 1.5 (biases are zero in a fresh model), and a matrix so large that it makes
    1.25 of a state of size 1: in a narrow fresh model queries and keys are so small that every token is attended to
    alike, and nothing about them could be seen. A rank goes by the size of its shard.
    """
    size = float(shard.float().square().mean().sqrt()) if shard.numel() else 0.0
    wanted = 1.25 * shard.shape[-1] ** -0.5 if shard.ndim > 1 else 1.5
    return max(0.5 * size, max(0.0, wanted**2 - size**2) ** 0.5)
