"""Decides whether two answers that the library math-verify has parsed are equal.

math-verify itself compares decimals to six places, so that all numbers below 5e-7 are equal for it. To avoid this, every
number in both answers is first replaced by its exact value (`equal_numbers`). If a number of the answer counts as equal to
a number of the gold answer, it is replaced by that number. Then math-verify has nothing left to round.

A decimal may be rounded. It counts as equal to a number in two cases: both agree to six decimals and five significant
digits, or the decimal is the number, rounded to at least six decimals and three significant digits.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy.core.relational import Relational

from async_grpo.rewards.answer_reading.prose import EMPTY_SET_NAMES
from async_grpo.rewards.builtin.equal_numbers import (
    equal_numbers,
    is_numeric,
    is_rounded,
    is_undefined,
    surely_differ,
    with_exact_decimals,
    with_imaginary_unit,
)
from async_grpo.rewards.builtin.sympy import SYMPY_ERRORS, is_computable

RELATIVE_TOLERANCE = 5e-5  # five significant digits
ABSOLUTE_TOLERANCE = 5e-7  # six decimals, the last one rounded
# A number may be the rounded form of another one if it has at least this many decimals and significant digits
MIN_PLACES = 6
MIN_DIGITS = 3
PRECISION_DIGITS = 50  # number of digits to which math-verify computes values such as roots

_SET_NAME = re.compile(r"[a-zA-Z](?:_\{?\w{1,8}\}?)?'{0,3}")
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))  # math-verify reads 5% as 5 times this factor


def equal_answers(gold_answers: list[Any], answers: list[Any]) -> bool:
    """Return whether an answer is equal to the gold answer in one of the ways in which both can be read.

    Args:
        gold_answers: What math-verify read in the gold answer: expressions of sympy, and its text.
        answers: What it read in the answer. An expression that may take forever to compute is not computed, and is equal
            only to the same expression.
    """
    return any(_equal_readings(gold, answer) for gold, answer in product(gold_answers, answers))


def _equal_readings(gold: Any, answer: Any) -> bool:
    if isinstance(gold, str) or isinstance(answer, str):
        # If only one of the readings is a text, they are not comparable
        are_texts = isinstance(gold, str) and isinstance(answer, str)
        return are_texts and gold.strip() != "" and _without_order(gold) == _without_order(answer)
    if not is_computable(answer):
        # `srepr` sorts the terms of a sum and the factors of a product
        return bool(gold == answer) or sympy.srepr(gold) == sympy.srepr(answer)
    if not is_computable(gold):
        return bool(verify([gold], [answer], timeout_seconds=None))
    if is_undefined(gold) or is_undefined(answer):
        return False
    try:
        return any(_equal_expressions(gold, candidate) for candidate in _candidates(gold, answer))
    except SYMPY_ERRORS:
        # The answer comes from the model, and an answer that sympy cannot compute counts as wrong
        return False


def _without_order(text: str) -> str:
    r"""Return the text with the operands of \cup or \cap in alphabetical order, so that A \cup B equals B \cup A."""
    for operator in (r"\cup", r"\cap"):
        operands = [operand.strip() for operand in text.split(operator)]
        if len(operands) > 1 and all(_SET_NAME.fullmatch(operand) for operand in operands):
            return operator.join(sorted(set(operands)))
    return text.strip()


def _equal_expressions(gold: Any, answer: Any) -> bool:
    gold = _with_imaginary_unit(gold)
    answer = _with_imaginary_unit(answer)
    if is_numeric(gold) and is_numeric(answer):
        return _equal_values(gold, answer)
    gold, answer = _as_comparable_sets(gold, answer)
    try:
        exact_values = {number: _exact_value(number) for number in _numbers_in(gold)}
        replacements = {number: _counterpart(number, exact_values) for number in _numbers_in(answer)}
    except ValueError:
        # A decimal number is so large or so small that it cannot be computed
        return bool(gold == answer)
    exact_gold = _replaced(gold, exact_values)
    exact_answer = _replaced(answer, replacements)
    if is_undefined(exact_gold) or is_undefined(exact_answer):
        return False
    gold_inequalities = _inequalities(exact_gold)
    if gold_inequalities and _in_order(gold_inequalities) == _in_order(_inequalities(exact_answer)):
        return True
    # Expressions that are a single symbol are left to math-verify: such a symbol may stand for a word, whose letters
    # math-verify compares
    are_formulas = all(
        isinstance(part, sympy.Expr) and not part.is_Symbol for part in (exact_gold, exact_answer)
    )
    if are_formulas and surely_differ(exact_gold, exact_answer):
        return False
    return bool(
        verify([exact_gold], [exact_answer], numeric_precision=PRECISION_DIGITS, timeout_seconds=None)
    )


def _with_imaginary_unit(expression: Any) -> Any:
    """Replace the variable i by the imaginary unit, also within equations."""
    if not isinstance(expression, Relational | And):
        return with_imaginary_unit(expression)
    variables = [symbol for symbol in expression.free_symbols if symbol.name == "i"]
    return _replaced(expression, dict.fromkeys(variables, sympy.I))


def _candidates(gold: Any, answer: Any) -> Iterator[Any]:
    """Yield the values that the answer may state: the whole answer and, as in 2/3 = 0.667, the value before rounding."""
    yield answer
    relation = answer
    while isinstance(relation, And) and relation._unsorted_args:
        relation = relation._unsorted_args[-1]
    if not isinstance(relation, sympy.Eq) or isinstance(gold, Relational | And):
        return
    exact, rounded = relation.args
    if (
        isinstance(rounded, sympy.Float)
        and is_numeric(exact)
        and is_rounded(exact, rounded, min_digits=1, min_places=1)
    ):
        yield exact


def _equal_values(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Return whether two numbers are equal. If only one of them is a percentage, 5% may mean 0.05 or 5."""
    gold_readings = [gold]
    answer_readings = [answer]
    if _is_percentage(gold) != _is_percentage(answer):
        gold_readings.append(_without_percent(gold))
        answer_readings.append(_without_percent(answer))
    try:
        return any(_nearly_equal(*readings) for readings in product(gold_readings, answer_readings))
    except ValueError:
        # A decimal number is so large or so small that it cannot be computed
        return bool(gold == answer)


