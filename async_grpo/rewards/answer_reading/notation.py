r"""Rewrites the notations of a mathematical answer to one notation, before any reward compares it.

`math_verify`, `mathd` and `sympy` compare what `plain_notation` returns, for the gold answer and for the answer of a
completion, so that they agree on what an answer is. They differ only in how they compare. All functions take linear
time, even for texts that are written to slow them down.
"""

import re
from decimal import Decimal
from fractions import Fraction

from async_grpo.rewards.answer_reading.boxes import ungrouped, without_layout
from async_grpo.rewards.answer_reading.characters import plain_characters

MAX_CHARACTERS = 20_000  # maximum length of a text that is rewritten
MAX_EXPONENT = 20  # largest power of ten that is written out
SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![a-zA-Z]))"

_FONTS = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt|normal)|boldsymbol|bm|mbox|operatorname)(?![a-zA-Z])"
_SPELLINGS = {  # applied one after the other
    r"\\\\(?=(?:d|t|c|nice|s)?frac|sqrt|text|boxed|pi)": r"\\",  # a command with two backslashes
    r"\\(?:d|t|c|nice|s|flat)frac(?![a-zA-Z])": r"\\frac",
    r"\\left\s{0,8}\\langle(?![a-zA-Z])|\\langle(?![a-zA-Z])": "(",
    r"\\right\s{0,8}\\rangle(?![a-zA-Z])|\\rangle(?![a-zA-Z])": ")",
    r"\\leq(?:slant)?(?![a-zA-Z])": r"\\le ",
    r"\\geq(?:slant)?(?![a-zA-Z])": r"\\ge ",
    r"\\neq(?![a-zA-Z])": r"\\ne ",
    r"\\(?:varnothing|O)(?![a-zA-Z])": r"\\emptyset ",
    r"\\(?:degree|textdegree)(?![a-zA-Z])": r"^\\circ ",
    r"\^\s{0,8}\{\s{0,8}\\circ\s{0,8}\}": r"^\\circ ",
    r",\s{0,8}\.\.\.": r", \\ldots ",
    # The constants e, i and pi, numbers, and single letters without their font
    r"\\(?:text(?:rm)?|mathrm|operatorname)\s{0,8}\{\s{0,8}([ei]|\\pi)\s{0,8}\}": r"\1",
    r"\{\\rm\s{1,8}([ei])\s{0,8}\}|\\rm\s{1,8}([ei])(?![a-zA-Z])": r"\1\2",
    rf"{_FONTS}\s{{0,8}}\{{\s{{0,8}}([-+]?\d[\d.,]{{0,40}})\s{{0,8}}\}}": r"\1",
    r"\\(?:mathbf|mathit|boldsymbol|bm)\s{0,8}\{\s{0,8}([a-zA-Z])\s{0,8}\}": r"\1",
    # Fractions and roots without braces
    r"\{([^{}\\]{1,60})\\over(?![a-zA-Z])([^{}\\]{1,60})\}": r"\\frac{\1}{\2}",
    r"\^\s?\{?(\d{1,9})\}?\s?/\s?_\s?\{?(\d{1,9})\}?": r"\\frac{\1}{\2}",
    r"\\frac\s{0,8}([0-9a-zA-Z])(?=\s{0,8}(?:[0-9a-zA-Z](?![0-9])|\{))": r"\\frac{\1}",
    r"(\\frac\{[^{}]{1,60}\})\s{0,8}([0-9a-zA-Z])(?![0-9])": r"\1{\2}",
    r"(\\frac)\s{1,8}(?=\{)": r"\1",
    r"(\\frac\{[^{}]{1,60}\})\s{1,8}(?=\{)": r"\1",
    r"\\sqrt\s{0,8}([0-9])(?![0-9])": r"\\sqrt{\1}",
    r"\A\s{0,8}\\frac\{\s?-\s?": r"-\\frac{",
    r"([\^_])\{\s?([0-9a-zA-Z])\s?\}(?![0-9a-zA-Z])": r"\1\2",
    r"\s{1,8}(?=\\(?:cup|cap|setminus)(?![a-zA-Z]))": "",
    r"_([0-9])\s(?=[0-9])": r"_{\1} ",  # so that `\log_2 8` does not become a list
    # Percent in words
    r"\s{0,8}\\text\s{0,8}\{\s{0,8}(?:percent|pct|per cent)\s{0,8}\}": r"\\%",
    r"(?<=\d)\s{0,8}(?:percent|pct|per cent)(?![a-zA-Z])": r"\\%",
    # Sets without an element
    r"\A\s{0,8}(?:\\text\s{0,8}\{)?\s{0,8}(?:[Nn]o (?:real )?solutions?|[Ee]mpty set)\s{0,8}\}?\s{0,8}\Z": r"\\emptyset ",
}
_SPELLING_PATTERNS = [(re.compile(pattern), replacement) for pattern, replacement in _SPELLINGS.items()]

