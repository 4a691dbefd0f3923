r"""Finds the content of LaTeX boxes such as \boxed{5}, and ignores the layout around, in and between them."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DIVIDER_CHARACTERS = 200  # maximum length of the text between two boxes of one answer
# Maximum length of a box that contains boxes. A longer one probably lacks a closing brace.
MAX_OUTER_CHARACTERS = 1000

_BOX_COMMANDS = ("boxed", "fbox")  # if a text contains both commands, only \boxed is read
# A box command may have two backslashes (`\\boxed{5}`). Other commands match with one character, so that `\{` is not
# taken for a brace.
_TOKEN = re.compile(r"\\{1,2}(?:boxed|fbox)(?![a-zA-Z])|\\(?:begin|end)(?![a-zA-Z])|\\.|[{}]", re.DOTALL)
_WORD_PIECE = re.compile(  # a piece of the word after a box command without braces, as in `\boxed 5`
    r"[^\s$~\\{}]+|\\(?!boxed|fbox|text|[mh]box|q?quad|[hv]space|displaystyle)[a-zA-Z]+|\\[{}%$#&_|]"
)
_ROW_BREAK = r"\\\\(?:\[[^\]\\]*\])?"
# White space, and LaTeX commands for space and style, which do not change the meaning of a text
_SPACE = (
    r"[\s~\u200b\u2060\ufeff]|\\[,;:!>/ ]|\\[hv]space\*?\s*\{[^{}\\]*\}"
    r"|\\(?:q?quad|en(?:space|skip)|(?:neg)?(?:thin|med|thick)space|space|nobreakspace|hfill|newline|linebreak|par"
    r"|noindent|(?:small|med|big)skip|(?:display|text|script|scriptscript)style)(?![a-zA-Z])"
)
# Parts of a text around and between boxes that are ignored: row breaks, space, delimiters, environments, brackets of
# \left and \right, and fonts
_LAYOUT = re.compile(
    rf"{_ROW_BREAK}|{_SPACE}|[${{}}&*]|\\[()\[\]]"
    r"|\\(?:begin|end)\s*\{[a-zA-Z]+\*?\}(?:\{[lcr| ]*\})?"
    r"|\\(?:left|right)(?![a-zA-Z])\s*[.()\[\]|]?"
    r"|\\(?:[bB]ig{1,2}[lmr]?|text|textrm|textnormal|[mh]box|mathrm|fbox|boxed)(?![a-zA-Z])"
)
_LEADING_SPACE = re.compile(rf"(?:{_SPACE})+")
_TRAILING_SPACE = re.compile(rf"(?:{_SPACE})+\Z")
_TRAILING_CHARACTERS = 100  # trailing space is searched for only in this many characters at the end of a text
# The whole text between two boxes of one answer, in small letters and without blanks
_DIVIDER = re.compile(r"[,;]?(?:and|or|and/or)?(?:maybe|perhaps|possibly)?")
# The name of the next value, as in `x = \boxed{1}, y_1 = \boxed{2}` or "x is \boxed{1}", in a
# text from which layout was removed
_NAME_OF_BOX = re.compile(r"(?<![a-zA-Z])[a-zA-Z](?:_\w{1,3})?(?:=| is)\Z")
# A divider with words before it that belong to the first value, as "papers and" in `\boxed{1} papers and \boxed{2} bins`
_DIVIDER_WITH_WORDS = re.compile(
    r"\s{0,8},?\s{0,8}(?!(?:is|was|are|were|so|then|but|no|not|it|we|fails|works|holds|wrong|right|false|true)(?![a-zA-Z]))"
    r"(?:(?:for|in|of)\s{1,8}(?:[a-zA-Z]{2,15}\s{1,8}){0,3}(?:\(?[a-zA-Z0-9]\)?\s{1,8})?|[a-z]{3,15}\s{1,8}){1,2}"
    r"(?:and|or)(?:\s{1,8}[a-zA-Z]\s?=)?\s{0,8}"
)
_WORDS_ONLY = re.compile(r"[a-zA-Z\s,.:;=]*")
_LETTER = re.compile(r"[a-zA-Z]")
_WORD_OR_RELATION = re.compile(r"[a-zA-Z]{2}|=")
_SENTENCE_END = re.compile(r"[.!?]\s+[A-Z]")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))  # delimiters of a formula
_SEPARATOR = r"(?:,\\!|,|\{,\}|\\,|~|[\u00a0\u202f\u2009])"
_GROUPED_NUMBER = re.compile(rf"-?\d{{1,3}}({_SEPARATOR}\d{{3}})+(\.\d+)?")


@dataclass(frozen=True)
class _Box:
    """A box command: its name, its begin and end in the text, and whether it is in a LaTeX environment."""

    name: str
    begin: int
    end: int
    is_in_environment: bool


@dataclass(frozen=True)
class _Span:
    """A complete box: its command, the begin and end of its content, and the end of the whole box."""

    box: _Box
    content_begin: int
    content_end: int
    end: int


def has_box(text: str) -> bool:
    r"""Return whether the text contains a \boxed or \fbox, even if its brace is not closed."""
    return bool(_boxes_and_braces(text)[0])


def boxed_answer(text: str, keeps_layout: bool = False) -> str | None:
    r"""Return the content of the last \boxed{...} or "\boxed x", or None without a box or if its brace is not closed.

    Braces are matched, and `\{` is not a brace. Layout (delimiters of formulas, spaces, \text, \left, alignment) around
    the content and between boxes is ignored. \fbox is read only in a text without \boxed.
    Boxes form one answer if only a comma, a semicolon, "and", "or", or a new row of an environment such as `cases`
    separates them. Their contents are joined by commas, without duplicates. If a box contains other boxes, the outer box
    counts, unless it only adds words or "x =" to the inner boxes. Then the inner boxes count.

    Args:
        text: The text.
        keeps_layout: Whether to remove only white space around the contents, and keep all other layout.

    >>> boxed_answer(r"\boxed{1}, no: \(x = \boxed{2}\)\quad\text{and}\quad\(\boxed{-3}\).")
    '2, -3'
    """
    boxes, closing_braces = _boxes_and_braces(text)
    names = {box.name for box in boxes}
    name = next((name for name in _BOX_COMMANDS if name in names), None)
    spans: list[_Span] = []  # boxes of the answer, from the last to the first
    # True once a box was left out. Then an earlier box only counts if it contains all boxes of the answer
    is_group_whole = False
    group_begin = len(text)
    group_end = len(text)
    for box in reversed(boxes):
        if box.name != name:
            continue
        span = _span_of(text, box, closing_braces)
        if not spans:
            if span is None:
                return None
            spans = [span]
            group_end = span.end
        elif span is None:
            is_group_whole = True
            continue
        elif span.end > group_begin:
            # This box contains the boxes found so far
            if span.content_end - span.content_begin > MAX_OUTER_CHARACTERS:
                break
            before_group = text[span.content_begin : group_begin]
            after_group = text[group_end : span.content_end]
            # An answer does not contain the end of a sentence, so a brace must be missing or misplaced
            if _SENTENCE_END.search(before_group) or _SENTENCE_END.search(after_group):
                break
            if not _is_words_only(_LAYOUT.sub(" ", f"{before_group} {after_group}")):
                spans = [span]
            group_end = span.end
            is_group_whole = False
        elif is_group_whole or not _is_divided(text, span, group_begin, spans[-1].box):
            is_group_whole = True
            continue
        else:
            spans.append(span)
        group_begin = box.begin
    if not spans:
        return None
    contents = [_content(text, span, boxes, closing_braces) for span in reversed(spans)]
    contents = [content.strip() if keeps_layout else without_layout(content) for content in contents]
    return ", ".join(dict.fromkeys(contents))


def _is_words_only(text: str) -> bool:
    r"""Return whether a text around a box is only words or "x =". A single letter may be a factor, as in `\boxed{5}x`."""
    if not _WORDS_ONLY.fullmatch(text):
        return False
    return _LETTER.search(text) is None or _WORD_OR_RELATION.search(text) is not None


def _boxes_and_braces(text: str) -> tuple[list[_Box], dict[int, int]]:
    """Return all box commands, and the position of the closing brace for each opening brace that is closed."""
    boxes: list[_Box] = []
    closing_braces: dict[int, int] = {}
    open_braces: list[int] = []
    num_environments = 0
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word == "{":
            open_braces.append(token.start())
        elif word == "}":
            if open_braces:
                closing_braces[open_braces.pop()] = token.start()
        elif word == r"\begin":
            num_environments += 1
        elif word == r"\end":
            num_environments = max(0, num_environments - 1)
        elif word.endswith(_BOX_COMMANDS):
            name = word.lstrip("\\")
            boxes.append(_Box(name, token.start(), token.end(), num_environments > 0))
    return boxes, closing_braces


def _span_of(text: str, box: _Box, closing_braces: dict[int, int]) -> _Span | None:
    """Return the span of a box, or None if its brace is not closed, or if it has no brace and nothing follows."""
    space = _LEADING_SPACE.match(text, box.end)
    begin = box.end if space is None else space.end()
    if text[begin : begin + 1] == "{":
        closing = closing_braces.get(begin)
        return None if closing is None else _Span(box, begin + 1, closing, closing + 1)
    end = begin + len(text[begin : _word_end(text, begin, closing_braces)].rstrip(".,;:"))
    return _Span(box, begin, end, end) if end > begin else None


def _word_end(text: str, begin: int, closing_braces: dict[int, int]) -> int:
    """Return where the word that starts at `begin` ends: at a space, a formula delimiter or an enclosing brace."""
    position = begin
    while True:
        piece = _WORD_PIECE.match(text, position)
        if piece is not None:
            position = piece.end()
        elif text[position : position + 1] == "{" and position in closing_braces:
            position = closing_braces[position] + 1
        else:
            return position


def _is_divided(text: str, span: _Span, group_begin: int, next_box: _Box) -> bool:
    """Return whether a box and the next box belong to one answer.

    They do if the next box directly follows the closing brace of the first. Otherwise, the text between them must be a
    divider, apart from layout (space, delimiters) and a name such as "x =" in front of the next box. A divider is a
    comma, a semicolon, "and" or "or", possibly after a few words that belong to the first box ("papers and"). If both
    boxes are in the same LaTeX environment, such as `cases`, the beginning of a new row is also a divider.
    """
    if group_begin - span.end > MAX_DIVIDER_CHARACTERS:
        return False
    between = text[span.end : group_begin]
    if not between and text[span.end - 1] == "}":
        return True
    divider = _NAME_OF_BOX.sub("", _LAYOUT.sub(" ", between).rstrip().replace(" =", "="))
    if divider.strip():
        is_divider = _DIVIDER.fullmatch("".join(divider.lower().split())) is not None
        return is_divider or _DIVIDER_WITH_WORDS.fullmatch(divider) is not None
    is_same_environment = "\\begin" not in between and "\\end" not in between
    are_in_environment = span.box.is_in_environment and next_box.is_in_environment
    return are_in_environment and is_same_environment and re.search(_ROW_BREAK, between) is not None


def _content(text: str, span: _Span, boxes: Sequence[_Box], closing_braces: dict[int, int]) -> str:
    """Return the content of a box. Boxes inside it are replaced by their contents."""
    content = text[span.content_begin : span.content_end]
    if not any(name in content for name in _BOX_COMMANDS):
        return content
    removed: list[tuple[int, int]] = []  # begin and end of each piece of text to remove
    first = bisect_left(boxes, span.content_begin, key=lambda box: box.begin)
    last = bisect_left(boxes, span.content_end, key=lambda box: box.begin)
    for box in boxes[first:last]:
        inner = _span_of(text, box, closing_braces)
        if inner is None:
            continue
        removed.append((box.begin, inner.content_begin))
        removed.append((inner.content_end, inner.end))
    pieces: list[str] = []
    position = span.content_begin
    for begin, end in sorted(removed):
        pieces.append(text[position:begin])
        position = end
    pieces.append(text[position : span.content_end])
    return "".join(pieces)


def without_layout(text: str) -> str:
    r"""Return a LaTeX text without spaces at its ends. If it is a single formula, its delimiters are removed, too.

    A text that consists only of layout is returned unchanged.

    >>> without_layout(r"\[ \displaystyle \frac12 \, \]"), without_layout("$5"), without_layout("$1$, $2$")
    ('\\frac12', '$5', '$1$, $2$')
    """
    return without_delimiters(_without_spaces(text))


def without_delimiters(text: str) -> str:
    r"""Return the text without white space at its ends. If it is a single formula, its delimiters are removed, too.

    >>> without_delimiters(r" \( C\, \)"), without_delimiters("~/bin "), without_delimiters("C:\\")
    ('C', '~/bin', 'C:\\')
    """
    text = text.strip()
    for opening, closing in _DELIMITERS:
        is_enclosed = text.startswith(opening) and text.endswith(closing)
        inner = text[len(opening) : -len(closing)]
        delimiters = ("$",) if opening[0] == "$" else (opening, closing)
        is_single = not any(delimiter in inner for delimiter in delimiters)
        if is_enclosed and is_single and len(text) > len(opening + closing) and not inner.endswith("\\"):
            return _without_spaces(inner)
    return text


def _without_spaces(text: str) -> str:
    """Remove spaces, spacing commands and style commands at the ends of a text, unless nothing would be left."""
    text = text.strip()
    whole = text
    if text.endswith("\\") and not text.endswith("\\\\"):
        # The backslash at the end is the rest of the spacing command `\ `, whose blank was already stripped
        text = text[:-1]
    leading = _LEADING_SPACE.match(text)
    if leading is not None:
        text = text[leading.end() :]
    head = text[:-_TRAILING_CHARACTERS]
    tail = text[-_TRAILING_CHARACTERS:]
    stripped_tail = _TRAILING_SPACE.sub("", tail)
    # `\\,` is a row break and a comma, so the `\,` in it is not a spacing command
    is_escape_cut = stripped_tail.endswith("\\")
    return head + (tail if is_escape_cut else stripped_tail) or whole


def ungrouped(text: str) -> str:
    r"""Remove the thousands separators of a number. Other texts are returned unchanged.

    >>> ungrouped("-1,234.5"), ungrouped(r"1\,234\,567"), ungrouped("1, 234")
    ('-1234.5', '1234567', '1, 234')
    """
    return re.sub(_SEPARATOR, "", text) if _GROUPED_NUMBER.fullmatch(text) else text
