r"""Reads answers to multiple-choice questions. They may state a letter, a value, or both, as in `\textbf{(B)}\ 12`."""

import re

from async_grpo.rewards.answer_reading.spellings import FONT, SPACE, as_latex

MAX_CHARACTERS = 2_000  # maximum length of an answer that may be a choice with its value

# The first word of a reason after a choice, as in "B, because A is false"
REASON = r"(?:because|since|as|not)(?![a-zA-Z])"
# A single letter as an answer, as in `\textbf{(C)}.`. It may have a font, parentheses, full stops, "Option" before it, and
# a reason after it
_CHOICE = re.compile(
    rf"""
    (?:{FONT}\s?\{{|\{{)? \s{{0,8}} (?:(?:[Oo]ption|[Cc]hoice)\s{{1,4}})?
    \(? \s{{0,8}} (?:{FONT}\s?\{{)? \s{{0,8}}
    ([a-zA-Z])
    \s{{0,8}} \}}? \s{{0,8}} \)? \.? \s{{0,8}} \}}? \.?
    (?:[,;:]?\s{{1,4}}{REASON}[^\n]{{0,200}})?
    """,
    re.VERBOSE,
)
_FONT_AT_BEGIN = re.compile(rf"{FONT}\s?\{{([^{{}}]{{1,200}})\}}")
# The beginning of a value after a letter. An operator does not match, because `(A) + 3` and `(A) \cup B` are not choices
_NUMBER_OR_COMMAND = (
    r"(?:[$€£¥]?\.?\d|\$|-\s?[\d.\\]"
    r"|\\(?!(?:cup|cap|times|cdot|setminus|subset|in|to|[gl]e|ne|equiv|approx|pm)(?![a-zA-Z])|[,;:!\ ]))"
)
# Words that may follow "B. " and show that no value follows, as in "B. or C"
_DOUBT = r"(?i:or|and|maybe|perhaps|possibly|either)(?![a-zA-Z])"
# The letter of a choice before its value, as in "(B) 12", "B) 12" or "B. Paris". The value itself does not match
CHOICE_WITH_VALUE = re.compile(
    rf"""
    \s{{0,8}}
    (?: (?:\(\s?([A-J])\s?\)|([A-J])\))
        (?: {SPACE}{{0,8}} (?={_NUMBER_OR_COMMAND})
          | {SPACE}{{1,8}} (?=\w{{2}}|[(\[]|[a-zA-Z]\s?[-^+=(])  # a word, a bracket or a formula
        )
      | ([A-J])[.:] {SPACE}{{1,8}} (?={_NUMBER_OR_COMMAND}|(?!{_DOUBT})\w{{2}})
    )
    """,
    re.VERBOSE,
)
# A value before the letter of its choice in parentheses, as in `12 (B)`, but not a function as in `\sin (A)`
_VALUE_WITH_CHOICE = re.compile(
    rf"((?={_NUMBER_OR_COMMAND})[^\n]{{0,200}}[\d}}%)])(?:{SPACE}|,){{1,8}}(?:{FONT}\s?\{{)?\(\s?([A-J])\s?\)\s?\}}?\.?"
)
# A relation without a left side, as in `\ge 5`, and one whose left side is a variable, as in `x \ge 5`
_SIGN = r"(?:[<>]|\\(?:[gl]e|ne)(?![a-zA-Z]))"
_BOUND = re.compile(rf"\s?{_SIGN}")
_VARIABLE_WITH_BOUND = re.compile(rf"\s?([a-zA-Z])\s?(?={_SIGN})")
# A second choice in a value, as in `12 or (C) 13`, but not the `(A)` in `P(A)`
_SECOND_CHOICE = re.compile(
    r"""
    (?<![a-zA-Z\\}])
    (?: \(\s?[A-J]\s?\)
      | (?<!\()[A-J][.:)]\s{1,4}[-\d$\\]  # not the end of `P(A) = 3`, and not that of a sentence
      | (?<=[,;]\s)[A-J][.:)]\s
      | (?<=\d)\s{1,4}[A-E](?=\s{1,4}[-\d$\\]|\s{0,4}\Z)  # as in `12 C 13`
      | (?:or|maybe|perhaps|possibly|wrong;?|it\ is)\s{1,4}\}?\s{0,4}[A-J](?![a-zA-Z])
    )
    """,
    re.VERBOSE,
)


