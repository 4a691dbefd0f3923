"""From per-token losses to one number: a sum, divided by a count that belongs to the whole minibatch.

The two halves are kept apart on purpose. A sum is additive over micro-batches and ranks, a mean is not: a
mean per micro-batch would give the tokens of a small micro-batch more weight. So training accumulates
`Aggregation.total` and divides by the global count of `Aggregation.unit` once, at the end of the step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.errors import ConfigurationError


@dataclass(frozen=True)
class Aggregation:
    """`total(loss, mask, sequence_ids, scale)` is the un-normalised sum; `unit` names its divisor."""

    total: Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
    unit: str  # "tokens" or "sequences", both counted where the mask is True
    needs_scale: bool = False


def _token_sum(loss: Tensor, mask: Tensor, sequence_ids: Tensor, scale: float | None) -> Tensor:
    return loss.sum()


def _sum_of_sequence_means(loss: Tensor, mask: Tensor, sequence_ids: Tensor, scale: float | None) -> Tensor:
    lengths = tokens_per_sequence(mask, sequence_ids).to(loss.dtype).clamp(min=1)
    return (loss.flatten() / lengths[sequence_ids.flatten()]).sum()


def _sum_over_constant(loss: Tensor, mask: Tensor, sequence_ids: Tensor, scale: float | None) -> Tensor:
    return loss.sum() / scale


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": Aggregation(_token_sum, unit="tokens"),
    "sequence_mean_token_mean": Aggregation(_sum_of_sequence_means, unit="sequences"),
    "constant_length": Aggregation(_sum_over_constant, unit="sequences", needs_scale=True),
}


def get_aggregation(mode: str, scale: float | None = None) -> Aggregation:
    """The aggregation of that name; ConfigurationError: there is none, or it needs a scale and has none."""
    if mode not in AGGREGATIONS:
        raise ConfigurationError(f"unknown aggregation {mode!r}; choose one of {', '.join(AGGREGATIONS)}")
    if AGGREGATIONS[mode].needs_scale and (scale is None or scale <= 0):
        raise ConfigurationError(
            f"{mode} divides by a length that is the same for every sample; scale is {scale}, "
            "give for example the maximum number of completion tokens"
        )
    return AGGREGATIONS[mode]


def row_ids(mask: Tensor) -> Tensor:
    """(B, T) row numbers: without packing a row is a sequence."""
    return torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(mask)


def tokens_per_sequence(mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """(max id + 1,) int64: the number of unmasked tokens of each sequence id."""
    ids = sequence_ids.flatten()
    num_sequences = int(ids.max()) + 1 if ids.numel() else 0
    return mask.new_zeros(num_sequences, dtype=torch.int64).index_add(0, ids, mask.flatten().long())


def count_units(mask: Tensor, sequence_ids: Tensor) -> dict[str, Tensor]:
    """The additive counts of every unit: unmasked tokens, and sequences that have one. 0-dim int64 each.

    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> counts = count_units(mask, row_ids(mask))
    >>> {unit: count.item() for unit, count in counts.items()}
    {'tokens': 2, 'sequences': 1}
    """
    lengths = tokens_per_sequence(mask, sequence_ids)
    return {"tokens": lengths.sum(), "sequences": (lengths > 0).sum()}


def aggregate_loss(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    sequence_ids: Tensor | None = None,
    group_ids: Tensor | None = None,
    global_tokens: float | None = None,
    global_sequences: float | None = None,
    global_groups: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """The loss of a minibatch, or of a part of it when the global counts are given; (B, T) -> 0-dim.

    token_mean: sum / tokens. sequence_mean_token_mean: mean over sequences of their token mean.
    constant_length: sum / (scale * sequences) (Dr. GRPO). Only unmasked tokens count, and only sequences that
    have one; nothing unmasked gives 0. Parts evaluated with the global counts add up to the whole.
    `group_ids` (B, T) and `global_groups` are for modes that weigh groups. ConfigurationError: unknown mode,
    missing scale.

    >>> loss = torch.tensor([[1., 2., 3.], [4., 5., 6.], [7., 8., 9.]])
    >>> mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    >>> round(aggregate_loss(loss, mask, "token_mean").item(), 5)
    3.33333
    >>> aggregate_loss(loss, mask, "sequence_mean_token_mean").item()
    4.25
    """
    aggregation = get_aggregation(mode, scale)
    mask = mask.bool()
    ids = row_ids(mask) if sequence_ids is None else sequence_ids
    given = {"tokens": global_tokens, "sequences": global_sequences, "groups": global_groups}[
        aggregation.unit
    ]
    count = count_units(mask, ids)[aggregation.unit].clamp(min=1) if given is None else given
    return aggregation.total(torch.where(mask, loss, 0), mask, ids, scale) / count
