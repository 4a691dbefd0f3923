"""Every estimator against its definition in Python floats, the rules that hold for all, and whitening over ranks."""

import itertools
import math
import statistics

import pytest
import torch
from advantage_reference import (
    NAMES,
    NO_GROUP,
    batches,
    call,
    definition,
    participants,
    with_equal_rewards,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.algorithm.decoupled_gae import decoupled_gae_returns, policy_lam
from async_grpo.algorithm.process_advantages import gae_returns
from async_grpo.algorithm.statistics import (
    merge_moments,
    returns_to_go,
    reverse_scan,
    whitened,
    whitening_moments,
)

NO_BASELINE_OF_THE_BATCH = ("remax", "reinforce_plus_plus", "gae", "decoupled_gae", "running_mean")
GROUP_BASELINE = [name for name in NAMES if name not in NO_BASELINE_OF_THE_BATCH]
GROUP_LOCAL = {"grpo", "dr_grpo", "rloo", "opo", "max_rl", "grpo_passk", "remax", "grpo_process"}
REWARDS = torch.tensor([[0.0, 1, 0, 0], [0, 2, 0, 0]])
MASK = torch.tensor([[True, True, False, False]] * 2)
NAN_IN_ROW_1 = torch.tensor([[0.0, 0, 0, 0], [math.nan, 0, 0, 0]])
NUMBERS = st.lists(st.integers(-64, 64).map(lambda n: n / 8), min_size=0, max_size=12)


def one_group(size):
    return torch.zeros(size, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in NAMES),
        ("grpo_passk", {"normalize": False}),
        ("grpo_batch_std", {"centred": False}),
        ("decoupled_gae", {"alpha": 0.5}),
    ],
)
@given(rows=batches())
@settings(max_examples=50, deadline=None)
def test_any_ragged_batch_equals_the_definition(name, options, rows):
    expected = torch.tensor(definition(name, rows, **options), dtype=torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        advantages = call(ADVANTAGE_ESTIMATORS, name, rows, dtype, **options)
        assert advantages.dtype is dtype and not advantages.requires_grad
        assert torch.allclose(advantages.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "name", [n for n, e in ADVANTAGE_ESTIMATORS.items() if (e.flat_between_rewards or e.sums) and e.outcome]
)
def test_a_column_per_sample_gives_every_token_what_a_column_per_token_would(name):
    lengths = [2, 4, 1, 3, 3, 2]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    placed = torch.zeros(6, 4, dtype=torch.float64)
    placed[range(6), [n - 1 for n in lengths]] = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.0, 0.5]).double()
    groups, valid = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([True] * 5 + [False])
    inputs = {"baselines": torch.full((6,), 0.5), "keys": groups, "means": torch.full((6,), 0.25)}
    inputs = {option: inputs[option] for option in ADVANTAGE_ESTIMATORS[name].required_inputs}
    by_token = ADVANTAGE_ESTIMATORS[name](placed, mask, groups, valid=valid, **inputs)
    column, counts = placed.sum(dim=1, keepdim=True), torch.tensor(lengths)[:, None]
    by_sample = ADVANTAGE_ESTIMATORS[name](column, counts, groups, valid=valid, **inputs)
    assert torch.allclose(by_sample.expand_as(mask).where(mask, 0), by_token, atol=1e-12)


@pytest.mark.parametrize("width", [0, 1, 2, 3, 4, 8, 9, 15, 17, 40])
def test_a_reverse_scan_is_its_recurrence_and_leaves_its_arguments_alone(width):
    terms, decay = torch.rand(2, 3, width, dtype=torch.float64)
    given = terms.clone(), decay.clone()
    expected, following = torch.zeros_like(terms), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(width)):
        expected[:, t] = following = terms[:, t] + decay[:, t] * following
    assert torch.allclose(reverse_scan(terms, decay), expected, atol=1e-12)
    assert torch.equal(terms, given[0]) and torch.equal(decay, given[1])


def test_a_source_without_a_mask_counts_on_all_tokens():
    rewards = {name: torch.rand(3, 3, dtype=torch.float64) for name in ("steps", "outcome")}
    mask, steps = torch.ones(3, 3), torch.eye(3)
    prime = ADVANTAGE_ESTIMATORS["prime_rloo"]
    partly = prime(rewards, mask, one_group(3), masks={"steps": steps})
    assert torch.equal(partly, prime(rewards, mask, one_group(3), masks={"steps": steps, "outcome": mask}))


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches())
@settings(max_examples=40, deadline=None)
def test_advantages_are_zero_where_nothing_is_trained_on_and_garbage_there_changes_no_bit(name, rows):
    clean = call(ADVANTAGE_ESTIMATORS, name, rows, garbage=0.0)
    for garbage in (math.nan, math.inf, -1e300):
        assert torch.equal(call(ADVANTAGE_ESTIMATORS, name, rows, garbage=garbage), clean)
    learns = torch.tensor([row.mask for row in rows]) & torch.tensor(participants(rows, name))[:, None]
    assert clean[~learns].count_nonzero() == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_no_rows_or_of_empty_responses_has_no_advantages(name):
    for shape in ((0, 3), (2, 0), (0, 0)):
        inputs = {"values": torch.zeros(shape), "baselines": torch.zeros(shape[0])}
        inputs |= {"keys": one_group(shape[0]), "means": torch.zeros(shape[0])}
        inputs = {option: inputs[option] for option in ADVANTAGE_ESTIMATORS[name].required_inputs}
        advantages = ADVANTAGE_ESTIMATORS[name](
            torch.zeros(shape), torch.zeros(shape), one_group(shape[0]), **inputs
        )
        assert advantages.shape == shape


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


