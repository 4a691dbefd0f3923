"""The critic's regression on returns, clipped around what it said before, and how much it explains."""

from collections.abc import Mapping

import torch
from torch import Tensor

from async_grpo.errors import ConfigurationError

NO_VARIANCE = 1e-6  # of the mean square: a smaller difference of two float32 sums is rounding


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor, *, clip: float | None = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """(per-token loss, metrics): 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

    Everything is (B, T) and 0 where the mask is False; what stands there in the inputs is never looked at.
    Only `values` gets a gradient. clip=None: 1/2 (V - R)^2. The clip is that of PPO's reference
    implementation (OpenAI baselines, ppo2); the paper has none. A token counts as clipped when its gradient
    is zero for it: V is further from V_old than the clip and still nearer to R.

    Metrics, all averaged over tokens: value_clip_frac, value_error (V - R), value_error_square, return_mean,
    return_square. Each is additive over micro-batches, so that `explained_variance` of a step's means is that
    of all its tokens together. ConfigurationError: a clip that is not positive.

    >>> one = torch.ones(1, 1)
    >>> loss, metrics = value_loss(3 * one, 4 * one, one, one)  # V may go from 1 to 1.5: (1.5 - 4)^2 / 2
    >>> loss.item(), metrics["value_clip_frac"].item(), metrics["value_error"].item()
    (3.125, 1.0, -1.0)
    """
    if clip is not None and not clip > 0:
        raise ConfigurationError(f"the value clip is {clip}; give a positive one, or None for no clip")
    mask = mask.bool()
    values = torch.where(mask, values, 0)
    returns, old_values = (torch.where(mask, given.detach(), 0) for given in (returns, old_values))
    error = values - returns
    square = error.square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        clipped_square = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        clipped = clipped_square > square
        square = torch.maximum(square, clipped_square)
    metrics = {
        "value_clip_frac": clipped.to(square.dtype),
        "value_error": error.detach(),
        "value_error_square": error.detach().square(),
        "return_mean": returns,
        "return_square": returns.square(),
    }
    return square / 2, metrics


def explained_variance(means: Mapping[str, float]) -> float:
    """1 - Var(R - V) / Var(R) over tokens, from the token means of `value_loss`'s metrics.

    1: the critic knows every return, up to a constant; 0: no better than their mean; negative: worse. 0 also
    where all returns are the same and there is nothing to explain.

    >>> explained_variance({"value_error": 0, "value_error_square": 1, "return_mean": 2, "return_square": 8})
    0.75
    """
    variance = means["return_square"] - means["return_mean"] ** 2
    unexplained = means["value_error_square"] - means["value_error"] ** 2
    return 1 - unexplained / variance if variance > NO_VARIANCE * means["return_square"] else 0.0
