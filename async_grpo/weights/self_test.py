"""Choose the tensors that each round of the self-test changes, change them, and compute the tolerance for engines."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from async_grpo.modeling import compute_device, copies, local_shard
from async_grpo.weights.package import canary_miss

# Lowest tolerance of any comparison, in nats. Float32 log-probs of the same text differ by this much between machines
MIN_TOLERANCE = 5e-5
# Engine and trainer may differ by this multiple of the trainer's sensitivity: the change of its log-probs when the last
# bits of its weights flip (`measure_sensitivity`). Healthy engines differ by at most 1.9 times the sensitivity in
# bfloat16, where sums are rounded once. In float32 each of hundreds of terms is rounded, and they differ by 2.6 times
# the sensitivity on a real model. If a tensor is lost, they differ by thousands of times the sensitivity (docs/log.md,
# 2026-11-25)
SENSITIVITIES = {torch.float32: 48.0, torch.bfloat16: 3.0}
# Minimum tolerance of the first sync for the difference between engine and trainer (`canary_miss`), by the engines'
# dtype. The tolerance is higher if the trainer is more sensitive to rounding. The value for bfloat16 is above the usual
# rounding, because engines with quantized weights differ by more
UNCHANGED_ALLOWED = {torch.float32: MIN_TOLERANCE, torch.bfloat16: 0.3}
# In a self-test, engine and trainer may also differ by this multiple of their difference before the tensors were
# changed. An engine with other kernels or with quantized weights differs by more than rounding
UNCHANGED_DIFFERENCES = 1.5

# Main memory in bytes that all ranks together may use to keep the original values of changed tensors. For 70 billion
# parameters in float32, all values together would take 280 GB
ORIGINALS_BYTES = 8 << 30

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes per value -> dtype


def self_test_groups(names: Collection[str]) -> list[frozenset[str]]:
    """Group tensor names by their layer, the first number in the name. Names without a number form one group.

    If every tensor changed at once, the loss of a key bias in one of 48 layers would change the canary's log-probs less
    than bfloat16 rounding does. If only the tensors of its layer change, the lost bias accounts for at least 4 % of the
    change, and rounding for at most 1.6 % (docs/log.md, 2026-11-22).

    >>> [sorted(group) for group in self_test_groups(["embed", "layers.0.q", "layers.0.k", "layers.1.q", "head"])]
    [['embed', 'head'], ['layers.0.k', 'layers.0.q'], ['layers.1.q']]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = re.search(r"\.\d+\.", name)
        groups.setdefault(layer[0] if layer else "", []).append(name)
    return [frozenset(group) for group in groups.values()]


def groups_within(weights: Mapping[str, torch.Tensor], limit_bytes: int) -> list[frozenset[str]]:
    """Join groups of `self_test_groups`, in order, as long as their original values on all ranks fit into `limit_bytes`.

    Every tensor is in exactly one group. A layer that exceeds the limit is not divided, because an engine that fuses
    tensors of a layer loads them together. The sizes of whole tensors count, not of shards, so that every rank forms
    the same groups.

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


def rounds(
    weights: Mapping[str, torch.Tensor],
    limit_bytes: int,
    wire_dtype: torch.dtype,
    unread: Collection[str],
    max_over_ranks: Callable[[list[float]], list[float]],
) -> list[frozenset[str]]:
    """Return the names of the tensors to change in each round of the self-test. They are the same on every rank.

    Args:
        weights: All weights by name.
        limit_bytes: Main memory for the original values of a round's tensors; see `groups_within`.
        wire_dtype: The dtype of the engines. In float32 no layer needs a separate round.
        unread: Names of the tensors that an engine cannot read back. Only rank 0 knows them.
        max_over_ranks: See `Canary`. In bfloat16, this function is a collective.
    """
    joined_layers = groups_within(weights, limit_bytes)
    if wire_dtype is torch.float32:
        return joined_layers
    layers = self_test_groups(weights)
    # Only rank 0 knows `unread`, so the flags of all other ranks are 0
    flags = max_over_ranks([float(not layer.isdisjoint(unread)) for layer in layers])
    unread_layers = [layer for layer, is_unread in zip(layers, flags, strict=True) if is_unread]
    return [*unread_layers, *joined_layers]


def _bytes_on_all_ranks(weight: torch.Tensor) -> int:
    """Return how many bytes all ranks together use for a weight."""
    return weight.numel() * weight.element_size() * copies(weight)


@contextmanager
@torch.no_grad()
def perturbed(weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Add noise to each of the weights (or to this rank's shards) while the block runs.

    If an engine loses one of these tensors, its results become visibly wrong. Without noise, a lost tensor might not be
    visible, because a training step changes it too little. While the block runs, the original values are kept in main
    memory (see `groups_within`).
    """
    shards = [local_shard(weight) for weight in weights.values()]
    originals = [shard.detach().to("cpu", copy=True) for shard in shards]
    generators: dict[torch.device, torch.Generator] = {}
    try:
        for shard, weight in zip(shards, weights.values(), strict=True):
            # Draw the noise on the GPU if there is one, because a CPU takes 10 to 20 s for 10^9 numbers
            device = compute_device(weight)
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(0)
            noise = torch.randn(shard.shape, generator=generators[device], device=device)
            noise *= noise_scale(shard, weight.shape[-1])
            shard.add_(noise.to(shard.device, shard.dtype))
        yield
    finally:
        for shard, original in zip(shards, originals, strict=True):
            shard.copy_(original)


