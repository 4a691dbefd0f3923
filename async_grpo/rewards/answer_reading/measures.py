r"""Reads the units of an answer, such as `\text{cm}^2` or "miles per hour", to compare them with those of the gold answer.

Units are compared by their names, and never converted: 100 cm does not equal a gold answer of 1 m.
"""

import re
from itertools import product

from async_grpo.rewards.answer_reading.spellings import FONT, SPACE, as_latex

Unit = tuple[tuple[str, int], ...]  # the names of base units and their powers, in alphabetical order

_SPELLINGS = {  # name of a unit -> its spellings
    "millimeter": "mm millimeter millimeters millimetre millimetres",
    "centimeter": "cm centimeter centimeters centimetre centimetres",
    "meter": "m meter meters metre metres",
    "kilometer": "km kilometer kilometers kilometre kilometres kms",
    "inch": "in inch inches", "foot": "ft foot feet", "yard": "yd yard yards", "mile": "mi mile miles",
    "second": "s sec second seconds secs", "minute": "m min minute minutes mins", "hour": "h hr hour hours hrs",
    "day": "day days", "week": "week weeks", "month": "month months", "year": "yr year years yrs",
    "milligram": "mg milligram milligrams", "gram": "g gram grams", "kilogram": "kg kilogram kilograms kgs",
    "pound": "lb lbs pound pounds GBP", "ounce": "oz ounce ounces", "ton": "ton tons tonne tonnes",
    "liter": "L liter liters litre litres", "milliliter": "mL ml milliliter milliliters millilitre millilitres",
    "gallon": "gal gallon gallons", "quart": "qt quart quarts", "pint": "pt pint pints",
    "dollar": "dollar dollars USD", "cent": "cent cents", "euro": "euro euros EUR", "yen": "yen JPY",
    "rupee": "rupee rupees INR", "yuan": "yuan CNY RMB",
    "degree": "degree degrees deg", "radian": "rad radian radians",
    "celsius": "degree degrees celsius Celsius", "fahrenheit": "degree degrees fahrenheit Fahrenheit",
    "newton": "N newton newtons", "joule": "J joule joules", "watt": "W watt watts", "volt": "V volt volts",
    "kilojoule": "kJ", "kilowatt": "kW", "hertz": "Hz hertz", "pascal": "Pa pascal pascals", "mole": "mol moles",
    "January": "January Jan", "February": "February Feb", "March": "March Mar", "April": "April Apr", "May": "May",
    "June": "June Jun", "July": "July Jul", "August": "August Aug", "September": "September Sep Sept",
    "October": "October Oct", "November": "November Nov", "December": "December Dec",
}  # fmt: skip
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_ABBREVIATIONS = {"mph": (("hour", -1), ("mile", 1)), "kph": (("hour", -1), ("kilometer", 1))}


def _unit_table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for name, spellings in _SPELLINGS.items():
        for spelling in spellings.split():
            table.setdefault(spelling, []).append(name)
    return table


_NAMES = _unit_table()  # a spelling -> the names of the units that it may mean

_FONT = re.compile(rf"{FONT}\s?\{{([^{{}}]{{0,60}})\}}")
_FRACTION = re.compile(r"\\frac\s?\{([a-zA-Z ^\d]{1,40})\}\s?\{([a-zA-Z ^\d]{1,40})\}")
_DEGREE = re.compile(r"\s{0,8}\^\s?\{?\s?\\circ\s?\}?\s{0,8}([CF](?![a-zA-Z]))?")
_DEGREE_NAMES = {"C": " celsius ", "F": " fahrenheit ", None: " degree "}
_DOLLAR = re.compile(r"(?<!\\)\$")
_PRICE = re.compile(r"(\\?\$|[€£¥₹])\s?[-+]?\s?\.?\d|\d\s?(\\\$|[€£¥₹])")
_PART = (
    r"(?:(?:/|\bper\b|\\cdot(?![a-zA-Z])|\*)\s{0,8})?(?:(?:square|sq|cubic|cu)\b\.?\s{0,8})?[a-zA-Z]{1,12}(?![a-zA-Z(])"
    r"(?:\s{1,8}(?:squared|cubed)\b|\s{0,8}\^\s?\{?\s?[-+]?\d\s?\}?)?\.?"
)
# A number and the unit after it
_MEASURE = re.compile(rf"(?:(?<=[\d}})])|(?<=\\pi)|(?<=\\pi\s))\s{{0,8}}({_PART}(?:\s{{0,8}}{_PART}){{0,3}})")
# A text that only has a number and a unit. In such a text, a single letter counts as a unit
_SINGLE = re.compile(
    r"\s{0,8}(?:[a-zA-Z]\s?=)?\s{0,8}[-+]?[\d.,/]{1,40}\s{0,8}[^\d=+*<>-]{0,60}(?:\^\s?\{?-?\d\}?[^\d=+*<>]{0,40})?"
)
_TOKEN = re.compile(r"/|\\cdot|\*|[a-zA-Z]{1,12}|\^\s?\{?\s?([-+]?\d)")
_SPACES = re.compile(SPACE)


