"""A page of rewards for `delayed_rewards.py`: the countdown reward behind a wait, as of a remote judge."""

import random
import time


def slow_countdown(sample: dict) -> dict:
    """Takes 0.5 to 1 s, and no CPU."""
    from async_grpo.rewards.builtin.countdown import score

    time.sleep(random.uniform(0.5, 1.0))
    return score(sample)


REWARD_ADAPTERS = {"slow_countdown": slow_countdown}
