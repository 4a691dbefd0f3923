"""Corrections for tokens that another policy sampled: importance weights, rejection, and metrics of the mismatch.

In this module, x = log pi(token) - log mu(token), where pi is the policy that is trained and mu the behaviour policy,
which sampled the token.

- A token of weight 0 still counts in the loss's denominator. A rejected token does not.
- All computations are without gradient and in float64. Padded rows and packed sequences give the same results.
- The sums and counts of parts of a batch add up, if each part consists of whole sequences.
- Masked positions may contain anything. A token whose x is NaN gets the weight NaN and is not rejected, so that the
  trainer notices the NaN and skips the step.
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Float64, Int, Num, Shaped
from torch import Tensor

from async_grpo.algorithm.aggregation import compact_ids, sequence_sums
from async_grpo.algorithm.kl import KL_KINDS
from async_grpo.options.fields import refuse

# |x| of a token, and |sum of x| of a sequence, are clamped to this: e^20 = 4.9e8
LOG_RATIO_LIMIT = 20.0
# Name -> (scope, estimator). The scope says which values of the estimator are compared with the bounds: the value of
# each token, or the sum, mean or maximum over a sequence
REJECTION_STATISTICS: dict[str, tuple[str, str]] = {
    "token_k1": ("token", "k1"),
    "token_k2": ("token", "k2"),
    "token_k3": ("token", "k3"),
    "sequence_sum_k1": ("sequence_sum", "k1"),
    "sequence_sum_k2": ("sequence_sum", "k2"),
    "sequence_sum_k3": ("sequence_sum", "k3"),
    "sequence_mean_k1": ("sequence_mean", "k1"),
    "sequence_mean_k2": ("sequence_mean", "k2"),
    "sequence_mean_k3": ("sequence_mean", "k3"),
    "sequence_max_k2": ("sequence_max", "k2"),
    "sequence_max_k3": ("sequence_max", "k3"),
}
LEVELS = ("token", "sequence")
MODES = ("truncate", "mask")

# The middle bin of the histogram contains |x| up to this value, and stands for a ratio of exactly 1
FINEST_LOG_RATIO = 1e-4
BINS_PER_SIDE = 256
NUM_BINS = 2 * BINS_PER_SIDE + 1
_GROWTH = math.log(LOG_RATIO_LIMIT / FINEST_LOG_RATIO) / BINS_PER_SIDE
# Relative distance of |x| from a bin's centre to the bin's edges, 2.4 %
RESOLUTION = math.expm1(_GROWTH / 2)


def clamp_log_ratio(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the log ratios clamped to +-20."""
    return x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratio(
    logprobs: Float[Tensor, "batch tokens"],
    behaviour_logprobs: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
) -> Float64[Tensor, "batch tokens"]:
    """Return x = logprobs - behaviour_logprobs without gradient or clamp, and 0 where the mask is False."""
    return torch.where(mask.bool(), logprobs.detach().double() - behaviour_logprobs.detach().double(), 0)


