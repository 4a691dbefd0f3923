r"""Computes plain arithmetic in LaTeX, such as `\frac{2}{3} \cdot 6`, and finds false equations such as `7 = 5`.

Nothing that a text names is ever evaluated as code: a small grammar reads numbers, fractions, roots, powers, pi and the
four operations. All functions take linear time, because the length of an expression is limited.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_CHARACTERS = 200  # maximum length of an expression
MAX_DEPTH = 20  # maximum number of nested brackets
MAX_FACTORIAL = 100  # largest number whose factorial is computed

# Largest relative difference of two values that count as equal
RELATIVE_TOLERANCE = 1e-9
# Largest relative difference of two values with \approx between them
APPROXIMATE_TOLERANCE = 0.05

_RELATION = re.compile(r"\\approx(?![a-zA-Z])|\\simeq(?![a-zA-Z])|={1,3}")
_TOKEN = re.compile(
    r"\s{0,200}(?:(\d{1,100}(?:\.\d{0,100})?|\.\d{1,100})"
    r"|\\(frac|sqrt|pi|cdot|times|div|left|right|binom)(?![a-zA-Z])|(\\?%|[-+*/^(){}!\[\]]))"
)
_DECIMALS = re.compile(r"-?\d{0,100}\.(\d{1,100})")
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "cdot": lambda left, right: left * right,
    "times": lambda left, right: left * right,
    "*": lambda left, right: left * right,
    "div": lambda left, right: left / right,
    "/": lambda left, right: left / right,
}
_CLOSINGS = {"(": ")", "{": "}", "[": "]"}
# First tokens of factors that may follow another factor without a sign, as `\sqrt{3}` in `2\sqrt{3}`
_SECOND_FACTORS = {"(", "frac", "sqrt", "pi", "binom"}
_END = ""  # stands for the end of the tokens


def states_false_equation(text: str) -> bool:
    r"""Return whether the last two numbers that a text equates are surely different, as in `7 = 5` or `5 \approx 7`.

    A decimal may be rounded or cut off, and a percentage may be written as 25 or 0.25. Only the last step of a
    calculation is checked. If any side is not plain arithmetic, such as the variable in `x = 3 + 3 = 7`, the result is
    False.

    >>> states_false_equation("7 = 5"), states_false_equation(r"5 \approx 7"), states_false_equation("x = 5")
    (True, True, False)
    >>> states_false_equation("2 + 3 = 5"), states_false_equation(r"\frac{2}{3} = 0.67"), states_false_equation("e = 3")
    (False, False, False)
    """
    relations = list(_RELATION.finditer(text))
    if not relations or len(text) > MAX_CHARACTERS:
        return False
    sides = _RELATION.split(text)
    values = [value for value in map(arithmetic_value, sides) if value is not None]
    if len(values) < len(sides):
        return False
    side, last_side = sides[-2:]
    value, last_value = values[-2:]
    tolerance = RELATIVE_TOLERANCE if "=" in relations[-1][0] else APPROXIMATE_TOLERANCE
    if ("%" in side) != ("%" in last_side):
        return all(_differ(value * factor, last_value, last_side, tolerance) for factor in (1, 100, 0.01))
    return _differ(value, last_value, last_side, tolerance) and _differ(last_value, value, side, tolerance)


def arithmetic_value(latex: str) -> float | None:
    r"""Return the value of plain arithmetic in LaTeX, or None for any other text.

    >>> arithmetic_value(r"\frac{1}{2} + 3 \cdot 2^2"), arithmetic_value(r"25\%"), arithmetic_value("3x")
    (12.5, 0.25, None)
    """
    if len(latex) > MAX_CHARACTERS:
        return None
    tokens: list[str] = []
    text = latex.strip()
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        token = match[1] or match[2] or match[3]
        if token not in ("left", "right"):
            tokens.append(token.lstrip("\\"))
        position = match.end()
    try:
        value = _Reader(tokens).read()
    except (ValueError, ArithmeticError):
        return None
    return value if math.isfinite(value) else None


def _differ(value: float, decimal: float, spelling: str, relative_tolerance: float) -> bool:
    """Return whether a value surely differs from a number that may be its rounded form.

    Args:
        value: The value.
        decimal: The number.
        spelling: The text of the number. If it is a decimal, it may differ by one unit of its last digit.
        relative_tolerance: Largest relative difference of two equal numbers.
    """
    decimals = _DECIMALS.fullmatch(spelling.strip())
    unit = 0.0 if decimals is None else 10.0 ** -len(decimals[1])
    largest = max(unit, relative_tolerance * max(abs(value), abs(decimal)))
    return abs(value - decimal) > largest


@dataclass
class _Reader:
    """Reads tokens from left to right. Each method raises ValueError if the tokens are no plain arithmetic."""

    tokens: list[str]
    position: int = 0
    depth: int = 0

    def read(self) -> float:
        """Return the value of all tokens."""
        value = self._sum()
        if self._next() != _END:
            raise ValueError("text follows the expression")
        return value

    def _next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else _END

    def _take(self, expected: str) -> None:
        if self._next() != expected:
            raise ValueError(f"{expected!r} is missing")
        self.position += 1

    def _sum(self) -> float:
        value = self._product()
        while self._next() in ("+", "-"):
            sign = self._sign()
            value += sign * self._product()
        return value

    def _sign(self) -> int:
        sign = 1
        if self._next() in ("+", "-"):
            sign = -1 if self._next() == "-" else 1
            self.position += 1
        return sign

    def _product(self) -> float:
        value = self._sign() * self._power()
        has_quotient = False
        while True:
            token = self._next()
            if token in _OPERATORS:
                self.position += 1
                has_quotient = has_quotient or token == "/"
                factor = self._sign() * self._power()
                value = _OPERATORS[token](value, factor)
            elif token in _SECOND_FACTORS:
                if has_quotient:
                    raise ValueError("`1/2(3)` may mean two things")
                value *= self._power()
            else:
                return value

    def _power(self) -> float:
        value = self._atom()
        while self._next() in ("!", "%"):
            value = _factorial(value) if self._next() == "!" else value / 100
            self.position += 1
        if self._next() == "^":
            self.position += 1
            value **= self._argument()
            if isinstance(value, complex):
                raise ValueError("the power is no real number")
        return value

    def _argument(self) -> float:
        r"""Return the value of an argument of a command: braces, or a single digit as in `\frac12`."""
        token = self._next()
        if token == "{":
            return self._atom()
        if len(token) == 1 and token.isdigit():
            self.position += 1
            return float(token)
        raise ValueError("no argument follows the command")

    def _atom(self) -> float:
        token = self._next()
        self.position += 1
        if token and token[0] in ".0123456789":
            return float(token)
        if token in _CLOSINGS:
            return self._in_brackets(_CLOSINGS[token])
        if token == "pi":
            return math.pi
        if token == "frac":
            return self._argument() / self._argument()
        if token == "binom":
            return _binomial(self._argument(), self._argument())
        if token == "sqrt":
            degree = 2.0
            if self._next() == "[":
                degree = self._atom()
            return _root(self._argument(), degree)
        raise ValueError(f"{token!r} is no plain arithmetic")

    def _in_brackets(self, closing: str) -> float:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError("too many brackets")
        value = self._sum()
        self._take(closing)
        self.depth -= 1
        return value


def _factorial(value: float) -> float:
    if value != int(value) or not 0 <= value <= MAX_FACTORIAL:
        raise ValueError(f"no factorial of {value}")
    return float(math.factorial(int(value)))


def _binomial(total: float, chosen: float) -> float:
    if total != int(total) or chosen != int(chosen) or not 0 <= chosen <= total <= MAX_FACTORIAL:
        raise ValueError(f"no binomial coefficient of {total} and {chosen}")
    return float(math.comb(int(total), int(chosen)))


def _root(value: float, degree: float) -> float:
    if value < 0:
        raise ValueError("the root is no real number")
    return float(value ** (1 / degree))