# `2e-1` may mean 2 times e minus 1. With a signed exponent, this is E-notation only if the number has a decimal point
# or is 1, or the exponent begins with 0 or has two digits.
_E_NOTATION = re.compile(
    r"(?<![\w.\\])(?:(\d{1,400}\.\d{1,400}|1)[eE]([+-]?\d{1,5})|(\d{1,400})[eE](\d{1,5}|[+-]0\d{0,4}|[+-]\d{2,5}|\+\d))"
    r"(?!\w|\.\d)"
)
_SCIENTIFIC = re.compile(
    r"([-+]?\d{1,30}(?:\.\d{1,30})?)\s{0,8}(?:\\times|\\cdot|\*|x)\s{0,8}10\s{0,8}\^\s{0,8}(?:\{\s?([-+]?\d{1,2})\s?\}|(\d))"
)
_POWER_OF_TEN = re.compile(r"([-+]?)10\^(?:\{([-+]?\d{1,2})\}|(\d))")
_APPROXIMATION = re.compile(r"\s{0,8}(\\approx(?![a-zA-Z])|=)\s{0,8}(-?\d{0,40}\.?\d{1,40})\s{0,8}\Z")
_FRACTION = re.compile(r"(-?)(?:\\frac\{(\d{1,40})\}\{(\d{1,40})\}|(\d{1,40})\s?/\s?(\d{1,40}))")
_SURE_SEPARATOR = r"(?:,\\!|\\!,?|\{,\}|\\[,;:]|~|[\u00a0\u202f\u2009\u2007\u2008\u2006])"
_SURELY_GROUPED = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_SURE_SEPARATOR}\d{{3}}){{1,20}}(?!\d)")
_SURE_SEPARATORS = re.compile(_SURE_SEPARATOR)
_GROUPED_BY_BLANKS = re.compile(r"[-+]?\d{1,3}(?:[ ']\d{3}){1,20}(?:\.\d{1,40})?")
_NAME = re.compile(r"\s*[a-zA-Z]\w?\s*=\s*(?=[^=]+\Z)")
_PERCENTAGE = re.compile(r"(.{1,100}?)\s?\\?%")
_DECIMAL = re.compile(r"\+?(-?)(\d{0,400})(?:\.(\d{0,400}))?")

_MIXED = re.compile(
    rf"(?<![\w.}}^/])(?<!\d )(?<!\\ )(\d{{1,15}})(?:{SPACE}{{0,8}}\\frac\{{(\d{{1,15}})\}}\{{(\d{{1,15}})\}}"
    rf"|{SPACE}{{1,8}}(\d{{1,15}})\s?/\s?(\d{{1,15}})(?![\w.]))(?!\s?[\^!/])"
)
_REPEATING = re.compile(
    r"(?<![\w.])(\d{1,15})\.(\d{0,15})(?:\\(?:overline|bar|dot)\s{0,8}(?:\{(\d{1,15})\}|(\d))|\((\d{1,15})\))"
)

