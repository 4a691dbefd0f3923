r"""Rewrites notation that math-verify misreads: Unicode signs, scientific E-notation, and units after a number."""

import re
import unicodedata

MAX_CHARACTERS = 20_000  # maximum length of a text that is checked for a unit

_SIGNS = {
    "\u2212": "-",  # minus sign
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ",
    "\u00f7": "/",
    "\u2044": "/",  # fraction slash
    "\u221e": r"\infty ",
    "\u00b0": r"^\circ ",
    "\u2205": r"\emptyset ",
    "\u03c0": r"\pi ",
    "\u00b1": r"\pm ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2208": r"\in ",
}
_SIGN = re.compile("[" + "".join(_SIGNS) + "]")
_FULL_WIDTH = re.compile("[\uff01-\uff5e]")
_FULL_WIDTH_OFFSET = 0xFEE0  # difference between the code points of a full-width character and its ASCII form
_VULGAR_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a"
_SUPERSCRIPT = re.compile(f"[{_SUPERSCRIPTS}]+")
_AS_DIGITS = str.maketrans(_SUPERSCRIPTS, "0123456789-+")
_ROOT = re.compile(r"\u221a\s*(?:\(([^()]{0,200})\)|\{([^{}]{0,200})\}|(\d+(?:\.\d+)?|[a-zA-Z]))")
# A dash is a minus sign only if no number precedes it. Between two numbers it may denote a range.
_DASH_AS_SIGN = re.compile(r"(^|[(\[{,=:])(\s{0,8})\u2013(?=\s{0,8}[\d.\\])")
_UPRIGHT_CONSTANT = re.compile(r"\\mathrm\s{0,8}\{\s{0,8}([ei])\s{0,8}\}")
_FRACTION_OF_DIGITS = re.compile(r"(\\[dtc]?frac)\s{0,8}(\d)\s{0,8}(\d)(?!\d)")
# `2e-1` may mean 2 times e minus 1. With a signed exponent, this is E-notation only if the number has a decimal point
# or is 1, or the exponent begins with 0.
_E_NOTATION = re.compile(
    r"(?<![\w.\\])(?:(\d{1,400}\.\d{1,400}|1)[eE]([+-]?\d{1,5})|(\d{1,400})[eE](\d{1,5}|[+-]0\d{0,4}))(?![\w.])"
)
_NUMBER = r"[-\u2212+]?(?:\d[\d,]{0,40}(?:\.\d{1,40})?|\.\d{1,40})"
_POWER = r"(?:\^\d|\^\{\d\}|\u00b2|\u00b3)?"
_UNIT = r"(?:[kcmd]?m|[km]?[gsN]|[VLCKJWA]|k[JWVN]|\u00b0\s?[CF]|hr?|min|sec|ft|in|yd|mi|Hz|Pa|mol)" + _POWER
_NUMBER_WITH_UNIT = re.compile(rf"\s*({_NUMBER})(?:\s|~|\\[, ]){{0,8}}{_UNIT}(?:/{_UNIT})?\s*\.?\s*")


def as_latex(text: str) -> str:
    r"""Return the text with Unicode signs and E-notation rewritten as LaTeX.

    >>> as_latex("4\u221a2 \u2212 3\u00b2"), as_latex("6.02e23"), as_latex("2e-1"), as_latex("\u2153")
    ('4\\sqrt{2} - 3^{2}', '6.02\\times 10^{23}', '2e-1', '\\frac{1}{3}')
    """
    text = _DASH_AS_SIGN.sub(r"\1\2-", text)
    text = _FULL_WIDTH.sub(lambda match: chr(ord(match[0]) - _FULL_WIDTH_OFFSET), text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3] or ''}}}", text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_AS_DIGITS)}}}", text)
    text = _VULGAR_FRACTION.sub(_latex_fraction, text)
    text = _SIGN.sub(lambda match: _SIGNS[match[0]], text)
    text = _UPRIGHT_CONSTANT.sub(r"\1", text)
    text = _FRACTION_OF_DIGITS.sub(r"\1{\2}{\3}", text)
    return _E_NOTATION.sub(_latex_power, text)


def number_before_unit(text: str) -> str | None:
    """Return the number from a text that consists of a number and a physical unit, or None for any other text.

    >>> number_before_unit("12 m/s"), number_before_unit("5 V"), number_before_unit("12 x")
    ('12', '5', None)
    """
    match = _NUMBER_WITH_UNIT.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    return None if match is None else match[1]


def _latex_fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _latex_power(match: re.Match[str]) -> str:
    mantissa = match[1] or match[3]
    exponent = int(match[2] or match[4])
    return rf"{mantissa}\times 10^{{{exponent}}}"