def plain_choice(text: str) -> str | None:
    r"""Return the letter of a choice without its font, parentheses and full stop, or None for any other text.

    >>> plain_choice(r"\textbf{(C)}"), plain_choice("C."), plain_choice("Option C"), plain_choice(r"\text{AC}")
    ('C', 'C', 'C', None)
    """
    match = _CHOICE.fullmatch(text)
    return None if match is None else match[1]


def choice_with_value(text: str) -> tuple[str, str] | None:
    r"""Return the letter and the value of a choice that states both, or None for any other text.

    >>> choice_with_value(r"\textbf{(B)}\ 12"), choice_with_value("B. 12"), choice_with_value(r"\text{(B) } \frac12")
    (('B', '12'), ('B', '12'), ('B', '\\frac12'))
    >>> choice_with_value("(B)"), choice_with_value(r"(B) \cup C"), choice_with_value("(B) 12 or (C) 13")
    (None, None, None)
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = text.strip()
    font = _FONT_AT_BEGIN.match(text)
    if font is not None:
        text = f"{font[1]} {text[font.end() :]}"
    match = CHOICE_WITH_VALUE.match(text)
    if match is None:
        match = _VALUE_WITH_CHOICE.fullmatch(text)
        return None if match is None or _SECOND_CHOICE.search(match[1]) else (match[2], match[1].strip())
    value = text[match.end() :].strip()
    # An answer that names two choices states neither of them
    if _SECOND_CHOICE.search(value):
        return None
    return letter_of(match), value


def letter_of(match: re.Match[str]) -> str:
    """Return the letter in a match of `CHOICE_WITH_VALUE`."""
    return match[1] or match[2] or match[3]


def compared_parts(gold: str, answer: str) -> list[tuple[str, str]]:
    r"""Return pairs (text of the gold answer, text of the answer). The answers are equal if both texts of each pair are.

    If one answer has a letter and its value, the other one may state only the letter or only the value.

    >>> compared_parts("12", r"\textbf{(B)}\ 12"), compared_parts("B", "(B) 12"), compared_parts("12", "34")
    ([('12', '12')], [('B', 'B')], [('12', '34')])
    >>> compared_parts("(A) 12", "(B) 12")
    [('A', 'B'), ('12', '12')]
    """
    gold_choice = choice_with_value(gold)
    choice = choice_with_value(answer)
    if gold_choice is not None and choice is not None:
        return list(zip(gold_choice, choice, strict=True))
    if gold_choice is not None:
        return [(_part_like(gold_choice, answer), answer)]
    if choice is not None:
        return [(gold, _part_like(choice, gold))]
    return [_with_left_sides(gold, answer)]


def _with_left_sides(gold: str, answer: str) -> tuple[str, str]:
    r"""Return both texts. If one is like `x \ge 5` and the other one like `\ge 5`, the latter gets the variable, too."""
    variable = _VARIABLE_WITH_BOUND.match(as_latex(answer[:MAX_CHARACTERS]))
    gold_variable = _VARIABLE_WITH_BOUND.match(as_latex(gold[:MAX_CHARACTERS]))
    if variable is not None and _BOUND.match(as_latex(gold[:MAX_CHARACTERS])):
        return f"{variable[1]} {gold}", answer
    if gold_variable is not None and _BOUND.match(as_latex(answer[:MAX_CHARACTERS])):
        return gold, f"{gold_variable[1]} {answer}"
    return gold, answer


def _part_like(choice: tuple[str, str], text: str) -> str:
    """Return the part of a choice that is comparable with a text: the letter if the text is a letter, else the value."""
    return choice[0] if plain_choice(text) is not None else choice[1]
