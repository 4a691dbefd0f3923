"""Aggregation against hand arithmetic and loops; sums of parts against the whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.aggregation import (
    AGGREGATIONS,
    aggregate_loss,
    tokens_of_group,
)
from async_grpo.errors import ConfigurationError

LOSS = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "scale", "message"),
    [
        *(("constant_length", scale, "maximum number of completion tokens") for scale in (None, 0.0, -1.0)),
        ("prompt_mean", None, "give group_ids .* group_tokens"),
        ("mean", None, ", ".join(AGGREGATIONS)),
    ],
)
def test_what_cannot_be_aggregated_is_answered_with_what_is_missing_or_known(mode, scale, message):
    with pytest.raises(ConfigurationError, match=message):
        aggregate_loss(LOSS, MASK, mode, scale=scale)


def by_loops(loss, mask, sequences, groups, mode, scale):
    """Plain Python over flat lists."""
    tokens = [(v, s, g) for v, kept, s, g in zip(loss, mask, sequences, groups, strict=True) if kept]
    if not tokens:
        return 0.0
    total = sum(value for value, _, _ in tokens)
    by_sequence, by_group = {}, {}
    for value, sequence, group in tokens:
        by_sequence.setdefault(sequence, []).append(value)
        by_group.setdefault(group, []).append(value)
    return {
        "token_mean": total / len(tokens),
        "token_sum": total,
        "sequence_mean_token_sum": total / len(by_sequence),
        "sequence_mean_token_mean": sum(sum(v) / len(v) for v in by_sequence.values()) / len(by_sequence),
        "constant_length": total / scale / len(by_sequence),
        "prompt_mean": sum(sum(v) / len(v) for v in by_group.values()) / len(by_group),
    }[mode]


@given(
    rows=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=8),
    mode=st.sampled_from(list(AGGREGATIONS)),
    cut=st.integers(0, 8),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=75, deadline=None)
def test_loops_packing_and_parts_agree_on_any_batch(rows, mode, cut, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor(rows)
    loss = torch.randn(mask.shape, dtype=torch.float64, generator=generator)
    dirty = torch.where(mask, loss, math.nan)
    ids = torch.randperm(100, generator=generator)[: len(rows)] * 10**12
    groups = torch.randint(0, 3, (len(rows),), generator=generator) * 10**9
    sequences, spread = (values[:, None].expand_as(mask) for values in (ids, groups))
    flat = [values.flatten().tolist() for values in (loss, mask, sequences, spread)]
    expected = by_loops(*flat, mode, scale=6.0)

    whole = aggregate_loss(dirty, mask, mode, scale=6.0, group_ids=groups)
    order = torch.randperm(mask.numel(), generator=generator)
    packed_loss, packed_mask, packed_ids, packed_groups = (
        values.flatten()[order][None] for values in (dirty, mask, torch.where(mask, sequences, -1), spread)
    )
    packed = aggregate_loss(
        packed_loss, packed_mask, mode, sequence_ids=packed_ids, group_ids=packed_groups, scale=6.0
    )
    tokens = tokens_of_group(mask, groups)
    counts = {
        "global_tokens": int(mask.sum()),
        "global_sequences": int(mask.any(1).sum()),
        "global_groups": len(groups[mask.any(1)].unique()),
    }
    parts = sum(
        aggregate_loss(dirty[part], mask[part], mode, scale=6.0, group_tokens=tokens[part], **counts)
        for part in (slice(0, cut), slice(cut, None))
        if mask[part].numel()
    )
    for got in (whole, packed, parts):
        assert abs(float(got) - expected) <= 1e-12 * max(1.0, abs(expected)) + 1e-12
