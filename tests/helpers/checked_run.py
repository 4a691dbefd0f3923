"""The checks that a run makes of its options and rewards before it starts, and two kinds of rewards for them."""

import dataclasses

from async_grpo.config.compatibility import check_methods
from async_grpo.config.rewards import ResolvedRewards, check_rewards
from async_grpo.config.run import RunConfig
from async_grpo.rewards.adapter.decorators import process_reward
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource


def outcome(sample):
    """Return a reward of the whole completion."""
    return {"reward": 1.0}


@process_reward
def steps(sample):
    """Return rewards of steps, of which there are none."""
    return {"step_rewards": []}


OUTCOME = {"a": outcome}
STEPS = {"s": steps}


def config(**changes) -> RunConfig:
    """Return the options of a run with these changes."""
    return RunConfig(**{"model_name_or_path": "m", "data_path": "d", **changes})


def check(made: RunConfig, adapters: dict) -> ResolvedRewards:
    """Check a configuration together with these rewards, as the start of a run does."""
    check_methods(made)
    made = dataclasses.replace(made, reward_fns=",".join(adapters))
    source = RewardRegistrySource("page_of_recipes", "")
    resolved = ResolvedRewards(source, adapters, adapters)
    check_rewards(made, resolved)
    return resolved
