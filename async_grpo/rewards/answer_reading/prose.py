r"""Distinguishes answers in words from formulas.

So "5 or more" is not compared as the number 5, and "Evelyn" is not compared as a product of letters. All functions take
linear time.
"""

import re

from async_grpo.rewards.answer_reading.choices import choice_with_value
from async_grpo.rewards.answer_reading.measures import units_of
from async_grpo.rewards.answer_reading.notation import plain_notation
from async_grpo.rewards.answer_reading.spellings import FONT, SPACE, WORD_IN_FORMULA, as_latex

MAX_CHARACTERS = 2_000  # maximum length of an answer that is compared as a text
MAX_UNIT_WORDS = 4  # maximum number of words after a value that may be its unit
# Names of the empty set in answers, in small letters and without blanks
EMPTY_SET_NAMES = {"nosolution", "nosolutions", "norealsolution", "norealsolutions", "emptyset", "none"}
MAX_WORDS = 12  # maximum number of words of a gold answer that is compared as a text

_FONT = re.compile(rf"{FONT}\s?\{{([^{{}}]{{0,400}})\}}")
_SPACES = re.compile(SPACE)
_DELIMITER = re.compile(r"\$|\\[()\[\]]")
# Parts of a formula that are no words: commands, functions, and products of variables such as `xy`
_NO_WORD = re.compile(
    rf"\\(?:begin|end)\{{[a-z]+\*?\}}|\\[a-zA-Z]+|(?<![a-zA-Z]){WORD_IN_FORMULA}(?![a-zA-Z])"
)
_WORD = re.compile(r"[a-zA-Z]{2,}")
# A word that cannot be a product of variables: it has at least three letters, and not only small consonants
_SURE_WORD = re.compile(r"(?![bcdfghjklmnpqrstvwxz]{1,20}(?![a-zA-Z]))[a-zA-Z]{3,}")
_WORDS_ONLY = re.compile(r"[a-zA-Z][a-zA-Z\s,'-]*")
_SEPARATOR = re.compile(r"\s?,\s?(?:and\s|or\s)?|\sand\s|\sor\s")
# Words after a value that change it
_CHANGING_WORD = re.compile(
    r"(?<![a-zA-Z])(?:or|and|more|less|fewer|least|most|greater|smaller|over|under|above|below|except|million|billion"
    r"|thousand|hundred|dozen|percent|times|than|out)(?![a-zA-Z])"
)
_RELATION = re.compile(r"[=<>]|\\(?:[gl]e|ne|in|equiv|approx)(?![a-zA-Z])")
_SENTENCE_END = re.compile(r"[.!?]\s+\S")
# Words that may stand before the value of a gold answer, as in "So there are 34 apples" and "The answer is 5"
_INTRODUCTION = re.compile(
    r"""
    (?:(?:so|thus|hence|therefore|then),?\s{1,4})?
    (?: (?:the|our|my)?\s{0,4}(?:final\s{1,4}|correct\s{1,4})?(?:answer|result|solution|value|total|sum)s?
        \s{0,4}(?:is|are|:|=|equals)\s{0,4}:?
      | (?:there|it|that|this)\s{1,4}(?:is|are)
      | a\ total\ of | about | approximately | exactly | roughly | only
    )?
    \s{0,8}
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LAST_ANSWER = re.compile(r"(?i:\banswers?\s{0,4}(?:is|are|:|=)\s{0,4}:?)")
_VALUE = re.compile(r"[-+]?\\?[$€£]?(?:\d|\\)|\$")  # the begin of a value


def without_introduction(text: str) -> str:
    """Return a gold answer without the words before its value.

    >>> without_introduction("9 * 2 = 18. The answer is 18."), without_introduction("So there are 34 apples")
    ('18.', '34 apples')
    >>> without_introduction("at least 5"), without_introduction("the sum")
    ('at least 5', 'the sum')
    """
    if len(text) > MAX_CHARACTERS:
        return text
    answers = list(_LAST_ANSWER.finditer(text))
    if answers and _SENTENCE_END.search(text, answers[-1].end()) is None:
        text = text[answers[-1].end() :].strip() or text
    font = _FONT.match(text)
    plain = text if font is None else f"{font[1]} {text[font.end() :]}".lstrip()
    introduction = _INTRODUCTION.match(plain)
    value = text if introduction is None or introduction.end() == 0 else plain[introduction.end() :]
    return value if _VALUE.match(value) else text


def is_prose(gold: str) -> bool:
    r"""Return whether a gold answer has words that change its value, as in "5 or more" and "at least 5".

    The result is False for a quantity, an equation with words around it, and words without a number.

    >>> is_prose("5 or more"), is_prose("By induction on 3 cases"), is_prose("18 dollars"), is_prose(r"5 \text{ or } 6")
    (True, True, False, False)
    """
    if len(gold) > MAX_CHARACTERS or choice_with_value(gold) is not None:
        return False
    plain = _DELIMITER.sub(" ", _FONT.sub(r" \1 ", plain_notation(gold)))
    if not _has_digit(plain) or _RELATION.search(plain) is not None or _is_quantity(plain):
        return False
    # A value with two units, such as "5 ft 6 in", is also prose. `_sure_words` does not find such short units, because
    # they could be products of variables
    return _sure_words(plain) != [] or len(units_of(gold)) > 1


def _is_quantity(plain: str) -> bool:
    """Return whether a text is a value and a few words after it, none of which changes the value, as in "3rd floor"."""
    word = _WORD.search(_NO_WORD.sub(lambda match: " " * len(match[0]), plain))
    if word is None:
        return False
    words = plain[word.start() :]
    is_short = len(words.split()) <= MAX_UNIT_WORDS and not _has_digit(words)
    return is_short and _has_digit(plain[: word.start()]) and _CHANGING_WORD.search(words) is None


def _has_digit(text: str) -> bool:
    return any(character.isdecimal() for character in text)


def refuse_long_prose(gold: str) -> None:
    """Raise ValueError if a gold answer consists of sentences, in which no value can be found."""
    text = _DELIMITER.sub(" ", _FONT.sub(r" \1 ", gold[:MAX_CHARACTERS]))
    words = _WORD.findall(_NO_WORD.sub(" ", text))
    has_sentences = _SENTENCE_END.search(text) is not None and len(words) > 2
    if (len(words) > MAX_WORDS or has_sentences) and "\\begin" not in gold:
        raise ValueError(
            f"the row's answer {gold!r:.200} is prose, in which no value can be found: write only the value, "
            r"or put it into \boxed{} or behind ####, or score such rows by `exact` or a judge"
        )


def equal_prose(gold: str, answer: str) -> bool | None:
    """Return whether an answer has the words of a gold answer that is prose; None for other gold answers."""
    return plain_words(gold) == plain_words(answer) if is_prose(gold) else None


def plain_words(text: str) -> str:
    r"""Return a text without fonts, delimiters, capital letters, superfluous spaces and a full stop.

    >>> plain_words(r"$5 \text{ or More}$.")
    '5 or more'
    """
    text = _DELIMITER.sub(" ", _FONT.sub(r" \1 ", as_latex(text[:MAX_CHARACTERS])))
    return " ".join(_SPACES.sub(" ", text).split()).rstrip(". ").casefold()


def words_only(text: str) -> str | None:
    r"""Return the plain words of a text that has only words, or None for any other text.

    At least one word must clearly not be a product of variables such as `xyz`. Words that commas, "and" or "or" separate
    are a list. Lists are sorted, because their order does not matter.

    >>> words_only(r"\text{Evelyn}"), words_only("red and blue"), words_only("xyz"), words_only("5 apples")
    ('evelyn', 'blue, red', None, None)
    """
    if len(text) > MAX_CHARACTERS:
        return None
    latex = _FONT.sub(r" \1 ", _DELIMITER.sub(" ", as_latex(text)))
    plain = " ".join(_SPACES.sub(" ", latex).split()).rstrip(". ")
    if _WORDS_ONLY.fullmatch(plain) is None or not _sure_words(plain):
        return None
    return ", ".join(sorted(_SEPARATOR.split(plain.casefold().replace(" -", "-"))))


def equal_words(gold: str, answer: str) -> bool | None:
    """Return whether an answer has the words of a gold answer that consists of words; None for other gold answers.

    The order of letters counts: "n y l e v E" does not equal "Evelyn". A name of the empty set, such as "none", counts as
    a value and not as words.
    """
    words = words_only(gold)
    if words is None or words.replace(" ", "") in EMPTY_SET_NAMES:
        return None
    return words == words_only(answer)


def _sure_words(plain: str) -> list[str]:
    """Return those words of a text that cannot be products of variables (see `_SURE_WORD`)."""
    return _SURE_WORD.findall(_NO_WORD.sub(" ", plain))
