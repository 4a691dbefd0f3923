"""`from async_grpo import ...`: the public names, each imported on first use."""

import importlib

import pytest

import async_grpo

# DESIGN.md, section 5, and what one needs to use them
PUBLISHED = {
    *("RewardType", "REWARD_ADAPTERS", "VerifierPool", "ExperienceBatcher", "GenerationWorker", "LogprobWorker"),
    *("WorkerRegistry", "ADVANTAGE_ESTIMATORS", "POLICY_LOSSES", "aggregate_loss", "kl_penalty"),
    *("importance_weights", "rejection_mask", "RunConfig", "WorkerConfig", "LocalConfig", "run_locally"),
    *("train", "TrainResult"),
}  # fmt: skip


def test_the_published_names_are_public():
    assert set(async_grpo.__all__) >= PUBLISHED
    assert set(dir(async_grpo)) >= set(async_grpo.__all__)


@pytest.mark.parametrize("name", async_grpo.__all__)
def test_each_name_is_the_object_of_its_module(name):
    found = getattr(async_grpo, name)
    home = importlib.import_module(async_grpo._HOME[name])
    assert found is getattr(home, name)
    if hasattr(found, "__module__"):
        assert found.__module__ == home.__name__  # not a name that the module has merely imported


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'VerifierPol'"):
        _ = async_grpo.VerifierPol
