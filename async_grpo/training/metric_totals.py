"""Sums of a micro-batch's metrics; and zeros in place of inputs that a dummy micro-batch lacks."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor


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
