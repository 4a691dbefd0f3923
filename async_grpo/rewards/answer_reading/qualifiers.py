r"""Compares the parts of an answer that its value does not contain: the base of a number, a.m. or p.m., a unit.

An answer without such a part may be right. An answer in which the part differs is wrong: `1011_3` is not `1011_2`, though
the digits are the same, and 34 m are not 34 cm. An answer is also wrong if it states a bound, a doubt or a false equation:
`\ge 5`, `5 \text{, maybe six}` and `7 = 5` do not state the number 5.
"""

import math
import re

from async_grpo.rewards.answer_reading.arithmetic import states_false_equation
from async_grpo.rewards.answer_reading.measures import have_other_units
from async_grpo.rewards.answer_reading.spellings import FONT, SPACE, as_latex

MAX_CHARACTERS = 2_000  # maximum length of an answer whose parts are compared

_IN_FONT = rf"{SPACE}{{0,8}}(?:{FONT}\s?\{{\s{{0,8}})?"
_PATTERNS = {  # name of a part -> where an answer states it
    "base": re.compile(r"\A\s?[0-9A-F]{1,60}\s?_\s?\{?\s?(\d{1,3})\s?\}?\Z"),
    "half of the day": re.compile(rf"\d{_IN_FONT}([aApP])\.?\s?[mM](?![a-zA-Z])"),
    "modulus": re.compile(r"\\?p?mod(?![a-zA-Z])\s?\{?\s?(\w{1,40})"),
    "name": re.compile(r"\A\s?([a-zA-Z](?:_\{?\w{1,8}\}?)?)\s?=(?=[^=]+\Z)"),
}
_RATIO = re.compile(r"\d{1,9}(?:\s?:\s?\d{1,9}){2,9}")  # a ratio of more than two numbers
_TIME = re.compile(r"(?<![\d.:])(\d{1,2})\s?:\s?(\d{2})(?![\d:])")
MAX_HOUR = 24
MAX_MINUTE = 59
_SIZE = re.compile(r"\\(?:left|right|[bB]ig{1,2}[lr]?)(?![a-zA-Z])\s?")
# The name before a list, as in `x \in` and `(x, y) =`
_NAME_OF_LIST = re.compile(r"(?:[a-zA-Z]|\([a-zA-Z](?:\s?,\s?[a-zA-Z]){0,5}\))\s?(?:=|\\in(?![a-zA-Z]))\s?")
_BRACKET_OR_COMMA = re.compile(r"\\?[(){}\[\]]|,")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")  # without this, 2024-03-05 would be read as the difference 2016
_NUMBER = re.compile(r"[-+]?\d[\d.,]{0,60}(?:/\d{1,60})?")
_RELATION_AT_BEGIN = re.compile(r"\s?(?:[<>]|\\(?:[gl]e|ne|[gl]t)(?![a-zA-Z]))")
_TEXT = re.compile(rf"{FONT}\s?\{{([^{{}}]{{1,200}})\}}")
_DOUBT = re.compile(r"(?<![a-zA-Z])(?:maybe|perhaps|possibly|not sure)(?![a-zA-Z])")
# Words after a number that make it a bound or the beginning of a range, as in "5 or more", "5 at most" and "5 to 7"
BOUND_WORDS = re.compile(
    r"(?<![a-zA-Z\\])(?:(?:or|and)\s{1,4}(?:(?:possibly|maybe)\s{1,4})?(?:more|less|fewer|greater|higher|lower|larger"
    r"|smaller|above|below|over|under|up)|at\s{1,4}(?:most|least)|to\s{1,4}\d{1,20})(?![a-zA-Z])"
)
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


def contradict(gold: str, answer: str) -> bool:
    r"""Return whether two answers state different qualifiers, or the answer states a bound, a doubt or a false equation.

    Qualifiers are bases, halves of the day, moduli, names, ratios, dates and units. Units are not converted, so that
    100 cm contradict 1 m.

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
    if answer != gold and states_false_equation(as_latex(answer)):
        return True
    if _DATE.fullmatch(gold) and _DATE.fullmatch(answer.strip()) is None:
        # A number contradicts a date. Without this check, 2016 would equal the difference 2024 - 03 - 05
        return _NUMBER.fullmatch(answer.strip()) is not None
    if _is_set_for_tuple(gold, answer) or _is_other_time(gold, answer):
        return True
    if have_other_units(gold, answer):
        return True
    gold_parts = _qualifiers(gold)
    parts = _qualifiers(answer)
    return any(parts[name] != gold_parts[name] for name in parts.keys() & gold_parts.keys())


def _is_bound_of_number(gold: str, answer: str) -> bool:
    r"""Return whether the answer is a bound, such as `\ge 5` or "5 or more", while the gold answer is a number."""
    has_bound_words = BOUND_WORDS.search(gold) is None and BOUND_WORDS.search(answer) is not None
    has_relation = _RELATION_AT_BEGIN.match(as_latex(answer)) is not None
    return has_bound_words or (has_relation and _NUMBER.fullmatch(gold) is not None)


def _is_set_for_tuple(gold: str, answer: str) -> bool:
    r"""Return whether one answer is a set, such as `\{1, 2\}`, and the other a tuple or an interval."""
    return {_kind_of_brackets(gold), _kind_of_brackets(answer)} == {"set", "tuple"}


def _kind_of_brackets(text: str) -> str | None:
    """Return "set" or "tuple" if brackets enclose a whole list, else None."""
    latex = _SIZE.sub("", as_latex(text)).strip()
    name = _NAME_OF_LIST.match(latex)
    list_text = latex if name is None else latex[name.end() :]
    depth = 0
    has_comma = False
    for bracket in _BRACKET_OR_COMMA.finditer(list_text):
        if bracket[0] == ",":
            has_comma = has_comma or depth == 1
        else:
            depth += 1 if bracket[0][-1] in "([{" else -1
        if depth <= 0 and bracket.end() < len(list_text):
            return None  # the first bracket is closed before the end, or the list has none
    if depth != 0 or not has_comma:
        return None
    if list_text.startswith((r"\{", "{")) and list_text.endswith("}"):
        return "set"
    return "tuple" if list_text[0] in "([" and list_text[-1] in ")]" else None


def _is_other_time(gold: str, answer: str) -> bool:
    """Return whether the gold answer is a time of the day, and the answer is not this time.

    A ratio of two numbers without a common divisor, such as 7:15, may not be a time, so it is not compared here.
    """
    gold_time = _TIME.fullmatch(as_latex(gold).strip())
    if gold_time is None or int(gold_time[1]) > MAX_HOUR or int(gold_time[2]) > MAX_MINUTE:
        return False
    hour = int(gold_time[1])
    if gold_time[2][0] != "0" and math.gcd(hour, int(gold_time[2])) == 1:
        return False
    time = _TIME.search(as_latex(answer))
    return time is None or int(time[1]) != hour or time[2] != gold_time[2]


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
    if _DATE.fullmatch(text):
        parts["date"] = text
    if _RATIO.fullmatch(text):
        numbers = [int(number) for number in text.split(":")]
        divisor = math.gcd(*numbers) or 1
        parts["ratio"] = ":".join(str(number // divisor) for number in numbers)
    return parts
