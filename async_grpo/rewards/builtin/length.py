"""Rewards for the number of tokens. Two schedules:

overlong    nothing up to a length, then less and less down to -1: to be added to another reward (`sum`).
            "Soft overlong punishment" of Yu et al., "DAPO" (2025), eq. 13
cosine      a reward by itself: a right answer is worth more when short, a wrong one less bad when long.
            Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (2025), section 4.2
"""

import math
from importlib import import_module
from typing import Any

SCHEDULES = ("overlong", "cosine")
JUDGES = ("math_verify", "mathd", "sympy", "countdown", "exact")

# r_0 and r_L (length 0 and L_max) of right and of wrong answers, and r_e of those that reach L_max: the values with
# which the paper's main results were computed.
RIGHT, WRONG, EXCEEDED = (2.0, 1.0), (-10.0, 0.0), -10.0


def overlong(num_tokens: int, max_tokens: int, cache_tokens: int) -> float:
    """With L = num_tokens, M = max_tokens, C = cache_tokens:

        0 if L <= M - C;    ((M - C) - L) / C if M - C < L <= M;    -1 if L > M

    >>> [overlong(num_tokens, 100, 20) for num_tokens in (80, 85, 100, 101)]
    [0.0, -0.25, -1.0, -1.0]
    """
    if num_tokens > max_tokens:
        return -1.0
    return min(0.0, (max_tokens - cache_tokens - num_tokens) / cache_tokens)


def cosine(num_tokens: int, max_tokens: int, right: bool) -> float:
    """r_L + (r_0 - r_L) (1 + cos(pi L / L_max)) / 2 below L_max, and r_e from L_max on.

    >>> [round(cosine(num_tokens, 100, right=True), 3) for num_tokens in (0, 50, 99, 100)]
    [2.0, 1.5, 1.0, -10.0]
    >>> [round(cosine(num_tokens, 100, right=False), 3) for num_tokens in (0, 50, 99)]
    [-10.0, -5.0, -0.002]
    """
    if num_tokens >= max_tokens:
        return EXCEEDED
    at_zero, at_max = RIGHT if right else WRONG
    return at_max + (at_zero - at_max) * (1 + math.cos(math.pi * num_tokens / max_tokens)) / 2


def score(
    sample: dict[str, Any],
    schedule: str = "overlong",
    max_tokens: int = 4096,
    cache_tokens: int = 1024,
    judge: str = "math_verify",
) -> dict[str, float]:
    """The schedule's reward for the length of the completion, and that length.

    Args:
        max_tokens: L_max: the run's limit of generated tokens.
        cache_tokens: L_cache of `overlong`: the width of the slope.
        judge: for `cosine`, the reward that says which answer is right (from 1.0 on).

    Raises:
        ValueError: an impossible option, or the judge cannot judge the row.

    >>> score({"completion_token_ids": [7] * 95}, max_tokens=100, cache_tokens=20)
    {'reward': -0.75, 'num_tokens': 95.0}
    """
    slope = cache_tokens if schedule == "overlong" else max_tokens
    if schedule not in SCHEDULES or judge not in JUDGES or not 0 < slope <= max_tokens:
        raise ValueError(
            f"`length` needs a schedule of {', '.join(SCHEDULES)}, a judge of {', '.join(JUDGES)} and 0 < cache_tokens <= "
            f"max_tokens, not {schedule!r}, {judge!r}, {cache_tokens}, {max_tokens}"
        )
    num_tokens = len(sample["completion_token_ids"])
    if schedule == "overlong":
        reward = overlong(num_tokens, max_tokens, cache_tokens)
        return {"reward": reward, "num_tokens": float(num_tokens)}
    judged = import_module(f"async_grpo.rewards.builtin.{judge}").score(sample)
    right = judged["reward"] >= 1.0
    return {
        "reward": cosine(num_tokens, max_tokens, right),
        "num_tokens": float(num_tokens),
        "right": float(right),
    }