def test_statistics_are_float64_whatever_the_rewards_are():
    rewards = torch.tensor([[2.0**24, 1.0], [2.0**24, 0.0]], dtype=torch.float32)
    assert rewards.sum(dim=1).unique().numel() == 1  # summed as they come, the rows would be equal
    assert ADVANTAGE_ESTIMATORS["dr_grpo"](rewards, torch.ones(2, 2), one_group(2))[:, 0].tolist() == [
        0.5,
        -0.5,
    ]


def test_the_registry_says_what_each_estimator_is_for():
    elsewhere = {"gigpo", "teacher"}  # test_gigpo.py, and the tests of teachers
    assert set(ADVANTAGE_ESTIMATORS) == {*NAMES, *elsewhere}
    assert {name for name, e in ADVANTAGE_ESTIMATORS.items() if e.group_local} == GROUP_LOCAL | elsewhere
    process_only = {"grpo_process", "prime_rloo"}
    both = {"reinforce_plus_plus", "gae", "decoupled_gae", "gigpo", "teacher"}
    assert set(AlgorithmConfig.estimators_for(process=True)) == process_only | both
    assert set(AlgorithmConfig.estimators_for(process=False)) == {*NAMES, *elsewhere} - process_only


def test_required_inputs_are_the_inputs_without_a_default():  # the options: tests/house/test_golden.py
    needs = {}
    for name, estimator in ADVANTAGE_ESTIMATORS.items():
        if estimator.required_inputs:
            needs[name] = estimator.required_inputs
    assert needs == {
        "remax": ("baselines",),
        "running_mean": ("keys", "means"),
        "gae": ("values",),
        "decoupled_gae": ("values",),
        "gigpo": ("turns", "states"),
    }


def test_estimators_that_compare_with_something_else_need_no_group():
    assert {name for name, e in ADVANTAGE_ESTIMATORS.items() if not e.needs_group} == {*NO_GROUP, "teacher"}
    alone = torch.arange(3)
    scores = torch.tensor([[2.0], [0.0], [1.0]])
    for name in ("grpo", "rloo", "gpg", "reinforce_plus_plus_baseline"):
        assert ADVANTAGE_ESTIMATORS[name](scores, torch.ones(3, 1), alone).count_nonzero() == 0
    flash = ADVANTAGE_ESTIMATORS["flash_reinforce"]
    assert flash(scores, torch.ones(3, 1), alone).flatten().tolist() == [1.0, -1.0, 0.0]
    # A sample without a reward moves no mean
    valid = torch.tensor([True, False, True])
    assert flash(scores, torch.ones(3, 1), alone, valid=valid).flatten().tolist() == [0.5, 0.0, -0.5]


def test_flash_reinforce_has_the_values_of_openrlhf():
    """`tests/test_reward_shaping.py` there: the rewards of four samples minus their mean, on each token."""
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0078125])
    placed = torch.stack([torch.zeros(4), rewards], dim=1)
    got = ADVANTAGE_ESTIMATORS["flash_reinforce"](placed, torch.ones(4, 2), torch.arange(4))
    assert torch.allclose(got, (rewards - rewards.mean())[:, None].expand(-1, 2), atol=1e-7)


@given(rows=batches())
@settings(max_examples=30, deadline=None)
def test_with_equal_lambdas_decoupled_gae_is_gae(rows):
    options = {"gamma": 0.9, "lam": 0.7}
    plain = call(ADVANTAGE_ESTIMATORS, "gae", rows, **options)
    assert torch.equal(call(ADVANTAGE_ESTIMATORS, "decoupled_gae", rows, **options, critic_lam=0.7), plain)
    rewards, values = (torch.tensor([getattr(row, key) for row in rows]) for key in ("a", "values"))
    mask = torch.tensor([row.mask for row in rows])
    both = decoupled_gae_returns(rewards, values, mask, **options, critic_lam=0.7)
    for got, expected in zip(both, gae_returns(rewards, values, mask, **options), strict=True):
        assert torch.equal(got, expected)


