"""Advantages against hand arithmetic and a brute-force loop in Python floats."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS

GRPO, DR_GRPO = ADVANTAGE_ESTIMATORS["grpo"], ADVANTAGE_ESTIMATORS["dr_grpo"]


def outcome(rewards, lengths, width=4):
    """(rewards, mask): row i has lengths[i] unmasked tokens and its reward on the last of them."""
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    placed = torch.zeros(len(rewards), width, dtype=torch.float64)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        if length:
            placed[row, length - 1] = reward
    return placed, mask


def brute_force(name, rewards, lengths, groups, valid):
    """One advantage per row, by the definition."""
    results = []
    for row, group in enumerate(groups):
        peers = [
            r
            for r, n, g, v in zip(rewards, lengths, groups, valid, strict=True)
            if g == group and v and n > 0
        ]
        learns = valid[row] and lengths[row] > 0 and len(peers) >= 2 and min(peers) != max(peers)
        if not learns:
            results.append(0.0)
            continue
        centred = rewards[row] - statistics.fmean(peers)
        results.append(centred / (statistics.stdev(peers) + 1e-6) if name == "grpo" else centred)
    return results


def test_grpo_divides_by_the_sample_standard_deviation():
    # scores 1, 0, 0, 1: mean 1/2, variance with ddof 1 = 4 * (1/4) / 3 = 1/3
    rewards, mask = outcome([1, 0, 0, 1], [4, 4, 4, 4])
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    advantages = GRPO(rewards, mask, torch.zeros(4, dtype=torch.int64))
    assert advantages[:, 0].tolist() == pytest.approx([expected, -expected, -expected, expected], abs=1e-12)


def test_dr_grpo_only_subtracts_the_mean():
    rewards, mask = outcome([1, 0, 0, 1], [1, 2, 3, 4])
    advantages = DR_GRPO(rewards, mask, torch.zeros(4, dtype=torch.int64))
    assert advantages[:, 0].tolist() == [0.5, -0.5, -0.5, 0.5]


def test_every_unmasked_token_of_a_row_gets_the_same_advantage_and_masked_tokens_get_zero():
    rewards, mask = outcome([3, 1], [3, 2])
    advantages = DR_GRPO(rewards, mask, torch.tensor([7, 7]))
    assert advantages.tolist() == [[1, 1, 1, 0], [-1, -1, 0, 0]]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_seven_equal_rewards_of_a_tenth_give_exactly_zero(name, dtype):
    assert sum([0.1] * 7) / 7 != 0.1  # why equality cannot be read from the mean
    rewards, mask = outcome([0.1] * 7, [2] * 7)
    advantages = ADVANTAGE_ESTIMATORS[name](rewards.to(dtype), mask, torch.full((7,), 3))
    assert advantages.count_nonzero() == 0
    assert advantages.dtype is dtype


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_an_invalid_sample_does_not_move_its_group_even_if_its_reward_is_nan(name):
    # Rewards 1 1 0 0 with the second one missing must come out as if it were not there
    rewards, mask = outcome([1, math.nan, 0, 0], [2, 2, 2, 2])
    valid = torch.tensor([True, False, True, True])
    with_hole = ADVANTAGE_ESTIMATORS[name](rewards, mask, torch.zeros(4, dtype=torch.int64), valid=valid)
    kept = rewards[valid], mask[valid], torch.zeros(3, dtype=torch.int64)
    assert torch.equal(with_hole[valid], ADVANTAGE_ESTIMATORS[name](*kept))
    assert with_hole[1].count_nonzero() == 0
    if name == "dr_grpo":
        assert with_hole[:, 0].tolist() == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])


def test_an_empty_completion_takes_no_part():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [5.0, 5.0]])
    mask = torch.tensor([[True, False], [True, False], [False, False]])
    assert DR_GRPO(rewards, mask, torch.zeros(3, dtype=torch.int64)).tolist() == [[0.5, 0], [-0.5, 0], [0, 0]]


def test_a_group_with_fewer_than_two_participants_teaches_nothing():
    rewards, mask = outcome([1, 5, 2], [2, 2, 2])
    valid = torch.tensor([True, True, False])
    advantages = GRPO(rewards, mask, torch.tensor([1, 2, 2]), valid=valid)
    assert advantages.count_nonzero() == 0


def test_a_valid_reward_that_is_not_finite_is_an_error_naming_its_row():
    rewards, mask = outcome([1, math.inf], [2, 2])
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        GRPO(rewards, mask, torch.zeros(2, dtype=torch.int64))


def test_a_group_id_per_token_is_refused():
    rewards, mask = outcome([1, 2], [2, 2])
    with pytest.raises(ValueError, match="one per row"):
        GRPO(rewards, mask, torch.zeros(2, 4, dtype=torch.int64))


rows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5]),  # reward
        st.integers(0, 4),  # length
        st.sampled_from([-1, 0, 5, 10**12]),  # group id
        st.booleans(),  # valid
    ),
    min_size=1,
    max_size=24,
)


@given(rows, st.sampled_from(["grpo", "dr_grpo"]))
@settings(max_examples=150, deadline=None)
def test_any_batch_of_mixed_groups_equals_the_definition(rows, name):
    rewards, lengths, groups, valid = (list(column) for column in zip(*rows, strict=True))
    placed, mask = outcome(rewards, lengths)
    advantages = ADVANTAGE_ESTIMATORS[name](placed, mask, torch.tensor(groups), valid=torch.tensor(valid))
    for row, expected in enumerate(brute_force(name, rewards, lengths, groups, valid)):
        assert advantages[row, : lengths[row]].tolist() == pytest.approx([expected] * lengths[row], abs=1e-9)
        assert advantages[row, lengths[row] :].count_nonzero() == 0


@given(rows, st.randoms())
@settings(max_examples=50, deadline=None)
def test_group_local_estimators_do_not_care_about_order_or_other_groups(rows, random):
    rewards, lengths, groups, valid = (list(column) for column in zip(*rows, strict=True))
    placed, mask = outcome(rewards, lengths)
    groups, valid = torch.tensor(groups), torch.tensor(valid)
    order = list(range(len(rows)))
    random.shuffle(order)
    for estimator in ADVANTAGE_ESTIMATORS.values():
        assert estimator.group_local
        whole = estimator(placed, mask, groups, valid=valid)
        shuffled = estimator(placed[order], mask[order], groups[order], valid=valid[order])
        assert torch.allclose(shuffled, whole[order], atol=1e-12, rtol=1e-9)
        alone = groups == groups[0]
        fragment = estimator(placed[alone], mask[alone], groups[alone], valid=valid[alone])
        assert torch.allclose(fragment, whole[alone], atol=1e-12, rtol=1e-9)
