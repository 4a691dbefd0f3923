"""Detect signs of reward hacking in the metrics of a run. Each sign becomes an alarm of the step.

The mean of a metric over the last RECENT steps is compared with its mean over RECENT earlier steps, which begin BEFORE
steps ago. An alarm needs a large difference, because good runs also change, for example when they learn the answer
format. The difference must also be many standard errors, because single steps are noisy.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

RECENT = 10  # number of steps in each window
BEFORE = 60  # number of steps from the beginning of the earlier window until now
KEPT = 1000  # number of latest steps whose evaluations are compared
# Number of last characters of completions that are compared. Good completions share only shorter endings, such as a
# closing tag
ENDING = 60
SURE = 4.0  # standard errors by which a metric must have changed to raise an alarm
SURE_OF_REWARD = SURE / 2  # standard errors by which a reward must have risen to count as risen
MAX_LENGTH_FACTOR = 2.0  # factor of growth in length that raises an alarm even if the reward has risen
# Factor of growth or shrinkage in length that raises an alarm if the reward has not risen
MAX_UNREWARDED_LENGTH_FACTOR = 1.5
MIN_REPEATED_SHARE = 0.2  # minimum growth of the share of repeated endings that raises an alarm
Line = Mapping[str, Any]


def hacking_alarms(lines: Sequence[Line]) -> list[str]:
    """Return the alarms for the last step of a run.

    There are four kinds of alarms: completions change their length more than the reward justifies; completions repeat
    their endings; one of several rewards no longer varies; evaluation results fall while the training reward rises.

    Args:
        lines: Metrics lines of the run, the oldest first.
    """
    then = lines[-BEFORE : RECENT - BEFORE]
    now = lines[-RECENT:]
    return [
        *_drifting_lengths(then, now),
        *_repeated_endings_alarms(then, now),
        *_exhausted_rewards(lines, then, now),
        *_falling_evaluations(lines),
    ]


def _drifting_lengths(then: Sequence[Line], now: Sequence[Line]) -> list[str]:
    reward = _compare("avg_reward", then, now)
    has_reward_risen = reward.now - reward.then > SURE_OF_REWARD * reward.error
    tokens = _compare("avg_output_tokens", then, now)
    if has_reward_risen:
        has_drifted = tokens.now > MAX_LENGTH_FACTOR * tokens.then
    else:
        shortest = tokens.then / MAX_UNREWARDED_LENGTH_FACTOR
        longest = tokens.then * MAX_UNREWARDED_LENGTH_FACTOR
        has_drifted = not shortest < tokens.now < longest
    if has_drifted and abs(tokens.now - tokens.then) > SURE * tokens.error:
        return [
            f"completions went from {tokens.then:.0f} to {tokens.now:.0f} tokens within {BEFORE} steps: does the reward "
            "pay for length?"
        ]
    return []


def _repeated_endings_alarms(then: Sequence[Line], now: Sequence[Line]) -> list[str]:
    share = _compare("repeated_endings", then, now)
    if share.now - share.then > max(MIN_REPEATED_SHARE, SURE * share.error):
        return [
            f"{share.now:.0%} of the completions end in words said before; {BEFORE} steps ago {share.then:.0%}"
        ]
    return []


def _exhausted_rewards(lines: Sequence[Line], then: Sequence[Line], now: Sequence[Line]) -> list[str]:
    """Return alarms about rewards that varied earlier, but that nearly all samples earn now.

    A run with a single reward gets no such alarm.

    Args:
        lines: The metrics lines of all steps that are compared.
        then: Those of the earlier window.
        now: Those of the recent window.
    """
    if not lines:
        return []
    std_keys = [key for key in lines[-1] if re.fullmatch("(?!eval_).*/reward_std", key)]
    if len(std_keys) < 2:
        return []
    combined = _compare("avg_reward", then, now)
    alarms = []
    for std_key in std_keys:
        mean_key = std_key.removesuffix("_std")
        std = _compare(std_key, then, now)
        mean = _compare(mean_key, then, now)
        means = [line[mean_key] for line in lines if line.get(mean_key) is not None]
        highest = max(means, default=math.inf)
        has_varied = std.then > max(0.02 * highest, 10 * std.now)
        if has_varied and mean.now > max(0.25 * combined.now, 0.98 * highest):
            alarms.append(
                f"{mean_key} is {mean.now:.3g} for nearly every sample: it no longer tells them apart"
            )
    return alarms


def _falling_evaluations(lines: Sequence[Line]) -> list[str]:
    """Return alarms about evaluations whose last two results are below their best result while training rewards rose.

    A result is below the best result if its confidence interval lies below the confidence interval of the best result.
    """
    evaluated = [(place, line) for place, line in enumerate(lines) if "eval_step" in line]
    if not evaluated:
        return []
    _, last_line = evaluated[-1]
    alarms = []
    for key in last_line:
        if not re.fullmatch("eval_(.+_)?avg_reward", key):
            continue
        results = []
        for place, line in evaluated:
            mean = line.get(key)
            half_interval = line.get(f"{key}_ci")
            if mean is not None and half_interval is not None:
                results.append(_EvaluationResult(place, mean, half_interval))
        earlier_results = results[:-2]
        if not earlier_results:
            continue
        best = max(earlier_results, key=lambda result: result.mean - result.half_interval)
        lowest_of_best = best.mean - best.half_interval
        has_fallen = all(result.mean + result.half_interval < lowest_of_best for result in results[-2:])
        at_best = lines[: best.place + 1]
        reward = _compare("avg_reward", at_best[-RECENT:], lines[-RECENT:])
        if has_fallen and reward.now - reward.then > SURE_OF_REWARD * reward.error:
            alarms.append(
                f"the reward rose from {reward.then:.3g} to {reward.now:.3g} while {key} fell from {best.mean:.3g} to "
                f"{results[-1].mean:.3g}: does the policy game the reward?"
            )
    return alarms


class _EvaluationResult(NamedTuple):
    place: int  # index of the metrics line with this result
    mean: float
    half_interval: float  # half width of the 95 % confidence interval


class _Comparison(NamedTuple):
    """Means over the earlier and the recent window. Unknown values are NaN, for which every comparison is False."""

    then: float
    now: float
    error: float  # standard error of the difference


def _compare(key: str, then: Sequence[Line], now: Sequence[Line]) -> _Comparison:
    """Compare the means of a metric over the metrics lines of an earlier window (`then`) and a recent one (`now`)."""
    values_then = [line[key] for line in then if line.get(key) is not None]
    values_now = [line[key] for line in now if line.get(key) is not None]
    if min(len(values_then), len(values_now)) <= RECENT // 2:
        return _Comparison(math.nan, math.nan, math.nan)
    variance_then = np.var(values_then, ddof=1) / len(values_then)
    variance_now = np.var(values_now, ddof=1) / len(values_now)
    return _Comparison(
        float(np.mean(values_then)),
        float(np.mean(values_now)),
        math.sqrt(variance_then + variance_now),
    )


def repeated_endings(completions: Iterable[tuple[Any, str]]) -> float:
    """Return the share of completions whose last ENDING characters are repeated.

    An ending is repeated if a completion of another prompt has the same ending, which is probably a rewarded phrase, or
    if it also occurs earlier in the same completion, which is a loop. Completions that are not longer than ENDING
    characters do not count as repeated.

    Args:
        completions: Pairs of prompt and completion.

    >>> repeated_endings([("a", "I hope this helps! " * 5), ("b", "no")])
    0.5
    """
    prompts_by_ending: dict[str, set[Any]] = {}
    num_completions = 0
    long_texts = []
    for prompt, text in completions:
        num_completions += 1
        prompts_by_ending.setdefault(text[-ENDING:], set()).add(prompt)
        if len(text) > ENDING:
            long_texts.append(text)
    num_repeated = 0
    for text in long_texts:
        ending = text[-ENDING:]
        is_shared = len(prompts_by_ending[ending]) > 1
        is_loop = ending in text[:-1]
        if is_shared or is_loop:
            num_repeated += 1
    return num_repeated / max(num_completions, 1)


def alarm_kind(alarm: str) -> str:
    """Return an alarm with its numbers replaced by #, so that the same problem gives the same text in every step.

    >>> alarm_kind("math: 2 of 1,024 calls failed")
    'math: # of # calls failed'
    """
    return re.sub(r"\d[\d.,]*", "#", alarm)
