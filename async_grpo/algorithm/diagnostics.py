"""How far the engine that samples is from the trainer that learns, in sums that add up.

With x = log pi(token) - log mu(token), pi the trainer's policy and mu the engine's, two programs that compute
the same model should give x = 0. A micro-batch contributes a dict of sums and a histogram, both additive over
micro-batches and ranks (each holds whole sequences); the report is made once, from the totals.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from async_grpo.algorithm.kl import kl_penalty
from async_grpo.algorithm.off_policy import LOG_RATIO_LIMIT, log_ratio, sequence_groups, sequence_sums

FINEST_LOG_RATIO = 1e-4  # |x| up to it falls into the middle bin, which reads as a ratio of exactly 1
BINS_PER_SIDE = 256
NUM_BINS = 2 * BINS_PER_SIDE + 1
_GROWTH = math.log(LOG_RATIO_LIMIT / FINEST_LOG_RATIO) / BINS_PER_SIDE
RESOLUTION = math.expm1(_GROWTH / 2)  # a bin's centre is within 2.4 % of every |x| in it


def mismatch_sums(
    logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, sequence_ids: Tensor | None = None
) -> dict[str, Tensor]:
    """0-dim float64 sums over the unmasked tokens of (B, T), and over sequences, for `mismatch_report`.

    The weights w = e^x, of a token or a sequence, are those of `importance_weights` before any bound: x and
    the sum of a sequence are held at +-20. Masked positions may hold anything.
    """
    mask = mask.bool()
    x = log_ratio(logprobs, behaviour_logprobs, mask)
    held = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ids, lengths = sequence_groups(mask, sequence_ids)
    weights = torch.where(mask, held.exp(), 0)
    sequence_x = sequence_sums(held, ids, lengths).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sequence_weights = torch.where(lengths > 0, sequence_x.exp(), 0)
    sums = {
        "tokens": mask.double(),
        "k1": -x,
        "k3": kl_penalty(torch.zeros_like(x), x, "k3"),
        "weight": weights,
        "weight_squared": weights.square(),
        "sequences": (lengths > 0).double(),
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
    total = {
        name.removeprefix("mismatch_").removesuffix("_sum"): float(value) for name, value in sums.items()
    }
    tokens, sequences = total["tokens"], total["sequences"]
    report = {
        "mismatch_k1": _divide(total["k1"], tokens),
        "mismatch_kl": _divide(total["k3"], tokens),
        "ess": _divide(total["weight"] ** 2, tokens * total["weight_squared"]),
        "chi2_token": _divide(total["weight_squared"], tokens) - 1,
        "ess_sequence": _divide(total["sequence_weight"] ** 2, sequences * total["sequence_weight_squared"]),
    }
    if histogram is not None:
        quantiles = histogram_quantiles(histogram, [0.01, 0.5, 0.99]).tolist()
        report |= dict(zip(("ratio_p01", "ratio_p50", "ratio_p99"), quantiles, strict=True))
    return report


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def ratio_histogram(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(NUM_BINS,) float64 counts of the unmasked tokens by their x, the same bins whatever the data.

    One bin for |x| <= 1e-4; on each side 256 bins, each 4.9 % wide, up to 20; what is beyond falls into the
    last one. A NaN at an unmasked position falls into none.
    """
    x = log_ratio(logprobs, behaviour_logprobs, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).flatten()
    edges = FINEST_LOG_RATIO * torch.exp(
        _GROWTH * torch.arange(BINS_PER_SIDE, dtype=x.dtype, device=x.device)
    )
    bins = torch.bucketize(x, torch.cat([-edges.flip(0), edges]))
    counted = mask.bool().flatten() & ~x.isnan()
    return torch.bincount(bins, weights=counted.to(x.dtype), minlength=NUM_BINS)


def histogram_quantiles(counts: Tensor, qs: list[float]) -> Tensor:
    """(len(qs),) float64: quantiles of the ratio e^x from summed histograms; NaN if nothing was counted.

    Linear between two order statistics of the ratio, as torch.quantile. The x of each is known to 2.4 % of
    its size, or to 1e-4 where that is more: every x of a bin reads as the geometric mean of its edges.

    >>> logprobs = torch.tensor([[0., 0., .7]])
    >>> counts = ratio_histogram(logprobs, torch.zeros(1, 3), torch.ones(1, 3))
    >>> [round(ratio, 2) for ratio in histogram_quantiles(counts, [0.5, 1.0]).tolist()]  # 1 and e^0.7 = 2.01
    [1.0, 2.0]
    """
    counts, shares = counts.double(), torch.tensor(qs, dtype=torch.float64, device=counts.device)
    total = counts.sum()
    if not total > 0:
        return torch.full_like(shares, math.nan)
    steps = torch.arange(BINS_PER_SIDE, dtype=torch.float64, device=counts.device) + 0.5
    side = FINEST_LOG_RATIO * torch.exp(_GROWTH * steps)
    ratios = torch.cat([-side.flip(0), side.new_zeros(1), side]).exp()
    cumulative, rank = counts.cumsum(0), shares * (total - 1)
    below, above = (
        ratios[torch.searchsorted(cumulative, order, right=True)] for order in (rank.floor(), rank.ceil())
    )
    return torch.lerp(below, above, rank - rank.floor())
