"""A slow reward of pictures for `drawing_delays.py`."""

import asyncio
import random

import numpy as np


async def slow_brightness(sample: dict, low: float = 0.1, high: float = 2.0) -> float:
    """Return the mean brightness of the picture after a wait, as a remote judge would. 64 samples wait at a time."""
    await asyncio.sleep(random.uniform(low, high))
    return float(np.asarray(sample["picture"]).mean() / 255)