def test_the_critic_learns_its_own_lambda_and_the_policy_one_of_its_length():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    values = torch.tensor([[0.5, 0.25, 0.5, 0.75], [0.5, 0.25, 9.0, 9.0]], dtype=torch.float64)
    advantages, returns = decoupled_gae_returns(rewards, values, mask, alpha=1.0)
    # Lambda is 1 - 1/4 and 1 - 1/2. Differences of the values: -0.25 0.25 0.25 0.25, and -0.25 0.75
    first = [0.25]
    for difference in (0.25, 0.25, -0.25):
        first.insert(0, difference + 0.75 * first[0])
    assert advantages[0].tolist() == pytest.approx(first, abs=1e-12)
    assert advantages[1].tolist() == pytest.approx([-0.25 + 0.5 * 0.75, 0.75, 0, 0], abs=1e-12)
    # With lambda 1, the returns are the rewards that follow, whatever the values
    assert returns.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert policy_lam(mask, lam=0.3, alpha=0.05).flatten().tolist() == [0, 0]  # shorter than 20 tokens


@pytest.mark.parametrize(
    "name, rewards, options, message",
    [
        ("grpo", REWARDS, {"gamma": 1.0}, r"grpo has no option \['gamma'\]; known: eps"),
        ("gae", REWARDS, {}, r"gae needs \['values'\]"),
        ("remax", REWARDS, {"baselines": None}, r"remax needs \['baselines'\]"),
        ("rloo", {"a": REWARDS}, {}, r"rloo takes a single .* not \['a'\]"),
        ("gdpo", {}, {}, r"gdpo takes at least one"),
        ("gdpo", {"a": REWARDS}, {"weights": {"b": 1.0}}, r"weights for \['b'\].* only for \['a'\]"),
        ("prime_rloo", {"a": REWARDS}, {"masks": {"b": MASK}}, r"masks for \['b'\].* only for \['a'\]"),
        ("prime_rloo", REWARDS, {"masks": MASK[:, :1]}, r"mask of reward \(2, 1\) must be \(2, 4\)"),
        ("grpo_process", REWARDS, {"step_mask": MASK[:1]}, r"mask of reward \(1, 4\) must be \(2, 4\)"),
        ("gae", REWARDS, {"values": REWARDS[0]}, r"values \(4,\) must be \(2, 4\)"),
        ("remax", REWARDS, {"baselines": REWARDS}, r"baselines \(2, 4\) must be \(2,\)"),
        ("grpo", REWARDS.long(), {}, r"dtype torch.int64"),
        ("grpo", NAN_IN_ROW_1, {}, r"rewards of rows \[1\] are not finite"),
        ("grpo", NAN_IN_ROW_1, {"group_ids": torch.arange(2)}, r"rows \[1\]"),  # even without a rival
        ("remax", REWARDS, {"baselines": NAN_IN_ROW_1[:, 0]}, r"baselines of rows \[1\] are not finite"),
        ("grpo", REWARDS, {"group_ids": MASK.long()}, "one per row"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(name, rewards, options, message):
    with pytest.raises(ValueError, match=message):
        ADVANTAGE_ESTIMATORS[name](rewards, MASK, **{"group_ids": one_group(2), **options})


def as_row(pool):
    return torch.tensor([pool], dtype=torch.float64)


def pooled(shards):
    return merge_moments(torch.stack([whitening_moments(as_row(s), torch.ones(1, len(s))) for s in shards]))


def whitened_row(pool, moments=None):
    return whitened(as_row(pool), torch.ones(1, len(pool)), moments)


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.sampled_from([0.0, 1e6]))
@settings(max_examples=50, deadline=None)
def test_shards_whitened_with_merged_moments_equal_the_whole_batch(shards, offset):
    shards = [[offset + x for x in shard] for shard in shards]
    whole = [x for shard in shards for x in shard]
    merged = pooled(shards)
    assert merged[0] == len(whole)
    if len(whole) >= 2:
        mean, variance = statistics.fmean(whole), statistics.variance(whole)
        together = torch.cat([whitened_row(shard, merged) for shard in shards], dim=1)
        expected = [(x - mean) / math.sqrt(variance + 1e-8) for x in whole]
        assert torch.allclose(together, as_row(expected), atol=1e-9, rtol=0)
        assert torch.allclose(whitened_row(whole), together, atol=1e-9, rtol=0)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.sampled_from([0.1, 1 / 3, 1e9 + 0.1]))
@settings(max_examples=50, deadline=None)
def test_equal_values_on_all_ranks_are_whitened_to_exactly_zero(sizes, value):
    moments = pooled([[value] * n for n in sizes]) if sum(sizes) else None
    assert whitened_row([value] * 7, moments).count_nonzero() == 0


def test_a_mean_that_dwarfs_the_deviation_costs_no_digits():
    pool = [2.0**40 + n for n in range(3)]  # squared and subtracted, nothing would be left of the variance 1
    assert whitened_row(pool, pooled([pool[:1], pool[1:]])).tolist() == [pytest.approx([-1, 0, 1], abs=1e-8)]


def test_a_long_discounted_return_neither_over_nor_underflows():
    # a cumulative sum of r * gamma^t, divided by gamma^t, would divide by 0.5^4000 = 0
    rewards, mask = torch.ones(1, 4000, dtype=torch.float64), torch.ones(1, 4000, dtype=torch.bool)
    assert torch.allclose(returns_to_go(rewards, mask, 0.5)[0, :3900], torch.tensor(2.0).double())
