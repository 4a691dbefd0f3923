r"""Splits a sequence that is abbreviated with dots, such as `1, 3, \ldots, 2n-1`, into the terms that are written."""

import re
from typing import NamedTuple

DOTS = "\u2026"  # the term that stands for the terms that are left out

_DOTS = re.compile(r"\\[lcd]?dots[bcimo]?(?![a-zA-Z])|\.{3}")
# The name before a sequence, as in `a_n =` or `n \in`
_NAME = re.compile(r"\s*[a-zA-Z](?:_\{?\w{1,8}\}?)?\s*(?:=|\\in(?![a-zA-Z]))")
_VARIABLE = re.compile(r"[a-zA-Z](?:_\w)?")
# Parts of a sequence that have no meaning: \left and \right, space, and delimiters of formulas
_LAYOUT = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:! ]|\\q?quad(?![a-zA-Z])|[~$]")
_BRACKETS = (r"\{\}", "()", "[]")
_DEPTHS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class Sequence(NamedTuple):
    """A sequence with dots.

    Attributes:
        brackets: `()` or `[]` around the whole sequence, or "". Braces do not count.
        terms: The terms that are written, and `DOTS` where others are left out.
    """

    brackets: str
    terms: list[str]


def read_sequence(text: str) -> Sequence | None:
    r"""Return the terms of a sequence with dots, or None if the text is not such a sequence.

    A name before the sequence, as in `n = 1, 2, \dots`, is not part of the sequence.

    >>> read_sequence(r"\{1, f(2, 3), \dots, n\}")
    Sequence(brackets='', terms=['1', 'f(2, 3)', '…', 'n'])
    >>> read_sequence("1, 2"), read_sequence("0.333...")
    (None, None)
    """
    text = _LAYOUT.sub(" ", _DOTS.sub(DOTS, text)).strip().rstrip(".")
    if DOTS not in text:
        return None
    text = text[_end_of_name(text) :].strip()
    brackets = ""
    for pair in _BRACKETS:
        half = len(pair) // 2
        if text.startswith(pair[:half]) and text.endswith(pair[half:]):
            text = text[half:-half].strip()
            brackets = pair if half == 1 else ""
            break
    terms = []
    for part in _split_at_commas(text):
        # Dots inside of a part, as in 0.333... or 1 + 2 + ... + n, do not stand for whole terms
        if part.startswith(DOTS):
            terms.append(DOTS)
            part = part.removeprefix(DOTS).strip()
        if part:
            terms.append(part)
    if DOTS not in terms or len(terms) == 1:
        return None
    return Sequence(brackets, terms)


def values_of_tuple(text: str) -> str | None:
    r"""Return the values of a list of equations such as `y = 2, x = 1` as a tuple, in the alphabetical order of the names.

    Return None for any other text, or if a name occurs twice.

    >>> values_of_tuple("y = 2, x = 1"), values_of_tuple("x = 1, x = 2"), values_of_tuple("x = 1")
    ('(1, 2)', None, None)
    """
    parts = [part.partition("=") for part in _split_at_commas(text)]
    names = {name.strip() for name, _, _ in parts}
    has_names = all(
        _VARIABLE.fullmatch(name.strip()) and value and "=" not in value for name, _, value in parts
    )
    if len(parts) < 2 or len(names) < len(parts) or not has_names:
        return None
    values = {name.strip(): value.strip() for name, _, value in parts}
    return f"({', '.join(values[name] for name in sorted(names))})"


def _end_of_name(text: str) -> int:
    match = _NAME.match(text)
    return match.end() if match else 0


def _split_at_commas(text: str) -> list[str]:
    """Return the parts between the commas outside of all brackets, without empty parts."""
    parts = []
    depth = 0
    begin = 0
    for position, character in enumerate(text):
        depth += _DEPTHS.get(character, 0)
        if character == "," and depth == 0:
            parts.append(text[begin:position].strip())
            begin = position + 1
    parts.append(text[begin:].strip())
    return [part for part in parts if part]
