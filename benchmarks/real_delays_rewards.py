"""What `real_delays.py` gives a run beside its options: a slow reward, and an estimator that waits for the whole step."""

import asyncio
import random

from async_grpo.algorithm.outcome_advantages import grpo


async def slow_countdown(sample: dict, low: float = 0.2, high: float = 4.0) -> dict:
    """The countdown reward after a wait, as of a remote judge; 64 samples wait at a time (an async reward's capacity)."""
    from async_grpo.rewards.builtin.countdown import score

    await asyncio.sleep(random.uniform(low, high))
    return score(sample)


def grpo_whole_step(rewards, used, groups):
    """GRPO as a bare function: the library must take it for batch-coupled, so no micro-batch is made before the last
    group of the step has its rewards."""
    return grpo(rewards, used, groups)


REWARD_ADAPTERS = {"slow_countdown": slow_countdown}
