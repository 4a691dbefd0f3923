"""Whitening over ranks, and discounted sums."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.statistics import (
    merge_moments,
    returns_to_go,
    whitened,
    whitening_moments,
)

numbers = st.lists(st.integers(-64, 64).map(lambda n: n / 8), min_size=0, max_size=12)


def as_row(pool):
    return torch.tensor([pool], dtype=torch.float64)


def used(pool):
    return torch.ones(1, len(pool), dtype=torch.bool)


@given(st.lists(numbers, min_size=1, max_size=5), st.sampled_from([0.0, 1e6]))
@settings(max_examples=150, deadline=None)
def test_shards_whitened_with_merged_moments_equal_the_whole_batch(shards, offset):
    shards = [[offset + x for x in shard] for shard in shards]
    whole = [x for shard in shards for x in shard]
    merged = merge_moments(torch.stack([whitening_moments(as_row(s), used(s)) for s in shards]))
    assert merged[0] == len(whole)
    if len(whole) >= 2:
        mean, variance = statistics.fmean(whole), statistics.variance(whole)
        assert merged[1].item() == pytest.approx(mean, abs=1e-9, rel=1e-15)
        assert merged[2].item() == pytest.approx(variance * (len(whole) - 1), abs=1e-9, rel=1e-10)
        together = torch.cat([whitened(as_row(s), used(s), merged) for s in shards], dim=1)
        expected = [(x - mean) / math.sqrt(variance + 1e-8) for x in whole]
        assert torch.allclose(together, as_row(expected), atol=1e-9, rtol=0)
        assert torch.allclose(whitened(as_row(whole), used(whole)), together, atol=1e-9, rtol=0)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.sampled_from([0.1, 1 / 3, 1e9 + 0.1]))
@settings(max_examples=50, deadline=None)
def test_equal_values_on_all_ranks_are_whitened_to_exactly_zero(sizes, value):
    merged = merge_moments(
        torch.stack([whitening_moments(as_row([value] * n), used([value] * n)) for n in sizes])
    )
    assert (
        whitened(as_row([value] * 7), used([value] * 7), merged if sum(sizes) else None).count_nonzero() == 0
    )


def test_a_mean_that_dwarfs_the_deviation_costs_no_digits():
    pool = [
        2.0**40,
        2.0**40 + 1,
        2.0**40 + 2,
    ]  # squared and subtracted, nothing would be left of the variance 1
    halves = torch.stack([whitening_moments(as_row(half), used(half)) for half in (pool[:1], pool[1:])])
    assert whitened(as_row(pool), used(pool), merge_moments(halves)).tolist() == [
        pytest.approx([-1, 0, 1], abs=1e-8)
    ]


def test_a_long_discounted_return_neither_over_nor_underflows():
    # a cumulative sum of r * gamma^t, divided by gamma^t, would divide by 0.5^4000 = 0
    rewards, mask = torch.ones(1, 4000, dtype=torch.float64), torch.ones(1, 4000, dtype=torch.bool)
    assert torch.allclose(returns_to_go(rewards, mask, 0.5)[0, :3900], torch.tensor(2.0).double())
