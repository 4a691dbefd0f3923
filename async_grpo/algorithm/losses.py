"""Per-token policy losses. Each one says what its metrics are; `aggregation` says how tokens are averaged.

`logprobs` carries the gradient; `old_logprobs` is what the ratio is taken against: the behaviour policy's by
default. Masked positions may hold anything, NaN and inf included: they are replaced *before* the maths,
because the gradient of `where(mask, f(x), 0)` is 0 * inf = NaN when f overflows at a masked x.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.algorithm.aggregation import row_ids

LOG_RATIO_LIMIT = 20.0  # exp of it is 4.9e8: beyond, the ratio is held and its gradient is zero


@dataclass(frozen=True)
class PolicyLoss:
    """One policy loss; `needs_proximal`: it cannot be computed without proximal log-probs in the batch."""

    function: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    needs_proximal: bool = False

    @property
    def options(self) -> dict[str, float]:
        """Its options and their defaults.

        >>> POLICY_LOSSES["ppo_clip"].options
        {'clip_low': 0.2, 'clip_high': 0.28}
        """
        return dict(self.function.__kwdefaults__ or {})

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        importance_weights: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        **options: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(per-token loss, metrics), everything (B, T) and zero where the mask is False.

        importance_weights (B, T): multiply the loss, without gradient. sequence_ids (B, T): the sequence that
        each token of a packed row belongs to (None: a row is a sequence). Metrics carry no gradient; they are
        averaged over tokens, or by their maximum where the name ends in `_max`.

        >>> one = torch.ones(1, 1)
        >>> loss, metrics = POLICY_LOSSES["ppo_clip"](one.log() + 1, 0 * one, 2 * one, one)  # ratio e > 1.28
        >>> round(loss.item(), 2), metrics["clip_frac_high"].item()
        (-2.56, 1.0)
        """
        mask = mask.bool()
        ids = row_ids(mask) if sequence_ids is None else sequence_ids
        logprobs, old_logprobs, advantages = (
            torch.where(mask, values, 0) for values in (logprobs, old_logprobs, advantages)
        )
        loss, metrics = self.function(logprobs, old_logprobs, advantages, mask, ids, **options)
        if importance_weights is not None:
            loss = loss * torch.where(mask, importance_weights.detach(), 0)
        zeroed = {
            name: torch.where(mask, value.detach().to(loss.dtype), 0) for name, value in metrics.items()
        }
        return torch.where(mask, loss, 0), zeroed


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _ratio_metrics(ratio: Tensor) -> dict[str, Tensor]:
    return {"ratio_mean": ratio, "ratio_max": ratio}


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = pi / pi_old.

    Schulman et al. 2017, eq. 7, with the two bounds apart as in Yu et al. 2025 ("DAPO"). A token counts as
    clipped when the clipped branch is the larger one, that is, when its gradient is zero.
    """
    ratio = _ratio(logprobs, old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    bites = clipped > unclipped
    metrics = {"clip_frac_low": bites & (ratio < 1), "clip_frac_high": bites & (ratio > 1)}
    return torch.maximum(unclipped, clipped), metrics | _ratio_metrics(ratio)


def grpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, sequence_ids: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A pi / stop_gradient(pi): the value is -A, the gradient -A grad log pi. No ratio, no clip."""
    own_ratio = (logprobs - logprobs.detach()).exp()
    return -advantages * own_ratio, _ratio_metrics(_ratio(logprobs, old_logprobs))


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(ppo_clip),
    "grpo": PolicyLoss(grpo),
}
