"""Tokens that another policy sampled: weigh them, leave them out, and say how far that policy is.

x = log pi(token) - log mu(token), pi the policy that is trained and mu the behaviour policy, which sampled. A weight of 0
leaves its token in the loss's denominator, rejection does not. Everything is without gradient, in float64, additive over
parts of whole sequences, and the same whether they are rows or packed. Masked positions may hold anything. At an unmasked
one a NaN is neither weighed away nor rejected: the trainer refuses the step.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from async_grpo.algorithm.aggregation import compact_ids, sequence_sums
from async_grpo.algorithm.kl import KL_KINDS
from async_grpo.options.fields import refuse

LOG_RATIO_LIMIT = 20.0  # x of a token and the sum of a sequence are held there: e^20 = 4.9e8
REJECTION_STATISTICS: dict[str, tuple[str, str]] = {  # name -> what is judged, and the estimator
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

FINEST_LOG_RATIO = 1e-4  # |x| up to it falls into the middle bin, which reads as a ratio of exactly 1
BINS_PER_SIDE = 256
NUM_BINS = 2 * BINS_PER_SIDE + 1
_GROWTH = math.log(LOG_RATIO_LIMIT / FINEST_LOG_RATIO) / BINS_PER_SIDE
RESOLUTION = math.expm1(_GROWTH / 2)  # a bin's centre is within 2.4 % of every |x| in it


def clamp_log_ratio(x: Tensor) -> Tensor:
    """Within +-20."""
    return x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratio(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """x = logprobs - behaviour_logprobs, float64 without gradient, 0 where the mask is False; not held."""
    return torch.where(mask.bool(), logprobs.detach().double() - behaviour_logprobs.detach().double(), 0)


def importance_weights(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    low: float | None = None,
    high: float = 2.0,
    normalize: bool = False,
    mean: float | Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Weights (B, T) in the dtype of `logprobs`, zero where the mask is False.

    level "token": w = e^x. "sequence": w = e^(sum of x over the unmasked tokens), the same for each of them. mode
    "truncate": min(w, high), and max(w, low) if there is a low (Ionides 2008, "Truncated importance sampling"). "mask": w
    inside [low, high], 0 outside (IcePop; Ling Team 2025, "Every Step Evolves"). x and its sum are held at +-20.
    normalize: divide by the mean of the bounded weights, the zeros of "mask" included, over tokens or over sequences;
    mean: by that one, where this is a part of a batch (`weight_totals`).
    ConfigurationError: a level, mode or bounds that are none.

    >>> logprobs, behaviour = torch.tensor([[.5, .9, .1]]).log(), torch.tensor([[.5, .3, .2]]).log()
    >>> importance_weights(logprobs, behaviour, torch.ones(1, 3)).tolist()  # ratios 1, 3, 1/2
    [[1.0, 2.0, 0.5]]
    >>> importance_weights(logprobs, behaviour, torch.ones(1, 3), level="sequence").tolist()
    [[1.5, 1.5, 1.5]]
    """
    for name, value, known in (("level", level, LEVELS), ("mode", mode, MODES)):
        refuse(value not in known, f"unknown importance {name} {value!r}; choose one of {', '.join(known)}")
    lowest = 0 if low is None else low
    refuse(
        high is None or not (high > 0 and 0 <= lowest <= high),
        f"importance weights cannot lie in [{low}, {high}]; give 0 <= low <= high and a positive high: 2, or inf",
    )
    mask = mask.bool()
    x = clamp_log_ratio(log_ratio(logprobs, behaviour_logprobs, mask))
    if level == "sequence":
        ids = compact_ids(sequence_ids, mask)
        x = clamp_log_ratio(sequence_sums(x, ids))[ids]
    weights = x.exp()
    if mode == "truncate":
        weights = weights.clamp(low, high)
    else:
        weights = weights.masked_fill((weights > high) | (weights < lowest), 0)
    weights = torch.where(mask, weights, 0)
    if normalize or mean is not None:
        if mean is None:
            total, count = weight_totals(weights, mask, level=level, sequence_ids=sequence_ids)
            mean = total / count.clamp(min=1)
        mean = torch.as_tensor(mean, dtype=weights.dtype, device=weights.device)
        weights = weights / torch.where(mean == 0, 1, mean)
    return weights.to(logprobs.dtype)


