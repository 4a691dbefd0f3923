"""The start-up self-test's weights: one group of tensors after the other visibly changed, then put back.

A group is a decoder layer, or all that lies outside the layers. Were every tensor changed at once, a key bias of one
layer in 48 would move the canary less than bfloat16 rounds it; among the tensors of its own layer it moves it by 4 %
and more of what all of them do, and rounding by 1.6 % at most (docs/log.md, 2026-11-22).
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from async_grpo.modeling import local_shard

# Units in the last place of the wire dtype by which a healthy engine may miss the canary's movement
ROUNDINGS = 4.5


def self_test_groups(names: Collection[str]) -> list[frozenset[str]]:
    """`names` by the first number in them (the layer), those without one together; every name in one group.

    >>> [sorted(group) for group in self_test_groups(["embed", "layers.0.q", "layers.0.k", "layers.1.q", "head"])]
    [['embed', 'head'], ['layers.0.k', 'layers.0.q'], ['layers.1.q']]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = re.search(r"\.\d+\.", name)
        groups.setdefault(layer[0] if layer else "", []).append(name)
    return [frozenset(group) for group in groups.values()]


def self_test_tolerance(moved: float, wire_dtype: torch.dtype, rounding: float) -> float:
    """The largest difference (root mean square, nats) of an engine that lost nothing.

    moved: what the round's change makes of the trainer's own canary, root mean square. rounding: by how much engine
    and trainer differed before anything was changed.

    >>> round(self_test_tolerance(0.4, torch.bfloat16, 0.004), 4)
    0.0141
    """
    return max(ROUNDINGS * torch.finfo(wire_dtype).eps * moved, 1.5 * rounding)


@contextmanager
def perturbed(weights: Mapping[str, torch.Tensor], seed: int = 0) -> Iterator[None]:
    """Add noise to each of `weights` (shards included) while the block runs; see `noise_scale`.

    An engine that loses one of the tensors then computes visibly other log-probs, whatever the learning rate would
    have hidden. The originals are kept aside: at start, before the optimizer's state exists, there is room for them.
    """
    shards = [local_shard(weight) for weight in weights.values()]
    scales = [noise_scale(weight) for weight in weights.values()]
    originals = [shard.clone() for shard in shards]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for shard, scale in zip(shards, scales, strict=True):
                noise = torch.randn(shard.shape, generator=generator) * scale
                shard.add_(noise.to(shard.device, shard.dtype))
        yield
    finally:
        with torch.no_grad():
            for shard, original in zip(shards, originals, strict=True):
                shard.copy_(original)


def noise_scale(weight: torch.Tensor) -> float:
    """Standard deviation of a tensor's noise: half its own root mean square, and enough for the sum to be seen.

    With the noise a vector is of size 1.5 (biases are zero in a fresh model), and a matrix so large that it makes
    1.25 of a state of size 1: in a narrow fresh model queries and keys are so small that every token is attended to
    alike, and nothing about them could be seen. A rank goes by the size of its shard.
    """
    shard = local_shard(weight).detach().float()
    size = float(shard.square().mean().sqrt()) if shard.numel() else 0.0
    wanted = 1.25 * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 1.5
    return max(0.5 * size, max(0.0, wanted**2 - size**2) ** 0.5)
