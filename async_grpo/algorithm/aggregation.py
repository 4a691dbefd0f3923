"""From per-token losses to one number: a sum, divided by a count that belongs to the whole minibatch.

A mean per micro-batch would give the tokens of a small one more weight. So training accumulates the sums
(`Aggregation.total`) and divides by the global count of `Aggregation.unit` once, at the end of the step.

A group, the sequences of one prompt, may be spread over micro-batches. They carry `group_tokens`: at every token
the number of unmasked tokens of its group in the minibatch.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse


@dataclass(frozen=True)
class Aggregation:
    """Each token's loss over what `per` says, then all over the number of `unit`s with an unmasked token."""

    unit: str | None  # "tokens", "sequences" or "groups"; None: divided by 1
    per: str | None = None  # tokens of its "sequence" or its "group"; the "scale" that all have in common
    scale: float = 1.0

    def total(
        self, loss: Tensor, mask: Tensor, sequence_ids: Tensor, group_tokens: Tensor | None = None
    ) -> Tensor:
        """The un-normalised sum; sequence_ids (B, T) from 0 without large gaps (`compact_ids` makes them so)."""
        if self.per == "sequence":
            loss = loss / sequence_sums(mask.long(), sequence_ids).clamp(min=1)[sequence_ids].to(loss.dtype)
        elif self.per == "group":
            if group_tokens is None:
                raise ConfigurationError(
                    "prompt_mean needs the tokens of each group: give group_ids if every group is whole, else group_tokens"
                )
            loss = loss / torch.where(mask, group_tokens, 1).to(loss.dtype)
        return loss.sum() / self.scale


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": Aggregation("tokens"),
    "token_sum": Aggregation(None),
    "sequence_mean_token_sum": Aggregation("sequences"),
    "sequence_mean_token_mean": Aggregation("sequences", per="sequence"),
    "constant_length": Aggregation("sequences", per="scale"),
    "prompt_mean": Aggregation("groups", per="group"),
}


def get_aggregation(mode: str, scale: float | None = None) -> Aggregation:
    """The aggregation of that name; ConfigurationError: there is none, or it needs a scale and has none."""
    known = ", ".join(AGGREGATIONS)
    refuse(mode not in AGGREGATIONS, f"unknown aggregation {mode!r}; choose one of {known}")
    if (aggregation := AGGREGATIONS[mode]).per != "scale":
        return aggregation
    if scale is None or scale <= 0:
        raise ConfigurationError(
            f"{mode} divides by a length that is the same for every sample; scale is {scale}, give for example the maximum "
            "number of completion tokens"
        )
    return replace(aggregation, scale=scale)


def compact_ids(ids: Tensor | None, mask: Tensor) -> Tensor:
    """(B, T) the ids, numbered from 0, any where masked; ids (B, T), one per row (B,), or None: a row is a sequence."""
    if ids is None:
        return torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(mask)
    if ids.dim() < mask.dim():
        ids = ids[:, None].expand_as(mask)
    ids = ids.masked_fill(~mask, ids[mask].min()) if mask.any() else torch.zeros_like(ids)
    return torch.unique(ids, return_inverse=True)[1]


def sequence_sums(values: Tensor, ids: Tensor) -> Tensor:
    """(max id + 1,): the sum of `values` (B, T), which are 0 where masked, over each id; of a mask: the lengths."""
    num_sequences = int(ids.max()) + 1 if ids.numel() else 0
    return values.new_zeros(num_sequences).index_add(0, ids.flatten(), values.flatten())


def tokens_of_group(mask: Tensor, group_ids: Tensor) -> Tensor:
    """(B, T) int64: at every unmasked token the number of those of its group, (B, T) or (B,), in this tensor, else 0."""
    ids = compact_ids(group_ids, mask)
    return torch.where(mask, sequence_sums(mask.long(), ids)[ids], 0)


def count_units(mask: Tensor, sequence_ids: Tensor, group_tokens: Tensor | None = None) -> dict[str, Tensor]:
    """The additive counts of every unit, 0-dim; "groups" with group_tokens (B, T): the shares that the tokens are."""
    lengths = sequence_sums(mask.long(), sequence_ids)
    counts = {"tokens": lengths.sum(), "sequences": (lengths > 0).sum()}
    if group_tokens is not None:
        shares = torch.where(mask, group_tokens, 1).double().reciprocal()
        counts["groups"] = torch.where(mask, shares, 0).sum()
    return counts


def aggregate_loss(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    sequence_ids: Tensor | None = None,
    group_ids: Tensor | None = None,
    group_tokens: Tensor | None = None,
    global_tokens: float | Tensor | None = None,
    global_sequences: float | Tensor | None = None,
    global_groups: float | Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The loss of a minibatch, or of a part of it when the global counts are given; (B, T) -> 0-dim.

    token_mean: sum / tokens (Yu et al. 2025, "DAPO"). token_sum: sum. sequence_mean_token_sum: sum / sequences.
    sequence_mean_token_mean: mean over sequences of their token mean (Shao et al. 2024, "GRPO"). constant_length:
    sum / (scale * sequences) (Liu et al. 2025, "Dr. GRPO"). prompt_mean: mean over groups of their token mean
    (Khatri et al. 2025, "ScaleRL").

    Only unmasked tokens count, and only sequences and groups that have one; nothing unmasked gives 0. Parts of whole
    sequences, evaluated with the global counts, add up to the whole; for prompt_mean parts of whole groups, or with
    `group_tokens` (B, T): unmasked tokens of the token's group in the whole minibatch. sequence_ids (B, T), default one
    per row, and group_ids, (B, T) or (B,): any integers. ConfigurationError: unknown mode, missing scale or groups.

    >>> loss = torch.tensor([[1., 2., 3.], [4., 5., 6.], [7., 8., 9.]])
    >>> mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    >>> [round(aggregate_loss(loss, mask, mode, scale=3).item(), 5) for mode in AGGREGATIONS if mode != "prompt_mean"]
    [3.33333, 10.0, 5.0, 4.25, 1.66667]
    >>> aggregate_loss(loss, mask, "constant_length", scale=5, global_sequences=4).item()
    0.5
    """
    aggregation = get_aggregation(mode, scale)
    mask = mask.bool()
    ids = compact_ids(sequence_ids, mask)
    if group_tokens is None and group_ids is not None:
        group_tokens = tokens_of_group(mask, group_ids)
    total = aggregation.total(torch.where(mask, loss, 0), mask, ids, group_tokens)
    if aggregation.unit is None:
        return total
    given = {"tokens": global_tokens, "sequences": global_sequences, "groups": global_groups}
    if (count := given[aggregation.unit]) is None:
        count = count_units(mask, ids, group_tokens)[aggregation.unit]
    return (total / (count + (count == 0))).to(loss.dtype)
