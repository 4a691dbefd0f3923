r"""Removes units and currencies from a number, and writes words such as "million" in digits."""

import re
from decimal import Decimal

from async_grpo.rewards.answer_reading.characters import plain_characters
from async_grpo.rewards.answer_reading.spellings import FONT, SPACE

MAX_CHARACTERS = 2_000  # maximum length of a text that may be a number with a unit

_CURRENCY_CODE = r"(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|Rs\.?)"
# A currency sign, command or code, the code perhaps in a font
_CURRENCY = (
    r"(?:(?:US|A|C|NZ)?\\?\$|[€£¥₹₩₽₺₪₫฿]|\\(?:pounds|euro|yen|textdollar|texteuro|textsterling)(?![a-zA-Z])"
    rf"|{_CURRENCY_CODE}(?![a-zA-Z])|{FONT}\s?\{{\s{{0,8}}{_CURRENCY_CODE}\s{{0,8}}\}})"
)
_AMOUNT = r"(?:\d[\d,]{0,40}(?:\.\d{0,40})?|\.\d{1,40})"
# An amount of money with the currency before or after it
_PRICE = re.compile(
    rf"""
    ([-+]?) {_CURRENCY} {SPACE}{{0,8}} ([-+]?{_AMOUNT})
    | ([-+]?{_AMOUNT}) {SPACE}{{0,8}} {_CURRENCY}
    """,
    re.VERBOSE,
)
_POWER = r"(?:\s?\^\s?\d|\s?\^\s?\{\s?[-+]?\d\s?\})"
# A symbol of a unit. If it is a single letter, it may also be a variable
_SYMBOL = (
    r"(?:[kcmd]?m|[km]?[gsN]|[kmM]?[VLCKJWA]|\^\\circ\s?[CFK]|hr?|min|sec|ft|in|yd|mi|lbs?|oz|[kMG]?Hz|k?Pa|mol|mph"
    r"|[mc]l)"
)
# A unit that cannot be a variable: two letters or more, a power, or a fraction of units
_UNIT = (
    rf"(?:{_SYMBOL}{_POWER}?\s?/\s?{_SYMBOL}{_POWER}?|{_SYMBOL}{_POWER}"
    r"|(?:[kcmd]m|[km][gsN]|[kmM][VLCKJWA]|\^\\circ\s?[CFK]?|hr|min|sec|ft|in|yd|mi|lbs?|oz|[kMG]?Hz|k?Pa|mol|mph|[mc]l"
    r"|sq\.?\s?(?:[kcmd]?m|ft|in|yd|mi)|cu\.?\s?(?:[kcmd]?m|ft|in|yd))(?![a-zA-Z]))"
)
# A number or a fraction of integers
_QUANTITY = rf"[-+]?(?:{_AMOUNT}|\d{{1,15}}/\d{{1,15}}|-?\\frac\{{\d{{1,15}}\}}\{{\d{{1,15}}\}})"
# Words after a number that change its value
_NO_UNITS = (
    r"(?:or|and|to|million|billion|trillion|thousand|hundred|dozen|mod|sin|cos|tan|cot|sec|csc|log|exp|sqrt|pi|factorial"
    r"|squared|cubed|choose|times|plus|minus|over|hal(?:f|ves)|(?:third|quarter|fourth|fifth|tenth|hundredth)s?|[abcnxyz]{2,3})"
)
# Up to four words of a unit, such as "square feet", none of which changes the value of the number
_WORDS = rf"(?:(?!{_NO_UNITS}(?![a-zA-Z]))[a-zA-Z]{{3,20}})(?:\s(?!{_NO_UNITS}(?![a-zA-Z]))[a-zA-Z]{{2,20}}){{0,3}}"
_MEASURED = re.compile(rf"({_QUANTITY})(?:{SPACE}{{0,8}}{_UNIT}|{SPACE}{{1,8}}{_WORDS})\s?\.?")
# A unit in a font, as in `\text{cm}`
_UNIT_IN_FONT = r"\\(?:text(?:rm|normal)?|mathrm|mbox|rm)\s{0,8}\{\s{0,8}[a-zA-Z]{1,9}\s{0,8}\}"
# A unit in a font at the end of a text, after a number, a brace or \pi: `\text{cm}^2`, `\text{m}/\text{s}`, or a
# fraction of units
_WRITTEN_UNIT = re.compile(
    rf"""
    (?:(?<=[\d}}])|(?<=\\pi)) {SPACE}{{0,8}}
    (?: \(?\\(?:text(?:rm|normal)?|mathrm|mbox|rm) \s{{0,8}} \{{\s{{0,8}}
        (?!{_NO_UNITS}(?![a-zA-Z])|[aApP]\.?[mM])          # not "5 or", "5 million", "5 pm"
        [a-zA-Z][a-zA-Z /.-]{{0,60}} \}} {_POWER}? \)?
        (?: \s?/\s? \\(?:text|mathrm)\s?\{{[a-zA-Z]{{1,9}}\}} {_POWER}? )?
      | \\frac\{{\s?{_UNIT_IN_FONT}{_POWER}?\s?\}}\{{\s?{_UNIT_IN_FONT}{_POWER}?\s?\}}
    )
    \s{{0,8}}\Z
    """,
    re.VERBOSE,
)
# "a.m." or "p.m." at the end of a text, perhaps in a font
_HALF_OF_DAY = re.compile(
    rf"(?<=\d){SPACE}{{0,8}}(?:{FONT}\s?\{{\s{{0,8}})?([aApP])\.?\s?[mM](?![a-zA-Z])\.?\s{{0,8}}\}}?\s{{0,8}}\Z"
)
_NUMBER = r"[-+]?(?:\d[\d,]{0,40}(?:\.\d{1,40})?|\.\d{1,40})"
_SYMBOL_AFTER_NUMBER = re.compile(rf"\s*({_NUMBER}){SPACE}{{0,8}}{_SYMBOL}\s*\.?\s*")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}  # word -> power of ten
_SCALE = "|".join(_SCALES)
# A number before a word such as "million", perhaps in a font
_SCALED = re.compile(
    rf"""
    (?<![\w.,]) ({_AMOUNT}) {SPACE}{{1,4}}
    (?: ({_SCALE})(?![a-zA-Z])
      | \\text\s?\{{\s?({_SCALE})(?![a-zA-Z]) ([^{{}}]{{0,40}}) \}}  # perhaps with a unit
    )
    """,
    re.VERBOSE,
)


