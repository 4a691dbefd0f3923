r"""The answer is literally one of those accepted: for choices, names and short texts.

The answer is the content of the last \boxed{}, else of the one <answer> behind the thought, else all that is behind
the thought. Accepted is the row's `answer` (as in the mathematics rewards), or each entry of its list `answers`.
"""

import unicodedata
from typing import Any

from async_grpo.rewards.builtin.answers import boxed_answer, completion_text, gold_answer, ungrouped
from async_grpo.rewards.builtin.format import answer_block


def given_answer(text: str) -> str:
    r"""The answer in the model's text.

    >>> given_answer(r"it is \boxed{B}"), given_answer("so</think> <answer> B </answer>"), given_answer("so</think> B")
    ('B', 'B', 'B')
    """
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    block = answer_block(text)
    return (text.rpartition("</think>")[2] if block is None else block).strip()


def normalise(text: str, strip: bool = True, case: bool = False) -> str:
    """One spelling of each character (NFKC); unless told otherwise, runs of white space are one and case is none.

    >>> normalise(" The  Hague\\n"), normalise("The Hague", case=True)
    ('the hague', 'The Hague')
    """
    text = unicodedata.normalize("NFKC", text)
    text = " ".join(text.split()) if strip else text
    return ungrouped(text if case else text.casefold())


def accepted_answers(sample: dict[str, Any]) -> list[str]:
    """The row's `answers`, or else its `answer`. Raises ValueError if there is none, or one is empty."""
    answers = sample.get("answers")
    if answers is None:
        return [gold_answer(sample)]
    if not isinstance(answers, list) or not answers:
        raise ValueError(f"the row's answers must be a list of texts or numbers, not {answers!r:.200}")
    return [gold_answer({"answer": answer}) for answer in answers]


def score(sample: dict[str, Any], strip: bool = True, case: bool = False) -> dict[str, float]:
    """1 if the normalised answer is one of those accepted, else 0.

    Args:
        strip: white space does not count, but to divide words.
        case: capitals count.

    Raises:
        ValueError: the row has no answer.

    >>> score({"completion": "so</think> the  hague", "answers": ["Den Haag", "The Hague"]})
    {'reward': 1.0}
    """
    accepted = {normalise(answer, strip, case) for answer in accepted_answers(sample)}
    return {"reward": float(normalise(given_answer(completion_text(sample)), strip, case) in accepted)}
