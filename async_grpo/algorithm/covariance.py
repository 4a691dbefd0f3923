"""Losses that give special treatment to the few tokens of a minibatch that reduce the entropy most.

Cui et al. 2025 ("The Entropy Mechanism of RL for Reasoning Language Models"): the higher the covariance
(A - mean A)(log pi - mean log pi) of a token, the more an update reduces the entropy, and a few tokens carry most of
the covariance. The means, the ranking and the number of selected tokens are those of the whole minibatch, so
`training.whole_step` selects the tokens. If `selected` is not passed, a loss treats its batch as the whole minibatch.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from async_grpo.algorithm.policy_losses import LossAndMetrics, LossBatch, ppo_clip, ratio_metrics
from async_grpo.options.fields import refuse


def token_sums(batch: LossBatch) -> Float64[Tensor, "3"]:
    """Return (sum of log pi, sum of A, number of tokens) over the unmasked tokens. The sums of parts add up."""
    terms = (batch.logprobs.detach(), batch.advantages, batch.mask)
    return torch.stack([torch.where(batch.mask, values, 0).double().sum() for values in terms])


def covariances(batch: LossBatch, sums: Float64[Tensor, "3"]) -> Float[Tensor, "batch tokens"]:
    """Return (A - mean A)(log pi - mean log pi) of each token, with the means from the minibatch's `token_sums`."""
    mean_logprob, mean_advantage = sums[:2] / sums[2].clamp(min=1)
    return (batch.advantages - mean_advantage) * (batch.logprobs.detach() - mean_logprob)


def kl_cov_scores(
    batch: LossBatch,
    sums: Float64[Tensor, "3"],
    token_keys: Int64[Tensor, "batch tokens"] | None = None,
    **other_settings: Any,
) -> Float[Tensor, "batch tokens"]:
    """Return the covariance of each token, and -inf for masked tokens and where the covariance is exactly 0.

    If all advantages are equal, every covariance is 0. With scores of 0, all tokens would tie and be selected.
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
    """Return a random number in [0, 1) for every candidate, and -inf for all other tokens.

    A token is a candidate if cov_low < covariance < cov_high and PPO's clip does not set its gradient to zero.

    Args:
        batch: The tokens.
        sums: `token_sums` of the minibatch.
        token_keys: An id of each token that is unique within the minibatch, so that the draws do not depend on the
            packing. None uses the index among the unmasked tokens of this batch.
        clip_low: PPO clips ratios below 1 - clip_low.
        clip_high: PPO clips ratios above 1 + clip_high.
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
    """Return max(1, floor(ratio * num_tokens)), where `num_tokens` counts the tokens of the whole minibatch."""
    refuse(not 0 < ratio <= 1, f"the share of selected tokens is {ratio}; it must lie in (0, 1]")
    return max(1, int(ratio * num_tokens))


def top_scores(scores: Float[Tensor, "*shape"], count: int) -> Float64[Tensor, " count"]:
    """Return the `count` largest scores in descending order, followed by -inf if there are fewer."""
    top = scores.flatten().double().topk(min(count, scores.numel())).values
    return torch.nn.functional.pad(top, (0, count - len(top)), value=-math.inf)


def select(scores: Float[Tensor, "*shape"], threshold: Float[Tensor, ""] | float) -> Bool[Tensor, "*shape"]:
    """Return True where a score is at least the threshold and not -inf. Scores equal to the threshold are included."""
    return (scores >= threshold) & (scores > -math.inf)


def uniform_draws(keys: Int64[Tensor, "*shape"], seed: int) -> Float64[Tensor, "*shape"]:
    """Return a number in [0, 1) for each key: a hash of key and seed, which is the same on every device.

    The numbers of a random generator would depend on the order of the tokens, and thus on the packing. The hash is
    SplitMix64 (Steele et al. 2014).
    """
    start = _mixed(torch.full_like(keys, int(seed)))
    bits = _mixed(start + keys * (0x9E3779B97F4A7C15 - 2**64))  # int64 wraps around as uint64 does
    return _shifted(bits, 11).double() / 2**53


def _mixed(z: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Return SplitMix64's mixing function of `z`."""
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shifted(z, 31)


def _shifted(z: Int64[Tensor, "*shape"], places: int) -> Int64[Tensor, "*shape"]:
    """Return `z` shifted right by a number of bits, with zeros filled in from the left."""
    # torch's shift fills in copies of the sign bit. The mask sets these bits to zero
    return (z >> places) & ((1 << (64 - places)) - 1)


def _select_share(
    scores: Float[Tensor, "batch tokens"], ratio: float, batch: LossBatch
) -> Bool[Tensor, "batch tokens"]:
    """Return a mask of the tokens with the highest scores. `ratio` is the fraction of unmasked tokens to select."""
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
    """Return the loss of `ppo_clip`, set to 0 at a few randomly selected tokens.

    The tokens are selected among those with cov_low < covariance < cov_high. `ratio` is the fraction of all tokens to
    select. `clip_low` and `clip_high` are 1 by default, as in the authors' recipe. The seed must change from step to
    step. The metric `selected_frac` is the fraction of selected tokens.
    """
    refuse(
        not cov_low < cov_high,
        f"clip_cov chooses among tokens with cov_low < covariance < cov_high, but cov_low {cov_low} is not below "
        f"cov_high {cov_high}",
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
    """Return -A r, plus coef |log pi - log pi_old| at the tokens with the highest covariance.

    `ratio` is the fraction of all tokens that get this penalty. The log-ratio in the penalty is not clamped, because it
    does not overflow, and a clamped penalty would have no gradient. The metric `selected_frac` is the fraction of
    tokens that got the penalty.
    """
    if selected is None:
        selected = _select_share(kl_cov_scores(batch, token_sums(batch)), ratio, batch)
    penalty = coef * (batch.logprobs - batch.old_logprobs).abs()
    loss = -batch.advantages * batch.ratio + torch.where(selected, penalty, 0)
    return loss, ratio_metrics(batch.ratio) | {"selected_frac": selected}