def importance_weights(
    logprobs: Float[Tensor, "batch tokens"],
    behaviour_logprobs: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    *,
    level: str = "token",
    mode: str = "truncate",
    low: float | None = None,
    high: float = 2.0,
    normalize: bool = False,
    mean: float | Float[Tensor, ""] | None = None,
    sequence_ids: Int[Tensor, "batch tokens"] | None = None,
) -> Float[Tensor, "batch tokens"]:
    """Return importance weights in the dtype of `logprobs`, zero where the mask is False.

    Args:
        logprobs: log pi.
        behaviour_logprobs: log mu.
        mask: True at the tokens that are trained on.
        level: With "token", w = e^x. With "sequence", w = e^(sum of x over the unmasked tokens of the sequence), the
            same for all its tokens. x and its sum are clamped to +-20.
        mode: "truncate": min(w, high), and max(w, low) if there is a low (Ionides 2008, "Truncated importance sampling").
            "mask": w inside [low, high], 0 outside (IcePop; Ling Team 2025, "Every Step Evolves").
        low: Lower bound of the weights.
        high: Upper bound of the weights.
        normalize: Divide by the mean of the bounded weights over tokens or sequences, including the zeros of "mask".
        mean: Divide by this mean of a whole batch, if the tensors are only a part of it (see `weight_totals`).
        sequence_ids: Any integers. None means that each row is one sequence.

    Raises:
        ConfigurationError: The level or the mode is unknown, or no positive weight lies within the bounds.

    >>> logprobs, behaviour = torch.tensor([[.5, .9, .1]]).log(), torch.tensor([[.5, .3, .2]]).log()
    >>> importance_weights(logprobs, behaviour, torch.ones(1, 3)).tolist()  # ratios 1, 3, 1/2
    [[1.0, 2.0, 0.5]]
    >>> importance_weights(logprobs, behaviour, torch.ones(1, 3), level="sequence").tolist()
    [[1.5, 1.5, 1.5]]
    """
    _check_weight_options(level, mode, low, high)
    mask = mask.bool()
    x = clamp_log_ratio(log_ratio(logprobs, behaviour_logprobs, mask))
    if level == "sequence":
        ids = compact_ids(sequence_ids, mask)
        x = clamp_log_ratio(sequence_sums(x, ids))[ids]
    weights = x.exp()
    if mode == "truncate":
        weights = weights.clamp(low, high)
    else:
        weights = weights.masked_fill((weights > high) | (weights < (low or 0)), 0)
    weights = torch.where(mask, weights, 0)
    if mean is None and normalize:
        total, count = weight_totals(weights, mask, level=level, sequence_ids=sequence_ids)
        mean = total / count.clamp(min=1)
    if mean is not None:
        mean = torch.as_tensor(mean, dtype=weights.dtype, device=weights.device)
        weights = weights / torch.where(mean == 0, 1, mean)
    return weights.to(logprobs.dtype)


def _check_weight_options(level: str, mode: str, low: float | None, high: float) -> None:
    """Raise ConfigurationError if the level or the mode is unknown, or no positive weight lies within the bounds."""
    for name, value, choices in (("level", level, LEVELS), ("mode", mode, MODES)):
        refuse(
            value not in choices, f"unknown importance {name} {value!r}; choose one of {', '.join(choices)}"
        )
    lowest = low or 0
    refuse(
        high is None or not (high > 0 and 0 <= lowest <= high),
        f"importance weights cannot lie in [{low}, {high}]; give 0 <= low <= high and high > 0, such as 2 or inf",
    )


def weight_totals(
    weights: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    *,
    level: str = "token",
    sequence_ids: Int[Tensor, "batch tokens"] | None = None,
) -> tuple[Float64[Tensor, ""], Float64[Tensor, ""]]:
    """Return (sum, count) of weights that are not normalised yet, over tokens or sequences.

    The sums and counts of the parts of a batch add up.
    """
    mask = mask.bool()
    weights = torch.where(mask, weights.detach().double(), 0)
    if level == "token":
        return weights.sum(), mask.sum().double()
    ids = compact_ids(sequence_ids, mask)
    lengths = sequence_sums(mask.long(), ids)
    # All tokens of a sequence have the same weight
    weights_of_sequences = sequence_sums(weights, ids) / lengths.clamp(min=1)
    return weights_of_sequences.sum(), (lengths > 0).sum().double()


def rejection_mask(
    logprobs: Float[Tensor, "batch tokens"],
    behaviour_logprobs: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    *,
    statistic: str,
    low: float | None = None,
    high: float | None = None,
    sequence_ids: Int[Tensor, "batch tokens"] | None = None,
) -> Bool[Tensor, "batch tokens"]:
    """Return True at the tokens to keep, and False wherever the mask is False.

    Tokens are kept if low <= statistic <= high. `token_*` judges each token by itself. `sequence_sum_*`,
    `sequence_mean_*` and `sequence_max_*` compute one value from the unmasked tokens of a sequence, and keep or reject
    all of them. x is clamped to +-20. The estimators ("When Speed Kills Stability", Liu et al. 2025):

    - k1: the ratio pi / mu of a token (`token_k1`) or of a sequence (`sequence_sum_k1`), or the geometric mean of a
      sequence's token ratios (`sequence_mean_k1`).
    - k2: x^2 / 2, which is never negative, and small where the policies agree.
    - k3: e^x - 1 - x, which is never negative, and small where the policies agree.

    Args:
        logprobs: log pi.
        behaviour_logprobs: log mu.
        mask: True at the tokens that are trained on.
        statistic: A name of REJECTION_STATISTICS.
        low: Lowest accepted value.
        high: Highest accepted value.
        sequence_ids: Any integers. None means that each row is one sequence.

    Raises:
        ConfigurationError: The statistic is unknown, or the bounds reject nothing or everything.

    >>> logprobs, behaviour = torch.tensor([[.5, .9, .1]]).log(), torch.tensor([[.5, .3, .2]]).log()
    >>> keep = {"low": 0.4, "high": 2.0}  # ratios 1, 3, 1/2; their product is 1.5
    >>> rejection_mask(logprobs, behaviour, torch.ones(1, 3), statistic="token_k1", **keep).tolist()
    [[True, False, True]]
    >>> rejection_mask(logprobs, behaviour, torch.ones(1, 3), statistic="sequence_sum_k1", **keep).tolist()
    [[True, True, True]]
    """
    refuse(
        statistic not in REJECTION_STATISTICS,
        f"unknown rejection statistic {statistic!r}; choose one of {', '.join(REJECTION_STATISTICS)}",
    )
    lowest = low or 0
    highest = math.inf if high is None else high
    refuse(
        not (0 <= lowest <= highest and highest > 0) or (lowest, highest) == (0, math.inf),
        f"rejection by {statistic} cannot keep [{low}, {high}]; give low or high or both, with 0 <= low <= high and a "
        "positive high",
    )
    mask = mask.bool()
    x = clamp_log_ratio(log_ratio(logprobs, behaviour_logprobs, mask))
    values = _rejection_values(x, mask, statistic, sequence_ids)
    return mask & ~((values < lowest) | (values > highest))