def have_other_units(gold: str, answer: str) -> bool:
    r"""Return whether the gold answer has units, and the answer states a unit that is none of them.

    A missing unit, or one that is not in the table of units, such as "apples", never counts as different.

    >>> have_other_units("34 cm", r"34\text{ m}"), have_other_units("34 min", "34 m"), have_other_units("34", "34 m")
    (True, False, False)
    >>> have_other_units(r"5 \text{ cm}^2", "5 square centimeters"), have_other_units("5 cm^2", "5 cm^3")
    (False, True)
    """
    gold_units = units_of(gold)
    units = units_of(answer)
    if not gold_units or not units:
        return False
    return any(all(unit.isdisjoint(gold_unit) for gold_unit in gold_units) for unit in units)


def units_of(text: str) -> list[set[Unit]]:
    r"""Return the possible meanings of each unit that a text states after a number.

    >>> units_of("12 km/h"), units_of("12 apples"), units_of("2m + 1")
    ([{(('hour', -1), ('kilometer', 1))}], [], [])
    """
    units: list[set[Unit]] = []
    if len(_DOLLAR.findall(text)) > 1:
        text = _DOLLAR.sub(" ", text)  # delimiters of formulas
    has_font = _FONT.search(text) is not None
    plain = _SPACES.sub(" ", _FONT.sub(r" \1 ", as_latex(text)))
    plain = _DEGREE.sub(lambda match: _DEGREE_NAMES[match[1]], _FRACTION.sub(r" \1/\2 ", plain))
    reads_letters = has_font or _SINGLE.fullmatch(plain) is not None
    for measure in _MEASURE.finditer(plain):
        meanings = _meanings(measure[1], reads_letters)
        if meanings:
            units.append(meanings)
    price = _PRICE.search(text)
    if price is not None and not units:
        units.append({((_CURRENCIES[(price[1] or price[2])[-1]], 1),)})
    return units


def _meanings(expression: str, reads_letters: bool) -> set[Unit]:
    """Return the possible meanings of an expression such as "km/h", or none if it contains an unknown word."""
    factors: list[list[tuple[tuple[str, int], ...]]] = []
    sign = 1
    power = 1
    for token in _TOKEN.finditer(expression):
        word = token[0]
        if word in ("/", "per"):
            sign = -1
        elif word in ("squared", "cubed") and factors:
            factors[-1] = [_raised(unit, _POWERS[word]) for unit in factors[-1]]
        elif word in _POWERS:
            power = _POWERS[word]
        elif token[1] is not None and factors:
            factors[-1] = [_raised(unit, int(token[1])) for unit in factors[-1]]
        elif word in _ABBREVIATIONS:
            factors.append([_ABBREVIATIONS[word]])
        elif word in _NAMES and (len(word) > 1 or reads_letters):
            factors.append([((name, sign * power),) for name in _NAMES[word]])
            power = 1
        elif word not in (r"\cdot", "*"):
            return set()
    return {_product(combination) for combination in product(*factors)} if factors else set()


def _raised(unit: Unit, power: int) -> Unit:
    return tuple((name, exponent * power) for name, exponent in unit)


def _product(units: tuple[Unit, ...]) -> Unit:
    powers: dict[str, int] = {}
    for unit in units:
        for name, power in unit:
            powers[name] = powers.get(name, 0) + power
    return tuple(sorted((name, power) for name, power in powers.items() if power))