def _nearly_equal(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Return whether two numbers are equal, or one of them is a decimal that may be the other one, rounded."""
    return (
        equal_numbers(gold, answer, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE)
        or is_rounded(gold, answer, MIN_DIGITS, MIN_PLACES)
        or is_rounded(answer, gold, MIN_DIGITS, MIN_PLACES)
    )


def _is_percentage(number: sympy.Expr) -> bool:
    return isinstance(number, sympy.Mul) and _PERCENT in number.args


def _without_percent(number: sympy.Expr) -> sympy.Expr:
    return sympy.Mul(*(factor for factor in sympy.Mul.make_args(number) if factor != _PERCENT))


def _numbers_in(expression: Any) -> Iterator[sympy.Expr]:
    """Yield the largest parts of an expression that are numbers."""
    if is_numeric(expression):
        yield expression
        return
    arguments = expression.flat() if isinstance(expression, sympy.MatrixBase) else expression.args
    for argument in arguments:
        yield from _numbers_in(argument)


def _exact_value(number: sympy.Expr) -> sympy.Expr:
    return with_exact_decimals(number).doit()


def _counterpart(number: sympy.Expr, exact_values: Mapping[sympy.Expr, sympy.Expr]) -> sympy.Expr:
    """Return the exact value of the number in the gold answer that `number` equals.

    If the gold answer has no such number, return the exact value of `number` itself.

    Args:
        number: A number in the answer of the completion.
        exact_values: Exact value of each number in the gold answer.
    """
    own_value = _exact_value(number)
    if own_value in exact_values.values():
        return own_value
    for gold, value in exact_values.items():
        if _equal_values(gold, number):
            return value
    return own_value


def _replaced(expression: Any, replacements: Mapping[sympy.Expr, sympy.Expr]) -> Any:
    """Replace parts of an expression, and keep the written order of the other parts."""
    if isinstance(expression, sympy.MatrixBase):
        return expression.applyfunc(lambda entry: _replaced(entry, replacements))
    if expression in replacements:
        return replacements[expression]
    arguments = list(getattr(expression, "_unsorted_args", expression.args))
    new_arguments = [_replaced(argument, replacements) for argument in arguments]
    if new_arguments == arguments:
        return expression
    if isinstance(expression, Relational):
        # sympy would evaluate an equation of two numbers to a truth value
        return expression.func(*new_arguments, evaluate=False)
    return expression.func(*new_arguments)


def _as_comparable_sets(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Return both answers. If only one of them is a set, the other is converted to a set if it describes one."""
    if isinstance(gold, sympy.Set) and not _inequalities(gold):
        answer = _set_of(answer, gold)
    elif isinstance(answer, sympy.Set) and not _inequalities(answer):
        gold = _set_of(gold, answer)
    return gold, answer


def _set_of(expression: Any, compared_set: sympy.Set) -> Any:
    """Return the set that inequalities of one variable or the words "no solution" describe, or `expression` unchanged.

    A list of inequalities describes their intersection: x > 1, x < 3. If the intersection is empty, the list describes
    their union: x < 1, x > 3. A chain such as 1 < x < 3 always describes the intersection.
    """
    if compared_set is sympy.S.EmptySet and isinstance(expression, sympy.Symbol):
        return compared_set if expression.name.lower() in EMPTY_SET_NAMES else expression
    inequalities = _inequalities(expression)
    if not inequalities or not all(_is_quickly_solved(inequality) for inequality in inequalities):
        return expression
    if len(expression.free_symbols) != 1:
        return expression
    sets = [inequality.as_set() for inequality in inequalities]
    common_part = sympy.Intersection(*sets)
    is_list = isinstance(expression, sympy.FiniteSet)
    return sympy.Union(*sets) if is_list and common_part is sympy.S.EmptySet else common_part


def _inequalities(expression: Any) -> list[Relational]:
    """Return the inequalities of an expression that is one inequality, a chain or a list of them. Else return []."""
    parts = [expression]
    if isinstance(expression, And | sympy.FiniteSet):
        parts = list(expression.args)
    kinds = (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)
    return parts if all(isinstance(part, kinds) for part in parts) else []


def _in_order(inequalities: list[Relational]) -> set[tuple[Any, Any, bool]]:
    """Return the smaller side, the larger side and the strictness of each inequality."""
    strict_kinds = (sympy.StrictLessThan, sympy.StrictGreaterThan)
    return {(part.lts, part.gts, isinstance(part, strict_kinds)) for part in inequalities}


def _is_quickly_solved(inequality: Relational) -> bool:
    """Return whether an inequality has polynomials of degree 2 or less. Others may take forever to solve."""
    variables = inequality.free_symbols
    difference = (inequality.lhs - inequality.rhs).replace(sympy.Abs, lambda argument: argument)
    if len(variables) != 1 or not difference.is_polynomial(*variables):
        return False
    return bool(sympy.degree(difference, next(iter(variables))) <= 2)
