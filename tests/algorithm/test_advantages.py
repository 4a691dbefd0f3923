"""Every estimator against its definition in Python floats, arithmetic by hand, and the rules that hold for all."""

import itertools
import math

import pytest
import torch
from advantage_reference import NAMES, batches, call, definition, participants, with_equal_rewards
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS

COUPLED = [name for name, estimator in ADVANTAGE_ESTIMATORS.items() if not estimator.group_local]
GROUP_BASELINE = [name for name in NAMES if name not in ("remax", "reinforce_plus_plus", "gae")]
GRPO, DR_GRPO = ADVANTAGE_ESTIMATORS["grpo"], ADVANTAGE_ESTIMATORS["dr_grpo"]


def outcome(rewards, lengths, width=4):
    """(rewards, mask): row i has lengths[i] unmasked tokens and its reward on the last of them."""
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    placed = torch.zeros(len(rewards), width, dtype=torch.float64)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        if length:
            placed[row, length - 1] = reward
    return placed, mask


def one_group(size):
    return torch.zeros(size, dtype=torch.int64)


# ------------------------------------------------------------------------------------------ the definitions


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in NAMES),
        ("grpo_passk", {"normalize": False}),
        ("grpo_batch_std", {"centred": False}),
    ],
)
@given(rows=batches())
@settings(max_examples=60, deadline=None)
def test_any_ragged_batch_equals_the_definition(name, options, rows):
    advantages = call(ADVANTAGE_ESTIMATORS, name, rows, **options)
    expected = torch.tensor(definition(name, rows, **options), dtype=torch.float64)
    assert torch.allclose(advantages, expected, atol=1e-10, rtol=1e-10) and not advantages.requires_grad


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches())
@settings(max_examples=25, deadline=None)
def test_float32_agrees_with_float64(name, rows):
    single = call(ADVANTAGE_ESTIMATORS, name, rows, torch.float32)
    assert single.dtype is torch.float32
    # 0.1 and 0.3 are rounded by float32: give both sides the rounded number
    for row in rows:
        row.a, row.b = (torch.tensor(r, dtype=torch.float32).double().tolist() for r in (row.a, row.b))
    double = call(ADVANTAGE_ESTIMATORS, name, rows, torch.float64)
    assert torch.allclose(single.double(), double, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [n for n, e in ADVANTAGE_ESTIMATORS.items() if e.per_sample])
def test_a_column_per_sample_gives_every_token_what_a_column_per_token_would(name):
    rewards, lengths = [1.0, 0.0, 0.25, 1.0, 0.0, 0.5], [2, 4, 1, 3, 3, 2]
    groups, valid = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([True] * 5 + [False])
    placed, mask = outcome(rewards, lengths)
    inputs = {"baselines": torch.tensor([0.5] * 6)} if ADVANTAGE_ESTIMATORS[name].needs else {}
    by_token = ADVANTAGE_ESTIMATORS[name](placed, mask, groups, valid=valid, **inputs)
    column, counts = placed.sum(dim=1, keepdim=True), torch.tensor(lengths)[:, None]
    by_sample = ADVANTAGE_ESTIMATORS[name](column, counts, groups, valid=valid, **inputs)
    assert torch.allclose(by_sample.expand_as(mask).where(mask, 0), by_token, atol=1e-12)


def test_a_source_without_a_mask_counts_on_all_tokens():
    rewards = {
        "steps": torch.rand(3, 3, dtype=torch.float64),
        "outcome": torch.rand(3, 3, dtype=torch.float64),
    }
    mask, steps = torch.ones(3, 3), torch.eye(3)
    prime = ADVANTAGE_ESTIMATORS["prime_rloo"]
    partly = prime(rewards, mask, one_group(3), masks={"steps": steps})
    assert torch.equal(partly, prime(rewards, mask, one_group(3), masks={"steps": steps, "outcome": mask}))


