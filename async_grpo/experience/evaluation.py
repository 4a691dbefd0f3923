"""The metrics of an evaluation: means over questions, each with the half width of its 95 % confidence interval.

Each question gets n completions. A completion passes if its reward is at least `pass_reward`. For pictures, only the mean
reward is reported, unless the user sets a `pass_reward`: rewards of pictures seldom reach the default of 1.

    avg_reward      mean reward
    avg@n           share of completions that pass
    pass@k          chance that at least one of k completions passes, for k = 1, 2, 4 ... up to n (unbiased estimate,
                    Chen et al. 2021, eq. 1)
    majority@n      share of questions whose most frequent answer passes. `stated_answer` reads the answers, as it does
                    for rewards. If a completion marks no answer, its last line is the answer. A completion without a
                    readable answer has no vote.

Intervals are computed over questions, because only questions are independent, not the completions of one question.
"""

import math
from collections.abc import Sequence
from statistics import multimode
from typing import Any

import numpy as np

from async_grpo.experience.step_metrics import reward_stats
from async_grpo.rewards.answer_reading.stated import stated_answer
from async_grpo.types import Group

DEFAULT_PASS_REWARD = 1.0
QUANTILE_OF_95 = 1.96  # half width of a 95 % confidence interval, in standard errors


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate the chance that at least one of k completions passes.

    Args:
        num_samples: Number of completions that were generated.
        num_passed: Number of these completions that passed.
        k: Number of completions that the estimate is for.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 3, 2)
    (0.25, 0.5, 0.0, 1.0)
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def evaluation_stats(groups: Sequence[Group], pass_reward: float) -> dict[str, Any]:
    """Return the metrics of an evaluation. The half width of the confidence interval of a metric M is `M_ci`.

    Args:
        groups: The completions of each question.
        pass_reward: The lowest reward with which a completion passes. If it has its default value, pictures cannot pass.
    """
    samples = [sample for group in groups for sample in group.samples]
    versions = [sample.completion.versions for sample in samples if len(sample.completion)]
    stats = reward_stats(samples)
    has_pictures = any(sample.completion.picture_png for sample in samples)
    can_pass = not has_pictures or pass_reward != DEFAULT_PASS_REWARD
    for name, values in _means_by_question(groups, pass_reward if can_pass else None).items():
        stats |= _mean(name, values)
    stats["num_questions"] = len(groups)
    stats["num_samples"] = len(samples)
    stats["version_min"] = min((int(v.min()) for v in versions), default=None)
    stats["version_max"] = max((int(v.max()) for v in versions), default=None)
    return stats


def _means_by_question(groups: Sequence[Group], pass_reward: float | None) -> dict[str, list[float]]:
    """Return each metric's values, one for each question that has a scored completion.

    Without `pass_reward`, only the mean reward is returned.
    """
    if pass_reward is None:
        rewarded = [group.rewards for group in groups if group.rewards]
        return {"avg_reward": [float(np.mean(question_rewards)) for question_rewards in rewarded]}
    num_drawn = max((len(group.samples) for group in groups), default=0)
    rewards: list[list[float]] = []
    passed: list[list[bool]] = []
    answers: list[list[str | None]] = []
    for group in groups:
        scored = [sample for sample in group.samples if sample.verdict.reward is not None]
        if scored:
            rewards.append(group.rewards)
            passed.append([reward >= pass_reward for reward in group.rewards])
            answers.append([answer_of(sample.completion.text) for sample in scored])
    means = {
        "avg_reward": [float(np.mean(question_rewards)) for question_rewards in rewards],
        f"avg@{num_drawn}": [float(np.mean(question_passed)) for question_passed in passed],
    }
    if num_drawn > 1:
        for power in range(num_drawn.bit_length()):
            k = 2**power
            enough = [question_passed for question_passed in passed if len(question_passed) >= k]
            means[f"pass@{k}"] = [pass_at_k(len(flags), sum(flags), k) for flags in enough]
    if num_drawn > 2:
        means[f"majority@{num_drawn}"] = list(map(_majority_passes, answers, passed))
    return means


def _mean(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and the half width of its 95 % confidence interval, by the normal approximation.

    Without values the mean is None. With fewer than two values the half width is None.
    """
    if not values:
        return {name: None, f"{name}_ci": None}
    half_interval = None
    if len(values) > 1:
        half_interval = QUANTILE_OF_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return {name: float(np.mean(values)), f"{name}_ci": half_interval}


def _majority_passes(answers: Sequence[str | None], passed: Sequence[bool]) -> float:
    """Return 1.0 if the most frequent answer passes, else 0.0.

    If several answers are equally frequent, the result is the share of these answers that passes. Completions whose answer
    is None have no vote. If all answers are None, the result is 0.0.
    """
    stated = [answer for answer in answers if answer is not None]
    first_passes = [passed[answers.index(answer)] for answer in multimode(stated)]
    return sum(first_passes) / max(1, len(first_passes))


def answer_of(text: str) -> str | None:
    r"""Return the answer that a completion marks, or else its last line. Without a readable answer, return None.

    >>> answer_of(r"so \boxed{12}."), answer_of("<answer> 3 + 4 </answer>"), answer_of("let me see\n 7 ")
    ('12', '3 + 4', '7')
    """
    return stated_answer(text, ("box", "last block", "marker", "last line"))
