r"""Compares numbers exactly. Only a number that is written as a decimal may differ, by a relative tolerance.

Two integers, fractions or powers of them are equal only if their difference is 0. Two other numbers, such as
`\sqrt{8}` and `2\sqrt{2}`, are equal if they agree to `PRECISION_DIGITS` digits, relative to the gold number. There is
no tolerance that does not depend on the size of the numbers, so that 1.6e-19 and 9.1e-31 differ.
"""

from collections.abc import Mapping
from typing import Any

import sympy

PRECISION_DIGITS = 40  # number of digits to which irrational numbers must agree
WORKING_DIGITS = 60  # number of digits to which irrational numbers are computed
QUICK_DIGITS = 15  # number of digits to which irrational numbers are computed at first
# If two numbers differ by more than twice this share of the gold number, they are not computed to more digits
SURE_RELATIVE_DIFFERENCE = 1e-6
# Value of the first variable for a quick comparison. The value of each further variable is larger by STEP
FIRST_VALUE = 1.37
STEP = 0.61
SMALLEST_QUICK_VALUE = 1e-100  # a smaller value may be 0, and is computed further
# Largest exponent of a decimal number that is computed exactly; 2**33,000 is about 1e10,000
MAX_BINARY_EXPONENT = 33_000
# Largest precision of such a number. Python does not convert text of 4300 digits or more to an integer
MAX_PRECISION_BITS = 14_000


def exact_decimal(number: sympy.Float) -> sympy.Rational:
    """Return the fraction that equals the decimal digits of a number.

    The value of a `Float` is a binary fraction near that number: 0.1 is not exactly one tenth.

    Raises:
        ValueError: The number has thousands of digits.

    >>> exact_decimal(sympy.Float("0.1"))
    1/10
    """
    _, _, exponent, num_bits = number._mpf_
    if abs(exponent + num_bits) > MAX_BINARY_EXPONENT or number._prec > MAX_PRECISION_BITS:
        raise ValueError("a decimal number has too many digits")
    return sympy.Rational(str(number))


def with_exact_decimals(expression: sympy.Basic) -> sympy.Basic:
    """Replace the decimal numbers in an expression by fractions.

    Raises:
        ValueError: A decimal number is too large or too small.
    """
    decimals = expression.atoms(sympy.Float)
    if not decimals:
        return expression
    return expression.xreplace({decimal: exact_decimal(decimal) for decimal in decimals})


def with_imaginary_unit(expression: Any) -> Any:
    """Replace the variable i by the imaginary unit, because parsers of LaTeX read i as a variable.

    >>> with_imaginary_unit(sympy.Symbol("i") ** 2)
    -1
    """
    variables = [symbol for symbol in expression.free_symbols if symbol.name == "i"]
    return expression.xreplace(dict.fromkeys(variables, sympy.I)) if variables else expression


def is_undefined(expression: Any) -> bool:
    """Return whether an expression contains a division by zero or an undefined value, which is equal to nothing."""
    return bool(expression.has(sympy.zoo, sympy.nan))


def is_numeric(expression: Any) -> bool:
    """Return whether an expression is a number: it has no variable, and is no set, relation or matrix."""
    return isinstance(expression, sympy.Expr) and bool(expression.is_number)