# ----------------------------------------------------------------------------- what teaches and what does not


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches())
@settings(max_examples=40, deadline=None)
def test_advantages_are_zero_where_nothing_is_trained_on_and_garbage_there_changes_no_bit(name, rows):
    clean = call(ADVANTAGE_ESTIMATORS, name, rows, garbage=0.0)
    for garbage in (math.nan, math.inf, -1e300):
        assert torch.equal(call(ADVANTAGE_ESTIMATORS, name, rows, garbage=garbage), clean)
    learns = torch.tensor([row.mask for row in rows]) & torch.tensor(participants(rows))[:, None]
    assert clean[~learns].count_nonzero() == 0


@pytest.mark.parametrize("name", COUPLED)
def test_a_batch_coupled_estimator_is_moved_by_another_group(name):
    rewards, mask = outcome([1, 0, 0, 4, 4, 0], [2, 3, 1, 1, 2, 4])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    inputs = {"values": torch.zeros(6, 4)} if name == "gae" else {}
    whole = ADVANTAGE_ESTIMATORS[name](rewards, mask, groups, **inputs)
    inputs = {option: tensor[:3] for option, tensor in inputs.items()}
    fragment = ADVANTAGE_ESTIMATORS[name](rewards[:3], mask[:3], groups[:3], **inputs)
    assert not torch.allclose(whole[:3], fragment, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_no_rows_or_of_empty_responses_has_no_advantages(name):
    for shape in ((0, 3), (2, 0), (0, 0)):
        inputs = {"values": torch.zeros(shape), "baselines": torch.zeros(shape[0])}
        inputs = {option: inputs[option] for option in ADVANTAGE_ESTIMATORS[name].needs}
        advantages = ADVANTAGE_ESTIMATORS[name](
            torch.zeros(shape), torch.zeros(shape), one_group(shape[0]), **inputs
        )
        assert advantages.shape == shape


# --------------------------------------------------------------------------------------------- equal rewards


@pytest.mark.parametrize("name", GROUP_BASELINE)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    rows=batches(),
    reward=st.sampled_from([0.1, 0.3, -2.5, 1e-9, 1e9 + 0.1]),
)
@settings(max_examples=25, deadline=None)
def test_equal_rewards_give_exactly_zero(name, dtype, rows, reward):
    advantages = call(ADVANTAGE_ESTIMATORS, name, with_equal_rewards(rows, reward), dtype)
    assert advantages.dtype is dtype
    assert advantages.count_nonzero() == 0


@pytest.mark.parametrize("name", ["grpo_process", "prime_rloo"])
def test_equal_step_rewards_on_rows_of_all_lengths_give_exactly_zero(name):
    for size, reward in itertools.product((3, 5, 6, 7, 11), (0.1, 0.3, 1 / 3, -2.7)):
        mask = torch.arange(6) < torch.tensor([1 + i % 6 for i in range(size)])[:, None]
        rewards = torch.full((size, 6), reward, dtype=torch.float64)
        assert ADVANTAGE_ESTIMATORS[name](rewards, mask, one_group(size)).count_nonzero() == 0


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae"])
@pytest.mark.parametrize("size", [3, 7, 11])
def test_a_pool_of_equal_returns_is_whitened_to_exactly_zero(name, size):
    rewards, mask = outcome([0.1] * size, [1 + i % 4 for i in range(size)])
    inputs = {"values": torch.zeros(size, 4)} if name == "gae" else {}
    assert ADVANTAGE_ESTIMATORS[name](rewards, mask, one_group(size), **inputs).count_nonzero() == 0


def test_statistics_are_float64_whatever_the_rewards_are():
    rewards = torch.tensor([[2.0**24, 1.0], [2.0**24, 0.0]], dtype=torch.float32)
    assert rewards.sum(dim=1).unique().numel() == 1  # summed as they come, the rows would be equal
    assert DR_GRPO(rewards, torch.ones(2, 2), one_group(2))[:, 0].tolist() == [0.5, -0.5]


def test_a_large_constant_beside_the_rewards_costs_no_digits():
    rewards, mask = outcome([0.25, 0.5, 0.0, 0.75], [2, 2, 2, 2])
    shifted, _ = outcome([2.0**50 + r for r in (0.25, 0.5, 0.0, 0.75)], [2, 2, 2, 2])
    assert torch.equal(GRPO(shifted, mask, one_group(4)), GRPO(rewards, mask, one_group(4)))
