"""How long would the number be? Asked before computing anything: `9^{9^{9}}` is only nine characters."""

import math
from typing import Any

import sympy

MAX_DIGITS = 10_000
MAX_NODES = 500
_LAZY = (
    sympy.Sum,
    sympy.Product,
    sympy.Integral,
    sympy.Derivative,
    sympy.Limit,
)  # a short text, endless work
_MAX_EXPONENT_DIGITS = 9.0


def is_computable(expression: Any) -> bool:
    """Whether a parsed, unevaluated expression is small enough to be simplified.

    >>> nine = sympy.Integer(9)
    >>> is_computable(nine**9), is_computable(sympy.Pow(nine, nine**9, evaluate=False))
    (True, False)
    """
    if not isinstance(expression, sympy.Basic):
        return True  # a matrix: its entries were read by the same parser, and a comparison is entry by entry
    for num_nodes, node in enumerate(sympy.preorder_traversal(expression), start=1):
        if num_nodes > MAX_NODES or isinstance(node, _LAZY):
            return False
    return digits_of(expression) <= MAX_DIGITS


def digits_of(node: sympy.Basic) -> float:
    """An upper bound of the decimal digits that evaluating `node` writes down; infinite when it is hopeless.

    >>> digits_of(sympy.Integer(12345)), digits_of(sympy.factorial(sympy.Symbol("n")))
    (5.0, 1.0)
    """
    if isinstance(node, sympy.Rational):
        return 1.0 + math.floor(math.log10(max(abs(node.p), node.q)))
    parts = [digits_of(part) for part in node.args]
    if isinstance(node, sympy.Pow):
        return parts[0] * _size_of(node.exp, parts[1])
    if isinstance(node, sympy.factorial):
        return _size_of(node.args[0], parts[0]) * parts[0]
    return max(1.0, sum(parts))


def _size_of(node: sympy.Basic, digits: float) -> float:
    """|node| for a number of so many digits; 1 for a symbol, infinite when it is too long to look at."""
    if digits > _MAX_EXPONENT_DIGITS:
        return math.inf
    size = abs(node.evalf(15))
    return max(1.0, float(size)) if size.is_number and size.is_finite else 1.0