def noise_scale(shard: torch.Tensor, num_columns: int) -> float:
    """Return the standard deviation of the noise for a tensor.

    It is half of the tensor's root mean square (rms), unless the sum of tensor and noise would then be too small to
    have a visible effect. For a vector, the sum has an rms of at least 1.5, because biases are zero in a new model. For
    a matrix, the sum maps inputs with an rms of 1 to outputs with an rms of at least 1.25: in a narrow new model,
    queries and keys are so small that all tokens get the same attention, and a small change would have no effect. Each
    rank computes the standard deviation from its own shard.

    Args:
        shard: The shard. Of a weight in 4 bits, it has the scales.
        num_columns: The length of the weight's last dimension.
    """
    size = float(shard.float().square().mean().sqrt()) if shard.numel() else 0.0
    min_size = 1.25 * num_columns**-0.5 if shard.ndim > 1 else 1.5
    missing_size = max(0.0, min_size**2 - size**2) ** 0.5
    return max(0.5 * size, missing_size)


def round_tolerance(
    sensitivity: float,
    unchanged_sensitivity: float,
    unchanged_difference: float,
    wire_dtype: torch.dtype,
) -> float:
    """Return the tolerance (`canary_miss`, in nats) for a healthy engine in a round of the self-test.

    If an engine rounds more coarsely than `wire_dtype`, for example one with fp8 weights, its difference from the
    trainer is assumed to grow in proportion to the trainer's sensitivity.

    Args:
        sensitivity: Sensitivity of the changed model; see `measure_sensitivity`.
        unchanged_sensitivity: Sensitivity of the model before the change; 0 if it was not measured.
        unchanged_difference: Difference between engine and trainer before the change.
        wire_dtype: The dtype of the engines, in which tensors are sent.

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
    """Return how much log-probs change (`canary_miss`, in nats) when the last bits of half of the weights flip.

    The flips have about the same effect as rounding in an engine that evaluates the same sums in another order. Deep
    models, and models with noise in their weights, amplify both.

    Args:
        logprobs: Function that computes the log-probs (N,) of fixed texts with the current weights.
        expected: The log-probs before the flip.
        weights: All weights of the model, or this rank's shards of them. Afterwards they are exactly the same as
            before.
        wire_dtype: The dtype of the engines. The last bit in this dtype is flipped.
    """
    with last_bits_flipped(weights.values(), wire_dtype):
        return canary_miss(logprobs() - expected)


@contextmanager
@torch.no_grad()
def last_bits_flipped(weights: Collection[torch.Tensor], wire_dtype: torch.dtype) -> Iterator[None]:
    """Flip the last bit in `wire_dtype` of every second value of the weights while the block runs.

    Afterwards a second flip restores the weights. So no copy is needed, for which the memory may not suffice.
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
    """Flip the last bit in `wire_dtype` of every second value in place.

    In a float32 weight, the last bit of bfloat16 is in the middle of the value. The bits below it do not change.
    """
    unit = torch.finfo(wire_dtype).eps / torch.finfo(shard.dtype).eps
    flipped_bit = max(1, int(unit))
    integers = torch.atleast_1d(shard.view(_INTEGERS[shard.element_size()]))
    integers[..., ::2].bitwise_xor_(flipped_bit)
