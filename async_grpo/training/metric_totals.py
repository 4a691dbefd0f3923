"""Sums of a micro-batch's metrics, the metrics of a step, and zeros in place of inputs that a dummy micro-batch lacks."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from async_grpo.algorithm.off_policy import mismatch_report
from async_grpo.algorithm.process_advantages import explained_variance

# Metrics that every step reports. If the loss does not compute one of them, it is reported as 0
ALWAYS_REPORTED = ("avg_kl_div", "clip_frac_low", "clip_frac_high", "entropy", "ratio_mean", "ratio_max")


def metric_totals(metrics: Mapping[str, Float[Tensor, "1 packed"]]) -> dict[str, Float[Tensor, ""]]:
    """Return the sum of each metric over the micro-batch, or its maximum if its name ends in `_max`."""
    totals = {}
    for name, values in metrics.items():
        is_maximum = name.endswith("_max")
        total = values.max() if is_maximum else values.sum()
        totals[name] = total.detach()
    return totals


def or_zeros(
    values: Float[Tensor, "1 packed"] | None, like: Float[Tensor, "1 packed"]
) -> Float[Tensor, "1 packed"]:
    """Return the values, or zeros if they are None, as in a dummy micro-batch."""
    return torch.zeros_like(like) if values is None else values


def step_metrics(
    totals: dict[str, float], histogram: Float64[Tensor, " bins"], count: float
) -> dict[str, float]:
    """Return the metrics of a step from its totals.

    Losses are divided by `count`. Other metrics are means over tokens, or maxima.
    """
    totals = dict(totals)
    mismatch_totals = {name: totals.pop(name) for name in list(totals) if name.startswith("mismatch_")}
    num_tokens = totals.pop("tokens")
    num_sequences = totals.pop("sequences")
    totals.pop("groups", None)

    metrics = {}
    for name in ("avg_loss", "backward_loss"):
        metrics[name] = totals.pop(name) / (count or 1.0)
    means = dict.fromkeys(ALWAYS_REPORTED, 0.0)
    for name, total in totals.items():
        means[name] = total if name.endswith("_max") else total / max(1.0, num_tokens)
    metrics |= means
    metrics |= mismatch_report(mismatch_totals, histogram)
    if "value_error" in means:
        metrics["explained_variance"] = explained_variance(means)
    metrics["avg_pg_clip"] = means["clip_frac_low"] + means["clip_frac_high"]
    # The metrics of the mismatch between trainer and engine also count rejected tokens, `num_tokens` does not
    num_compared = mismatch_totals["mismatch_tokens_sum"]
    metrics["rejected_share"] = 1 - num_tokens / num_compared if num_compared else 0.0
    metrics["num_non_masked_tokens"] = num_tokens
    # The same number under a second name, which scripts may read
    metrics["total_non_masked_tokens"] = num_tokens
    metrics["num_non_masked_sequences"] = num_sequences
    return metrics
