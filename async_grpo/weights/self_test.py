"""The self-test: which tensors change together in one round, by how much, and what a healthy engine may miss there."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from async_grpo.modeling import copies, local_shard
from async_grpo.weights.package import canary_miss

# The smallest tolerance of any comparison, nats: below it, float32 log-probs of one text differ on different machines
MIN_TOLERANCE = 5e-5
# Engine and trainer may differ by so many times what the trainer differs by from itself when last bits of its weights flip.
# In bfloat16, where sums are rounded once, healthy engines show at most 1.9 times that; in float32, where each of hundreds
# of terms is, 2.6 times on a real model, and a lost tensor shows by thousands (docs/log.md, 2026-11-25)
SENSITIVITIES = {torch.float32: 48.0, torch.bfloat16: 3.0}
# Or, in a self-test, by so many times what they differed by before anything was changed: an engine with other kernels, or
# with quantised weights, differs by more than rounding
UNCHANGED_DIFFERENCES = 1.5

# Main memory that all ranks together may fill with originals while tensors are changed. 70 billion parameters in float32
# are 280 GB, which a node need not have beside packed weights and the object store
ORIGINALS_BYTES = 8 << 30

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per value


def self_test_groups(names: Collection[str]) -> list[frozenset[str]]:
    """Group `names` by the first number in them (the layer), those without one together; every name is in one group.

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


def groups_within(weights: Mapping[str, torch.Tensor], limit_bytes: int) -> list[frozenset[str]]:
    """Join the groups of `self_test_groups`, in order, while the originals of all ranks fit into `limit_bytes`.

    Every tensor is in exactly one of them. A group that is larger than the limit stands alone: an engine that fuses
    tensors of a layer loads them together. The bytes are those of whole tensors, so that every rank joins alike.

    >>> weights = {f"layers.{number}.{kind}": torch.zeros(4) for number in range(3) for kind in "qk"}  # 16 bytes each
    >>> [sorted(group) for group in groups_within(weights, 64)]
    [['layers.0.k', 'layers.0.q', 'layers.1.k', 'layers.1.q'], ['layers.2.k', 'layers.2.q']]
    """
    joined: list[frozenset[str]] = []
    room_bytes = 0
    for group in self_test_groups(weights):
        group_bytes = sum(_bytes_on_all_ranks(weights[name]) for name in group)
        if joined and group_bytes <= room_bytes:
            joined[-1] |= group
        else:
            joined.append(group)
            room_bytes = limit_bytes
        room_bytes -= group_bytes
    return joined


def _bytes_on_all_ranks(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size() * copies(weight)


@contextmanager
@torch.no_grad()
def perturbed(weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Add noise to each of `weights` (shards included) while the block runs.

    An engine that loses one of the tensors then holds, and computes, something visibly different, whatever the learning
    rate would have hidden. The originals are kept in main memory meanwhile (`groups_within`).
    """
    shards = [local_shard(weight) for weight in weights.values()]
    originals = [shard.detach().to("cpu", copy=True) for shard in shards]
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


def round_tolerance(
    sensitivity: float,
    unchanged_sensitivity: float,
    unchanged_difference: float,
    wire_dtype: torch.dtype,
) -> float:
    """Return what a healthy engine may miss the canary by in a round of the self-test, `canary_miss` in nats.

    An engine that rounds more coarsely than the wire, such as one with weights in fp8, does so in the changed model, too:
    what it differed by before grows as much as the trainer's own sensitivity does.

    Args:
        sensitivity: Of the changed model, see `measure_sensitivity`.
        unchanged_sensitivity: The same before anything was changed.
        unchanged_difference: What engine and trainer differed by then.
        wire_dtype: The engines' dtype.

    >>> round_tolerance(0.02, 0.001, 0.002, torch.bfloat16)  # rounds as the wire does: 3 times 0.02
    0.06
    >>> round_tolerance(0.02, 0.001, 0.01, torch.bfloat16)  # differs by 10 times the sensitivity: 1.5 * 10 * 0.02
    0.3
    """
    rounding = SENSITIVITIES[wire_dtype] * sensitivity
    growth = max(1.0, sensitivity / unchanged_sensitivity) if unchanged_sensitivity else 1.0
    other_kernels = UNCHANGED_DIFFERENCES * unchanged_difference * growth
    return max(rounding, other_kernels, MIN_TOLERANCE)


def measure_sensitivity(
    logprobs: Callable[[], np.ndarray],
    expected: np.ndarray,
    weights: Mapping[str, torch.Tensor],
    wire_dtype: torch.dtype,
) -> float:
    """Return how far log-probs move (`canary_miss`, nats) when the last bits of half of the weights flip.

    This is what rounding makes of the model as it is: an engine that evaluates the same sums in another order rounds about
    as often. It takes no other model as the rule, and sees how much a deep or wildly changed model amplifies.

    Args:
        logprobs: Computes the log-probs (N,) of fixed texts by the weights as they are.
        expected: What it returns before the bits flip.
        weights: All weights of the model (shards included); unchanged afterwards, to the bit.
        wire_dtype: The dtype whose last bits flip: the engines'.
    """
    with last_bits_flipped(weights.values(), wire_dtype):
        return canary_miss(logprobs() - expected)


@contextmanager
@torch.no_grad()
def last_bits_flipped(weights: Collection[torch.Tensor], wire_dtype: torch.dtype) -> Iterator[None]:
    """Flip the last bit, as `wire_dtype` sees it, of every second value of `weights` while the block runs.

    Flipping again restores them: no copy is kept, which a trainer's memory might not hold beside gradients and moments.
    """
    shards = [local_shard(weight).detach() for weight in weights]
    for shard in shards:
        _flip_last_bits(shard, wire_dtype)
    try:
        yield
    finally:
        for shard in shards:
            _flip_last_bits(shard, wire_dtype)


def _flip_last_bits(shard: torch.Tensor, wire_dtype: torch.dtype) -> None:
    """Flip the bits in place.

    A float32 master has bits beyond a bfloat16 wire's: there the wire's last bit is flipped.
    """
    unit = torch.finfo(wire_dtype).eps / torch.finfo(shard.dtype).eps
    bit = max(1, int(unit))
    bits = torch.atleast_1d(shard.view(_INTEGERS[shard.element_size()]))
    bits[..., ::2].bitwise_xor_(bit)
