"""What a policy loss reads, and the losses, each with its paper; `covariance` has two more.

Each takes a `LossBatch` and returns (per-token loss, per-token metrics); `losses.PolicyLoss` cleans what goes in and what
comes out. r = pi / pi_old with |log r| <= 20, A the advantage, sg() stops the gradient. Means over a sequence run over the
unmasked tokens of the token's own sequence id, so that they are exact on packed rows.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from async_grpo.algorithm.aggregation import compact_ids, sequence_sums
from async_grpo.algorithm.off_policy import held
from async_grpo.options.fields import refuse

CAP_MODES = ("drop", "clamp")
PROBABILITY_FLOOR = 1e-8  # of 1 - p: log p rounds to 0 near p = 1, and the binary KL would be infinite

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
        """log(pi / pi_old) within +-20: one far token must give neither inf nor the whole gradient."""
        return held(self.logprobs - self.old_logprobs)

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
        sums = sequence_sums(torch.where(self.mask, values, 0).double(), self._ids)
        return sums[self._ids].to(values.dtype)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """(B, T): at every token the mean of `values` over the unmasked tokens of its sequence."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values)).clamp(min=1)

    @cached_property
    def _ids(self) -> Tensor:
        return compact_ids(self.sequence_ids, self.mask)


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


def grpo(batch: LossBatch) -> LossAndMetrics:
    """-A pi / sg(pi): the value is -A, the gradient -A grad log pi. No ratio, no clip.

    The gradient of Shao et al. 2024 ("DeepSeekMath", eq. 3) on policy, where its ratio is 1.
    """
    return -batch.advantages * batch.own_ratio, ratio_metrics(batch.ratio)


def gpg(batch: LossBatch) -> LossAndMetrics:
    """-A log pi (Chu et al. 2025, "GPG"): the gradient of `grpo` with another value."""
    return -batch.advantages * batch.logprobs, ratio_metrics(batch.ratio)


