"""The rewards of the comparison with TRL. Both sides call them; this library with `--reward-fns .../rewards.py:NAME`.

The duration of a sample's reward is derived from a hash of the sample. So both sides have the same waits, whatever the
order of the samples is.
"""

import asyncio
import hashlib
import math
import re
from statistics import NormalDist
from typing import Any

from async_grpo.rewards.builtin import countdown as rules

SHORTEST_S, LONGEST_S = 0.1, 4.0
JUDGE_MEDIAN_S, JUDGE_SIGMA, JUDGE_CAP_S = 0.5, 1.2, 20.0


def drawn(sample: dict[str, Any]) -> float:
    """Return a number that is uniform in (0, 1), from a hash of the sample's prompt and completion."""
    text = sample["input"] + " ".join(map(str, sample["completion_token_ids"]))
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") + 0.5) / 2**48


def countdown(sample: dict[str, Any]) -> float:
    """Call the shipped reward, from a function in a user's file."""
    return float(rules.score(sample)["reward"])


def named(sample: dict[str, Any]) -> float:
    """Return 1 if the completion names the capital, else 0."""
    return float(re.search(sample["pattern"], sample["completion"]) is not None)


def hashed(sample: dict[str, Any]) -> float:
    """Return 0 or 1 at random, for models that have no task because only their lengths matter."""
    return float(drawn(sample) < 0.5)


def seconds(sample: dict[str, Any]) -> float:
    """Return a wait in seconds, uniform between the two bounds."""
    return SHORTEST_S + (LONGEST_S - SHORTEST_S) * drawn(sample)


def judge_seconds(sample: dict[str, Any]) -> float:
    """Return a wait in seconds, log-normal with a maximum."""
    return min(JUDGE_CAP_S, JUDGE_MEDIAN_S * math.exp(JUDGE_SIGMA * NormalDist().inv_cdf(drawn(sample))))


async def slow(sample: dict[str, Any]) -> float:
    """Return the countdown reward after a wait of 0.1 to 4 s."""
    await asyncio.sleep(seconds(sample))
    return countdown(sample)


async def judge(sample: dict[str, Any]) -> float:
    """Return the countdown reward after a wait like that of a judge, which is sometimes long."""
    await asyncio.sleep(judge_seconds(sample))
    return countdown(sample)
