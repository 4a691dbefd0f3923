"""Signs that a reward is gamed, read off the metrics lines of a run, in words: as `alarms` of the step.

What the last RECENT steps say is compared with what as many said, BEFORE steps ago: the difference must be large in itself
and many standard errors, as a step alone is noise, and a small reward for the format is earned by all in every good run.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

RECENT, BEFORE, KEPT = 10, 60, 1000  # steps: to average over, to compare with, to look back for evaluations
ENDING = 60  # characters; a shorter one, a closing tag, honest completions share
SURE = 4.0  # standard errors
Line = Mapping[str, Any]


def hacking_alarms(lines: Sequence[Line]) -> list[str]:
    """The alarms of the last of these steps, the oldest first: lengths drift without being paid for, endings repeat, one
    reward of several is earned by all, evaluations fall as the reward rises."""
    found: list[str] = []
    then, now = lines[-BEFORE : RECENT - BEFORE], lines[-RECENT:]
    reward_then, reward, error = _compared("avg_reward", then, now)
    paid = reward - reward_then > SURE / 2 * error
    before, after, error = _compared("avg_output_tokens", then, now)
    drifts = after > 2 * before or (not paid and not before / 1.5 < after < 1.5 * before)
    if drifts and abs(after - before) > SURE * error:
        lengths = f"from {before:.0f} to {after:.0f} tokens within {BEFORE} steps"
        found.append(f"completions went {lengths}: does the reward pay for length?")
    before, after, error = _compared("repeated_endings", then, now)
    if after - before > max(0.2, SURE * error):
        ends = f"{after:.0%} of the completions end in words said before"
        found.append(f"{ends}; {BEFORE} steps ago {before:.0%}")
    spreads = [key for key in (lines[-1] if lines else ()) if re.fullmatch("(?!eval_).*/reward_std", key)]
    for key in spreads if len(spreads) > 1 else ():
        before, after, _ = _compared(key, then, now)
        _, says, _ = _compared(name := key.removesuffix("_std"), then, now)
        highest = max((line[name] for line in lines if line.get(name) is not None), default=math.inf)
        varied = before > max(0.02 * highest, 10 * after)
        if varied and says > max(0.25 * reward, 0.98 * highest):
            found.append(f"{name} is {says:.3g} for nearly every sample: it tells them apart no more")
    return found + _falling_evaluations(lines)


def _falling_evaluations(lines: Sequence[Line]) -> list[str]:
    """Those whose last two are below their best one, intervals and all, while the reward in training rose."""
    found: list[str] = []
    evaluated = [(place, line) for place, line in enumerate(lines) if "eval_step" in line]
    keys = [key for _, line in evaluated[-1:] for key in line if re.fullmatch("eval_(.+_)?avg_reward", key)]
    for key in keys:
        told = [(place, line.get(key), line.get(f"{key}_ci")) for place, line in evaluated]
        known: list[Any] = [one for one in told if None not in one]
        best, value, half = max(known[:-2], key=lambda one: one[1] - one[2], default=(0, -math.inf, 0.0))
        before, after, error = _compared("avg_reward", lines[: best + 1][-RECENT:], lines[-RECENT:])
        fell = all(later + its_half < value - half for _, later, its_half in known[-2:])
        if fell and after - before > SURE / 2 * error:
            falls = f"{key} fell from {value:.3g} to {known[-1][1]:.3g}"
            found.append(f"the reward rose from {before:.3g} to {after:.3g} while {falls}: is it gamed?")
    return found


def _compared(key: str, then: Sequence[Line], now: Sequence[Line]) -> tuple[float, float, float]:
    """Its means then and now, and the standard error of their difference; NaN, above which nothing is, if unknown."""
    windows = [[line[key] for line in part if line.get(key) is not None] for part in (then, now)]
    if min(map(len, windows)) <= RECENT // 2:
        return math.nan, math.nan, math.nan
    error = math.sqrt(sum(np.var(window, ddof=1) / len(window) for window in windows))
    return float(np.mean(windows[0])), float(np.mean(windows[1])), error


def repeated_endings(completions: Iterable[tuple[Any, str]]) -> float:
    """Of (prompt, completion) the share whose last ENDING characters end one to another prompt, too, or came before in it.

    The first is a phrase that is paid for whatever was asked, the second a loop. What is no longer repeats nothing.

    >>> repeated_endings([("a", "I hope this helps! " * 5), ("b", "no")])
    0.5
    """
    given, asked = list(completions), dict[str, set[Any]]()
    for prompt, text in given:
        asked.setdefault(text[-ENDING:], set()).add(prompt)
    ends = [(text, text[-ENDING:]) for _, text in given if len(text) > ENDING]
    return sum(len(asked[end]) > 1 or end in text[:-1] for text, end in ends) / max(len(given), 1)


def alarm_kind(alarm: str) -> str:
    """An alarm without its numbers: the same in every step.

    >>> alarm_kind("math: 2 of 1,024 calls failed")
    'math: # of # calls failed'
    """
    return re.sub(r"\d[\d.,]*", "#", alarm)
