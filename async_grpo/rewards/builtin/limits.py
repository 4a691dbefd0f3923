"""An end to computations that would not end: by their size, asked before; by the clock, while they run.

`9^{9^{9}}` is only nine characters, so a short text says nothing about the work.
"""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sympy

MAX_DIGITS = 10_000
MAX_NODES = 500
_MAX_EXPONENT_DIGITS = 9.0


class TooSlow(BaseException):
    """The computation took too long. No Exception: libraries catch those in places, and go on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after so many seconds. ValueError outside the main thread, where no signal arrives.

    Code in C is interrupted only where it looks for signals, as matching a regular expression does.
    """

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def is_computable(expression: Any) -> bool:
    """Whether a parsed, unevaluated expression is small enough to be simplified.

    >>> import sympy
    >>> nine = sympy.Integer(9)
    >>> is_computable(nine**9), is_computable(sympy.Pow(nine, nine**9, evaluate=False))
    (True, False)
    """
    import sympy  # here: the rewards that need only the clock start without it

    if not isinstance(expression, sympy.Basic):
        return True  # a matrix: its entries were read by the same parser, and a comparison is entry by entry
    endless = (
        sympy.Sum,
        sympy.Product,
        sympy.Integral,
        sympy.Derivative,
        sympy.Limit,
    )  # a short text, endless work
    for num_nodes, node in enumerate(sympy.preorder_traversal(expression), start=1):
        if num_nodes > MAX_NODES or isinstance(node, endless):
            return False
    return digits_of(expression) <= MAX_DIGITS


def digits_of(node: "sympy.Basic") -> float:
    """An upper bound of the decimal digits that evaluating `node` writes down; infinite when it is hopeless.

    >>> import sympy
    >>> digits_of(sympy.Integer(12345)), digits_of(sympy.factorial(sympy.Symbol("n")))
    (5.0, 1.0)
    """
    import sympy

    if isinstance(node, sympy.Rational):
        return 1.0 + math.floor(math.log10(max(abs(node.p), node.q)))
    parts = [digits_of(part) for part in node.args]
    if isinstance(node, sympy.Pow):
        return parts[0] * _size_of(node.exp, parts[1])
    if isinstance(node, sympy.factorial):
        return _size_of(node.args[0], parts[0]) * parts[0]
    return max(1.0, sum(parts))


def _size_of(node: "sympy.Basic", digits: float) -> float:
    """|node| for a number of so many digits; 1 for a symbol, infinite when it is too long to look at."""
    if digits > _MAX_EXPONENT_DIGITS:
        return math.inf
    size = abs(node.evalf(15))
    return max(1.0, float(size)) if size.is_number and size.is_finite else 1.0
