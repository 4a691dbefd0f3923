r"""Rewrites the many spellings of a number or a sign in a text as one spelling in plain LaTeX.

The text may be a formula, a list or a whole sentence, because all parts of it keep their places. Every regular
expression takes linear time, because the number of its repetitions is bounded.
"""

import re
from fractions import Fraction

from async_grpo.rewards.answer_reading.characters import plain_characters

SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![a-zA-Z]))"
# A LaTeX command that sets its argument in a font
FONT = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt|normal)|boldsymbol|bm|mbox|operatorname)(?![a-zA-Z])"
# Words that a formula may contain without a command for their font, such as `\text`: names of functions, products of
# variables, and "and" and "or" in lists
WORD_IN_FORMULA = (
    r"(?:and|or|sqrt|pi|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|arc(?:sin|cos|tan)|[abcxyz]{2,3})"
)
_NUMERALS = {  # word -> number, for bases such as `101_{\text{two}}`
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "eleven": "11", "twelve": "12", "sixteen": "16",
}  # fmt: skip
_SPELLINGS = {  # a pattern -> what replaces it. Applied one after the other
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
    r"(?<=\d)\{:\}(?=\d)": ":",
    # The argument of a function is converted from degrees to radians. Elsewhere, a degree sign is removed like a unit
    r"\\(sin|cos|tan|cot|sec|csc)\s?(?:\(\s?(\d{1,4})\s?\^\\circ\s{0,2}\)|(\d{1,4})\s?\^\\circ(?![a-zA-Z]))": (
        r"\\\1(\\frac{\2\3\\pi}{180})"
    ),
    r",\s{0,8}\.\.\.": r", \\ldots ",
    # Remove blanks around < and >. In `a < b < c`, math-verify takes a single letter after a blank for a unit
    r"\s{1,8}(?=[<>])|(?<=[<>])\s{1,8}": "",
    r"(\\[lg]e)\s{1,8}([a-zA-Z])\s{0,8}\Z": r"\1{\2}",
    # The constants e, i and pi, numbers, and single letters without their font
    r"\\(?:text(?:rm)?|mathrm|operatorname)\s{0,8}\{\s{0,8}([ei]|\\pi)\s{0,8}\}": r"\1",
    r"\{\\rm\s{1,8}([ei])\s{0,8}\}|\\rm\s{1,8}([ei])(?![a-zA-Z])": r"\1\2",
    rf"{FONT}\s{{0,8}}\{{\s{{0,8}}([-+]?\d[\d.,]{{0,40}})\s{{0,8}}\}}": r"\1",
    r"\\(?:mathbf|mathit|boldsymbol|bm)\s{0,8}\{\s{0,8}([a-zA-Z])\s{0,8}\}": r"\1",
    # Fractions and roots without braces
    r"\{([^{}\\]{1,60})\\over(?![a-zA-Z])([^{}\\]{1,60})\}": r"\\frac{\1}{\2}",
    r"\^\s?\{?(\d{1,9})\}?\s?/\s?_\s?\{?(\d{1,9})\}?": r"\\frac{\1}{\2}",
    r"\\frac\s{0,8}([0-9a-zA-Z])(?=\s{0,8}(?:[0-9a-zA-Z](?![0-9])|\{))": r"\\frac{\1}",
    r"(\\frac\{[^{}]{1,60}\})\s{0,8}([0-9a-zA-Z])(?![0-9])": r"\1{\2}",
    r"(\\frac)\s{1,8}(?=\{)": r"\1",
    r"(\\frac\{[^{}]{1,60}\})\s{1,8}(?=\{)": r"\1",
    r"\\sqrt\s{0,8}([0-9])(?![0-9])": r"\\sqrt{\1}",
    # Move a minus sign from the numerator to the front, unless the numerator has several terms as in `\frac{-1+x}{2}`
    r"\A\s{0,8}\\frac\{\s?-\s?(?=[\w.\\]{1,40}\s?\})": r"-\\frac{",
    r"([\^_])\{\s?([0-9a-zA-Z])\s?\}(?![0-9a-zA-Z])": r"\1\2",
    r"\s{1,8}(?=\\(?:cup|cap|setminus)(?![a-zA-Z]))": "",
    r"_([0-9])\s(?=[0-9])": r"_{\1} ",  # so that `\log_2 8` does not become a list
    r"(?<![\w)}])\(\s?(\d{1,60})\s?\)\s?_": r"\1_",  # a number in another base
    # Percent in words
    r"\s{0,8}\\text\s{0,8}\{\s{0,8}(?:percent|pct|per cent)\s{0,8}\}": r"\\%",
    r"(?<=\d)\s{0,8}(?:percent|pct|per cent)(?![a-zA-Z])": r"\\%",
    # Ordinal numbers, as in `3^{\text{rd}}`
    rf"(?<=\d)\s?\^\s?\{{?\s?{FONT}\s?\{{\s?(?:st|nd|rd|th)\s?\}}{{1,2}}": "",
    # Names of infinity and of the empty set
    r"\A\s{0,8}(?:\\text\s{0,8}\{)?\s{0,8}[Ii]nfinity\s{0,8}\}?\s{0,8}\Z": r"\\infty ",
    r"\A\s{0,8}(?:\\text\s{0,8}\{)?\s{0,8}(?:(?:[Tt]here (?:is|are) )?[Nn]o (?:real )?solutions?|[Ee]mpty set)"
    r"\s{0,8}\}?\s{0,8}\Z": r"\\emptyset ",
    # Repeating decimals: dots over the first and the last digit of the period
    r"\\dot\s?\{?(\d)\}?(\d{0,12})\\dot\s?\{?(\d)\}?": r"\\overline{\1\2\3}",
}
_SPELLING_PATTERNS = [(re.compile(pattern), replacement) for pattern, replacement in _SPELLINGS.items()]

