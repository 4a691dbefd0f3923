"""What the registry says of each estimator, and what every estimator refuses."""

import math

import pytest
import torch
from advantage_reference import NAMES

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.config import AlgorithmConfig

GROUP_LOCAL = {"grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "remax", "grpo_process"}
GRPO = ADVANTAGE_ESTIMATORS["grpo"]
REWARDS = torch.tensor([[0.0, 1, 0, 0], [0, 2, 0, 0]])
MASK = torch.tensor([[True, True, False, False]] * 2)
NAN_IN_ROW_1 = torch.tensor([[0.0, 0, 0, 0], [math.nan, 0, 0, 0]])


def one_group(size):
    return torch.zeros(size, dtype=torch.int64)


def test_the_registry_says_what_each_estimator_is_for():
    assert set(ADVANTAGE_ESTIMATORS) == set(NAMES)
    assert {name for name, e in ADVANTAGE_ESTIMATORS.items() if e.group_local} == GROUP_LOCAL
    process_only, both = {"grpo_process", "prime_rloo"}, {"reinforce_plus_plus", "gae"}
    assert set(AlgorithmConfig.estimators_for(process=True)) == process_only | both
    assert set(AlgorithmConfig.estimators_for(process=False)) == set(NAMES) - process_only


def test_options_are_the_scalars_and_needs_the_inputs():
    options = {name: estimator.options for name, estimator in ADVANTAGE_ESTIMATORS.items()}
    assert {name: values for name, values in options.items() if values} == {
        "grpo": {"eps": 1e-6},
        "grpo_passk": {"eps": 1e-6, "normalize": True},
        "gdpo": {"eps": 1e-6},
        "grpo_batch_std": {"eps": 1e-6, "centred": True},
        "grpo_process": {"eps": 1e-6},
        "reinforce_plus_plus": {"gamma": 1.0},
        "gae": {"gamma": 1.0, "lam": 1.0, "whiten": True},
    }
    needs = {name: estimator.needs for name, estimator in ADVANTAGE_ESTIMATORS.items() if estimator.needs}
    assert needs == {"remax": ("baselines",), "gae": ("values",)}


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
        ("remax", REWARDS, {"baselines": NAN_IN_ROW_1[:, 0]}, r"baselines of rows \[1\] are not finite"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(name, rewards, options, message):
    with pytest.raises(ValueError, match=message):
        ADVANTAGE_ESTIMATORS[name](rewards, MASK, one_group(2), **options)


def test_a_group_id_per_token_is_refused():
    with pytest.raises(ValueError, match="one per row"):
        GRPO(REWARDS, MASK, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="one per row"):
        GRPO(REWARDS, MASK, one_group(2), valid=MASK)


def test_a_reward_that_is_not_finite_is_an_error_even_in_a_row_without_a_rival():
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        GRPO(NAN_IN_ROW_1, MASK, torch.tensor([0, 1]))
