r"""`stated_answer`: the rule that rewards, votes and evaluations use to find the answer in a completion.

All functions take linear time, even for texts that are written to slow them down.
"""

import re
from collections.abc import Sequence
from typing import Literal

from async_grpo.rewards.answer_reading.boxes import boxed_answer, has_box
from async_grpo.rewards.answer_reading.fences import fenced_blocks

Form = Literal["box", "written box", "block", "last block", "marker", "rest", "last line"]


def stated_answer(text: str, forms: Sequence[Form] = ("box", "block")) -> str | None:
    r"""Return the answer that a completion states, or None if it states none.

    The forms are tried in the given order. The first one that the text contains decides.

        box         the last \boxed{...} (`boxed_answer`). If the last box is cut off, the result is None, and no
                    other form is tried
        written box the same box with its LaTeX layout ($, \left, spacing commands); only white space is stripped
        block       the text of <answer>...</answer>, if there is exactly one such block after the thought
        last block  the text of the last complete <answer>...</answer> after the thought
        marker      the rest of the line after the last "####", if it contains a digit (as in GSM8K)
        rest        all text after the thought
        last line   the last line, or the block between lines of ``` or ~~~ if the text ends with one

    A thought ends with the last "</think>". Only the text after it is searched, unless nothing follows the thought.

    >>> stated_answer(r"<think>\boxed{3}?</think> So \boxed{4}."), stated_answer(r"\boxed{3}, no: \boxed{\frac{4")
    ('4', None)
    """
    behind_thought = text.rpartition("</think>")[2]
    spoken = behind_thought if behind_thought.strip() else text
    for form in forms:
        answer: str | None = None
        if form in ("box", "written box") and has_box(spoken):
            return boxed_answer(spoken, keeps_layout=form == "written box")
        if form == "block":
            answer = _only_block(spoken)
        elif form == "last block":
            answer = _last_block(spoken)
        elif form == "marker":
            answer = _marked_line(spoken)
        elif form == "rest":
            answer = spoken
        elif form == "last line":
            answer = _last_line(spoken)
        if answer is not None:
            return answer.strip()
    return None


def answer_block(text: str) -> str | None:
    """Return the text between <answer> and </answer>, or None unless exactly one such block follows the thought."""
    return _only_block(text.rpartition("</think>")[2])


def _only_block(text: str) -> str | None:
    """Return the text between <answer> and </answer>, or None unless there is exactly one such block."""
    parts = re.split("(</?answer>)", text)
    tags = parts[1::2]
    return parts[2] if tags == ["<answer>", "</answer>"] else None


def _last_block(text: str) -> str | None:
    """Return the text of the last complete <answer>...</answer>, or None if there is none."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    return content if opening and closing else None


def _marked_line(text: str) -> str | None:
    """Return the rest of the line after the last "####", or None if it has no digit, as in a Markdown heading."""
    _, marker, behind = text.rpartition("####")
    line = behind.strip().partition("\n")[0]
    has_digit = any(character.isdecimal() for character in line)
    return line if marker and has_digit else None


def _last_line(text: str) -> str | None:
    """Return the last line, or the fenced block at the end of the text. Return None if the text is blank."""
    text = text.strip()
    line = text.rpartition("\n")[2].strip()
    if line.startswith(("```", "~~~")) and not line.strip(line[0]):
        blocks = fenced_blocks(text)
        return blocks[-1][1] if blocks else line
    return line or None
