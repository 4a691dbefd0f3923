"""A slow reward for `real_delays.py`, and an estimator that waits for the whole step."""

import asyncio
import random

from async_grpo.algorithm.outcome_advantages import grpo


async def slow_countdown(sample: dict, low: float = 0.2, high: float = 4.0) -> dict:
    """Return the countdown reward after a wait like that of a remote judge.

    64 samples wait at a time, the capacity of an async reward.
    """
    from async_grpo.rewards.builtin.countdown import score

    await asyncio.sleep(random.uniform(low, high))
    return score(sample)


def grpo_whole_step(rewards, used, groups):
    """Compute GRPO in a plain function, which cannot declare that it needs only one group at a time.

    So the library assumes that it needs the whole batch, and makes no micro-batch before all groups of the step are
    scored.
    """
    return grpo(rewards, used, groups)


REWARD_ADAPTERS = {"slow_countdown": slow_countdown}
