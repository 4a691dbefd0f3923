"""Checkers for `fuzz_rewards`: they read arithmetic by descent over characters, and share no code with the rewards."""

import re
import unicodedata
from fractions import Fraction
from itertools import product

PLAIN_INTEGER = re.compile(r"(?:0|[1-9][0-9]*)(?![0-9])")
DECIMAL = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")


class Arithmetic:
    """`value` and the `numbers` of an expression of + - * / ( ), blanks and numbers.

    Raises:
        ValueError, ZeroDivisionError: it is none, or has no value.
    """

    def __init__(self, text: str, number: re.Pattern[str] = PLAIN_INTEGER) -> None:
        self._text, self._at, self._number = text.strip() + "\0", 0, number
        self.numbers: list[Fraction] = []
        self.value = self._sum()
        if self._peek() != "\0":
            raise ValueError("something is left")

    def _peek(self) -> str:
        while self._text[self._at] == " ":
            self._at += 1
        return self._text[self._at]

    def _take(self, choices: str) -> str:
        if self._peek() not in choices:
            return ""
        self._at += 1
        return self._text[self._at - 1]

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+-"):
            value += self._product() * (1 if sign == "+" else -1)
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while operator := self._take("*/"):
            value = value * self._atom() if operator == "*" else value / self._atom()
        return value

    def _atom(self) -> Fraction:
        if self._take("-"):
            return -self._atom()
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise ValueError("a bracket is open")
            return value
        self._peek()
        match = self._number.match(self._text, self._at)
        if match is None:
            raise ValueError("no number")
        self._at = match.end()
        self.numbers.append(Fraction(match[0].rstrip(".")))
        return self.numbers[-1]


def solves(completion: str, nums: list[int], target: int) -> bool:
    """Whether the only answer behind the thought uses each number once and hits the target."""
    tail = completion.strip().split("</think>")[-1]
    parts = tail.split("<answer>")
    if len(parts) != 2 or parts[1].count("</answer>") != 1 or "</answer>" in parts[0]:
        return False
    try:
        expression = Arithmetic(parts[1].split("</answer>")[0])
    except (ValueError, ZeroDivisionError, RecursionError):
        return False
    return sorted(expression.numbers) == sorted(nums) and expression.value == target


_SPELLINGS = [  # LaTeX -> plain arithmetic
    (r"[$~]|\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]", ""),
    (r"\\(text|mbox)\{[^{}]*\}|\^\\circ(?![a-z])|\^\{\\circ\}", ""),
    (r"^\s*[a-zA-Z]{1,2}\s*=", ""),
    (r"\\(cdot|times)(?![a-z])", "*"),
    (r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", ""),
    (r"\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))", r"((\1\2)/(\3\4))"),
    (r"\{", "("),
    (r"\}", ")"),
]
_MIXED = re.compile(r"([0-9]+)\s*(\(\([^()]*\)/\([^()]*\)\))|([0-9]+)\s+([0-9]+\s*/\s*[0-9]+)")
_PRODUCT = re.compile(r"(?<=[0-9.)])\s*(?=\()|(?<=\))\s*(?=[0-9.(])")
_BLANK = re.compile(r"(?<=[0-9])\s+(?=[0-9])")


def readings(text: str) -> set[Fraction]:
    r"""The numbers that a benevolent reader may see in a LaTeX text; none if the checker cannot read it.

    >>> sorted(map(str, readings(r"-1\frac{1}{2}"))), sorted(map(str, readings(r"50\%"))), readings(r"7x = 80")
    (['-1/2', '-3/2'], ['1/2', '50'], set())
    >>> readings("1 2"), readings("0,5")
    ({Fraction(12, 1)}, {Fraction(1, 2)})
    """
    text = "".join(str(unicodedata.decimal(character, character)) for character in text)
    values = set()
    for percent, mixed, comma in product(("", "/100"), (r"(\1\3+\2\4)", r"\g<0>"), (",", ".")):
        spelling = re.sub(r"(?<=[0-9]),(?=[0-9])", comma, text)
        for pattern, plain in _SPELLINGS:
            spelling = re.sub(pattern, plain, spelling)
        spelling = _MIXED.sub(mixed, re.sub(r"\\?%", percent, spelling))
        try:
            values.add(Arithmetic(_BLANK.sub("", _PRODUCT.sub("*", spelling)), DECIMAL).value)
        except (ValueError, ZeroDivisionError, RecursionError):
            continue
    return values


_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")


def judged(completion: str, gold: Fraction, tolerance: Fraction) -> bool | None:
    """Whether a benevolent reader finds the gold answer in one of the boxes; None if the checker cannot read one."""
    found = [readings(content) for content in _BOX.findall(completion)]
    if any(abs(value - gold) <= tolerance for values in found for value in values):
        return True
    return False if found and all(found) and len(found) == completion.count("\\boxed") else None
