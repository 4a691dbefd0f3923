"""The choice of clip_cov and kl_cov: covariance, candidates, quota, ties and the random draw."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_losses_brute_force import random_inputs

from async_grpo.algorithm.covariance import (
    clip_cov_scores,
    num_selected,
    select,
    token_sums,
    top_scores,
    uniform_draws,
)
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.algorithm.policy_losses import LossBatch

CLIP_COV = {"clip_low": 0.2, "clip_high": 0.2, "cov_low": 0.1, "cov_high": 5.0}


def batch_of(inputs):
    mask, names = inputs["mask"], ("logprobs", "old_logprobs", "advantages")
    return LossBatch(*(torch.where(mask, inputs[name], 0) for name in names), mask)


@given(
    scores=st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 0.75, 2.0]), min_size=1, max_size=12),
    count=st.integers(1, 14),
    cut=st.integers(0, 12),
)
@settings(max_examples=150, deadline=None)
def test_selected_are_the_best_with_their_ties_whoever_holds_them(scores, count, cut):
    whole = torch.tensor(scores)
    gathered = torch.cat([top_scores(whole[:cut], count), top_scores(whole[cut:], count)])
    threshold = top_scores(gathered, count)[-1]
    ranked = sorted((score for score in scores if score > -math.inf), reverse=True)
    lowest = ranked[:count][-1] if ranked else math.inf
    assert select(whole, threshold).tolist() == [score >= lowest for score in scores]


def test_equal_advantages_drive_no_entropy_and_select_nothing():
    inputs = random_inputs(0, torch.float32)
    inputs["advantages"] = torch.full_like(inputs["advantages"], 0.3)
    _, metrics = POLICY_LOSSES["kl_cov"](**inputs)
    assert metrics["selected_frac"].sum() == 0


def test_clip_cov_takes_its_quota_of_the_candidates_at_random():
    chosen = []
    inputs = random_inputs(2, rows=12)
    options = CLIP_COV | {"ratio": 0.05}
    scores = clip_cov_scores(batch_of(inputs), token_sums(batch_of(inputs)), seed=0, **CLIP_COV)
    candidates = scores > -math.inf
    for seed in range(300):
        _, metrics = POLICY_LOSSES["clip_cov"](**inputs, **options, seed=seed)
        selected = metrics["selected_frac"].bool()
        assert selected.sum() == num_selected(0.05, inputs["mask"].sum().item()) < candidates.sum()
        assert not (selected & ~candidates).any()
        chosen.append(selected)
    again = POLICY_LOSSES["clip_cov"](**inputs, **options, seed=299)[1]["selected_frac"].bool()
    assert torch.equal(chosen[-1], again)
    # each candidate in 300 draws with probability k/n: within 5 standard deviations of a binomial
    times = torch.stack(chosen).sum(0)[candidates]
    p = int(chosen[0].sum()) / int(candidates.sum())
    assert (times - 300 * p).abs().max() < 5 * math.sqrt(300 * p * (1 - p))


def test_scores_do_not_see_masked_garbage():
    clean = batch_of(random_inputs(0))
    tensors = (clean.logprobs, clean.old_logprobs, clean.advantages)
    dirty = LossBatch(*(torch.where(clean.mask, values, math.nan) for values in tensors), clean.mask)
    for loss in (POLICY_LOSSES["clip_cov"], POLICY_LOSSES["kl_cov"]):
        expected = loss.scores(clean, token_sums(clean), None, **loss.options)
        assert torch.equal(loss.scores(dirty, token_sums(dirty), None, **loss.options), expected)


def splitmix64(state):
    """The published generator's output for a state, in Python's unbounded integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_draws_are_splitmix64_whatever_the_shape(seed):
    keys = torch.tensor([[0, 1, 2], [10**12, 2**62, 5]])
    expected = [
        (splitmix64((splitmix64(seed) + key * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53
        for key in keys.flatten().tolist()
    ]
    assert uniform_draws(keys, seed).flatten().tolist() == expected
    assert uniform_draws(torch.tensor(0), 0) == 0  # splitmix64(0): the smallest draw, still a candidate
