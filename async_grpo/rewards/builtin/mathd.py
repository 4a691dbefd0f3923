r"""Equality of the last \boxed{} and the gold answer after the normalisation of the MATH data set.

The rules are those of Hendrycks et al., "Measuring Mathematical Problem Solving With the MATH Dataset"
(2021), but for three: thousands separators of a plain number go away; a unit ends the answer, so that `5 \text{ or }6` is
not 5; and what is left of `=` begins with a letter, so that `7x = 80` is not 80.
"""

import re
from typing import Any

from async_grpo.rewards.builtin.answers import boxed_answer, completion_text, gold_answer, ungrouped

MAX_CHARACTERS = 1000

_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\n|\\!|\\left(?![a-z])|\\right(?![a-z])", ""),
        (r"\\\\(?=[a-zA-Z])", r"\\"),  # a command that was escaped twice
        (r"\\[td]frac", r"\\frac"),
        (r"\^\s*(\{\s*\\circ\s*\}|\\circ)", ""),  # degrees
        (r"\\\$|\$|\\%|%", ""),
        (
            r"(?<=\S)\s*\\(text|mbox)\{ [^{}\d]*\}(\^\d|\^\{\d\})?\s*$",
            "",
        ),  # a unit behind the answer: 5 \text{ cm}^2
        (r"^\s*\\(text|mbox)\{([^{}]*)\}\s*$", r"\2"),  # nothing but text
        (r"(^|[\s{])\.(?=\d)", r"\g<1>0."),
        (r"^\s*[a-zA-Z]\w?\s*=(?=[^=]+$)", ""),  # k = 5
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
        (r"\\frac\s*(\w)\s*", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*(\w)", r"\1{\2}"),
    ]
]
_SIMPLE_FRACTION = re.compile(r"(-?\d+)/(-?\d+)")


def clean(text: str) -> str:
    r"""The rules that keep the text readable by a LaTeX parser: all but the removal of blanks.

    >>> clean(r"x = \dfrac12 \text{ cm}")
    '\\frac{1}{2}'
    """
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = ungrouped(text.strip())
    return r"\frac{1}{2}" if text == "0.5" else text


def normalise(text: str) -> str:
    r"""The text by which two answers are compared.

    >>> normalise("0.5") == normalise("1/2") == normalise(r"\tfrac 1 2"), normalise(r"90^\circ")
    (True, '90')
    """
    return _SIMPLE_FRACTION.sub(_as_frac, re.sub(r"\s", "", clean(text)))


def _as_frac(match: re.Match[str]) -> str:
    whole = match.span() == (0, len(match.string))
    return rf"\frac{{{match[1]}}}{{{match[2]}}}" if whole else match[0]


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""1 if the last \boxed{} equals the row's `answer`; 0 otherwise, also without a box.

    Raises:
        ValueError: the row's answer is missing or empty.

    >>> score({"completion": r"so \boxed{\frac{1}{2}}", "answer": 0.5})
    {'reward': 1.0}
    """
    gold = normalise(gold_answer(sample))
    if not gold:
        raise ValueError(f"nothing is left of the row's answer {sample['answer']!r} after normalisation")
    boxed = boxed_answer(completion_text(sample))
    if boxed is None or len(boxed) > MAX_CHARACTERS:
        return {"reward": 0.0}
    return {"reward": float(normalise(boxed) == gold)}
