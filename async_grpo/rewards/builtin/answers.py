r"""The text to score and the gold answer of a row, as all shipped rewards read them.

`async_grpo.rewards.answer_reading.stated` finds the answer in the text to score.
"""

import math
from decimal import Decimal
from typing import Any

from async_grpo.rewards.answer_reading.boxes import boxed_answer as boxed_answer
from async_grpo.rewards.answer_reading.boxes import has_box
from async_grpo.rewards.answer_reading.boxes import ungrouped as ungrouped
from async_grpo.rewards.answer_reading.boxes import without_delimiters as without_delimiters
from async_grpo.rewards.answer_reading.boxes import without_layout as without_layout
from async_grpo.rewards.answer_reading.fences import fenced_blocks as fenced_blocks
from async_grpo.rewards.answer_reading.prose import refuse_long_prose, without_introduction
from async_grpo.rewards.answer_reading.stated import answer_block as answer_block
from async_grpo.rewards.answer_reading.stated import stated_answer as stated_answer


def completion_text(sample: dict[str, Any]) -> str:
    """Return the completion, stripped of surrounding white space and of one trailing `end_token` (a key of the row)."""
    text = str(sample["completion"]).strip()
    end_token = sample.get("end_token")
    return text.removesuffix(end_token).rstrip() if end_token else text


def answering_part(text: str) -> str:
    r"""Return the part of a completion that contains the answer, for answers that are documents or code.

    This is the text of the <answer> block if there is exactly one and nothing follows it. In all other cases, it is the
    whole text. It is also the whole text if all fenced blocks are before the <answer> block, because the answer is then
    probably in a fenced block.

    Args:
        text: The completion without its thought.

    >>> answering_part("So: <answer>{}</answer>"), answering_part("```\n{}\n```\n<answer>above</answer>")
    ('{}', '```\n{}\n```\n<answer>above</answer>')
    """
    answer = answer_block(text)
    is_last = text.rstrip().endswith("</answer>")
    if answer is None or not is_last or not answer.strip():
        return text
    has_blocks_before = bool(fenced_blocks(text)) and not fenced_blocks(answer)
    return text if has_blocks_before else answer


def gold_answer(sample: dict[str, Any], is_latex: bool = True) -> str:
    r"""Return the gold answer of a row, as text.

    It is the text after the last "####" in the row's `answer` (as in GSM8K), or else the whole `answer`. If that text
    contains one <answer> or boxes, it is their content. LaTeX layout (`without_layout`) and thousands separators are
    removed.

    Args:
        sample: The row, with or without a completion.
        is_latex: Whether the answer is LaTeX. If it is not, for example a path or a name, characters that would be
            layout in LaTeX are kept, except in a box or a formula.

    Raises:
        ValueError: The answer is missing, empty, or neither text nor a number, or the brace of its box is not closed.

    >>> gold_answer({"answer": "9 * 113 = 1,017\n#### 1,017"}), gold_answer({"answer": 7.0})
    ('1017', '7')
    """
    answer = sample.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"the row's answer must be text or a number, not {answer!r}")
    if isinstance(answer, float) and math.isfinite(answer):
        # In plain decimals, because `str` would return "1e-05"
        answer = int(answer) if answer.is_integer() else f"{Decimal(repr(answer)):f}"
    text = str(answer).rpartition("####")[2].strip()
    text = (answer_block(text) or text).strip()
    if has_box(text):
        boxed = boxed_answer(text)
        if boxed is None:
            raise ValueError(f"the box in the row's answer {answer!r} has no end: close its brace")
        text = boxed
    text = ungrouped(without_layout(text) if is_latex else without_delimiters(text))
    if not text:
        raise ValueError(f"the row's answer {answer!r} is empty: nothing can be compared with it")
    return text


def mathematical_gold(sample: dict[str, Any]) -> str:
    """Return the gold answer of a row for the rewards that compare values, without words before its value.

    Raises:
        ValueError: See `gold_answer`. Or the answer consists of several sentences or many words, or is a JSON object.

    >>> mathematical_gold({"answer": "So the answer is 18 dollars"}), mathematical_gold({"answer": "5 or more"})
    ('18 dollars', '5 or more')
    """
    gold = without_introduction(gold_answer(sample))
    if gold.startswith('{"') and gold.endswith("}"):
        raise ValueError(
            f"the row's answer {gold!r:.200} is a JSON object: name the field that holds the value, such as by "
            "--answer-column answer.ground_truth"
        )
    refuse_long_prose(gold)
    return gold
