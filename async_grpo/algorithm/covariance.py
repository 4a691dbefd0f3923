"""Losses that treat the few tokens of a minibatch differently that reduce the entropy most.

Cui et al. 2025 ("The Entropy Mechanism of RL for Reasoning Language Models"): the entropy falls with the covariance
(A - mean A)(log pi - mean log pi), and a few tokens carry most of it. The means, the ranking and the number of selected
tokens are those of the whole minibatch, so `training.whole_step` selects the tokens. Without `selected`, a
loss takes its batch for the whole minibatch.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from async_grpo.algorithm.policy_losses import LossAndMetrics, LossBatch, ppo_clip, ratio_metrics
from async_grpo.options.fields import refuse


def token_sums(batch: LossBatch) -> Float64[Tensor, "3"]:
    """Return the sums of log pi and of A over unmasked tokens, and their number; sums of parts add up."""
    terms = (batch.logprobs.detach(), batch.advantages, batch.mask)
    return torch.stack([torch.where(batch.mask, values, 0).double().sum() for values in terms])


def covariances(batch: LossBatch, sums: Float64[Tensor, "3"]) -> Float[Tensor, "batch tokens"]:
    """Return (A - mean A)(log pi - mean log pi) with the means of the minibatch's `token_sums`."""
    mean_logprob, mean_advantage = sums[:2] / sums[2].clamp(min=1)
    return (batch.advantages - mean_advantage) * (batch.logprobs.detach() - mean_logprob)


def kl_cov_scores(
    batch: LossBatch,
    sums: Float64[Tensor, "3"],
    token_keys: Int64[Tensor, "batch tokens"] | None = None,
    **other_settings: Any,
) -> Float[Tensor, "batch tokens"]:
    """Return the covariance, or -inf where it is exactly 0.

    Otherwise every token would tie if all advantages were equal.
    """
    covariance = covariances(batch, sums)
    return torch.where(batch.mask & (covariance != 0), covariance, -math.inf)


def clip_cov_scores(
    batch: LossBatch,
    sums: Float64[Tensor, "3"],
    token_keys: Int64[Tensor, "batch tokens"] | None = None,
    *,
    clip_low: float,
    clip_high: float,
    cov_low: float,
    cov_high: float,
    seed: int,
    **other_settings: Any,
) -> Float64[Tensor, "batch tokens"]:
    """Return a random number in [0, 1) for every candidate, else -inf.

    A token is a candidate if cov_low < covariance < cov_high, and PPO's clip leaves it its gradient.

    Args:
        batch: The tokens.
        sums: `token_sums` of the minibatch.
        token_keys: Unique within the minibatch, so that the draws do not depend on the packing; None takes
            the rank among the unmasked tokens of this tensor.
        clip_low: Bound of PPO's clip.
        clip_high: Bound of PPO's clip.
        cov_low: Lower bound of the covariance.
        cov_high: Upper bound of the covariance.
        seed: Seed of the draws.
        other_settings: Ignored.
    """
    covariance = covariances(batch, sums)
    _, clip_metrics = ppo_clip(batch, clip_low=clip_low, clip_high=clip_high)
    is_clipped = clip_metrics["clip_frac_low"] | clip_metrics["clip_frac_high"]
    is_candidate = batch.mask & (covariance > cov_low) & (covariance < cov_high) & ~is_clipped
    if token_keys is None:
        token_keys = batch.mask.flatten().cumsum(0).view_as(batch.mask)
    return torch.where(is_candidate, uniform_draws(token_keys, seed), -math.inf)


def num_selected(ratio: float, num_tokens: float) -> int:
    """Return max(1, floor(ratio * num_tokens)), with the number of tokens of the whole minibatch."""
    refuse(not 0 < ratio <= 1, f"the share of selected tokens is {ratio}; it must lie in (0, 1]")
    return max(1, int(ratio * num_tokens))


