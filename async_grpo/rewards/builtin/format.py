"""Is the response a thought followed by exactly one answer?

The prompt of a row ends with "<think>", so the response is "<think>" plus the completion. Well formed is

    <think> ... </think>
    <answer> ... </answer>

with one line break between the two, nothing behind the answer, one `</think>` and one answer. The thought may
mention the answer tags: only what follows `</think>` counts as answer.
"""

import re
from typing import Any

from async_grpo.rewards.builtin.answers import completion_text

_WELL_FORMED = re.compile(r"<think>.*?</think>\n<answer>.*?</answer>", re.DOTALL)
_THOUGHT_CREDIT, _ANSWER_CREDIT = 0.1, 0.5


def response_text(sample: dict[str, Any]) -> str:
    """The response as the rules see it: the prefilled "<think>" and the completion without its end token."""
    return "<think>" + completion_text(sample)


def answer_block(response: str) -> str | None:
    """The text between the answer tags; None unless there is exactly one such block after the thought.

    >>> answer_block("<think>I owe an <answer>.</think>\\n<answer> 1+2 </answer>")
    ' 1+2 '
    >>> answer_block("<think></think>\\n<answer>1</answer> or <answer>2</answer>") is None
    True
    """
    tail = response.rpartition("</think>")[2]
    if tail.count("<answer>") != 1 or tail.count("</answer>") != 1:
        return None
    start, end = tail.index("<answer>") + len("<answer>"), tail.index("</answer>")
    return tail[start:end] if start <= end else None


def well_formedness(response: str) -> float:
    """1.0 for a well-formed response, else 0.1 for a closed thought plus 0.5 for exactly one answer.

    >>> well_formedness("<think>so</think>\\n<answer>1</answer>"), well_formedness("<think>so</think> 1")
    (1.0, 0.1)
    """
    has_answer = answer_block(response) is not None
    if has_answer and response.count("</think>") == 1 and _WELL_FORMED.fullmatch(response):
        return 1.0
    return _THOUGHT_CREDIT * ("</think>" in response) + _ANSWER_CREDIT * has_answer


def score(sample: dict[str, Any], weight: float = 0.1) -> dict[str, float]:
    """`weight` times the well-formedness.

    >>> score({"completion": "so</think>\\n<answer>1</answer>"})
    {'reward': 0.1, 'format_reward': 1.0}
    """
    format_reward = well_formedness(response_text(sample))
    return {"reward": weight * format_reward, "format_reward": format_reward}
