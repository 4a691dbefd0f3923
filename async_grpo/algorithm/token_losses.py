"""Policy losses in which a token's loss depends on that token alone.

r = pi / pi_old with |log r| <= 20, A the advantage, sg() stops the gradient. Every function takes a `LossBatch`
and returns (per-token loss, per-token metrics); `losses.PolicyLoss` cleans what goes in and what comes out.
"""

import torch
from torch import Tensor

from async_grpo.algorithm.loss_batch import (
    LossAndMetrics,
    LossBatch,
    bounded_log_ratio,
    clipped_surrogate,
    ratio_metrics,
)
from async_grpo.errors import ConfigurationError

CAP_MODES = ("drop", "clamp")
PROBABILITY_FLOOR = 1e-8  # of 1 - p: log p rounds to 0 near p = 1, and the binary KL would be infinite


def grpo(batch: LossBatch) -> LossAndMetrics:
    """-A pi / sg(pi): the value is -A, the gradient -A grad log pi. No ratio, no clip.

    The gradient of Shao et al. 2024 ("DeepSeekMath", eq. 3) on policy, where its ratio is 1.
    """
    return -batch.advantages * batch.own_ratio, ratio_metrics(batch.ratio)


def gpg(batch: LossBatch) -> LossAndMetrics:
    """-A log pi (Chu et al. 2025, "GPG"): the gradient of `grpo` with another value."""
    return -batch.advantages * batch.logprobs, ratio_metrics(batch.ratio)


def ppo_clip(batch: LossBatch, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossAndMetrics:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (Schulman et al. 2017, eq. 7).

    Two bounds and their values as in Yu et al. 2025 ("DAPO", clip-higher).
    """
    loss, metrics = clipped_surrogate(batch.ratio, batch.advantages, clip_low, clip_high)
    return loss, metrics | ratio_metrics(batch.ratio)


def dual_clip(
    batch: LossBatch, *, clip_low: float = 0.2, clip_high: float = 0.28, clip_c: float = 3.0
) -> LossAndMetrics:
    """`ppo_clip`, and where A < 0 never more than -A clip_c (Ye et al. 2020, "dual-clip PPO", c = 3).

    PPO bounds a bad token that became rare, not one that became frequent: there its loss grows with r. Held
    tokens have no gradient; metric `clip_frac_dual`. ValueError unless clip_c > 1.
    """
    if clip_c <= 1:
        raise ConfigurationError(
            f"clip_c of dual_clip is {clip_c}; it bounds ratios above 1, so it must be > 1"
        )
    loss, metrics = clipped_surrogate(batch.ratio, batch.advantages, clip_low, clip_high)
    bound = -batch.advantages * clip_c
    held = (batch.advantages < 0) & (loss > bound)
    metrics |= ratio_metrics(batch.ratio) | {"clip_frac_dual": held}
    return torch.where(held, bound, loss), metrics


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
    proximal_logprobs (B, T). Tokens with w > cap get weight 0 (cap_mode "drop", as verl's async-reward recipe,
    which has the cap 5) or the cap ("clamp"). Metrics: the ratio is pi / pi_prox; `behaviour_weight_mean`;
    `behaviour_dropped_frac` and `behaviour_clamped_frac`, the tokens above the cap. ValueError: cap <= 0 or
    another cap_mode.
    """
    if cap <= 0 or cap_mode not in CAP_MODES:
        raise ConfigurationError(
            f"decoupled has cap {cap} and cap_mode {cap_mode!r}; the cap must be positive, "
            f"the mode one of {', '.join(CAP_MODES)}"
        )
    ratio = bounded_log_ratio(batch.logprobs, proximal_logprobs).exp()
    loss, metrics = clipped_surrogate(ratio, batch.advantages, clip_low, clip_high)
    weights = bounded_log_ratio(proximal_logprobs, batch.old_logprobs).exp()
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
    "ScaleRL"); lower bound 1 - clip_low, none by default as in both papers. (verl uses 0.2 on both sides.) The
    clip fractions count bounded weights.
    """
    lowest = None if clip_low is None else 1 - clip_low
    highest = 1 + clip_high
    ratio = batch.ratio.detach()
    loss = -ratio.clamp(lowest, highest) * batch.advantages * batch.logprobs
    below = torch.zeros_like(batch.mask) if lowest is None else ratio < lowest
    return loss, ratio_metrics(ratio) | {"clip_frac_low": below, "clip_frac_high": ratio > highest}


def sapo(batch: LossBatch, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossAndMetrics:
    """-A sigmoid(tau (r - 1)) 4 / tau: a soft gate; on policy the gradient is -A grad log pi.

    Gao et al. 2025 ("Soft Adaptive Policy Optimization"), with its temperatures: tau_pos where A > 0, else
    tau_neg. (verl always averages it per sequence; here the aggregation is the one that was asked for.)
    ValueError unless both are positive.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ConfigurationError(f"sapo has tau_pos {tau_pos} and tau_neg {tau_neg}; both must be positive")
    tau = torch.full_like(batch.ratio, tau_neg).masked_fill(batch.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (batch.ratio - 1)) * 4 / tau
    return -batch.advantages * gate, ratio_metrics(batch.ratio)


def dppo_tv(
    batch: LossBatch, *, eps_low: float = 0.2, eps_high: float = 0.2, clip_c: float = 20.0
) -> LossAndMetrics:
    """-A sg(min(r, clip_c)) log pi, without the tokens whose probability already moved too far, |p - p_old| > eps.

    Qi et al. 2026 ("Rethinking the Trust Region in LLM RL"), binary total variation. Left out are tokens
    with A > 0 and p - p_old > eps_high, or A < 0 and p_old - p > eps_low; a token on its way back always
    stays. (The authors' recipe has 0.15 on both sides and no bound on r.) The clip fractions count the tokens
    left out, high for A > 0. ValueError unless clip_c > 0.
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
    if clip_c <= 0:
        raise ConfigurationError(
            f"clip_c bounds the importance weight from above; it is {clip_c}, not positive"
        )
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
    reward minus value. The log-ratio is not bounded: nothing overflows, and a bound would end the pull where it
    is needed most. ValueError unless beta > 0.
    """
    if not beta > 0:
        raise ConfigurationError(f"beta of dro is {beta}; without a positive pull the loss is gpg: use that")
    pull = beta / 2 * (batch.logprobs - batch.old_logprobs).square()
    return pull - batch.advantages * batch.logprobs, ratio_metrics(batch.ratio)
