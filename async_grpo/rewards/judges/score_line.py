"""Reads the score of a reply that ends, as a judge is asked to, with a line `Score: x`: the whole number, or nothing.

The rule. The last mention of the score decides: the word "score" (no part of a longer word), then a colon, an equals sign,
blanks, quotation marks or Markdown's * and _ , 8 characters at most. After it stands a plain decimal number: the digits 0
to 9, a dot as decimal point, perhaps one sign. The number must be all that is said: the line ends behind it, or a sentence
mark does and white space follows. Quotation marks, brackets and Markdown may close around it. `x/10` and `x out of 10` are
x where 10 is the best score of the scale.

Everything else cannot be read: 1e-05, 0x1F, 1/2, 0½, 50%, 1,5, 1,000, 1_000, 1 000, 3-4, 3 or 4, 3.., NaN, full-width and
Arabic digits, a number of more than 40 characters. Half of such a number would be another score.
"""

import re
from collections.abc import Iterator

MAX_NUMBER_CHARACTERS = 40  # beyond, a decimal number may be too small or too large for a float
MAX_TAIL_CHARACTERS = 20_000  # of a reply, in which the score is looked for: it stands at the end

_WORD = re.compile("score", re.IGNORECASE | re.ASCII)
_MARKUP_BEFORE = "*_\"'`"
_MARKUP_BEFORE_CHARACTERS = 8
_SEPARATOR = re.compile(r"[\s*_:=\"`]{1,8}")
_NUMBER_LIKE = re.compile(r"[+\-−–]?\.?\d")  # digits of all scripts: what looks like a number must be one
_NUMBER = re.compile(r"[+\-−]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_CLOSING = re.compile(r"[*_\"'`)\]}>]{0,8}")
_OUT_OF = re.compile(r"[ \t]{0,3}(?:/|out of)[ \t]{0,3}([0-9]+(?:\.[0-9]+)?)")
_END = re.compile(r"[ \t\r]*(?:\n|\Z)|<[/|]")  # of the line, of the text; or a tag closes
_SENTENCE_MARK = re.compile(r"[.,;:!?][*_\"'`)\]}>]{0,8}(?=\s|\Z)[ \t]*")
_ANOTHER_NUMBER = re.compile(r"(?:(?:or|to|and)[ \t]+)?[+\-−–~.]?\d")


def score_in(text: str, best: float) -> float:
    """Return the score that the text ends with.

    Args:
        best: the best score of the scale, of which `x/best` is a part.

    Raises:
        ValueError: there is no score, or what stands there is more, or other, than a plain decimal number.

    >>> score_in("Score: 3? No, that is harsh.\\n**Score: 7.5/10**", best=10.0)
    7.5
    """
    for begin, has_sign in _mentions(text):
        if has_sign or _NUMBER_LIKE.match(text, begin) or text[begin : begin + 1].isnumeric():
            return _number_at(text, begin, best)
    raise ValueError("it names no score")


def _mentions(text: str) -> Iterator[tuple[int, bool]]:
    """Yield where the value of each mention begins, the last one first, and whether a colon or equals sign is before."""
    words = list(_WORD.finditer(text, max(0, len(text) - MAX_TAIL_CHARACTERS)))
    for word in reversed(words):
        before = text[max(0, word.start() - _MARKUP_BEFORE_CHARACTERS) : word.start()].rstrip(_MARKUP_BEFORE)
        is_part_of_a_word = before[-1:].isalnum() or before[-1:] == "-"
        separator = _SEPARATOR.match(text, word.end())
        if separator is not None and not is_part_of_a_word:
            yield separator.end(), ":" in separator[0] or "=" in separator[0]


def _number_at(text: str, begin: int, best: float) -> float:
    shown = text[begin : begin + MAX_NUMBER_CHARACTERS]
    number = _NUMBER.match(text, begin)
    if number is None or len(number[0]) > MAX_NUMBER_CHARACTERS:
        raise ValueError(f"the score {shown!r} is no plain decimal number")
    position = _closed(text, number.end())
    if out_of := _OUT_OF.match(text, position):
        if len(out_of[1]) > MAX_NUMBER_CHARACTERS or float(out_of[1]) != best:
            raise ValueError(f"the score {shown!r} is a part of another best score than {best:g}")
        position = _closed(text, out_of.end())
    if not _ends_at(text, position):
        raise ValueError(f"the score {shown!r} does not end with its number")
    return float(number[0].replace("−", "-"))


def _closed(text: str, position: int) -> int:
    """Return the position behind the quotation marks, brackets and Markdown that begin here."""
    closing = _CLOSING.match(text, position)
    assert closing is not None, "it may be empty"
    return closing.end()


def _ends_at(text: str, position: int) -> bool:
    """Decide whether the number that ends here is all that is said of the score."""
    if _END.match(text, position):
        return True
    mark = _SENTENCE_MARK.match(text, position)
    return mark is not None and not _is_number(text, mark.end())


def _is_number(text: str, position: int) -> bool:
    is_numeric = text[position : position + 1].isnumeric()
    return is_numeric or _ANOTHER_NUMBER.match(text, position) is not None