_CURRENCY = (
    r"(?:(?:US|A|C|NZ)?\\?\$|[€£¥₹₩₽₺₪₫฿]|\\(?:pounds|euro|yen|textdollar|texteuro|textsterling)(?![a-zA-Z])"
    r"|(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|Rs\.?)(?![a-zA-Z]))"
)
_AMOUNT = r"(?:\d[\d,]{0,40}(?:\.\d{0,40})?|\.\d{1,40})"
_PRICE = re.compile(
    rf"([-+]?){_CURRENCY}{SPACE}{{0,8}}([-+]?{_AMOUNT})|([-+]?{_AMOUNT}){SPACE}{{0,8}}{_CURRENCY}"
)
_POWER = r"(?:\s?\^\s?\d|\s?\^\s?\{\s?[-+]?\d\s?\})"
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
_QUANTITY = rf"[-+]?(?:{_AMOUNT}|\d{{1,15}}/\d{{1,15}}|-?\\frac\{{\d{{1,15}}\}}\{{\d{{1,15}}\}})"
# Words after a number that change its value
_NO_UNITS = (
    r"(?:or|and|to|million|billion|trillion|thousand|hundred|dozen|mod|sin|cos|tan|cot|sec|csc|log|exp|sqrt|pi|factorial"
    r"|squared|cubed|choose|times|plus|minus|over|hal(?:f|ves)|(?:third|quarter|fourth|fifth|tenth|hundredth)s?|[abcnxyz]{2,3})"
)
_WORDS = rf"(?:(?!{_NO_UNITS}(?![a-zA-Z]))[a-zA-Z]{{3,20}})(?:\s(?!{_NO_UNITS}(?![a-zA-Z]))[a-zA-Z]{{2,20}}){{0,3}}"
_MEASURED = re.compile(rf"({_QUANTITY})(?:{SPACE}{{0,8}}{_UNIT}|{SPACE}{{1,8}}{_WORDS})\s?\.?")
_WRITTEN_UNIT = re.compile(
    rf"(?<=[\d}}]){SPACE}{{0,8}}\\(?:text(?:rm|normal)?|mathrm|mbox|rm)\s{{0,8}}\{{\s{{0,8}}"
    rf"(?!{_NO_UNITS}(?![a-zA-Z])|[aApP]\.?[mM])[a-zA-Z][a-zA-Z /.-]{{0,60}}\}}{_POWER}?"
    rf"(?:\s?/\s?\\(?:text|mathrm)\s?\{{[a-zA-Z]{{1,9}}\}}{_POWER}?)?\s{{0,8}}\Z"
)
_CHOICE = re.compile(
    rf"(?:{_FONTS}\s?\{{|\{{)?\s{{0,8}}\(?\s{{0,8}}(?:{_FONTS}\s?\{{)?\s{{0,8}}([a-zA-Z])\s{{0,8}}\}}?\s{{0,8}}\)?\.?\s{{0,8}}\}}?\.?"
)
_WORDS_IN_FONT = re.compile(rf"{_FONTS}\s?(\{{[^{{}}]{{0,400}}\}})")
_END_OF_SENTENCE = re.compile(r"(?<=[\w)\]}%$])(?<!\\right)(?<!\\left)(?<!ldots)[\s.,;:]{1,20}\Z")
_NUMBER = r"[-+]?(?:\d[\d,]{0,40}(?:\.\d{1,40})?|\.\d{1,40})"
_SYMBOL_AFTER_NUMBER = re.compile(rf"\s*({_NUMBER}){SPACE}{{0,8}}{_SYMBOL}\s*\.?\s*")


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
    text = as_latex(text)
    text = _without_end(without_layout(_without_end(text)))
    choice = plain_choice(text)
    if choice is not None:
        return choice
    text = _without_approximation(text)
    name = _NAME.match(text)
    begin = "" if name is None else name[0]
    value = _plain_number(_without_unit(text[len(begin) :].strip()))
    return begin + value


