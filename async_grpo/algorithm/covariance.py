"""Losses that treat a few tokens of the whole minibatch apart: those that drive the entropy down.

Cui et al. 2025 ("The Entropy Mechanism of RL for Reasoning Language Models"): the entropy falls by the covariance
(A - mean A)(log pi - mean log pi), and a handful of tokens carries most of it. Means, ranking and quota belong to
the whole minibatch; `training.whole_step` chooses there.
Without `selected`, (B, T) bool, the losses take the tensors they are given for the whole minibatch.
"""

import math
from typing import Any

import torch
from torch import Tensor

from async_grpo.algorithm.policy_losses import LossAndMetrics, LossBatch, ppo_clip, ratio_metrics
from async_grpo.options.fields import refuse


def token_sums(batch: LossBatch) -> Tensor:
    """(3,) float64: the sums of log pi and of A over unmasked tokens, and their number. Additive."""
    terms = (batch.logprobs.detach(), batch.advantages, batch.mask)
    return torch.stack([torch.where(batch.mask, values, 0).double().sum() for values in terms])


def covariances(batch: LossBatch, sums: Tensor) -> Tensor:
    """(B, T) float64: (A - mean A)(log pi - mean log pi), the means from the minibatch's `token_sums`."""
    mean_logprob, mean_advantage = sums[:2] / sums[2].clamp(min=1)
    return (batch.advantages - mean_advantage) * (batch.logprobs.detach() - mean_logprob)


def kl_cov_scores(batch: LossBatch, sums: Tensor, token_keys: Tensor | None = None, **_: Any) -> Tensor:
    """(B, T) float64: the covariance; -inf where it is exactly 0, or every token would tie if all A were equal."""
    covariance = covariances(batch, sums)
    return torch.where(batch.mask & (covariance != 0), covariance, -math.inf)


def clip_cov_scores(
    batch: LossBatch,
    sums: Tensor,
    token_keys: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    cov_low: float,
    cov_high: float,
    seed: int,
    **_: Any,
) -> Tensor:
    """(B, T) float64: a random number in [0, 1) for every candidate, else -inf.

    Candidates: cov_low < covariance < cov_high, and PPO's clip leaves the token its gradient. token_keys
    (B, T) int64: a number of the token's own within the minibatch, which makes the draw independent of packing;
    None: its rank among the unmasked tokens of this tensor.
    """
    covariance = covariances(batch, sums)
    clips = ppo_clip(batch, clip_low=clip_low, clip_high=clip_high)[1]
    candidates = batch.mask & (covariance > cov_low) & (covariance < cov_high)
    candidates &= ~(clips["clip_frac_low"] | clips["clip_frac_high"])
    if token_keys is None:
        token_keys = batch.mask.flatten().cumsum(0).view_as(batch.mask)
    return torch.where(candidates, uniform_draws(token_keys, seed), -math.inf)


def num_selected(ratio: float, num_tokens: float) -> int:
    """max(1, floor(ratio * num_tokens)); num_tokens: of the whole minibatch."""
    refuse(not 0 < ratio <= 1, f"the share of selected tokens is {ratio}; it must lie in (0, 1]")
    return max(1, int(ratio * num_tokens))


def top_scores(scores: Tensor, count: int) -> Tensor:
    """(count,) float64: the largest of `scores`, descending, -inf where there are not as many."""
    top = scores.flatten().double().topk(min(count, scores.numel())).values
    return torch.nn.functional.pad(top, (0, count - len(top)), value=-math.inf)


def select(scores: Tensor, threshold: Tensor | float) -> Tensor:
    """(B, T) bool: candidates (not -inf) at or above the threshold. Tokens that tie are treated alike."""
    return (scores >= threshold) & (scores > -math.inf)


def uniform_draws(keys: Tensor, seed: int) -> Tensor:
    """The shape of `keys` (int64), float64 in [0, 1): a hash of key and seed, the same on every device.

    A generator would give a token another number for every packing. Mixing: SplitMix64 (Steele et al. 2014).
    """
    start = _mixed(torch.full_like(keys, int(seed)))
    bits = _mixed(start + keys * (0x9E3779B97F4A7C15 - 2**64))  # int64 wraps around as uint64 does
    return _shifted(bits, 11).double() / 2**53


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, places: int) -> Tensor:
    return (z >> places) & ((1 << (64 - places)) - 1)  # torch's shift drags the sign along


def _chosen(scores: Tensor, ratio: float, batch: LossBatch) -> Tensor:
    return select(scores, top_scores(scores, num_selected(ratio, batch.mask.sum().item()))[-1])


def clip_cov(
    batch: LossBatch,
    *,
    selected: Tensor | None = None,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int = 0,
) -> LossAndMetrics:
    """`ppo_clip`, and 0 for the selected tokens: at random, `ratio` of all tokens, among cov_low < cov < cov_high.

    Bounds of the clip: 1 and 1 as in the authors' recipe. Change the seed from step to step. Metric: `selected_frac`.
    """
    refuse(
        not cov_low < cov_high,
        f"clip_cov chooses among tokens with cov_low {cov_low} < covariance < cov_high {cov_high}: there are none",
    )
    clip = {"clip_low": clip_low, "clip_high": clip_high}
    if selected is None:
        sums, window = token_sums(batch), {"cov_low": cov_low, "cov_high": cov_high}
        selected = _chosen(clip_cov_scores(batch, sums, None, **clip, **window, seed=seed), ratio, batch)
    loss, metrics = ppo_clip(batch, **clip)
    return torch.where(selected, 0, loss), metrics | {"selected_frac": selected}


def kl_cov(
    batch: LossBatch, *, selected: Tensor | None = None, ratio: float = 2e-4, coef: float = 1.0
) -> LossAndMetrics:
    """-A r, plus coef |log pi - log pi_old| for the selected tokens: the `ratio` of all with the highest covariance.

    The penalty's log-ratio is not bounded: nothing overflows, and a bound would end the pull. Metric: `selected_frac`.
    """
    if selected is None:
        selected = _chosen(kl_cov_scores(batch, token_sums(batch)), ratio, batch)
    penalty = coef * (batch.logprobs - batch.old_logprobs).abs()
    loss = -batch.advantages * batch.ratio + torch.where(selected, penalty, 0)
    return loss, ratio_metrics(batch.ratio) | {"selected_frac": selected}