def top_scores(scores: Float[Tensor, "*shape"], count: int) -> Float64[Tensor, " count"]:
    """Return the `count` largest scores in descending order, followed by -inf if there are fewer."""
    top = scores.flatten().double().topk(min(count, scores.numel())).values
    return torch.nn.functional.pad(top, (0, count - len(top)), value=-math.inf)


def select(scores: Float[Tensor, "*shape"], threshold: Float[Tensor, ""] | float) -> Bool[Tensor, "*shape"]:
    """Return the candidates (not -inf) at or above the threshold, including all that tie with it."""
    return (scores >= threshold) & (scores > -math.inf)


def uniform_draws(keys: Int64[Tensor, "*shape"], seed: int) -> Float64[Tensor, "*shape"]:
    """Return numbers in [0, 1) for the keys: a hash of key and seed, the same on every device.

    The numbers of a generator would depend on the packing. The hash is SplitMix64 (Steele et al. 2014).
    """
    start = _mixed(torch.full_like(keys, int(seed)))
    bits = _mixed(start + keys * (0x9E3779B97F4A7C15 - 2**64))  # int64 wraps around as uint64 does
    return _shifted(bits, 11).double() / 2**53


def _mixed(z: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Return the mixing function of SplitMix64."""
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shifted(z, 31)


def _shifted(z: Int64[Tensor, "*shape"], places: int) -> Int64[Tensor, "*shape"]:
    """Shift right by a number of bits, with zeros from the left."""
    # torch's shift would repeat the sign bit
    return (z >> places) & ((1 << (64 - places)) - 1)


def _select_share(
    scores: Float[Tensor, "batch tokens"], ratio: float, batch: LossBatch
) -> Bool[Tensor, "batch tokens"]:
    """Return the share `ratio` of the batch's tokens with the highest scores."""
    count = num_selected(ratio, batch.mask.sum().item())
    threshold = top_scores(scores, count)[-1]
    return select(scores, threshold)


def clip_cov(
    batch: LossBatch,
    *,
    selected: Bool[Tensor, "batch tokens"] | None = None,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int = 0,
) -> LossAndMetrics:
    """Return `ppo_clip`, and 0 for `ratio` of all tokens, drawn at random among those with cov_low < cov < cov_high.

    The bounds of the clip are 1 and 1, as in the authors' recipe. The seed must change from step to step. The metric
    `selected_frac` counts the selected tokens.
    """
    refuse(
        not cov_low < cov_high,
        f"clip_cov chooses among tokens with cov_low {cov_low} < covariance < cov_high {cov_high}: there are none",
    )
    if selected is None:
        scores = clip_cov_scores(
            batch,
            token_sums(batch),
            clip_low=clip_low,
            clip_high=clip_high,
            cov_low=cov_low,
            cov_high=cov_high,
            seed=seed,
        )
        selected = _select_share(scores, ratio, batch)
    loss, metrics = ppo_clip(batch, clip_low=clip_low, clip_high=clip_high)
    return torch.where(selected, 0, loss), metrics | {"selected_frac": selected}


def kl_cov(
    batch: LossBatch,
    *,
    selected: Bool[Tensor, "batch tokens"] | None = None,
    ratio: float = 2e-4,
    coef: float = 1.0,
) -> LossAndMetrics:
    """Return -A r, plus coef |log pi - log pi_old| for `ratio` of all tokens, those with the highest covariance.

    The log-ratio of the penalty is not bounded: it does not overflow, and a bound would end the pull. The metric
    `selected_frac` counts the selected tokens.
    """
    if selected is None:
        selected = _select_share(kl_cov_scores(batch, token_sums(batch)), ratio, batch)
    penalty = coef * (batch.logprobs - batch.old_logprobs).abs()
    loss = -batch.advantages * batch.ratio + torch.where(selected, penalty, 0)
    return loss, ratio_metrics(batch.ratio) | {"selected_frac": selected}
