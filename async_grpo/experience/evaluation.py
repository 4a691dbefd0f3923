"""What an evaluation says of the policy: means over questions, each with the half width of its 95 % interval.

n completions of each question are drawn. A completion passes if its reward reaches `pass_reward`.

    avg_reward      mean reward
    avg@n           share of completions that pass
    pass@k          chance that one of k completions passes, for k = 1, 2, 4 ... up to n (Chen et al. 2021, eq. 1, unbiased)
    majority@n      share of questions whose most frequent answer passes. The answer is read as the rewards read it
                    (`stated_answer`), else it is the last line; a completion that states none has no vote.

Questions are independent of each other, completions of one question are not: so the interval is over questions.
"""

import math
from collections.abc import Sequence
from statistics import multimode
from typing import Any

import numpy as np

from async_grpo.experience.step_metrics import reward_stats
from async_grpo.rewards.answer_reading.stated import stated_answer
from async_grpo.types import Group


def pass_at_k(drawn: int, passed: int, k: int) -> float:
    """The chance that one of k completions passes, estimated from `drawn` of which `passed` did.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 3, 2)
    (0.25, 0.5, 0.0, 1.0)
    """
    return 1.0 - math.comb(drawn - passed, k) / math.comb(drawn, k)


def evaluation_stats(groups: Sequence[Group], pass_reward: float) -> dict[str, Any]:
    """The figures of an evaluation, by name; those of a mean M have its half interval at `M_ci`."""
    samples = [sample for group in groups for sample in group.samples]
    drawn = max((len(group.samples) for group in groups), default=0)
    rewards, passed, answers = list[list[float]](), list[list[bool]](), list[list[str | None]]()
    for group in groups:
        given = [(sample.verdict.reward, sample.completion.text) for sample in group.samples]
        scored = [(reward, text) for reward, text in given if reward is not None]
        if scored:  # what could not be scored says nothing
            rewards.append([reward for reward, _ in scored])
            passed.append([reward >= pass_reward for reward, _ in scored])
            answers.append([answer_of(text) for _, text in scored])
    means = {
        "avg_reward": [float(np.mean(of)) for of in rewards],
        f"avg@{drawn}": [float(np.mean(of)) for of in passed],
    }
    for k in (2**power for power in range(drawn.bit_length()) if drawn > 1):
        means[f"pass@{k}"] = [pass_at_k(len(of), sum(of), k) for of in passed if len(of) >= k]
    if drawn > 2:
        means[f"majority@{drawn}"] = list(map(_majority_passes, answers, passed))
    versions = [sample.completion.versions for sample in samples if len(sample.completion)]
    return {
        **reward_stats(samples),
        **{name: value for mean, values in means.items() for name, value in _mean(mean, values).items()},
        "num_questions": len(groups),
        "num_samples": len(samples),
        "version_min": min((int(v.min()) for v in versions), default=None),
        "version_max": max((int(v.max()) for v in versions), default=None),
    }


def _mean(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """The mean, and half of its 95 % interval by the normal approximation; None where there is too little."""
    if not values:
        return {name: None, f"{name}_ci": None}
    half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return {name: float(np.mean(values)), f"{name}_ci": half}


def _majority_passes(answers: Sequence[str | None], passed: Sequence[bool]) -> float:
    """Return 1.0 if the most frequent answer passes; between equally frequent ones, the share of them that do.

    None is no answer, and is counted as none. Where no completion has an answer, none passes: 0.0.
    """
    stated = [answer for answer in answers if answer is not None]
    first_passes = [passed[answers.index(answer)] for answer in multimode(stated)]
    return sum(first_passes) / max(1, len(first_passes))


def answer_of(text: str) -> str | None:
    r"""Return what a completion answers, None if it states nothing: `stated_answer` with the last line as its last form.

    >>> answer_of(r"so \boxed{12}."), answer_of("<answer> 3 + 4 </answer>"), answer_of("let me see\n 7 ")
    ('12', '3 + 4', '7')
    """
    return stated_answer(text, ("box", "last block", "marker", "last line"))
