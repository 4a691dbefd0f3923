"""Countdown, judged step by step: what a process reward model says, by rule.

    each number in the answer   +f if it is one of `nums` and not used before, else -f
    the close of the answer     +1 if it is right, as `countdown` judges

with f = 0.3 / len(nums), so that all numbers together are worth less than the answer. The answer begins with the
only <answer> behind the thought. One without an end is judged as far as it goes; without a beginning, or with
several, there are no steps. No more than 2 * len(nums) numbers are judged: babble must not cost without bound.
"""

import re
from itertools import islice
from typing import Any

from async_grpo.rewards.builtin.answers import completion_text
from async_grpo.rewards.builtin.countdown import score as outcome
from async_grpo.rewards.builtin.countdown import task_of

NUMBERS_CREDIT = 0.3  # of all numbers together
_OPEN, _CLOSE = "<answer>", "</answer>"
_NUMBER = re.compile(r"[0-9]+")


def answer_bounds(text: str) -> tuple[int, int]:
    """Where the only answer behind the thought begins and ends; (0, 0) if there is not exactly one beginning.

    >>> answer_bounds("</think><answer>1+2</answer>"), answer_bounds("1+2</answer>")
    ((16, 19), (0, 0))
    """
    thought_end = text.rfind("</think>") + 1  # 0 without a thought: then the whole text is searched
    if text.count(_OPEN, thought_end) != 1:
        return 0, 0
    begin = text.index(_OPEN, thought_end) + len(_OPEN)
    end = text.find(_CLOSE, begin)
    return begin, end if end >= 0 else len(text)


def number_steps(text: str, begin: int, end: int, nums: list[int]) -> list[dict[str, float]]:
    """A step for each number written in text[begin:end]. As text: "03" is not 3.

    >>> number_steps("14*14", 0, 5, [14, 3])
    [{'reward': 0.15, 'char_end': 2}, {'reward': -0.15, 'char_end': 5}]
    """
    unused = [str(number) for number in nums]
    credit = NUMBERS_CREDIT / len(nums)
    steps = []
    for match in islice(_NUMBER.finditer(text, begin, end), 2 * len(nums)):
        fits = match[0] in unused
        if fits:
            unused.remove(match[0])
        steps.append({"reward": credit if fits else -credit, "char_end": match.end()})
    return steps


def score(sample: dict[str, Any]) -> dict[str, Any]:
    """The steps, and what they are worth by kind.

    Raises:
        ValueError: the row has no usable `nums` or `target`.

    >>> found = score({"completion": "</think><answer>9</answer>", "nums": [9], "target": 9})
    >>> found["step_rewards"]
    [{'reward': 0.3, 'char_end': 17}, {'reward': 1.0, 'char_end': 26}]
    """
    nums, _ = task_of(sample)
    answer_reward = outcome(sample)["answer_reward"]
    text = str(sample["completion"])
    indent = len(text) - len(text.lstrip())  # the rules see the text without it, and without the end token
    text = text[: indent + len(completion_text(sample))]
    begin, end = answer_bounds(text)
    steps = number_steps(text, begin, end, nums)
    numbers_reward = sum(step["reward"] for step in steps)
    if answer_reward:
        steps.append({"reward": answer_reward, "char_end": end + len(_CLOSE)})
    return {"step_rewards": steps, "numbers_reward": numbers_reward, "answer_reward": answer_reward}