# The base of a number in words, as in `101_{\text{two}}`
_BASE_IN_WORDS = re.compile(rf"(?<=\d)\s?_\s?\{{\s?(?:{FONT}\s?\{{\s?)?([a-z]{{3,7}})\s?\}}{{1,2}}")
# `2e-1` may mean 2 times e minus 1. With a negative exponent, this is E-notation only if the number has a decimal point
# or is 1, or if the exponent begins with 0 or has at least two digits
_E_NOTATION = re.compile(
    r"""
    (?<![\w.\\])
    (?: (\d{1,400}\.\d{1,400}|1) [eE] ([+-]?\d{1,5})
      | (\d{1,400}) [eE] (\d{1,5}|[+-]0\d{0,4}|[+-]\d{2,5}|\+\d)
    )
    (?!\w|\.\d)
    """,
    re.VERBOSE,
)
# A thousands separator that cannot separate the elements of a list
_SURE_SEPARATOR = r"(?:,\\!|\\!,?|\{,\}|\\[,;:]|~|[\u00a0\u202f\u2009\u2007\u2008\u2006])"
_SURELY_GROUPED = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_SURE_SEPARATOR}\d{{3}}){{1,20}}(?!\d)")
_SURE_SEPARATORS = re.compile(_SURE_SEPARATOR)
# A mixed number such as `3 \frac{1}{2}` or `3 1/2`, unless it is part of a larger number, a power or a quotient
_MIXED = re.compile(
    rf"""
    (?<![\w.}}^/]) (?<!\d[ ]) (?<!\\[ ])
    (\d{{1,15}})
    (?: {SPACE}{{0,8}} \\frac\{{(\d{{1,15}})\}}\{{(\d{{1,15}})\}}
      | {SPACE}{{1,8}} (\d{{1,15}})\s?/\s?(\d{{1,15}}) (?![\w.])
    )
    (?!\s?[\^!/])
    """,
    re.VERBOSE,
)
# A decimal whose repeating digits are marked, as in `0.1\overline{6}` or `0.(3)`
_REPEATING = re.compile(
    r"""
    (?<![\w.]) (\d{1,15}) \. (\d{0,15})
    (?: \\(?:overline|bar|dot)\s{0,8} (?:\{(\d{1,15})\}|(\d))
      | \((\d{1,15})\)
    )
    """,
    re.VERBOSE,
)
# A decimal in which the same digits stand three or more times before the dots, as in 0.1666...
_REPEATED = re.compile(
    r"(?<![\w.])(\d{1,15})\.(\d{0,6}?)(\d{1,6}?)\3{2,20}\s{0,2}(?:\.{3}|\\[lc]?dots(?![a-zA-Z])\s?)"
)