def ppo_clip(batch: LossBatch, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossAndMetrics:
    """`clipped_surrogate`, with two bounds and their values as in Yu et al. 2025 ("DAPO", clip-higher)."""
    loss, metrics = clipped_surrogate(batch.ratio, batch.advantages, clip_low, clip_high)
    return loss, metrics | ratio_metrics(batch.ratio)


def dual_clip(
    batch: LossBatch, *, clip_low: float = 0.2, clip_high: float = 0.28, clip_c: float = 3.0
) -> LossAndMetrics:
    """`ppo_clip`, and where A < 0 never more than -A clip_c (Ye et al. 2020, "dual-clip PPO", c = 3).

    PPO bounds a bad token that became rare, not one that became frequent: there its loss grows with r. Held tokens have
    no gradient; metric `clip_frac_dual`.
    """
    refuse(clip_c <= 1, f"clip_c of dual_clip is {clip_c}; it bounds ratios above 1, so it must be > 1")
    loss, metrics = ppo_clip(batch, clip_low=clip_low, clip_high=clip_high)
    bound = -batch.advantages * clip_c
    too_large = (batch.advantages < 0) & (loss > bound)
    return torch.where(too_large, bound, loss), metrics | {"clip_frac_dual": too_large}


def decoupled(
    batch: LossBatch,
    *,
    proximal_logprobs: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    cap: float = 5.0,
    cap_mode: str = "drop",
) -> LossAndMetrics:
    """w * `ppo_clip` with r = pi / pi_prox, w = sg(pi_prox / pi_old): the decoupled objective.

    Hilton et al. 2021 ("Batch size-invariance for policy optimization"): the clip is around a recent
    policy, the importance weight corrects for the one that sampled, whose log-probs `old_logprobs` must be.
    proximal_logprobs (B, T). Tokens with w > cap get weight 0 (cap_mode "drop") or the cap ("clamp"). Metrics: the ratio
    is pi / pi_prox; `behaviour_weight_mean`; `behaviour_dropped_frac` and `behaviour_clamped_frac`, the tokens above it.
    """
    refuse(
        cap <= 0 or cap_mode not in CAP_MODES,
        f"decoupled has cap {cap} and cap_mode {cap_mode!r}; the cap must be positive, the mode one of "
        f"{', '.join(CAP_MODES)}",
    )
    ratio = held(batch.logprobs - proximal_logprobs).exp()
    loss, metrics = clipped_surrogate(ratio, batch.advantages, clip_low, clip_high)
    weights = held(proximal_logprobs - batch.old_logprobs).exp()
    above = weights > cap
    weights = torch.where(above, 0.0 if cap_mode == "drop" else cap, weights)
    metrics |= ratio_metrics(ratio) | {
        "behaviour_weight_mean": weights,
        "behaviour_dropped_frac": above & (weights == 0),
        "behaviour_clamped_frac": above & (weights > 0),
    }
    return loss * weights, metrics


def cispo(batch: LossBatch, *, clip_low: float | None = None, clip_high: float = 4.0) -> LossAndMetrics:
    """-sg(clip(r)) A log pi: the importance weight is bounded, no token loses its gradient.

    MiniMax 2025 ("MiniMax-M1", eq. 4-5). Upper bound 1 + clip_high, 5 by default (eps_max of Khatri et al. 2025,
    "ScaleRL"); lower bound 1 - clip_low, none by default as in both papers. The clip fractions count bounded weights.
    """
    lowest, highest = 0 if clip_low is None else 1 - clip_low, 1 + clip_high
    ratio = batch.ratio.detach()
    loss = -ratio.clamp(lowest, highest) * batch.advantages * batch.logprobs
    return loss, ratio_metrics(ratio) | {"clip_frac_low": ratio < lowest, "clip_frac_high": ratio > highest}


def sapo(batch: LossBatch, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossAndMetrics:
    """-A sigmoid(tau (r - 1)) 4 / tau: a soft gate; on policy the gradient is -A grad log pi.

    Gao et al. 2025 ("Soft Adaptive Policy Optimization"), with its temperatures: tau_pos where A > 0, else tau_neg.
    """
    refuse(min(tau_pos, tau_neg) <= 0, f"sapo: tau_pos {tau_pos} and tau_neg {tau_neg} must be positive")
    tau = torch.full_like(batch.ratio, tau_neg).masked_fill(batch.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (batch.ratio - 1)) * 4 / tau
    return -batch.advantages * gate, ratio_metrics(batch.ratio)


def dppo_tv(
    batch: LossBatch, *, eps_low: float = 0.2, eps_high: float = 0.2, clip_c: float = 20.0
) -> LossAndMetrics:
    """-A sg(min(r, clip_c)) log pi, without the tokens whose probability already moved too far, |p - p_old| > eps.

    Qi et al. 2026 ("Rethinking the Trust Region in LLM RL"), binary total variation. Left out are tokens with A > 0 and
    p - p_old > eps_high, or A < 0 and p_old - p > eps_low; a token on its way back always stays. The clip fractions
    count the tokens left out, high for A > 0.
    """
    moved = (batch.logprobs.detach().exp() - batch.old_logprobs.exp()).abs()
    return _divergence_masked(batch, moved, eps_low, eps_high, clip_c)


def dppo_kl(
    batch: LossBatch, *, eps_low: float = 0.05, eps_high: float = 0.05, clip_c: float = 20.0
) -> LossAndMetrics:
    """`dppo_tv` with the binary KL p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)) for the distance.

    Qi et al. 2026; bounds of the authors' recipe. 1 - p is held above 1e-8.
    """
    logprobs, old = batch.logprobs.detach(), batch.old_logprobs
    rest, old_rest = (-torch.expm1(values).clamp(max=-PROBABILITY_FLOOR) for values in (logprobs, old))
    divergence = -old.exp() * batch.log_ratio.detach() + old_rest * (old_rest / rest).log()
    return _divergence_masked(batch, divergence, eps_low, eps_high, clip_c)


def _divergence_masked(
    batch: LossBatch, divergence: Tensor, eps_low: float, eps_high: float, clip_c: float
) -> LossAndMetrics:
    refuse(clip_c <= 0, f"clip_c bounds the importance weight from above; it is {clip_c}, not positive")
    ratio = batch.ratio.detach()
    # Only the update that would move further away is stopped: r > 1 where A pushes up, r < 1 where it pushes down
    too_high = (batch.advantages > 0) & (ratio > 1) & (divergence > eps_high)
    too_low = (batch.advantages < 0) & (ratio < 1) & (divergence > eps_low)
    loss = -batch.advantages * ratio.clamp(max=clip_c) * batch.logprobs
    metrics = {"clip_frac_low": too_low, "clip_frac_high": too_high}
    return torch.where(too_high | too_low, 0, loss), metrics | ratio_metrics(ratio)


def dro(batch: LossBatch, *, beta: float = 0.05) -> LossAndMetrics:
    """-(A log pi - beta / 2 (log pi - log pi_old)^2): policy gradient with a quadratic pull to the old policy.

    The policy's part of Richemond et al. 2024 ("Offline regularised RL for LLM alignment"), with A in place of
    reward minus value. The log-ratio is not bounded: a bound would end the pull where it is needed most.
    """
    refuse(not beta > 0, f"beta of dro is {beta}; without a positive pull the loss is gpg: use that")
    pull = beta / 2 * (batch.logprobs - batch.old_logprobs).square()
    return pull - batch.advantages * batch.logprobs, ratio_metrics(batch.ratio)


def gspo(batch: LossBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossAndMetrics:
    """PPO's clip around s_t = sg(s) pi / sg(pi), with s the geometric mean of r over the token's sequence.

    Zheng et al. 2025 ("GSPO"), the token form GSPO-token (eq. 13-14), with its clip bounds.
    It equals GSPO where the advantage is the same over a sequence. `ratio_*` are the tokens', `sequence_ratio_*`
    and the clip fractions the sequences'.
    """
    sequence_ratio = batch.sequence_mean(batch.log_ratio.detach()).exp()
    loss, metrics = clipped_surrogate(sequence_ratio * batch.own_ratio, batch.advantages, clip_low, clip_high)
    return loss, metrics | ratio_metrics(batch.ratio) | ratio_metrics(sequence_ratio, "sequence_")


def geo_mean(batch: LossBatch, *, clip_low: float = 0.4, clip_high: float = 0.4) -> LossAndMetrics:
    """-A exp(mean of k over the sequence): k = log r, held at -clip_low or clip_high where PPO would clip.

    Zhao et al. 2025 ("Geometric-Mean Policy Optimization"), clip (e^-0.4, e^0.4): for A > 0 k is at most clip_high, for
    A < 0 at least -clip_low, and a token with A = 0 has k = 0. The sequence's ratio keeps the gradient of all its tokens.
    """
    k, advantages = batch.log_ratio, batch.advantages
    bounded = torch.where(advantages > 0, k.clamp(max=clip_high), k.clamp(min=-clip_low))
    sequence_ratio = batch.sequence_mean(torch.where(advantages == 0, 0, bounded)).exp()
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
    the ratios, which vanishes with the length. `sequence_ratio_*` are s, `clip_frac_high` counts tokens held at 1.
    """
    sequence_ratio = batch.sequence_mean(batch.log_ratio.detach()).exp()
    is_bad = batch.sequence_sum(batch.advantages) < 0
    weights = torch.where(is_bad, sequence_ratio.clamp(max=1), 1)
    metrics = {"clip_frac_high": is_bad & (sequence_ratio > 1)} | ratio_metrics(batch.ratio)
    return -weights * batch.advantages * batch.logprobs, metrics | ratio_metrics(sequence_ratio, "sequence_")
