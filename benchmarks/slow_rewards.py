"""A registry of rewards for `delayed_rewards.py`: the countdown reward after a wait like that of a remote judge."""

import random
import time


def slow_countdown(sample: dict) -> dict:
    """Return the countdown reward after a wait of 0.5 to 1 s, without using CPU."""
    from async_grpo.rewards.builtin.countdown import score

    time.sleep(random.uniform(0.5, 1.0))
    return score(sample)


REWARD_ADAPTERS = {"slow_countdown": slow_countdown}