def _rejection_values(
    x: Float64[Tensor, "batch tokens"],
    mask: Bool[Tensor, "batch tokens"],
    statistic: str,
    sequence_ids: Int[Tensor, "batch tokens"] | None,
) -> Float64[Tensor, "batch tokens"]:
    """Return, at every token, the value of a rejection statistic of the log ratios x."""
    scope, kind = REJECTION_STATISTICS[statistic]
    values = x if kind == "k1" else KL_KINDS[kind](-x)
    if scope != "token":
        ids = compact_ids(sequence_ids, mask)
        sums = sequence_sums(values, ids)
        if scope == "sequence_mean":
            lengths = sequence_sums(mask.long(), ids)
            sums = sums / lengths.clamp(min=1)
        elif scope == "sequence_max":
            # k2 and k3 are never negative, so the 0 at masked positions does not change a maximum
            sums = torch.zeros_like(sums).scatter_reduce(0, ids.flatten(), values.flatten(), "amax")
        values = sums[ids]
    if kind == "k1":
        # The ratio of a long sequence may become inf, which is rejected like every ratio above the bound
        values = values.exp()
    return values


def mismatch_sums(
    logprobs: Float[Tensor, "batch tokens"],
    behaviour_logprobs: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    *,
    sequence_ids: Int[Tensor, "batch tokens"] | None = None,
) -> dict[str, Float64[Tensor, ""]]:
    """Return the sums over unmasked tokens and over sequences from which `mismatch_report` computes its metrics."""
    mask = mask.bool()
    x = log_ratio(logprobs, behaviour_logprobs, mask)
    ids = compact_ids(sequence_ids, mask)
    has_tokens = sequence_sums(mask.long(), ids) > 0
    weights = torch.where(mask, clamp_log_ratio(x).exp(), 0)
    sequence_weights = torch.where(
        has_tokens, clamp_log_ratio(sequence_sums(clamp_log_ratio(x), ids)).exp(), 0
    )
    sums = {
        "tokens": mask.double(),
        "k1": -x,
        "k3": KL_KINDS["k3"](-x),
        "weight": weights,
        "weight_squared": weights.square(),
        "sequences": has_tokens.double(),
        "sequence_weight": sequence_weights,
        "sequence_weight_squared": sequence_weights.square(),
    }
    return {f"mismatch_{name}_sum": values.sum() for name, values in sums.items()}


