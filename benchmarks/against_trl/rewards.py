"""The rewards of the comparison with TRL, called by both sides: ours as `--reward-fns .../rewards.py:NAME`.

What a sample's reward takes is drawn by a hash of the sample, so that both sides meet the same waits, in any order.
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
    """Uniform in (0, 1), by the sample's prompt and completion."""
    text = sample["input"] + " ".join(map(str, sample["completion_token_ids"]))
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") + 0.5) / 2**48


def countdown(sample: dict[str, Any]) -> float:
    """The shipped reward, as a function of a user's own file."""
    return float(rules.score(sample)["reward"])


def named(sample: dict[str, Any]) -> float:
    """1 if the completion names the capital."""
    return float(re.search(sample["pattern"], sample["completion"]) is not None)


def hashed(sample: dict[str, Any]) -> float:
    """0 or 1 at random: for models that were made for their lengths, not for a task."""
    return float(drawn(sample) < 0.5)


def seconds(sample: dict[str, Any]) -> float:
    """Uniform between the two bounds."""
    return SHORTEST_S + (LONGEST_S - SHORTEST_S) * drawn(sample)


def judge_seconds(sample: dict[str, Any]) -> float:
    """Log-normal, with a cap."""
    return min(JUDGE_CAP_S, JUDGE_MEDIAN_S * math.exp(JUDGE_SIGMA * NormalDist().inv_cdf(drawn(sample))))


async def slow(sample: dict[str, Any]) -> float:
    """Countdown behind a wait of 0.1 to 4 s."""
    await asyncio.sleep(seconds(sample))
    return countdown(sample)


async def judge(sample: dict[str, Any]) -> float:
    """Countdown behind a judge with a long tail."""
    await asyncio.sleep(judge_seconds(sample))
    return countdown(sample)