def weight_totals(
    weights: Tensor, mask: Tensor, *, level: str = "token", sequence_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sum, count) of weights that are not normalised, over tokens or sequences, 0-dim float64; additive."""
    mask = mask.bool()
    weights = torch.where(mask, weights.detach().double(), 0)
    if level == "token":
        return weights.sum(), mask.sum().double()
    ids = compact_ids(sequence_ids, mask)
    lengths = sequence_sums(mask.long(), ids)
    return (sequence_sums(weights, ids) / lengths.clamp(min=1)).sum(), (lengths > 0).sum().double()


def rejection_mask(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    statistic: str,
    low: float | None = None,
    high: float | None = None,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Bool (B, T): the tokens to keep, False wherever the mask is. A sequence is kept or dropped as a whole.

    `token_*` judges each token by itself, `sequence_sum_*`, `sequence_mean_*` and `sequence_max_*` a sequence
    by its unmasked tokens. x is held at +-20. Kept: low <= it <= high.
    k1: the ratio pi / mu of a token, of a sequence (`sequence_sum_k1`) or its geometric mean (`sequence_mean_k1`).
    k2: x^2 / 2. k3: e^x - 1 - x. Never negative, small where the policies agree.
    From "When Speed Kills Stability" (Liu et al. 2025). ConfigurationError: an unknown statistic, or bounds that reject
    nothing or everything.

    >>> logprobs, behaviour = torch.tensor([[.5, .9, .1]]).log(), torch.tensor([[.5, .3, .2]]).log()
    >>> keep = {"low": 0.4, "high": 2.0}  # ratios 1, 3, 1/2; their product is 1.5
    >>> rejection_mask(logprobs, behaviour, torch.ones(1, 3), statistic="token_k1", **keep).tolist()
    [[True, False, True]]
    >>> rejection_mask(logprobs, behaviour, torch.ones(1, 3), statistic="sequence_sum_k1", **keep).tolist()
    [[True, True, True]]
    """
    unknown, known = statistic not in REJECTION_STATISTICS, ", ".join(REJECTION_STATISTICS)
    refuse(unknown, f"unknown rejection statistic {statistic!r}; choose one of {known}")
    lowest, highest = low or 0, math.inf if high is None else high
    refuse(
        not (0 <= lowest <= highest and highest > 0) or (lowest, highest) == (0, math.inf),
        f"rejection by {statistic} cannot keep [{low}, {high}]; give 0 <= low <= high, at least one of them, and high > 0",
    )
    mask = mask.bool()
    scope, kind = REJECTION_STATISTICS[statistic]
    x = clamp_log_ratio(log_ratio(logprobs, behaviour_logprobs, mask))
    values = x if kind == "k1" else KL_KINDS[kind](-x)
    if scope != "token":
        ids = compact_ids(sequence_ids, mask)
        sums, lengths = sequence_sums(values, ids), sequence_sums(mask.long(), ids)
        if scope == "sequence_max":  # never negative, so that the 0 of masked positions is harmless
            sums = torch.zeros_like(sums).scatter_reduce(0, ids.flatten(), values.flatten(), "amax")
        values = (sums / lengths.clamp(min=1) if scope == "sequence_mean" else sums)[ids]
    if kind == "k1":
        values = values.exp()  # inf of a long sequence is above every bound, as its ratio is
    return mask & ~((values < lowest) | (values > highest))


def mismatch_sums(
    logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, sequence_ids: Tensor | None = None
) -> dict[str, Tensor]:
    """0-dim float64 sums over the unmasked tokens of (B, T), and over sequences, for `mismatch_report`."""
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