def mismatch_report(
    sums: Mapping[str, Float[Tensor, ""] | float], histogram: Num[Tensor, " bins"] | None = None
) -> dict[str, float]:
    """Return the metrics of the mismatch between the policies. All are NaN if there are no tokens.

    With w = e^x of a token or of a sequence:

    - mismatch_k1, mismatch_kl: mean of -x and of e^x - 1 - x (k1 and k3 of KL(mu || pi), in nats per token).
    - ess, ess_sequence: effective sample size as a fraction, (sum w)^2 / (n sum w^2), over tokens and over sequences
      (Kong 1992). 1 means that all weights are equal.
    - chi2_token: mean w^2 - 1, the chi-square divergence of pi from mu.
    - ratio_p01, ratio_p50, ratio_p99: quantiles of w, see `histogram_quantiles`.

    Args:
        sums: The results of `mismatch_sums`, summed over the parts of a batch.
        histogram: The results of `ratio_histogram`, summed over the parts of a batch. None leaves the quantiles out.

    >>> logprobs, behaviour = torch.tensor([[.5, .9]]).log(), torch.tensor([[.5, .3]]).log()  # ratios 1, 3
    >>> report = mismatch_report(mismatch_sums(logprobs, behaviour, torch.ones(1, 2)))
    >>> {name: round(value, 3) for name, value in report.items()}
    {'mismatch_k1': -0.549, 'mismatch_kl': 0.451, 'ess': 0.8, 'chi2_token': 4.0, 'ess_sequence': 1.0}
    """
    total = {}
    for name, value in sums.items():
        total[name.removeprefix("mismatch_").removesuffix("_sum")] = float(value)
    squares = total["weight_squared"]
    tokens = total["tokens"] or math.nan
    sequences = total["sequences"] or math.nan
    report = {
        "mismatch_k1": total["k1"] / tokens,
        "mismatch_kl": total["k3"] / tokens,
        "ess": total["weight"] ** 2 / (tokens * squares),
        "chi2_token": squares / tokens - 1,
        "ess_sequence": total["sequence_weight"] ** 2 / (sequences * total["sequence_weight_squared"]),
    }
    if histogram is not None:
        p01, p50, p99 = histogram_quantiles(histogram, [0.01, 0.5, 0.99]).tolist()
        report |= {"ratio_p01": p01, "ratio_p50": p50, "ratio_p99": p99}
    return report


def ratio_histogram(
    logprobs: Float[Tensor, "batch tokens"],
    behaviour_logprobs: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
) -> Num[Tensor, " bins"]:
    """Return a histogram of the log ratios x of unmasked tokens, in NUM_BINS bins. NaN is not counted.

    The middle bin counts |x| <= 1e-4. On each side follow 256 bins, each 4.9 % wide, up to |x| = 20. Larger values are
    counted in the last bin.
    """
    x = clamp_log_ratio(log_ratio(logprobs, behaviour_logprobs, mask)).flatten()
    edges = _magnitudes(torch.arange(BINS_PER_SIDE, dtype=x.dtype, device=x.device))
    bins = torch.bucketize(x, torch.cat([-edges.flip(0), edges]))
    is_counted = mask.bool().flatten() & ~x.isnan()
    return torch.bincount(bins, weights=is_counted.to(x.dtype), minlength=NUM_BINS)


def _magnitudes(bins: Float64[Tensor, " bins"]) -> Float64[Tensor, " bins"]:
    """Return |x| at a distance from the middle bin. The distance is a number of bins, which may be fractional."""
    return FINEST_LOG_RATIO * torch.exp(_GROWTH * bins)


def histogram_quantiles(counts: Num[Tensor, " bins"], qs: list[float]) -> Float64[Tensor, " quantiles"]:
    """Return the quantiles `qs` of the ratio e^x from summed histograms, or NaN if nothing was counted.

    Quantiles are interpolated linearly between neighbouring values, as in torch.quantile. Every token of a bin is
    treated as if its |x| were the geometric mean of the bin's edges.

    >>> logprobs = torch.tensor([[0., 0., .7]])
    >>> counts = ratio_histogram(logprobs, torch.zeros(1, 3), torch.ones(1, 3))
    >>> [round(ratio, 2) for ratio in histogram_quantiles(counts, [0.5, 1.0]).tolist()]  # 1 and e^0.7 = 2.01
    [1.0, 2.0]
    """
    counts = counts.double()
    shares = torch.tensor(qs, dtype=torch.float64, device=counts.device)
    total = counts.sum()
    if not total > 0:
        return torch.full_like(shares, math.nan)
    centres = _magnitudes(torch.arange(BINS_PER_SIDE, dtype=torch.float64, device=counts.device) + 0.5)
    ratios = torch.cat([-centres.flip(0), centres.new_zeros(1), centres]).exp()
    cumulative = counts.cumsum(0)
    rank = shares * (total - 1)
    ratio_below = ratios[torch.searchsorted(cumulative, rank.floor(), right=True)]
    ratio_above = ratios[torch.searchsorted(cumulative, rank.ceil(), right=True)]
    return torch.lerp(ratio_below, ratio_above, rank - rank.floor())
