"""The masks of the policy loss against loops and `torch.quantile`, and the published values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import random_inputs

from async_grpo.algorithm.policy_masks import (
    high_entropy_mask,
    mask_policy_loss,
    num_in_top_quantile,
    off_policy_sequence_mask,
)
from async_grpo.errors import ConfigurationError


def loops(logprobs, behaviour, advantages, mask, threshold):
    """Token by token, in Python floats."""
    result = []
    for row in range(len(mask)):
        places = [t for t in range(mask.shape[1]) if mask[row, t]]
        gaps = [behaviour[row, t].item() - logprobs[row, t].item() for t in places]
        is_off = bool(gaps) and math.fsum(gaps) / len(gaps) > threshold
        result.append(
            [t in places and not (advantages[row, t].item() < 0 and is_off) for t in range(mask.shape[1])]
        )
    return result


def test_a_bad_sequence_that_the_policy_has_left_gets_no_policy_loss_whatever_the_good_ones_do():
    """TRL's test: advantages 1, -1, -1, mean gaps 2, 0.5, 2, threshold 1: the third one goes."""
    behaviour = torch.zeros(3, 2)
    logprobs = -torch.tensor([[2.0, 2.0], [0.5, 0.5], [2.0, 2.0]])
    advantages = torch.tensor([1.0, -1.0, -1.0])[:, None].expand(3, 2)
    keeps = off_policy_sequence_mask(logprobs, behaviour, advantages, torch.ones(3, 2), threshold=1.0)
    assert keeps.tolist() == [[True, True], [True, True], [False, False]]


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3])
def test_the_mask_is_that_of_the_loops_also_packed_shuffled_and_with_garbage_where_it_is_masked(threshold):
    num_left_out = 0
    for seed in range(6):
        inputs = random_inputs(seed, spread=1.0, rows=8)
        tensors = [inputs[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")]
        expected = torch.tensor(loops(*tensors, threshold))
        assert torch.equal(off_policy_sequence_mask(*tensors, threshold=threshold), expected)
        order = torch.randperm(expected.numel(), generator=torch.Generator().manual_seed(seed))
        garbage = [torch.where(inputs["mask"], values, math.nan) for values in tensors[:3]]
        packed = [values.flatten()[order][None] for values in [*garbage, inputs["mask"]]]
        ids = torch.arange(8)[:, None].expand_as(expected).flatten()[order][None]
        keeps = off_policy_sequence_mask(*packed, threshold=threshold, sequence_ids=7 - ids)
        assert torch.equal(keeps[0], expected.flatten()[order])
        num_left_out += (inputs["mask"] & ~expected).sum().item()
    assert num_left_out > 5


def test_a_gap_that_is_not_a_number_leaves_nothing_out_so_that_the_trainer_notices_it():
    behaviour = torch.tensor([[0.0, math.nan]])
    keeps = off_policy_sequence_mask(
        torch.full((1, 2), -9.0), behaviour, -torch.ones(1, 2), torch.ones(1, 2), threshold=1.0
    )
    assert keeps.all()


def test_a_negative_threshold_is_refused():
    with pytest.raises(ConfigurationError, match="cannot be negative"):
        off_policy_sequence_mask(*[torch.zeros(1, 1)] * 4, threshold=-0.1)


@given(
    values=st.lists(st.integers(-20, 20), min_size=1, max_size=40),
    quantile=st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_selected_are_the_tokens_at_or_above_the_quantile_of_torch(values, quantile):
    entropy = torch.tensor([values], dtype=torch.float64)
    mask = torch.ones_like(entropy).bool()
    threshold = torch.quantile(entropy[0], 1 - quantile)
    selected = high_entropy_mask(entropy, mask, quantile=quantile)
    # 1e-9: torch interpolates with rounding, also where the position is a whole number
    assert torch.equal(selected, entropy >= threshold - 1e-9)


def test_a_quantile_of_1_selects_all_tokens_and_one_of_0_the_highest_alone_and_none_that_is_masked():
    entropy = torch.tensor([[0.3, 0.9, 0.1, 7.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert high_entropy_mask(entropy, mask, quantile=1.0).tolist() == [[True, True, True, False]]
    assert high_entropy_mask(entropy, mask, quantile=0.0).tolist() == [[False, True, False, False]]
    assert not high_entropy_mask(entropy, 0 * mask, quantile=1.0).any()
    with pytest.raises(ConfigurationError, match="must lie between 0 and 1"):
        num_in_top_quantile(1.5, 3)


def test_both_masks_together_take_the_loss_from_their_tokens_and_count_them():
    losses = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    masked, metrics = mask_policy_loss(
        losses,
        torch.full((2, 2), -5.0),
        torch.zeros(2, 2),
        advantages,
        torch.tensor([[True, True], [True, False]]),
        threshold=1.0,
        has_high_entropy=torch.tensor([[True, False], [True, True]]),
    )
    assert masked.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert metrics["off_policy_masked_frac"].tolist() == [[False, False], [True, False]]
    assert metrics["high_entropy_frac"].tolist() == [[True, False], [True, False]]
