"""What every policy loss reads, and the two pieces that most of them share: the bounded ratio and PPO's clip."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from async_grpo.algorithm.aggregation import compact_ids, row_ids

LOG_RATIO_LIMIT = 20.0  # exp of it is 4.9e8: beyond, the ratio is held and its gradient is zero

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class LossBatch:
    """(B, T) each, finite, zero where `mask` is False; only `logprobs` may carry a gradient.

    `sequence_ids`: the sequence of each token, any integers; None: a row is a sequence.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor | None = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """log(pi / pi_old), held within +-20."""
        return bounded_log_ratio(self.logprobs, self.old_logprobs)

    @cached_property
    def ratio(self) -> Tensor:
        """pi / pi_old."""
        return self.log_ratio.exp()

    @cached_property
    def own_ratio(self) -> Tensor:
        """pi / stop_gradient(pi): 1, with the gradient of log pi."""
        return (self.logprobs - self.logprobs.detach()).exp()

    def sequence_sum(self, values: Tensor) -> Tensor:
        """(B, T): at every token the sum of `values` over the unmasked tokens of its sequence."""
        # float64, because the order of the sum changes with the packing and the sign of a sum decides (topr)
        flat = torch.where(self.mask, values, 0).flatten().double()
        sums = flat.new_zeros(self._num_sequences).index_add(0, self._ids, flat)
        return sums[self._ids].view_as(values).to(values.dtype)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """(B, T): at every token the mean of `values` over the unmasked tokens of its sequence."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values)).clamp(min=1)

    @cached_property
    def _ids(self) -> Tensor:
        ids = row_ids(self.mask) if self.sequence_ids is None else compact_ids(self.sequence_ids, self.mask)
        return ids.flatten()

    @cached_property
    def _num_sequences(self) -> int:
        return int(self._ids.max()) + 1 if self._ids.numel() else 0


def bounded_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log(pi / pi_old) within +-20: one far token must give neither inf nor the whole gradient."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio_metrics(ratio: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """Its mean and maximum over tokens."""
    return {f"{prefix}ratio_mean": ratio, f"{prefix}ratio_max": ratio}


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> LossAndMetrics:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) per token (Schulman et al. 2017, "PPO", eq. 7).

    A token counts as clipped where the clipped branch is the larger one, that is, where its gradient is zero.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    bites = clipped > unclipped
    metrics = {"clip_frac_low": bites & (ratio < 1), "clip_frac_high": bites & (ratio > 1)}
    return torch.maximum(unclipped, clipped), metrics