def mismatch_report(sums: Mapping[str, Tensor | float], histogram: Tensor | None = None) -> dict[str, float]:
    """Metrics of `mismatch_sums`, added up, and of `ratio_histogram`, if there is one; NaN without tokens.

    mismatch_k1, mismatch_kl: mean of -x and of e^x - 1 - x (k1 and k3 of KL(mu || pi), nats per token).
    ess, ess_sequence: effective sample size as a fraction, (sum w)^2 / (n sum w^2), over tokens and over
    sequences (Kong 1992): 1 means that every weight is the same. chi2_token: mean w^2 - 1, the chi-square
    divergence of pi from mu. ratio_p01, ratio_p50, ratio_p99: quantiles of w, see `histogram_quantiles`.

    >>> logprobs, behaviour = torch.tensor([[.5, .9]]).log(), torch.tensor([[.5, .3]]).log()  # ratios 1, 3
    >>> report = mismatch_report(mismatch_sums(logprobs, behaviour, torch.ones(1, 2)))
    >>> {name: round(value, 3) for name, value in report.items()}
    {'mismatch_k1': -0.549, 'mismatch_kl': 0.451, 'ess': 0.8, 'chi2_token': 4.0, 'ess_sequence': 1.0}
    """
    total = {name[len("mismatch_") : -len("_sum")]: float(value) for name, value in sums.items()}
    tokens, squares = total["tokens"] or math.nan, total["weight_squared"]
    sequences = total["sequences"] or math.nan
    report = {
        "mismatch_k1": total["k1"] / tokens,
        "mismatch_kl": total["k3"] / tokens,
        "ess": total["weight"] ** 2 / (tokens * squares),
        "chi2_token": squares / tokens - 1,
        "ess_sequence": total["sequence_weight"] ** 2 / (sequences * total["sequence_weight_squared"]),
    }
    if histogram is not None:
        quantiles = histogram_quantiles(histogram, [0.01, 0.5, 0.99]).tolist()
        report |= dict(zip(("ratio_p01", "ratio_p50", "ratio_p99"), quantiles, strict=True))
    return report


def ratio_histogram(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(NUM_BINS,) float64 counts of the unmasked tokens by their x; a NaN is not counted.

    One bin for |x| <= 1e-4; on each side 256 bins, each 4.9 % wide, up to 20; what is beyond falls into the last one.
    """
    x = clamp_log_ratio(log_ratio(logprobs, behaviour_logprobs, mask)).flatten()
    edges = _sizes(torch.arange(BINS_PER_SIDE, dtype=x.dtype, device=x.device))
    bins = torch.bucketize(x, torch.cat([-edges.flip(0), edges]))
    counted = mask.bool().flatten() & ~x.isnan()
    return torch.bincount(bins, weights=counted.to(x.dtype), minlength=NUM_BINS)


def _sizes(steps: Tensor) -> Tensor:
    """|x| after so many bins on one side, any fraction of one included."""
    return FINEST_LOG_RATIO * torch.exp(_GROWTH * steps)


def histogram_quantiles(counts: Tensor, qs: list[float]) -> Tensor:
    """(len(qs),) float64: quantiles of the ratio e^x from summed histograms; NaN if nothing was counted.

    Linear between order statistics, as torch.quantile; a bin reads as the geometric mean of its edges.

    >>> logprobs = torch.tensor([[0., 0., .7]])
    >>> counts = ratio_histogram(logprobs, torch.zeros(1, 3), torch.ones(1, 3))
    >>> [round(ratio, 2) for ratio in histogram_quantiles(counts, [0.5, 1.0]).tolist()]  # 1 and e^0.7 = 2.01
    [1.0, 2.0]
    """
    counts, shares = counts.double(), torch.tensor(qs, dtype=torch.float64, device=counts.device)
    total = counts.sum()
    if not total > 0:
        return torch.full_like(shares, math.nan)
    side = _sizes(torch.arange(BINS_PER_SIDE, dtype=torch.float64, device=counts.device) + 0.5)
    ratios = torch.cat([-side.flip(0), side.new_zeros(1), side]).exp()
    cumulative, rank = counts.cumsum(0), shares * (total - 1)
    below, above = (
        ratios[torch.searchsorted(cumulative, order, right=True)] for order in (rank.floor(), rank.ceil())
    )
    return torch.lerp(below, above, rank - rank.floor())
