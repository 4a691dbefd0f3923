r"""What the rewards share: the text to score and the row's gold answer.

How the answer is read in a text stands in `async_grpo.rewards.answer_reading.stated`, for all rewards alike.
"""

import math
from decimal import Decimal
from typing import Any

from async_grpo.rewards.answer_reading.boxes import boxed_answer as boxed_answer
from async_grpo.rewards.answer_reading.boxes import has_box
from async_grpo.rewards.answer_reading.boxes import ungrouped as ungrouped
from async_grpo.rewards.answer_reading.boxes import without_delimiters as without_delimiters
from async_grpo.rewards.answer_reading.boxes import without_layout as without_layout
from async_grpo.rewards.answer_reading.stated import answer_block as answer_block
from async_grpo.rewards.answer_reading.stated import fenced_blocks as fenced_blocks
from async_grpo.rewards.answer_reading.stated import stated_answer as stated_answer


def completion_text(sample: dict[str, Any]) -> str:
    """The generated text without surrounding white space and without one trailing `end_token` of the row."""
    text = str(sample["completion"]).strip()
    end_token = sample.get("end_token")
    return text.removesuffix(end_token).rstrip() if end_token else text


def gold_answer(sample: dict[str, Any], is_latex: bool = True) -> str:
    r"""Return the row's `answer` as text: what follows the last "####" (GSM8K), or the content of its boxes.

    It is read as the answer of a completion is (`boxed_answer`, `without_layout`). What is no LaTeX (a path, a name) keeps
    what would be layout there, but in a box or a formula.

    Raises:
        ValueError: there is no answer, it is empty, its box is cut off, or it is neither text nor a number.

    >>> gold_answer({"answer": "9 * 113 = 1,017\n#### 1,017"}), gold_answer({"answer": 7.0})
    ('1017', '7')
    """
    answer = sample.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"the row's answer must be text or a number, not {answer!r}")
    if isinstance(answer, float) and math.isfinite(answer):
        answer = int(answer) if answer.is_integer() else f"{Decimal(repr(answer)):f}"  # Python writes 1e-05
    text = str(answer).rpartition("####")[2].strip()
    if has_box(text):
        boxed = boxed_answer(text)
        if boxed is None:
            raise ValueError(f"the box in the row's answer {answer!r} has no end: close its brace")
        text = boxed
    text = ungrouped(without_layout(text) if is_latex else without_delimiters(text))
    if not text:
        raise ValueError(f"the row's answer {answer!r} is empty: nothing can be compared with it")
    return text
