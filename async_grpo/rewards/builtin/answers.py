r"""What the rewards share: the text to score, the answer in it, the row's gold answer, and an end to computations.

Each function looks at a character a bounded number of times, however the text was made to prevent that.
"""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

MAX_DIVIDER_CHARACTERS = 200  # between two boxes of one answer

_COMMAND = "\\boxed"
_DIVIDERS = {",", "and", "or", ",and", ",or"}
_LAYOUT = re.compile(r"[\s${}~]|\\(?:q?quad|text|mbox|mathrm)(?![a-zA-Z])|\\[,;:! ]")
_GROUPED_NUMBER = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_CONTENT = re.compile(r"\s*(\{|[^\s$]+)")  # of a box: a brace, or a word
_BRACE = re.compile(r"[{}]")
_FENCE = re.compile(r"[ \t]*```[ \t]*(\w*)")


class _TooSlow(BaseException):  # no Exception: libraries catch those in places, and go on
    pass


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Interrupt the block after so many seconds, with a TimeoutError. Raises ValueError outside the main thread, where no
    signal arrives. Code in C is interrupted only where it looks for signals, as matching a regular expression does.
    """

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise _TooSlow

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TooSlow as error:
        raise TimeoutError(f"{what} takes more than {seconds:g} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def completion_text(sample: dict[str, Any]) -> str:
    """The generated text without surrounding white space and without one trailing `end_token` of the row."""
    text = str(sample["completion"]).strip()
    end_token = sample.get("end_token")
    return text.removesuffix(end_token).rstrip() if end_token else text


def boxed_answer(text: str) -> str | None:
    r"""The content of the last \boxed{...} or "\boxed x"; None without one, or if its brace stays open. Boxes before it
    that only a comma, "and" or "or" divides from it are joined to it by commas; equal ones count once.

    >>> boxed_answer(r"\boxed{1}, no: $x = \boxed{2}\quad\text{and}\quad\boxed{-3}$.")
    '2, -3'
    """
    contents: list[str] = []
    position = first = len(text)
    while (position := text.rfind(_COMMAND, 0, position)) >= 0:
        box = _box_at(text, position + len(_COMMAND))
        if box is None:
            break
        content, end = box
        between = text[end:first] if first - end <= MAX_DIVIDER_CHARACTERS else "too long"
        if contents and _LAYOUT.sub("", between) not in _DIVIDERS:
            break
        first = position
        contents.append(content)
    return ", ".join(dict.fromkeys(reversed(contents))) if contents else None


def _box_at(text: str, position: int) -> tuple[str, int] | None:
    """Content and end of the box whose command ends at `position`; None if there is no content, or no end of it."""
    start = _CONTENT.match(text, position)
    if start is None or start[1] != "{":
        return (start[1], start.end()) if start else None
    depth = 1
    for brace in _BRACE.finditer(text, start.end()):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start.end() : brace.start()].strip(), brace.end()
    return None


def answer_block(text: str) -> str | None:
    """The text between the answer tags; None unless there is exactly one such block after the thought."""
    parts = re.split("(</?answer>)", text.rpartition("</think>")[2])
    return parts[2] if parts[1::2] == ["<answer>", "</answer>"] else None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Language (lower case, "" without one) and content of each closed block between lines of ```."""
    blocks: list[tuple[str, str]] = []
    fence, lines = None, list[str]()
    for line in text.split("\n"):
        if fence is None:
            fence, lines = _FENCE.match(line), []
        elif line.strip(" \t\r") == "```":
            blocks.append((fence[1].lower(), "".join(lines)))
            fence = None
        else:
            lines.append(line + "\n")
    return blocks


def gold_answer(sample: dict[str, Any]) -> str:
    r"""The row's `answer` as text: what follows the last "####" (GSM8K), or the content of its boxes (`boxed_answer`).
    Raises ValueError: there is none, it is empty, or it is neither text nor a number.

    >>> gold_answer({"answer": "9 * 113 = 1,017\n#### 1,017"}), gold_answer({"answer": 7.0})
    ('1017', '7')
    """
    answer = sample.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"the row's answer must be text or a number, not {answer!r}")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    text = str(answer).rpartition("####")[2].strip()
    boxed = boxed_answer(text)
    text = ungrouped(text if boxed is None else boxed)
    if not text:
        raise ValueError(f"the row's answer {answer!r} is empty: nothing can be compared with it")
    return text


def ungrouped(text: str) -> str:
    """A number without its thousands separators; anything else as it is."""
    return text.replace(",", "") if _GROUPED_NUMBER.fullmatch(text) else text
