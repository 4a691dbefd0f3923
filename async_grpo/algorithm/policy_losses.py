"""The policy losses, each with its paper, and the batch that they read. The module `covariance` has two more losses.

Each loss takes a `LossBatch` and returns (per-token loss, per-token metrics). `losses.PolicyLoss` replaces masked
values by 0 in the inputs and in the results. In the formulas, r = pi / pi_old with log r clamped to +-20, A is the
advantage, and sg() stops the gradient. A mean over a sequence is taken over the unmasked tokens with the same sequence
id, so that it is exact on packed rows. A metric whose name contains `_frac` is 1 at the tokens that it counts, so the
mean of the metric is the share of these tokens.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Int64, Shaped
from torch import Tensor

from async_grpo.algorithm.aggregation import compact_ids, sequence_sums
from async_grpo.algorithm.off_policy import LOG_RATIO_LIMIT, clamp_log_ratio
from async_grpo.options.fields import refuse

CAP_MODES = ("drop", "clamp")
# Lowest value of 1 - p. Near p = 1, log p rounds to 0, so that 1 - p would be 0 and the binary KL infinite
PROBABILITY_FLOOR = 1e-8
# Lowest log w of `vespo`: log 1e-8, as in the authors' code
VESPO_LOWEST_LOG_WEIGHT = math.log(1e-8)

LossAndMetrics = tuple[Float[Tensor, "batch tokens"], dict[str, Shaped[Tensor, "batch tokens"]]]


@dataclass(frozen=True)
class LossBatch:
    """Inputs of a policy loss. All are finite, and zero where `mask` is False."""

    # Log-probs of the policy; the only tensor that may carry a gradient
    logprobs: Float[Tensor, "batch tokens"]
    old_logprobs: Float[Tensor, "batch tokens"]  # log-probs of the policy in the denominator of the ratio
    advantages: Float[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"]  # True at the tokens that are trained on
    # Id of each token's sequence, any integer. None means that each row is one sequence
    sequence_ids: Int[Tensor, "batch tokens"] | None = None

    @cached_property
    def log_ratio(self) -> Float[Tensor, "batch tokens"]:
        """Return log(pi / pi_old), clamped to +-20.

        Without the clamp, a single token with a huge ratio could make the loss infinite or dominate the gradient.
        """
        return clamp_log_ratio(self.logprobs - self.old_logprobs)

    @cached_property
    def ratio(self) -> Float[Tensor, "batch tokens"]:
        """Return pi / pi_old, from the clamped `log_ratio`."""
        return self.log_ratio.exp()

    @cached_property
    def unit_ratio(self) -> Float[Tensor, "batch tokens"]:
        """Return pi / sg(pi), whose value is 1 and whose gradient is that of log pi."""
        return (self.logprobs - self.logprobs.detach()).exp()

    def sequence_sum(self, values: Float[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens"]:
        """Return, at every token, the sum of `values` over the unmasked tokens of its sequence."""
        # The packing changes the order of summation, and thus the rounding. `topr` depends on the sign of a sum, which
        # the rounding errors of float32 could flip. The rounding errors of float64 are too small to do so
        sums = sequence_sums(torch.where(self.mask, values, 0).double(), self._ids)
        return sums[self._ids].to(values.dtype)

    def sequence_mean(self, values: Float[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens"]:
        """Return, at every token, the mean of `values` over the unmasked tokens of its sequence."""
        num_tokens = self.sequence_sum(torch.ones_like(values))
        return self.sequence_sum(values) / num_tokens.clamp(min=1)

    @cached_property
    def _ids(self) -> Int64[Tensor, "batch tokens"]:
        return compact_ids(self.sequence_ids, self.mask)


def ratio_metrics(
    ratio: Float[Tensor, "batch tokens"], prefix: str = ""
) -> dict[str, Float[Tensor, "batch tokens"]]:
    """Return the metrics `ratio_mean` and `ratio_max`. Both are the ratio of each token; the caller reduces them."""
    return {f"{prefix}ratio_mean": ratio, f"{prefix}ratio_max": ratio}


def clipped_surrogate(
    ratio: Float[Tensor, "batch tokens"],
    advantages: Float[Tensor, "batch tokens"],
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """Return max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) per token (Schulman et al. 2017, "PPO", eq. 7).

    A token counts as clipped if the second term is the larger one, that is, if the token has no gradient.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = clipped > unclipped
    metrics = {"clip_frac_low": is_clipped & (ratio < 1), "clip_frac_high": is_clipped & (ratio > 1)}
    return torch.maximum(unclipped, clipped), metrics