def equal_numbers(
    gold: sympy.Expr, answer: sympy.Expr, relative_tolerance: float, absolute_tolerance: float | None = None
) -> bool:
    """Return whether two numbers are equal. They must be small enough to be computed (see `is_computable`).

    Args:
        gold: The gold number.
        answer: The number to compare.
        relative_tolerance: Largest difference, relative to the gold number, if one of the two contains a decimal.
        absolute_tolerance: Largest absolute difference if one of the two contains a decimal. Both limits apply. None
            sets no such limit.

    Raises:
        ValueError: A decimal number is too large or too small to be converted.

    >>> equal_numbers(sympy.Rational(1, 3), sympy.Float("0.333333"), 1e-5)
    True
    >>> equal_numbers(sympy.Integer(2) ** 100, sympy.Integer(2) ** 100 + 1, 1e-5)
    False
    """
    if surely_differ(gold, answer, relative_tolerance):
        return False
    has_decimal = gold.has(sympy.Float) or answer.has(sympy.Float)
    exact_gold = with_exact_decimals(gold).doit()
    exact_answer = with_exact_decimals(answer).doit()
    if is_undefined(exact_gold) or is_undefined(exact_answer):
        return False
    if exact_gold == exact_answer:
        return True
    # The difference of infinite values is not meaningful
    if exact_gold.is_infinite or exact_answer.is_infinite:
        return False
    difference = abs(exact_gold - exact_answer)
    scale = abs(exact_gold)
    is_rational = isinstance(difference, sympy.Rational) and isinstance(scale, sympy.Rational)
    if not is_rational:
        difference = _magnitude(difference, exact_gold, exact_answer)
        scale = scale.evalf(WORKING_DIGITS)
        if not isinstance(difference, sympy.Float | sympy.Rational):
            return False
    if has_decimal:
        largest = _exact(relative_tolerance) * scale
        if absolute_tolerance is not None:
            largest = min(largest, _exact(absolute_tolerance))
    else:
        largest = 0 if is_rational else scale * sympy.Rational(10) ** -PRECISION_DIGITS
    return bool(difference <= largest)


def surely_differ(gold: sympy.Expr, answer: sympy.Expr, relative_tolerance: float = 0.0) -> bool:
    """Return whether two expressions clearly have different values, at one value of each variable.

    This takes little time, while computing an exact difference may take forever. If the result is False, the expressions
    may still differ, and must be compared exactly.
    """
    variables = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {variable: FIRST_VALUE + STEP * index for index, variable in enumerate(variables)}
    gold_value = _complex_value(gold, point)
    value = _complex_value(answer, point)
    if gold_value is None or value is None:
        return False
    largest = 2 * max(relative_tolerance, SURE_RELATIVE_DIFFERENCE) * abs(gold_value)
    return abs(gold_value - value) > largest


def _complex_value(expression: sympy.Expr, point: Mapping[sympy.Symbol, float]) -> complex | None:
    """Return the value of an expression at a point, to a few digits.

    Return None if the value cannot be computed, is infinite or huge, or is so small that it may be zero.
    """
    try:
        value = complex(expression.evalf(QUICK_DIGITS, subs=point))
    except (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError):
        return None
    is_usual = SMALLEST_QUICK_VALUE < abs(value) < 1 / SMALLEST_QUICK_VALUE
    return value if is_usual else None


def _magnitude(difference: sympy.Expr, gold: sympy.Expr, answer: sympy.Expr) -> sympy.Expr:
    """Return the difference of two numbers as a decimal number. For complex numbers, return its absolute value."""
    size = difference.evalf(WORKING_DIGITS)
    if isinstance(size, sympy.Float | sympy.Rational):
        return size
    return abs(gold.evalf(WORKING_DIGITS) - answer.evalf(WORKING_DIGITS)).evalf(WORKING_DIGITS)


def is_rounded(value: sympy.Expr, decimal: sympy.Expr, min_digits: int, min_places: int) -> bool:
    """Return whether a decimal is the number `value`, rounded to as many decimal places as the decimal has.

    Args:
        value: The number that may be rounded.
        decimal: The number that may be its rounded form. If it is not a decimal, the result is False.
        min_digits: Number of significant digits that the decimal must have.
        min_places: Number of decimal places that the decimal must have.

    Raises:
        ValueError: A decimal number is too large or too small to be converted.

    >>> is_rounded(sympy.Rational(2, 3), sympy.Float("0.667"), 3, 3)
    True
    """
    exact = with_exact_decimals(decimal).doit()
    if not decimal.has(sympy.Float) or not isinstance(exact, sympy.Rational):
        return False
    num_places = max(sympy.multiplicity(2, exact.q), sympy.multiplicity(5, exact.q))
    digits = exact * sympy.Integer(10) ** num_places
    if not digits.is_Integer or num_places < min_places or abs(digits) < 10 ** (min_digits - 1):
        return False
    return equal_numbers(decimal, value, 1.0, 0.5 * 10.0**-num_places)


def _exact(tolerance: float) -> sympy.Rational:
    """Return the fraction that equals the decimal digits of a tolerance. The float 1e-6 is not exactly 1/1000000."""
    return sympy.Rational(repr(tolerance))
