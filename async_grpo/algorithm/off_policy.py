"""Tokens that another policy sampled: weigh them, or leave them out.

With x = log pi(token) - log mu(token), pi the policy that is trained and mu the behaviour policy, which
sampled, `importance_weights` gives e^x within bounds, and `rejection_mask` says which tokens or sequences to
keep. They are independent: a weight of 0 leaves its token in the mask, and with it in the loss's denominator.

Everything here is without gradient, computed in float64, and the same whether sequences are rows or packed
(`sequence_ids`, as in `losses`). Masked positions may hold anything. At an unmasked position a NaN is neither
weighed away nor rejected: it stays, for the trainer to refuse the step.
"""

import math

import torch
from torch import Tensor

from async_grpo.algorithm.aggregation import compact_ids, row_ids, tokens_per_sequence
from async_grpo.algorithm.kl import KL_KINDS
from async_grpo.errors import ConfigurationError

LOG_RATIO_LIMIT = 20.0  # x of a token and the sum of a sequence are held there: e^20 = 4.9e8
LEVELS = ("token", "sequence")
MODES = ("truncate", "mask")
STATISTICS = (
    *(
        f"{scope}_{kind}"
        for scope in ("token", "sequence_sum", "sequence_mean")
        for kind in ("k1", "k2", "k3")
    ),
    "sequence_max_k2",
    "sequence_max_k3",
)


