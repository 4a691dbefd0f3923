"""Aggregate per-token losses to one number: a sum, divided by a count over the whole minibatch.

A mean per micro-batch would give the tokens of a small micro-batch more weight. So training accumulates sums
(`Aggregation.total`), and divides them once, at the end of the step, by the global count of `Aggregation.unit`.

A group, the sequences of one prompt, may be spread over several micro-batches. Each token therefore carries
`group_tokens`, the number of unmasked tokens of its group in the minibatch.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Int64, Num, Shaped
from torch import Tensor

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse


@dataclass(frozen=True)
class Aggregation:
    """How token losses are averaged: each loss is divided by `per`, and their sum by the number of `unit`s.

    Only unmasked tokens count, and only sequences and groups that contain one.
    """

    # Divisor of the sum: the number of "tokens", "sequences" or "groups"; None divides by 1
    unit: str | None
    # Divisor of a token's loss: the number of tokens in its "sequence" or its "group", or the constant "scale"; None
    # divides by 1
    per: str | None = None
    scale: float = 1.0

    def total(
        self,
        loss: Float[Tensor, "batch tokens"],
        mask: Bool[Tensor, "batch tokens"],
        sequence_ids: Int[Tensor, "batch tokens"],
        group_tokens: Int[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the sum of the losses, not yet divided by the number of units.

        Args:
            loss: The loss of each token, zero where masked.
            mask: True at the tokens that count.
            sequence_ids: Integers from 0 without large gaps (see `compact_ids`).
            group_tokens: Number of unmasked tokens in the token's group. Needed only for per="group".
        """
        if self.per == "sequence":
            lengths = sequence_sums(mask.long(), sequence_ids).clamp(min=1)
            loss = loss / lengths[sequence_ids].to(loss.dtype)
        elif self.per == "group":
            if group_tokens is None:
                raise ConfigurationError(
                    "prompt_mean needs the number of tokens of each group: give group_ids if every group is complete, "
                    "otherwise group_tokens"
                )
            loss = loss / torch.where(mask, group_tokens, 1).to(loss.dtype)
        return loss.sum() / self.scale


AGGREGATIONS: dict[str, Aggregation] = {
    # sum of all token losses / number of tokens (Yu et al. 2025, "DAPO")
    "token_mean": Aggregation("tokens"),
    # sum of all token losses
    "token_sum": Aggregation(None),
    # sum of all token losses / number of sequences
    "sequence_mean_token_sum": Aggregation("sequences"),
    # mean over the tokens of each sequence, then mean over sequences (Shao et al. 2024, "GRPO")
    "sequence_mean_token_mean": Aggregation("sequences", per="sequence"),
    # sum of all token losses / (scale * number of sequences) (Liu et al. 2025, "Dr. GRPO")
    "constant_length": Aggregation("sequences", per="scale"),
    # mean over the tokens of each group, then mean over groups (Khatri et al. 2025, "ScaleRL")
    "prompt_mean": Aggregation("groups", per="group"),
}


def get_aggregation(mode: str, scale: float | None = None) -> Aggregation:
    """Return the aggregation with a name.

    Raises:
        ConfigurationError: There is no such aggregation, or it needs a positive scale.
    """
    modes = ", ".join(AGGREGATIONS)
    refuse(mode not in AGGREGATIONS, f"unknown aggregation {mode!r}; choose one of {modes}")
    aggregation = AGGREGATIONS[mode]
    if aggregation.per != "scale":
        return aggregation
    if scale is None or scale <= 0:
        raise ConfigurationError(
            f"{mode} divides by a length that is the same for every sample; scale is {scale}, give for example the maximum "
            "number of completion tokens"
        )
    return replace(aggregation, scale=scale)


def compact_ids(
    ids: Int[Tensor, "batch tokens"] | Int[Tensor, " batch"] | None, mask: Bool[Tensor, "batch tokens"]
) -> Int64[Tensor, "batch tokens"]:
    """Return the ids, renumbered from 0 without gaps. Masked positions also get some of these ids.

    Args:
        ids: Any integers, one per token or one per row. None means that each row is one sequence.
        mask: True at the tokens that count.
    """
    if ids is None:
        return torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(mask)
    if ids.dim() < mask.dim():
        ids = ids[:, None].expand_as(mask)
    if not mask.any():
        return torch.zeros_like(ids, dtype=torch.int64)
    ids = ids.masked_fill(~mask, ids[mask].min())
    return torch.unique(ids, return_inverse=True)[1]