def without_unit(text: str) -> str:
    r"""Return the number of a price or a quantity.

    From other texts, only a unit such as \text{cm} is removed, and "a.m." becomes "am".

    >>> without_unit(r"\$18.90"), without_unit("34 km/h"), without_unit(r"2\pi \text{ cm}^2"), without_unit("5 x")
    ('18.90', '34', '2\\pi', '5 x')
    """
    price = _PRICE.fullmatch(text)
    if price is not None:
        return (price[1] or "") + (price[2] or price[3])
    text = _WRITTEN_UNIT.sub("", _HALF_OF_DAY.sub(_plain_half_of_day, text))
    measured = _MEASURED.fullmatch(text)
    return text if measured is None else measured[1]


def _plain_half_of_day(match: re.Match[str]) -> str:
    return rf"\text{{ {match[1].lower()}m}}"


def number_before_unit(text: str) -> str | None:
    """Return the number before a unit that may also be a variable, as in `5 N`, or None for any other text.

    >>> number_before_unit("5 V"), number_before_unit("12 m/s"), number_before_unit("12 x")
    ('5', '12', None)
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = plain_characters(text)
    match = _SYMBOL_AFTER_NUMBER.fullmatch(text) or _MEASURED.fullmatch(text)
    return None if match is None else match[1]


def without_scales(text: str) -> str:
    r"""Return the text with numbers such as "2.5 million" written in digits. A unit after them is kept.

    >>> without_scales(r"2.5 million people, or \$3 \text{ thousand dollars}")
    '2500000 people, or \\$3000\\text{ dollars}'
    """
    return _SCALED.sub(_in_digits, text)


def _in_digits(match: re.Match[str]) -> str:
    power = _SCALES[match[2] or match[3]]
    number = f"{Decimal(match[1].replace(',', '')).scaleb(power):f}"
    unit = rf"\text{{{match[4]}}}" if match[4] and match[4].strip() else ""
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit
