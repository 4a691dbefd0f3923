r"""Rewrites the notations of a mathematical answer to one notation, before any reward compares it.

`math_verify`, `mathd` and `sympy` compare what `plain_notation` returns, for the gold answer and for the answer of a
completion, so that they agree on what an answer is. They differ only in how they compare. All functions take linear
time, even for texts that are written to slow them down.
"""

import re
from decimal import Decimal
from fractions import Fraction

from async_grpo.rewards.answer_reading.boxes import ungrouped, without_layout
from async_grpo.rewards.answer_reading.choices import plain_choice
from async_grpo.rewards.answer_reading.spellings import FONT, as_latex
from async_grpo.rewards.answer_reading.units import number_before_unit, without_scales, without_unit

MAX_CHARACTERS = 20_000  # maximum length of a text that is rewritten
MAX_EXPONENT = 20  # largest power of ten that is written out

# A number times a power of ten, as in `6.02 \times 10^{23}`
_SCIENTIFIC = re.compile(
    r"""
    ([-+]?\d{1,30}(?:\.\d{1,30})?)
    \s{0,8} (?:\\times|\\cdot|\*|x) \s{0,8} 10 \s{0,8}\^\s{0,8}
    (?:\{\s?([-+]?\d{1,2})\s?\}|(\d))
    """,
    re.VERBOSE,
)
_POWER_OF_TEN = re.compile(r"([-+]?)10\^(?:\{([-+]?\d{1,2})\}|(\d))")
# The decimals at the end of a text that repeat its value, as in `3\pi \approx 9.42` or `2/3 = 0.67`
_APPROXIMATION = re.compile(r"\s{0,8}(\\approx(?![a-zA-Z])|=)\s{0,8}(-?\d{0,40}\.?\d{1,40})\s{0,8}\Z")
# A fraction of two integers, as `\frac{2}{3}` or `2/3`
_FRACTION = re.compile(r"(-?)(?:\\frac\{(\d{1,40})\}\{(\d{1,40})\}|(\d{1,40})\s?/\s?(\d{1,40}))")
_GROUPED_BY_BLANKS = re.compile(r"[-+]?\d{1,3}(?:[ ']\d{3}){1,20}(?:\.\d{1,40})?")
_NAME = re.compile(r"\s*[a-zA-Z]\w?\s*=\s*(?=[^=]+\Z)")
# A number and its name on the right, as in `5 = x`, but not `f(x) = x`
_NAME_BEHIND = re.compile(r"((?:[-+\d.,/(){}^*\s]|\\[a-z]{2,8}){1,200}?)\s?=\s{0,8}([a-zA-Z])")
_PERCENTAGE = re.compile(r"(.{1,100}?)\s?\\?%")
_DECIMAL = re.compile(r"\+?(-?)(\d{0,400})(?:\.(\d{0,400}))?")
_WORDS_IN_FONT = re.compile(rf"{FONT}\s?(\{{[^{{}}]{{0,400}}\}})")
# A condition after an equation, as in "f(x) = 2x for all real x"
_CONDITION = re.compile(
    r"(=[^=]{1,400}?)\s{0,8},?\s{0,8}(?:\\text\s?\{\s?)?for (?:all|every|any)(?![a-zA-Z])[^=]{0,100}\Z"
)
# The names before a tuple, as in `(x, y) = (1, 2)`
_NAMES_OF_TUPLE = re.compile(r"\(\s?([a-zA-Z](?:\s?,\s?[a-zA-Z]){1,5})\s?\)\s?=\s?(?=\()")
# Punctuation at the end of a text, unless it belongs to \right, \left or dots such as \ldots
_END_OF_SENTENCE = re.compile(r"(?<=[\w)\]}%$])(?<!\\right)(?<!\\left)(?<!ldots)[\s.,;:]{1,20}\Z")
# "2 and 2/3", where the fraction is less than 1
_MIXED_WITH_AND = re.compile(
    r"""
    (-?\d{1,15}) \s{1,4} (?:and|\\text\s?\{\s?and\s?\}) \s{1,4}
    (?:(\d{1,15})\s?/\s?(\d{1,15})|\\frac\{(\d{1,15})\}\{(\d{1,15})\})
    """,
    re.VERBOSE,
)
_SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])\s?")
# The modulus at the end of a congruence, as in `\pmod{7}`, `\pmod 7` or `(mod 7)`
_MODULUS = re.compile(
    r"""
    \s{0,8}
    (?: \\pmod(?![a-zA-Z]) \s? (?:\{\s?\w{1,40}\s?\}|\w)
      | \(\s? \\?b?mod(?![a-zA-Z]) \s{0,4} \w{1,40} \s?\)
    )
    \s{0,8}\Z
    """,
    re.VERBOSE,
)
_CONGRUENT = re.compile(r"\s{0,8}\\equiv(?![a-zA-Z])\s{0,8}")


def plain_notation(text: str) -> str:
    r"""Return an answer in the notation that the rewards compare.

    The result has no Unicode signs, E-notation, mixed or repeating numbers, thousands separators, currencies and units
    (unless the unit may be a variable, as in `5 N`), no font around a single letter, and no full stop at its end.

    >>> plain_notation("3 1/2"), plain_notation("6.02e23"), plain_notation(r"\$1{,}234.50"), plain_notation("34 m²")
    ('\\frac{7}{2}', '6.02\\times 10^{23}', '1234.5', '34')
    >>> plain_notation(r"\textbf{(C)}"), plain_notation(r"\mathrm{e}^2"), plain_notation(r"\nicefrac 3 4.")
    ('C', 'e^2', '\\frac{3}{4}')
    """
    if len(text) > MAX_CHARACTERS:
        return text
    text = _latex_without_end(text)
    choice = plain_choice(text)
    if choice is not None:
        return choice
    text = _without_names(_CONDITION.sub(r"\1", text))
    text = _without_modulus(_without_approximation(text))
    text = _MIXED_WITH_AND.sub(_sum_of_mixed, text) if _MIXED_WITH_AND.fullmatch(text) else text
    text = _with_round_brackets(_with_name_first(text))
    name = _NAME.match(text)
    begin = "" if name is None else name[0]
    value = _plain_number(without_unit(without_scales(text[len(begin) :].strip())))
    return begin + _both_signs(value)


def readings(text: str) -> list[str]:
    r"""Return what an answer may mean, as one or more notations, the likeliest one first.

    `5 N` may be a product, or the number 5 with a unit. `\frac{2}{3} = 0.667` may be the fraction alone, or the whole
    equation. `3\pi \approx 9.42` may also be the decimals alone. `2 and 2/3` may be a mixed number, or two numbers.

    >>> readings("5 N"), readings(r"\frac{2}{3} = 0.667"), readings("7")
    (['5 N', '5'], ['\\frac{2}{3}', '\\frac{2}{3} = 0.667'], ['7'])
    """
    plain = plain_notation(text)
    notations = [plain]
    latex = _latex_without_end(text) if len(text) <= MAX_CHARACTERS else text
    if _without_approximation(latex) != latex or _MIXED_WITH_AND.fullmatch(latex):
        notations.append(latex)
    approximation = _APPROXIMATION.search(latex)
    if approximation is not None and approximation[1] != "=":
        notations.append(approximation[2])
    number = number_before_unit(plain)
    if number is not None:
        notations.append(number)
    return notations


def words_of(text: str) -> str:
    r"""Return the words if a text is only a font command with words, such as \textbf{Yes}. Else return the text itself."""
    match = _WORDS_IN_FONT.fullmatch(text)
    return text if match is None else match[1][1:-1].strip()


def _latex_without_end(text: str) -> str:
    return _without_end(without_layout(_without_end(as_latex(text))))


def _without_end(text: str) -> str:
    """Return the text without a full stop or a comma at its end."""
    return _END_OF_SENTENCE.sub("", text)


def _without_approximation(text: str) -> str:
    r"""Return a formula without the approximation that follows it, as in `3\pi \approx 9.42` or `2/3 = 0.67`."""
    approximation = _APPROXIMATION.search(text)
    if approximation is None or approximation.start() == 0:
        return text
    formula = text[: approximation.start()]
    fraction = _FRACTION.fullmatch(formula.strip())
    if approximation[1] != "=":
        return formula
    if fraction is None or int(fraction[3] or fraction[5]) == 0:
        return text
    value = Fraction(int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5]))
    decimals = Fraction(approximation[2])
    num_decimals = len(approximation[2].partition(".")[2])
    is_close = abs((-value if fraction[1] else value) - decimals) < Fraction(1, 10**num_decimals)
    return formula if is_close and num_decimals > 0 else text


def _without_modulus(text: str) -> str:
    r"""Return a congruence such as `x \equiv 3 \pmod{7}` as an equation without its modulus."""
    congruence = _MODULUS.sub("", text)
    return text if congruence == text else _CONGRUENT.sub(" = ", congruence)


def _without_names(text: str) -> str:
    """Return a tuple such as `(x, y) = (1, 2)` without the names, if the names are in alphabetical order."""
    match = _NAMES_OF_TUPLE.match(text)
    if match is None:
        return text
    names = [name.strip() for name in match[1].split(",")]
    return text[match.end() :] if names == sorted(names) else text


def _sum_of_mixed(match: re.Match[str]) -> str:
    numerator = match[2] or match[4]
    denominator = match[3] or match[5]
    is_proper = int(numerator) < int(denominator)
    return as_latex(f"{match[1]} {numerator}/{denominator}") if is_proper else match[0]


def _with_name_first(text: str) -> str:
    """Return an equation such as `5 = x` with its name on the left. Other texts are unchanged."""
    equation = _NAME_BEHIND.fullmatch(text)
    return text if equation is None else f"{equation[2]} = {equation[1].strip()}"


def _with_round_brackets(text: str) -> str:
    """Return an interval such as `]1, 2[` with the brackets `(1, 2)`. Other texts are unchanged."""
    if text.count("[") + text.count("]") != 2 or "," not in text:
        return text
    if text.startswith("]"):
        text = f"({text[1:]}"
    return f"{text[:-1]})" if text.endswith("[") else text


def _both_signs(text: str) -> str:
    r"""Return the two values of a formula with one sign `\pm`, separated by a comma. Other texts are unchanged."""
    if len(_SIGNS.findall(text)) != 1 or "," in text:
        return text
    values = [_SIGNS.sub(sign, text).strip().removeprefix("+") for sign in "+-"]
    return ", ".join(values)


def _plain_number(text: str) -> str:
    """Return a number in plain decimals, without separators and superfluous zeros. Return any other text unchanged."""
    if _GROUPED_BY_BLANKS.fullmatch(text):
        text = text.replace(" ", "").replace("'", "")
    text = ungrouped(text)
    scientific = _SCIENTIFIC.fullmatch(text)
    power = _POWER_OF_TEN.fullmatch(text)
    if scientific is not None:
        return _written_out(scientific[1], scientific[2] or scientific[3]) or text
    if power is not None:
        return _written_out(power[1] + "1", power[2] or power[3]) or text
    decimal = _DECIMAL.fullmatch(text)
    if decimal is None or not (decimal[2] or decimal[3]):
        return text
    fraction = (decimal[3] or "").rstrip("0")
    return f"{decimal[1]}{decimal[2] or '0'}" + (f".{fraction}" if fraction else "")


def _written_out(mantissa: str, exponent: str) -> str | None:
    """Return the number mantissa * 10^exponent in plain decimals, or None if it would be too long."""
    if abs(int(exponent)) > MAX_EXPONENT:
        return None
    number = f"{Decimal(f'{mantissa}e{exponent}'):f}"
    return number.rstrip("0").rstrip(".") if "." in number else number


def plain_value(text: str) -> Fraction | None:
    r"""Return the value of a number, a fraction or a percentage in plain digits, or None for any other text.

    >>> plain_value("0.25") == plain_value(r"25\%") == plain_value("1/4"), plain_value("1/0"), plain_value("x")
    (True, None, None)
    """
    percentage = _PERCENTAGE.fullmatch(text)
    number = text if percentage is None else percentage[1]
    fraction = _FRACTION.fullmatch(number)
    value: Fraction | None = None
    try:
        if fraction is not None:
            value = Fraction(int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5]))
            value = -value if fraction[1] else value
        elif _DECIMAL.fullmatch(number):
            value = Fraction(number)
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if value is not None and percentage is not None else value
