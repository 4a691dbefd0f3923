r"""What the rewards share: the text to score, the row's gold answer, and an end to computations.

How the answer is read in a text stands in `async_grpo.rewards.answer_reading.stated`, for all rewards alike.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from async_grpo.rewards.answer_reading.boxes import boxed_answer as boxed_answer
from async_grpo.rewards.answer_reading.boxes import has_box
from async_grpo.rewards.answer_reading.boxes import ungrouped as ungrouped
from async_grpo.rewards.answer_reading.boxes import without_delimiters as without_delimiters
from async_grpo.rewards.answer_reading.boxes import without_layout as without_layout
from async_grpo.rewards.answer_reading.stated import answer_block as answer_block
from async_grpo.rewards.answer_reading.stated import fenced_blocks as fenced_blocks
from async_grpo.rewards.answer_reading.stated import stated_answer as stated_answer


class _TimeLimitReached(BaseException):  # no Exception: libraries catch those in places, and go on
    pass


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Interrupt the block after so many seconds, with a TimeoutError. Raises ValueError outside the main thread, where no
    signal arrives. Code in C is interrupted only where it looks for signals, as matching a regular expression does.
    """

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise _TimeLimitReached

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TimeLimitReached as error:
        raise TimeoutError(f"{what} takes more than {seconds:g} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


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
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
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