def as_latex(text: str) -> str:
    r"""Return the text with Unicode signs, E-notation, mixed numbers and rare LaTeX commands rewritten as plain LaTeX.

    >>> as_latex("4√2 \u2212 3²"), as_latex("6.02e23"), as_latex("2e-1"), as_latex("\u2153")
    ('4\\sqrt{2} - 3^2', '6.02\\times 10^{23}', '2e-1', '\\frac{1}{3}')
    >>> as_latex(r"\frac{-1}{2}"), as_latex(r"\frac{-1+x}{2}"), as_latex("0.1666...")
    ('-\\frac{1}{2}', '\\frac{-1+x}{2}', '\\frac{1}{6}')
    """
    text = plain_text(text)
    for pattern, replacement in _SPELLING_PATTERNS:
        text = pattern.sub(replacement, text)
    text = _BASE_IN_WORDS.sub(_base_in_digits, text)
    text = _without_sure_separators(text)
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _REPEATED.sub(_fraction_of_repeated, text)
    text = _MIXED.sub(_fraction_of_mixed, text)
    return _E_NOTATION.sub(_latex_power, text)


def plain_text(text: str) -> str:
    """Return a text of words and formulas with plain characters, and without thousands separators such as thin spaces."""
    return plain_characters(_without_sure_separators(text))


def _without_sure_separators(text: str) -> str:
    """Remove thousands separators that cannot separate the elements of a list, such as `{,}` and the thin space."""
    return _SURELY_GROUPED.sub(lambda match: _SURE_SEPARATORS.sub("", match[0]), text)


def _base_in_digits(match: re.Match[str]) -> str:
    numeral = _NUMERALS.get(match[1])
    return match[0] if numeral is None else f"_{{{numeral}}}"


def _fraction_of_mixed(match: re.Match[str]) -> str:
    whole = int(match[1])
    numerator = int(match[2] or match[4])
    denominator = int(match[3] or match[5])
    # `2\frac{10}{3}` may be a product. "2 10/3" is always read as a mixed number, because nobody writes a product so
    is_product = match[2] is not None and numerator >= denominator
    if is_product or denominator == 0:
        return match[0]
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


def _fraction_of_repeating(match: re.Match[str]) -> str:
    period = match[3] or match[4] or match[5]
    if match[5] is not None and match[2]:
        return match[0]  # `0.5(3)` may be a product
    return _latex_of_period(match[1], match[2], period)


def _fraction_of_repeated(match: re.Match[str]) -> str:
    return _latex_of_period(match[1], match[2], match[3])


def _latex_of_period(whole: str, decimals: str, period: str) -> str:
    """Return the value of a decimal whose last decimals, the period, repeat without end."""
    digits_once = whole + decimals  # the digits before the repeating ones
    denominator = int("9" * len(period)) * 10 ** len(decimals)
    value = Fraction(int(digits_once + period) - int(digits_once), denominator)
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _latex_power(match: re.Match[str]) -> str:
    mantissa = match[1] or match[3]
    exponent = int(match[2] or match[4])
    return rf"{mantissa}\times 10^{{{exponent}}}"
