r"""Compares the parts of an answer that its value does not contain: the base of a number, a.m. or p.m., a unit.

An answer without such a part may be right. An answer with another one is wrong: `1011_3` is not `1011_2`, though the
digits are the same, and 34 m are not 34 cm. An answer that takes its value back is wrong, too: `\ge 5` and
`5 \text{, maybe six}` do not state the number 5.
"""

import math
import re

from async_grpo.rewards.answer_reading.spellings import FONT, SPACE, as_latex

MAX_CHARACTERS = 2_000  # maximum length of an answer whose parts are compared

_IN_FONT = rf"{SPACE}{{0,8}}(?:{FONT}\s?\{{\s{{0,8}})?"
_PATTERNS = {  # name of a part -> where an answer states it
    "base": re.compile(r"\A\s?[0-9A-F]{1,60}\s?_\s?\{?\s?(\d{1,3})\s?\}?\Z"),
    "half of the day": re.compile(rf"\d{_IN_FONT}([aApP])\.?\s?[mM](?![a-zA-Z])"),
    "modulus": re.compile(r"\\?p?mod(?![a-zA-Z])\s?\{?\s?(\w{1,40})"),
    "name": re.compile(r"\A\s?([a-zA-Z](?:_\{?\w{1,8}\}?)?)\s?=(?=[^=]+\Z)"),
}
_UNIT = re.compile(rf"(?:(?<=\d)|(?<=\}})){_IN_FONT}([a-zA-Z]{{1,10}})(?![a-zA-Z])")
_RATIO = re.compile(r"\d{1,9}(?:\s?:\s?\d{1,9}){2,9}")  # of more than two numbers
_PRICE = re.compile(r"\\?\$\s?\d")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")  # as a difference, 2024-03-05 would be the number 2016
_NUMBER = re.compile(r"[-+]?\d[\d.,]{0,60}(?:/\d{1,60})?")
_RELATION_AT_BEGIN = re.compile(r"\s?(?:[<>]|\\(?:[gl]e|ne|[gl]t)(?![a-zA-Z]))")
_TEXT = re.compile(rf"{FONT}\s?\{{([^{{}}]{{1,200}})\}}")
_DOUBT = re.compile(r"(?<![a-zA-Z])(?:maybe|perhaps|possibly|not sure)(?![a-zA-Z])")
_OTHER_NUMBER = re.compile(r"(?<![a-zA-Z])or\s{1,4}([a-z]{3,9})(?![a-zA-Z])")
_DIGITS = re.compile(r"\d{1,60}")
_NUMERALS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
# dimension -> spellings of its units. Units of different dimensions are not compared, because one of the two may be none
_UNITS = {
    "length": [
        "mm millimeter millimeters", "cm centimeter centimeters", "m meter meters metre metres",
        "km kilometer kilometers", "in inch inches", "ft foot feet", "yd yard yards", "mi mile miles",
    ],
    "time": [
        "s sec second seconds", "min minute minutes", "h hr hour hours", "day days", "week weeks", "month months",
        "year years",
    ],
    "mass": ["mg", "g gram grams", "kg kilogram kilograms", "lb lbs pound pounds", "oz ounce ounces", "ton tons"],
    "money": ["dollar dollars", "cent cents"],
    "month of a date": [
        "January Jan", "February Feb", "March Mar", "April Apr", "May", "June Jun", "July Jul", "August Aug",
        "September Sep Sept", "October Oct", "November Nov", "December Dec",
    ],
}  # fmt: skip


def _unit_table() -> dict[str, tuple[str, str]]:
    table: dict[str, tuple[str, str]] = {}
    for dimension, units in _UNITS.items():
        for spellings in units:
            for spelling in spellings.split():
                table[spelling] = (dimension, spellings)
    return table


_UNIT_OF_WORD = _unit_table()  # a word -> its dimension and its unit


def contradict(gold: str, answer: str) -> bool:
    r"""Return whether two answers state different qualifiers, or the answer states a bound or a doubtful value.

    Qualifiers are bases, halves of the day, moduli, names, ratios, dates and units of one dimension.

    >>> contradict("1011_2", "1011_3"), contradict("1011_2", "1011"), contradict("12:30 pm", r"12:30 \text{ a.m.}")
    (True, False, True)
    >>> contradict("34 cm", r"34\text{ m}"), contradict("34 min", "34 minutes"), contradict("x = 5", "y = 5")
    (True, False, True)
    >>> contradict("5", r"\ge 5"), contradict("5", r"5 \text{, maybe six}"), contradict("2024-03-05", "2016")
    (True, True, True)
    """
    if max(len(gold), len(answer)) > MAX_CHARACTERS:
        return False
    if _is_bound_of_number(gold, answer) or _states_doubt(answer):
        return True
    if _DATE.fullmatch(gold) and _DATE.fullmatch(answer.strip()) is None:
        # Only a value could be equal to the difference of the three numbers
        return _NUMBER.fullmatch(answer.strip()) is not None
    gold_parts = _qualifiers(gold)
    parts = _qualifiers(answer)
    return any(parts[name] != gold_parts[name] for name in parts.keys() & gold_parts.keys())


def _is_bound_of_number(gold: str, answer: str) -> bool:
    """Return whether the answer is a relation without a left side, while the gold answer is a number."""
    return _NUMBER.fullmatch(gold) is not None and _RELATION_AT_BEGIN.match(as_latex(answer)) is not None


def _states_doubt(answer: str) -> bool:
    r"""Return whether words in a font doubt the value before them, or add another number, as in `5 \text{ or seven}`."""
    for words in _TEXT.findall(answer):
        number = _OTHER_NUMBER.search(words)
        if number is not None and number[1] in _NUMERALS:
            digits = str(_NUMERALS.index(number[1]))
            return digits not in _DIGITS.findall(answer)
        if _DOUBT.search(words):
            return True
    return False


def _qualifiers(text: str) -> dict[str, str]:
    """Return the parts of an answer that qualify its value, by their names."""
    text = as_latex(text).strip()
    parts: dict[str, str] = {}
    for name, pattern in _PATTERNS.items():
        match = pattern.search(text)
        if match is not None:
            parts[name] = match[1].lower() if name == "half of the day" else match[1]
    for match in _UNIT.finditer(text):
        if match[1] in _UNIT_OF_WORD:
            dimension, unit = _UNIT_OF_WORD[match[1]]
            parts.setdefault(dimension, unit)
    if _DATE.fullmatch(text):
        parts["date"] = text
    if _RATIO.fullmatch(text):
        numbers = [int(number) for number in text.split(":")]
        divisor = math.gcd(*numbers) or 1
        parts["ratio"] = ":".join(str(number // divisor) for number in numbers)
    if _PRICE.search(text):
        parts.setdefault("money", _UNITS["money"][0])
    return parts
