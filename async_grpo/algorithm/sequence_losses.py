"""Policy losses whose weight belongs to a whole sequence; the loss still is one number per token.

They are exact on packed rows: means run over the unmasked tokens of the token's own sequence id. The papers
average over tokens, then over sequences: that is the aggregation `sequence_mean_token_mean`, which verl applies
to these losses whatever was configured (its geo_mean moreover per micro-batch). Here the aggregation is the one
that was asked for. r = pi / pi_old with |log r| <= 20, A the advantage, sg() stops the gradient.
"""

import torch

from async_grpo.algorithm.loss_batch import LossAndMetrics, LossBatch, clipped_surrogate, ratio_metrics


def gspo(batch: LossBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossAndMetrics:
    """PPO's clip around s_t = sg(s) pi / sg(pi), with s the geometric mean of r over the token's sequence.

    Zheng et al. 2025 ("GSPO"), the token form GSPO-token (eq. 13-14), with its clip bounds (3e-4 and 4e-4; verl keeps 0.2).
    It equals GSPO where the advantage is the same over a sequence. `ratio_*` are the tokens', `sequence_ratio_*`
    and the clip fractions the sequences'.
    """
    sequence_ratio = batch.sequence_mean(batch.log_ratio.detach()).exp()
    ratio = sequence_ratio * batch.own_ratio
    loss, metrics = clipped_surrogate(ratio, batch.advantages, clip_low, clip_high)
    return loss, metrics | ratio_metrics(batch.ratio) | ratio_metrics(sequence_ratio, "sequence_")


def geo_mean(batch: LossBatch, *, clip_low: float = 0.4, clip_high: float = 0.4) -> LossAndMetrics:
    """-A exp(mean of k over the sequence): k = log r, held at -clip_low or clip_high where PPO would clip.

    Zhao et al. 2025 ("Geometric-Mean Policy Optimization"), clip (e^-0.4, e^0.4): for A > 0 k is at most clip_high, for
    A < 0 at least -clip_low, and a token with A = 0 has k = 0. The sequence's ratio keeps the gradient of all
    its tokens. (verl multiplies the sequence by the geometric mean of the importance weights; here each token
    by its own.)
    """
    k, advantages = batch.log_ratio, batch.advantages
    held = torch.where(advantages > 0, k.clamp(max=clip_high), k.clamp(min=-clip_low))
    sequence_ratio = batch.sequence_mean(torch.where(advantages == 0, 0, held)).exp()
    metrics = {
        "clip_frac_low": (advantages < 0) & (k < -clip_low),
        "clip_frac_high": (advantages > 0) & (k > clip_high),
    }
    metrics |= ratio_metrics(batch.ratio) | ratio_metrics(sequence_ratio, "sequence_")
    return -advantages * sequence_ratio, metrics


def topr(batch: LossBatch) -> LossAndMetrics:
    """-w A log pi: w = 1 for a sequence whose advantages sum to at least 0, else sg(s) held within [0, 1].

    s is the geometric mean of r over the sequence. Le Roux et al. 2025 ("Tapered Off-Policy REINFORCE"): good
    sequences are reinforced as they are, bad ones fade as the policy leaves them. The paper tapers the product of
    the ratios; the mean, as in verl's pull request 6986, does not vanish with the length. `sequence_ratio_*` are s,
    `clip_frac_high` counts tokens of sequences held at 1.
    """
    sequence_ratio = batch.sequence_mean(batch.log_ratio.detach()).exp()
    is_bad = batch.sequence_sum(batch.advantages) < 0
    weights = torch.where(is_bad, sequence_ratio.clamp(max=1), 1)
    metrics = {"clip_frac_high": is_bad & (sequence_ratio > 1)} | ratio_metrics(batch.ratio)
    return -weights * batch.advantages * batch.logprobs, metrics | ratio_metrics(sequence_ratio, "sequence_")
