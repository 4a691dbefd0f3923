"""Rewards that come from the environment: for the whole trajectory, or for each turn."""

from typing import Any

from async_grpo.rewards.adapter.decorators import process_reward


def environment(sample: dict[str, Any]) -> float:
    """Return the environment's reward for the whole trajectory."""
    reward = sample.get("environment_reward")
    if reward is None:
        raise ValueError(
            "the environment gives no reward, or did not end in time: name rewards with --reward-fns to score the last turn"
        )
    return float(reward)


@process_reward
def environment_turns(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the environment's reward for each turn, as a step that ends at the last token of the turn."""
    ends = sample.get("turn_ends", [])
    rewards = sample.get("turn_rewards", [])
    if not rewards or len(rewards) != len(ends):
        raise ValueError("the environment gives no reward for each turn: use the reward `environment`")
    steps = [{"reward": reward, "token_end": end} for reward, end in zip(rewards, ends, strict=True)]
    return {"step_rewards": steps}