def readings(text: str) -> list[str]:
    r"""Return the notations of an answer that may mean several things, the likeliest one first.

    An approximation of a fraction may be the answer, and so may the number before a letter that may be a unit.

    >>> readings("5 N"), readings(r"\frac{2}{3} = 0.667"), readings("7")
    (['5 N', '5'], ['\\frac{2}{3}', '\\frac{2}{3} = 0.667'], ['7'])
    """
    plain = plain_notation(text)
    notations = [plain]
    latex = (
        _without_end(without_layout(_without_end(as_latex(text)))) if len(text) <= MAX_CHARACTERS else text
    )
    if _without_approximation(latex) != latex:
        notations.append(latex)
    number = number_before_unit(plain)
    if number is not None:
        notations.append(number)
    return notations


def as_latex(text: str) -> str:
    r"""Return the text with Unicode signs, E-notation, mixed numbers and rare LaTeX commands rewritten as plain LaTeX.

    Parts of the text keep their places, so that the text may be a formula, a list or a whole sentence.

    >>> as_latex("4√2 \u2212 3²"), as_latex("6.02e23"), as_latex("2e-1"), as_latex("\u2153")
    ('4\\sqrt{2} - 3^2', '6.02\\times 10^{23}', '2e-1', '\\frac{1}{3}')
    """
    text = plain_text(text)
    for pattern, replacement in _SPELLING_PATTERNS:
        text = pattern.sub(replacement, text)
    text = _without_sure_separators(text)
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _MIXED.sub(_fraction_of_mixed, text)
    return _E_NOTATION.sub(_latex_power, text)


def plain_text(text: str) -> str:
    """Return a text of words and formulas with plain characters, and without thousands separators such as thin spaces."""
    return plain_characters(_without_sure_separators(text))


def plain_choice(text: str) -> str | None:
    r"""Return the letter of a choice without its font, parentheses and full stop, or None for any other text.

    >>> plain_choice(r"\textbf{(C)}"), plain_choice("C."), plain_choice(r"\text{AC}")
    ('C', 'C', None)
    """
    match = _CHOICE.fullmatch(text)
    return None if match is None else match[1]


def words_of(text: str) -> str:
    r"""Return the words if a text is only a font command with words, such as \textbf{Yes}. Else return the text itself."""
    match = _WORDS_IN_FONT.fullmatch(text)
    return text if match is None else match[1][1:-1].strip()


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


def _without_sure_separators(text: str) -> str:
    """Remove thousands separators that cannot separate the elements of a list, such as `{,}` and the thin space."""
    return _SURELY_GROUPED.sub(lambda match: _SURE_SEPARATORS.sub("", match[0]), text)


def _without_unit(text: str) -> str:
    r"""Return the number of a price or a quantity. From other texts, only a unit such as \text{cm} is removed."""
    price = _PRICE.fullmatch(text)
    if price is not None:
        return (price[1] or "") + (price[2] or price[3])
    text = _WRITTEN_UNIT.sub("", text)
    measured = _MEASURED.fullmatch(text)
    return text if measured is None else measured[1]


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


def _fraction_of_mixed(match: re.Match[str]) -> str:
    whole = int(match[1])
    numerator = int(match[2] or match[4])
    denominator = int(match[3] or match[5])
    # `2\frac{10}{3}` may be a product, but nobody writes a product as "2 10/3"
    is_product = match[2] is not None and numerator >= denominator
    if is_product or denominator == 0:
        return match[0]
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


def _fraction_of_repeating(match: re.Match[str]) -> str:
    digits_once = match[1] + match[2]  # the digits before the repeating ones
    period = match[3] or match[4] or match[5]
    if match[5] is not None and match[2]:
        return match[0]  # `0.5(3)` may be a product
    denominator = int("9" * len(period)) * 10 ** len(match[2])
    value = Fraction(int(digits_once + period) - int(digits_once), denominator)
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _latex_power(match: re.Match[str]) -> str:
    mantissa = match[1] or match[3]
    exponent = int(match[2] or match[4])
    return rf"{mantissa}\times 10^{{{exponent}}}"


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