def sequence_sums(
    values: Num[Tensor, "batch tokens"], ids: Int[Tensor, "batch tokens"]
) -> Num[Tensor, " sequences"]:
    """Return the sum of the values of each id, 0 ... max id. If the values are a mask, the sums are sequence lengths.

    Args:
        values: Zero where masked.
        ids: Integers from 0.
    """
    num_sequences = int(ids.max()) + 1 if ids.numel() else 0
    return values.new_zeros(num_sequences).index_add(0, ids.flatten(), values.flatten())


def tokens_of_group(
    mask: Bool[Tensor, "batch tokens"], group_ids: Int[Tensor, "batch tokens"] | Int[Tensor, " batch"]
) -> Int64[Tensor, "batch tokens"]:
    """Return, at every unmasked token, the number of unmasked tokens in its group, and 0 at masked tokens.

    Args:
        mask: True at the tokens that count.
        group_ids: Any integers, one per token or one per row.
    """
    ids = compact_ids(group_ids, mask)
    return torch.where(mask, sequence_sums(mask.long(), ids)[ids], 0)


def count_units(
    mask: Bool[Tensor, "batch tokens"],
    sequence_ids: Int[Tensor, "batch tokens"],
    group_tokens: Int[Tensor, "batch tokens"] | None = None,
) -> dict[str, Num[Tensor, ""]]:
    """Return the number of unmasked tokens, and of sequences and groups that contain one.

    The counts of the parts of a minibatch add up to those of the whole minibatch. Groups are counted only if
    `group_tokens` is passed: each token of a group with n tokens counts as 1/n of a group.
    """
    lengths = sequence_sums(mask.long(), sequence_ids)
    counts = {"tokens": lengths.sum(), "sequences": (lengths > 0).sum()}
    if group_tokens is not None:
        shares = torch.where(mask, group_tokens, 1).double().reciprocal()
        counts["groups"] = torch.where(mask, shares, 0).sum()
    return counts


def aggregate_loss(
    loss: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    mode: str,
    *,
    sequence_ids: Int[Tensor, "batch tokens"] | None = None,
    group_ids: Int[Tensor, "batch tokens"] | Int[Tensor, " batch"] | None = None,
    group_tokens: Int[Tensor, "batch tokens"] | None = None,
    global_tokens: float | Num[Tensor, ""] | None = None,
    global_sequences: float | Num[Tensor, ""] | None = None,
    global_groups: float | Num[Tensor, ""] | None = None,
    scale: float | None = None,
) -> Float[Tensor, ""]:
    """Return the loss of a minibatch, or the share that a part of the minibatch contributes to it.

    Only unmasked tokens count, and only sequences and groups that contain one. Without any unmasked token, the loss is
    0. The losses of parts add up to the loss of the whole minibatch if each part consists of whole sequences and gets
    the global counts. For prompt_mean the parts must consist of whole groups, unless `group_tokens` is passed.

    Args:
        loss: The loss of each token.
        mask: True at the tokens that count.
        mode: A name of AGGREGATIONS.
        sequence_ids: Any integers. None means that each row is one sequence.
        group_ids: Any integers, one per token or one per row.
        group_tokens: Number of unmasked tokens of the token's group in the whole minibatch.
        global_tokens: Number of unmasked tokens of the whole minibatch. None counts the tokens of this part.
        global_sequences: Number of sequences of the whole minibatch. None counts the sequences of this part.
        global_groups: Number of groups of the whole minibatch. None counts the groups of this part.
        scale: The length that constant_length divides by, in tokens.

    Raises:
        ConfigurationError: The mode is unknown, or the scale or the group ids that it needs are missing.

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
    global_counts = {"tokens": global_tokens, "sequences": global_sequences, "groups": global_groups}
    count = global_counts[aggregation.unit]
    if count is None:
        count = count_units(mask, ids, group_tokens)[aggregation.unit]
    if count == 0:
        count = 1
    return (total / count).to(loss.dtype)