def grpo(batch: LossBatch) -> LossAndMetrics:
    """Return -A pi / sg(pi), whose value is -A and whose gradient is -A grad log pi. It has no ratio and no clip.

    This is the on-policy gradient of Shao et al. 2024 ("DeepSeekMath", eq. 3): on policy, the ratio in the paper is 1.
    """
    return -batch.advantages * batch.unit_ratio, ratio_metrics(batch.ratio)


def gpg(batch: LossBatch) -> LossAndMetrics:
    """Return -A log pi (Chu et al. 2025, "GPG"). Its gradient is that of `grpo`, but its value differs."""
    return -batch.advantages * batch.logprobs, ratio_metrics(batch.ratio)


def ppo_clip(batch: LossBatch, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossAndMetrics:
    """Return the `clipped_surrogate`. The default bounds are those of Yu et al. 2025 ("DAPO", clip-higher)."""
    loss, metrics = clipped_surrogate(batch.ratio, batch.advantages, clip_low, clip_high)
    return loss, metrics | ratio_metrics(batch.ratio)


def dual_clip(
    batch: LossBatch, *, clip_low: float = 0.2, clip_high: float = 0.28, clip_c: float = 3.0
) -> LossAndMetrics:
    """Return the loss of `ppo_clip`, limited to -A clip_c at tokens with A < 0 (Ye et al. 2020, "dual-clip PPO").

    At A < 0, PPO's loss -A r grows without bound as the token becomes more probable (r rises). Tokens whose loss would
    exceed the limit have no gradient. The metric `clip_frac_dual` counts them.
    """
    refuse(clip_c <= 1, f"clip_c of dual_clip is {clip_c}; it bounds ratios above 1, so it must be > 1")
    loss, metrics = ppo_clip(batch, clip_low=clip_low, clip_high=clip_high)
    bound = -batch.advantages * clip_c
    too_large = (batch.advantages < 0) & (loss > bound)
    return torch.where(too_large, bound, loss), metrics | {"clip_frac_dual": too_large}


def decoupled(
    batch: LossBatch,
    *,
    proximal_logprobs: Float[Tensor, "batch tokens"],
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    cap: float = 5.0,
    cap_mode: str = "drop",
) -> LossAndMetrics:
    """Return w * `ppo_clip` with r = pi / pi_prox and w = sg(pi_prox / pi_old), the decoupled objective.

    Hilton et al. 2021 ("Batch size-invariance for policy optimization"): the clip limits the distance from a recent
    policy pi_prox, and the importance weight w corrects for the policy that sampled the tokens.

    Args:
        batch: Its `old_logprobs` must be those of the policy that sampled the tokens.
        proximal_logprobs: Log-probs of the recent policy.
        clip_low: The ratio is clipped below 1 - clip_low.
        clip_high: The ratio is clipped above 1 + clip_high.
        cap: Highest weight w.
        cap_mode: What to do if w > cap: "drop" sets w to 0, "clamp" sets it to the cap.

    Returns:
        The loss and its metrics. The metrics of the ratio are those of pi / pi_prox. `behaviour_weight_mean` is the
        mean of w. `behaviour_dropped_frac` and `behaviour_clamped_frac` count the tokens whose weight was dropped or
        clamped.
    """
    refuse(
        cap <= 0 or cap_mode not in CAP_MODES,
        f"decoupled has cap {cap} and cap_mode {cap_mode!r}; the cap must be positive, the mode one of "
        f"{', '.join(CAP_MODES)}",
    )
    ratio = clamp_log_ratio(batch.logprobs - proximal_logprobs).exp()
    loss, metrics = clipped_surrogate(ratio, batch.advantages, clip_low, clip_high)
    weights = clamp_log_ratio(proximal_logprobs - batch.old_logprobs).exp()
    is_above_cap = weights > cap
    weights = torch.where(is_above_cap, 0.0 if cap_mode == "drop" else cap, weights)
    metrics |= ratio_metrics(ratio)
    metrics["behaviour_weight_mean"] = weights
    metrics["behaviour_dropped_frac"] = is_above_cap & (weights == 0)
    metrics["behaviour_clamped_frac"] = is_above_cap & (weights > 0)
    return loss * weights, metrics


def cispo(batch: LossBatch, *, clip_low: float | None = None, clip_high: float = 4.0) -> LossAndMetrics:
    """Return -sg(clip(r)) A log pi. The clip limits the importance weight r, and no token loses its gradient.

    MiniMax 2025 ("MiniMax-M1", eq. 4-5). The upper bound is 1 + clip_high, 5 by default (eps_max of Khatri et al. 2025,
    "ScaleRL"). The lower bound is 1 - clip_low. By default there is no lower bound, as in both papers. The clip
    fractions count the clipped weights.
    """
    lowest = 0 if clip_low is None else 1 - clip_low
    highest = 1 + clip_high
    ratio = batch.ratio.detach()
    loss = -ratio.clamp(lowest, highest) * batch.advantages * batch.logprobs
    metrics = {"clip_frac_low": ratio < lowest, "clip_frac_high": ratio > highest}
    return loss, metrics | ratio_metrics(ratio)


def sapo(batch: LossBatch, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossAndMetrics:
    """Return -A sigmoid(tau (r - 1)) 4 / tau, a soft gate in place of a clip.

    On policy, the gradient is -A grad log pi. Gao et al. 2025 ("Soft Adaptive Policy Optimization"). tau is tau_pos
    where A > 0, and tau_neg elsewhere. The defaults are those of the paper.
    """
    refuse(min(tau_pos, tau_neg) <= 0, f"sapo: tau_pos {tau_pos} and tau_neg {tau_neg} must be positive")
    tau = torch.full_like(batch.ratio, tau_neg).masked_fill(batch.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (batch.ratio - 1)) * 4 / tau
    return -batch.advantages * gate, ratio_metrics(batch.ratio)


def dppo_tv(
    batch: LossBatch, *, eps_low: float = 0.2, eps_high: float = 0.2, clip_c: float = 20.0
) -> LossAndMetrics:
    """Return -A sg(min(r, clip_c)) log pi, set to 0 at tokens whose probability moved too far, |p - p_old| > eps.

    Qi et al. 2026 ("Rethinking the Trust Region in LLM RL"), binary total variation. The loss is 0 at tokens with A > 0
    and p - p_old > eps_high, and at tokens with A < 0 and p_old - p > eps_low. A token that the gradient moves back
    towards p_old always keeps its loss. The clip fractions count the tokens that are set to 0: `clip_frac_high` those
    with A > 0, `clip_frac_low` those with A < 0.
    """
    distance = (batch.logprobs.detach().exp() - batch.old_logprobs.exp()).abs()
    return _divergence_masked(batch, distance, eps_low, eps_high, clip_c)


def dppo_kl(
    batch: LossBatch, *, eps_low: float = 0.05, eps_high: float = 0.05, clip_c: float = 20.0
) -> LossAndMetrics:
    """Return the loss of `dppo_tv` with another distance, the binary KL divergence.

    The distance is p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), with 1 - p at least 1e-8. Qi et al.
    2026, with the bounds of the authors' recipe.
    """
    complement = _complement(batch.logprobs.detach())
    old_complement = _complement(batch.old_logprobs)
    divergence = -batch.old_logprobs.exp() * batch.log_ratio.detach()
    divergence = divergence + old_complement * (old_complement / complement).log()
    return _divergence_masked(batch, divergence, eps_low, eps_high, clip_c)


def _complement(logprobs: Float[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens"]:
    """Return 1 - p, at least 1e-8, from log-probs log p."""
    complement = -torch.expm1(logprobs)
    return complement.clamp(min=PROBABILITY_FLOOR)


def _divergence_masked(
    batch: LossBatch,
    divergence: Float[Tensor, "batch tokens"],
    eps_low: float,
    eps_high: float,
    clip_c: float,
) -> LossAndMetrics:
    """Return -A sg(min(r, clip_c)) log pi, set to 0 at tokens that would move further beyond a bound."""
    refuse(clip_c <= 0, f"clip_c bounds the importance weight from above; it is {clip_c}, not positive")
    ratio = batch.ratio.detach()
    # The loss is set to 0 only if the update would increase the distance: r > 1 with A > 0, or r < 1 with A < 0
    too_high = (batch.advantages > 0) & (ratio > 1) & (divergence > eps_high)
    too_low = (batch.advantages < 0) & (ratio < 1) & (divergence > eps_low)
    loss = -batch.advantages * ratio.clamp(max=clip_c) * batch.logprobs
    metrics = {"clip_frac_low": too_low, "clip_frac_high": too_high}
    return torch.where(too_high | too_low, 0, loss), metrics | ratio_metrics(ratio)


def dro(batch: LossBatch, *, beta: float = 0.05) -> LossAndMetrics:
    """Return -(A log pi - beta / 2 (log pi - log pi_old)^2), a policy gradient with a quadratic pull to the old policy.

    This is the policy loss of Richemond et al. 2024 ("Offline regularised RL for LLM alignment"), with A in place of
    the paper's reward minus value. The log-ratio is not clamped, because a clamp would remove the gradient where the
    pull is needed most.
    """
    refuse(not beta > 0, f"beta of dro is {beta}, but must be positive; for a loss without the pull, use gpg")
    pull = beta / 2 * (batch.logprobs - batch.old_logprobs).square()
    return pull - batch.advantages * batch.logprobs, ratio_metrics(batch.ratio)


def gspo(batch: LossBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossAndMetrics:
    """Return the `clipped_surrogate` of s_t = sg(s) pi / sg(pi), where s is the geometric mean of r over the sequence.

    Zheng et al. 2025 ("GSPO"), in the per-token form GSPO-token (eq. 13-14), with the clip bounds of the paper. It
    equals GSPO if all tokens of a sequence have the same advantage. The metrics `ratio_*` describe r. The metrics
    `sequence_ratio_*` and the clip fractions describe s.
    """
    sequence_ratio = batch.sequence_mean(batch.log_ratio.detach()).exp()
    loss, metrics = clipped_surrogate(
        sequence_ratio * batch.unit_ratio, batch.advantages, clip_low, clip_high
    )
    return loss, metrics | ratio_metrics(batch.ratio) | ratio_metrics(sequence_ratio, "sequence_")


def geo_mean(batch: LossBatch, *, clip_low: float = 0.4, clip_high: float = 0.4) -> LossAndMetrics:
    """Return -A exp(mean of k over the sequence), where k is log r, clamped on the side on which PPO clips.

    Zhao et al. 2025 ("Geometric-Mean Policy Optimization"), with the paper's clip range (e^-0.4, e^0.4) as default: k
    is at most clip_high if A > 0, at least -clip_low if A < 0, and 0 if A = 0. The loss of each token contains the
    ratio of its whole sequence, so its gradient reaches all tokens of the sequence.
    """
    log_ratio = batch.log_ratio
    advantages = batch.advantages
    k = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    sequence_ratio = batch.sequence_mean(torch.where(advantages == 0, 0, k)).exp()
    metrics = {
        "clip_frac_low": (advantages < 0) & (log_ratio < -clip_low),
        "clip_frac_high": (advantages > 0) & (log_ratio > clip_high),
    }
    metrics |= ratio_metrics(batch.ratio) | ratio_metrics(sequence_ratio, "sequence_")
    return -advantages * sequence_ratio, metrics


def topr(batch: LossBatch) -> LossAndMetrics:
    """Return -w A log pi, with a smaller weight w for bad sequences that the policy has moved away from.

    w is 1 for a sequence whose advantages sum to at least 0, and min(sg(s), 1) for other sequences. s is the geometric
    mean of r over the sequence. Le Roux et al. 2025 ("Tapered Off-Policy REINFORCE") use the product of r over the
    sequence in place of s, but this product vanishes for long sequences. The metrics `sequence_ratio_*` describe s.
    `clip_frac_high` counts the tokens whose s was limited to 1.
    """
    sequence_ratio = batch.sequence_mean(batch.log_ratio.detach()).exp()
    is_bad = batch.sequence_sum(batch.advantages) < 0
    weights = torch.where(is_bad, sequence_ratio.clamp(max=1), 1)
    metrics = {"clip_frac_high": is_bad & (sequence_ratio > 1)}
    metrics |= ratio_metrics(batch.ratio) | ratio_metrics(sequence_ratio, "sequence_")
    return -weights * batch.advantages * batch.logprobs, metrics


def vespo(
    batch: LossBatch,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> LossAndMetrics:
    """Return -sg(phi(w)) A log pi, where w is the product of r over the sequence and phi a smooth weight with phi(1) = 1.

    Shen et al. 2026 ("VESPO"). phi(w) = w^k e^(lambda (1 - w)) falls to 0 on both sides of its maximum at w = k / lambda. k
    and lambda are `k_pos` and `lambda_pos` where A >= 0, `k_neg` and `lambda_neg` elsewhere. log w is clamped to [log
    1e-8, 20]. The metrics `sequence_weight_mean` and `sequence_weight_max` describe phi(w).
    """
    refuse(
        min(k_pos, lambda_pos, k_neg, lambda_neg) < 0,
        f"vespo: k_pos {k_pos}, lambda_pos {lambda_pos}, k_neg {k_neg} and lambda_neg {lambda_neg} cannot be negative",
    )
    log_weight = batch.sequence_sum(batch.log_ratio.detach()).clamp(VESPO_LOWEST_LOG_WEIGHT, LOG_RATIO_LIMIT)
    is_good = batch.advantages >= 0
    k = torch.full_like(log_weight, k_neg).masked_fill(is_good, k_pos)
    decay = torch.full_like(log_weight, lambda_neg).masked_fill(is_good, lambda_pos)
    phi = (k * log_weight + decay * (1 - log_weight.exp())).exp()
    metrics = {"sequence_weight_mean": phi, "sequence_weight_max": phi}
    return -phi * batch.advantages * batch.logprobs, metrics | ratio_metrics(batch.ratio)
