r"""`score_in` reads the score of a reply that ends with a line `Score: x`. It never reads only a part of the number.

The last mention of the score counts. A mention is the word "score", not as a part of a longer word, followed by a
separator: a colon, an equals sign, blanks, quotation marks, Markdown's * and _ , or the word "is". A mention with a
colon, an equals sign or "is" takes precedence over one without. The separator is followed by a plain decimal number:
the digits 0 to 9, optionally with a decimal point and a sign. The number may be enclosed in brackets, \boxed{} or a
pair of dollar signs. `x/10` and `x out of 10` are read as x if 10 is the best score of the scale.

The number must be followed by the end of the line, by a closing tag, or by a punctuation mark and white space. If the
mention has a colon or an equals sign, a remark may follow the number on the same line. A remark begins with a bracket,
a dash between blanks, a check mark or a word that cannot be a part of a number. It has no other number, in digits or
words, near its beginning.

Everything else is an error: 1e-05, 0x1F, 1/2, 0½, 50%, 1,5, 1,000, 1_000, 1 000, 3-4, 3 or 4, 3.., NaN, full-width and
Arabic digits, a number of more than 40 characters. Reading only a part of such a number would give a wrong score.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_NUMBER_CHARACTERS = 40  # a longer number may be too small or too large for a float
MAX_TAIL_CHARACTERS = 20_000  # length of the end of a reply that is searched for the score

_WORD = re.compile("score", re.IGNORECASE | re.ASCII)
_MARKUP_BEFORE = "*_\"'`"
_MARKUP_BEFORE_CHARACTERS = 8
_SEPARATOR = re.compile(r"([\s*_\"`]{1,8}is\b)?[\s*_:：=\"`]{1,40}", re.IGNORECASE)
_SIGNS = ":：="
_OPENING = re.compile(r"(?:\\boxed\{|[\[($*_\"`]){0,8}")
_NUMBER_LIKE = re.compile(r"[+\-−–]?\.?\d")  # \d matches digits of all scripts
_NUMBER = re.compile(r"[+\-−]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_CLOSING = re.compile(r"[*_\"'`)\]}>$]{0,8}")
_OUT_OF = re.compile(r"[ \t]{0,3}(?:/|out of)[ \t]{0,3}([0-9]+(?:\.[0-9]+)?)")
# The end of the line or of the text, or the beginning of a closing tag
_END = re.compile(r"[^\S\n]*(?:\n|\Z)|<[/|]")
_SENTENCE_MARK = re.compile(r"[.,;:!?][*_\"'`)\]}>$]{0,8}(?=\s|\Z)[^\S\n]*")
_ANOTHER_NUMBER = re.compile(r"[+\-−–~.=*/×÷^<>≈]{0,3}[^\S\n]*\d")
_ALTERNATIVE = re.compile(r"(?:or|to|and)\b", re.IGNORECASE)
_REMARK = re.compile(r"[ \t]{1,3}(?:\(|[-–—]{1,3}[ \t]{1,3}|[✓✔✅]|([^\W\d_]{2,30}))")
_LETTERS = re.compile(r"[^\W\d_]+")
# A remark must have no other number in this many first characters: a number so near may be a part of the score. Numbers
# further on are accepted
_REMARK_CHARACTERS = 24
_NO_REMARK = frozenset("or to and out per by oder bis und ou point times plus minus squared cubed".split())
_NUMBER_WORDS = frozenset(
    (
        "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy "
        "eighty ninety hundred hundreds thousand thousands million millions billion billions trillion dozen dozens "
        "half halves third thirds quarter quarters fifth fifths tenth tenths hundredths percent percents percentage cent "
        "mil mio mln bn"
    ).split()
)


def score_in(text: str, best: float) -> float:
    r"""Return the score at the end of the text.

    Args:
        text: The reply.
        best: The best score of the scale. `x/best` is read as x.

    Raises:
        ValueError: There is no score, or it is not a plain decimal number.

    >>> score_in("Score: 3? No, that is harsh.\n**Score: 7.5/10**", best=10.0)
    7.5
    """
    mentions = list(_mentions(text))
    for mention in mentions:
        if mention.has_sign or (mention.has_verb and _looks_like_a_number(text, mention.opened())):
            return _number_at(text, mention, best)
    for mention in mentions:
        if not mention.has_verb and _looks_like_a_number(text, mention.begin):
            return _number_at(text, mention, best)
    raise ValueError("it names no score")


@dataclass(frozen=True)
class _Mention:
    """A mention of the score: where its value begins, and which separator precedes the value."""

    text: str
    begin: int
    has_sign: bool  # the separator contains a colon or an equals sign
    has_verb: bool  # the separator contains the word "is"

    def opened(self) -> int:
        """Return the position of the number. Brackets may open before it, but only after a sign or the word "is"."""
        if not self.has_sign and not self.has_verb:
            return self.begin
        opening = _OPENING.match(self.text, self.begin)
        return self.begin if opening is None else opening.end()


def _mentions(text: str) -> Iterator[_Mention]:
    """Yield the mentions of the score, the last one first."""
    words = list(_WORD.finditer(text, max(0, len(text) - MAX_TAIL_CHARACTERS)))
    for word in reversed(words):
        before = text[max(0, word.start() - _MARKUP_BEFORE_CHARACTERS) : word.start()].rstrip(_MARKUP_BEFORE)
        is_part_of_a_word = before[-1:].isalnum() or before[-1:] == "-"
        separator = _SEPARATOR.match(text, word.end())
        if separator is not None and not is_part_of_a_word:
            has_sign = any(sign in separator[0] for sign in _SIGNS)
            yield _Mention(text, separator.end(), has_sign, has_verb=separator[1] is not None)


def _looks_like_a_number(text: str, position: int) -> bool:
    return _NUMBER_LIKE.match(text, position) is not None or text[position : position + 1].isnumeric()


def _number_at(text: str, mention: _Mention, best: float) -> float:
    begin = mention.opened()
    excerpt = text[begin : begin + MAX_NUMBER_CHARACTERS]
    number = _NUMBER.match(text, begin)
    if number is None or len(number[0]) > MAX_NUMBER_CHARACTERS:
        raise ValueError(f"the score {excerpt!r} is no plain decimal number")
    position = _closed(text, number.end())
    out_of = _OUT_OF.match(text, position)
    if out_of:
        if len(out_of[1]) > MAX_NUMBER_CHARACTERS or float(out_of[1]) != best:
            raise ValueError(f"the score {excerpt!r} names another best score than {best:g}")
        position = _closed(text, out_of.end())
    if text.count("$", mention.begin, begin) != text.count("$", begin, position):
        raise ValueError(f"the score {excerpt!r} is an amount of dollars")
    has_remark = mention.has_sign and _is_remark(text, position)
    if not has_remark and not _ends_at(text, position):
        raise ValueError(f"the score {excerpt!r} does not end with its number")
    return float(number[0].replace("−", "-"))


def _closed(text: str, position: int) -> int:
    """Return the position after closing quotation marks, brackets and Markdown."""
    closing = _CLOSING.match(text, position)
    assert closing is not None, "the pattern matches the empty text"
    return closing.end()


def _ends_at(text: str, position: int) -> bool:
    """Return whether the score ends at this position, with no text after it that could change its value."""
    if _END.match(text, position):
        return True
    mark = _SENTENCE_MARK.match(text, position)
    return mark is not None and not _is_number(text, mark.end())


def _is_number(text: str, position: int) -> bool:
    """Return whether another number follows, directly or after "or", "to" or "and"."""
    if _ALTERNATIVE.match(text, position):
        return _names_a_number(text, position)
    return _looks_like_a_number(text, position) or _ANOTHER_NUMBER.match(text, position) is not None


def _is_remark(text: str, position: int) -> bool:
    """Return whether the number is followed by a remark that does not change it."""
    remark = _REMARK.match(text, position)
    if remark is None or (remark[1] or "").lower() in _NO_REMARK:
        return False
    return not _names_a_number(text, position)


def _names_a_number(text: str, position: int) -> bool:
    """Return whether a number, in digits or words, follows on the same line within _REMARK_CHARACTERS."""
    near = text[position : position + _REMARK_CHARACTERS].partition("\n")[0].lower()
    is_in_words = not _NUMBER_WORDS.isdisjoint(_LETTERS.findall(near))
    return is_in_words or any(character.isnumeric() for character in near)