def log_ratio(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """x = logprobs - behaviour_logprobs, float64 without gradient, 0 where the mask is False; not held."""
    return torch.where(mask.bool(), logprobs.detach().double() - behaviour_logprobs.detach().double(), 0)


def sequence_groups(mask: Tensor, sequence_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """ids (B, T), 0 where the mask is False, and the number of unmasked tokens of each id, (max id + 1,)."""
    ids = row_ids(mask) if sequence_ids is None else compact_ids(sequence_ids, mask)
    ids = torch.where(mask, ids, 0)
    return ids, tokens_per_sequence(mask, ids)


def sequence_sums(values: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """(max id + 1,): the sum of `values` (B, T), which are 0 where masked, over each sequence."""
    return values.new_zeros(len(lengths)).index_add(0, ids.flatten(), values.flatten())


def check_importance(level: str, mode: str, low: float | None, high: float) -> None:
    """ConfigurationError: settings that `importance_weights` cannot use."""
    for name, value, known in (("level", level, LEVELS), ("mode", mode, MODES)):
        if value not in known:
            raise ConfigurationError(f"unknown importance {name} {value!r}; choose one of {', '.join(known)}")
    if high is None or not high > 0:
        raise ConfigurationError(
            f"importance weights are bounded by high={high}, which must be positive; give 2, or inf"
        )
    if low is not None and not 0 <= low <= high:
        raise ConfigurationError(f"importance weights cannot lie in [{low}, {high}]; give 0 <= low <= high")


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

    level "token": w = e^x. "sequence": w = e^(sum of x over the unmasked tokens), the same for each of them.
    mode "truncate": min(w, high), and max(w, low) if there is a low (Ionides 2008, "Truncated importance
    sampling"). "mask": w inside [low, high], 0 outside (IcePop; Ling Team 2025, "Every Step Evolves").
    x and its sum are held at +-20.
    normalize: divide by the mean of the bounded weights, the zeros of "mask" included, over tokens or over
    sequences. `mean` takes the place of that of this batch: the sum over the count of `weight_totals`, each
    summed over all the parts. Weights that are all 0 stay 0. ConfigurationError: see `check_importance`.

    >>> logprobs, behaviour = torch.tensor([[.5, .9, .1]]).log(), torch.tensor([[.5, .3, .2]]).log()
    >>> importance_weights(logprobs, behaviour, torch.ones(1, 3)).tolist()  # ratios 1, 3, 1/2
    [[1.0, 2.0, 0.5]]
    >>> importance_weights(logprobs, behaviour, torch.ones(1, 3), level="sequence").tolist()
    [[1.5, 1.5, 1.5]]
    """
    check_importance(level, mode, low, high)
    mask = mask.bool()
    ids, lengths = sequence_groups(mask, sequence_ids)
    x = log_ratio(logprobs, behaviour_logprobs, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if level == "sequence":
        x = sequence_sums(x, ids, lengths).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[ids]
    weights = x.exp()
    if mode == "truncate":
        weights = weights.clamp(low, high)
    else:
        outside = (weights > high) | (weights < (0 if low is None else low))
        weights = weights.masked_fill(outside, 0)
    weights = torch.where(mask, weights, 0)
    if normalize:
        if mean is None:
            total, count = weight_totals(weights, mask, level=level, sequence_ids=sequence_ids)
            mean = total / count.clamp(min=1)
        mean = torch.as_tensor(mean, dtype=weights.dtype, device=weights.device)
        weights = weights / torch.where(mean == 0, 1, mean)
    return weights.to(logprobs.dtype)


def weight_totals(
    weights: Tensor, mask: Tensor, *, level: str = "token", sequence_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sum, count) of weights (B, T) over tokens or over sequences, 0-dim float64, additive over parts.

    A part holds whole sequences. The weights are those of `importance_weights` at that level, not normalised.

    >>> weights, mask = torch.tensor([[2., 2.], [1., 0.]]), torch.tensor([[1, 1], [1, 0]])
    >>> total, count = weight_totals(weights, mask, level="sequence")
    >>> total.item(), count.item()
    (3.0, 2.0)
    """
    mask = mask.bool()
    weights = torch.where(mask, weights.detach().double(), 0)
    if level == "token":
        return weights.sum(), mask.sum().double()
    ids, lengths = sequence_groups(mask, sequence_ids)
    means = sequence_sums(weights, ids, lengths) / lengths.clamp(min=1)
    return means.sum(), (lengths > 0).sum().double()


def check_rejection(statistic: str, low: float | None, high: float | None) -> None:
    """ConfigurationError: settings that `rejection_mask` cannot use, or that reject nothing."""
    if statistic not in STATISTICS:
        raise ConfigurationError(
            f"unknown rejection statistic {statistic!r}; choose one of {', '.join(STATISTICS)}"
        )
    if low is None and high is None:
        raise ConfigurationError(
            f"rejection by {statistic} without a bound rejects nothing; give low or high"
        )
    if high is not None and not high > 0:
        raise ConfigurationError(
            f"rejection by {statistic} above {high} rejects everything; high must be positive"
        )
    if low is not None and not low >= 0:
        raise ConfigurationError(
            f"rejection by {statistic} below {low} rejects nothing; low must not be negative"
        )
    if low == 0 and statistic.endswith("k1"):
        raise ConfigurationError(
            f"{statistic} is bounded by a ratio pi / mu, which is never {low}; give low 0.5, or None"
        )
    if low is not None and high is not None and low > high:
        raise ConfigurationError(f"rejection by {statistic} cannot keep [{low}, {high}]; give low <= high")


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
    by its unmasked tokens. x is held at +-20.

    k1: x, and the bounds are on its exponential, the ratio pi / mu: that of a token, of a sequence
    (`sequence_sum_k1`) or its geometric mean per token (`sequence_mean_k1`). Kept: low <= ratio <= high.
    k2: x^2 / 2. k3: e^x - 1 - x. Never negative, small where the policies agree. Kept: low <= it <= high.
    A bound that is None is none at all (verl takes 1 / high for the lower one of k1, and bounds mu / pi).

    From "When Speed Kills Stability" (Liu et al. 2025). ConfigurationError: see `check_rejection`.

    >>> logprobs, behaviour = torch.tensor([[.5, .9, .1]]).log(), torch.tensor([[.5, .3, .2]]).log()
    >>> keep = {"low": 0.4, "high": 2.0}  # ratios 1, 3, 1/2; their product is 1.5
    >>> rejection_mask(logprobs, behaviour, torch.ones(1, 3), statistic="token_k1", **keep).tolist()
    [[True, False, True]]
    >>> rejection_mask(logprobs, behaviour, torch.ones(1, 3), statistic="sequence_sum_k1", **keep).tolist()
    [[True, True, True]]
    """
    check_rejection(statistic, low, high)
    mask = mask.bool()
    scope, kind = statistic.rsplit("_", 1)
    x = log_ratio(logprobs, behaviour_logprobs, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values = x if kind == "k1" else KL_KINDS[kind](-x)
    if scope != "token":
        values = _per_sequence(values, mask, sequence_ids, scope)
    if kind == "k1":  # in log space, where the ratio of a long sequence does not overflow
        low, high = (None if bound is None else math.log(bound) for bound in (low, high))
    keep = mask
    if high is not None:
        keep = keep & ~(values > high)
    if low is not None:
        keep = keep & ~(values < low)
    return keep


def _per_sequence(values: Tensor, mask: Tensor, sequence_ids: Tensor | None, scope: str) -> Tensor:
    """(B, T): the sum, mean or maximum over the sequence of each token."""
    ids, lengths = sequence_groups(mask, sequence_ids)
    if scope == "sequence_max":  # of what is never negative, so that the 0 of masked positions is harmless
        return values.new_zeros(len(lengths)).scatter_reduce(0, ids.flatten(), values.flatten(), "amax")[ids]
    sums = sequence_sums(values, ids, lengths)
    return (sums if scope == "sequence_sum" else sums / lengths.clamp(min=1))[ids]
