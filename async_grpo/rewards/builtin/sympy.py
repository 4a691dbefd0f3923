r"""Equality of the stated answer and the gold answer by sympy, element by element.

Both sides get the normalisation of `mathd`; a tuple or interval must agree in brackets and length. An integer demands an
integer and a fraction the same fraction, as in PRM800K (Lightman et al., "Let's Verify Step by Step", 2023): "4/2" is an
unfinished answer to "2". The text is read by a LaTeX grammar, never by sympy's own parser, which evaluates it.
"""

import math
import re
from itertools import islice
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy

from async_grpo.processes.deadline import interrupted_after
from async_grpo.rewards.builtin.answers import completion_text, gold_answer, stated_answer
from async_grpo.rewards.builtin.mathd import MAX_CHARACTERS, clean, normalise

SECONDS = (
    5.0  # for one comparison; then there is no judgement, or a busy machine would make right answers wrong
)
RELATIVE_TOLERANCE = 1e-12
MAX_DIGITS, MAX_NODES = 10_000, 500  # of an expression that is computed

_NORMALISATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_INTEGER = re.compile(r"-?\d+")
_FRACTION = re.compile(r"-{0,2}\\frac\{\d+\}\{\d+\}")
_BARE_NAME = re.compile(r"(?<![\\a-zA-Z])(pi|sin|cos|tan|log|ln)(?![a-zA-Z])")
# Short texts, endless work
_ENDLESS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit)
_SYMPY_ERRORS = (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


def split_elements(text: str) -> tuple[str, list[str]]:
    """The enclosing brackets of a tuple or interval (else "") and its elements."""
    inner = text[1:-1]
    bracketed = text[:1] in tuple("([") and text[-1:] in tuple(")]")
    if not bracketed or "," not in inner or re.search(r"[()\[\]]", inner):
        return "", [text]
    return text[0] + text[-1], [element.strip() for element in inner.split(",")]


def parse(text: str) -> Any:
    """The text as a sympy expression, matrix, set or relation. Raises ValueError if it is unreadable or too large."""
    latex = _BARE_NAME.sub(r"\\\1", text)
    try:
        expression = latex2sympy(latex, is_real=True, normalization_config=_NORMALISATION)
    except Exception as error:  # the grammar raises plain Exception, its converter whatever sympy raises
        raise ValueError(f"cannot read {text!r}: {error}") from error
    if not is_computable(expression):
        raise ValueError(f"{text!r} is too large to compute")
    return expression


def exact_form(text: str) -> str | None:
    """What must agree literally if both answers have it: an integer, or a fraction with its sign before it."""
    text = text.replace(r"\frac{-", r"-\frac{")
    return text if _INTEGER.fullmatch(text) or _FRACTION.fullmatch(text) else None


def same_value(gold: Any, given: Any) -> bool:
    """Whether two are equal: numbers to 12 digits, formulas by `simplify`, sets and relations literally."""
    if sympy.zoo in (gold, given):
        return False  # 1/0 is no value: the ratios 1:0 and 2:0 would be equal
    are_formulas = isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr)
    if not are_formulas or gold.is_infinite or given.is_infinite:  # a distance to infinity says nothing
        return bool(gold == given)
    difference = gold - given
    if difference.is_number:
        distance, scale = abs(difference.evalf(30)), abs(gold.evalf(30))
        if distance > RELATIVE_TOLERANCE * max(scale, 1):
            return False
        if distance <= RELATIVE_TOLERANCE * scale:
            return True
    return bool(sympy.simplify(difference) == 0)


def equal_elements(gold: str, given: str) -> bool:
    """Whether two elements have the same value; a given one that is unreadable is a wrong one.

    Raises ValueError if the gold one cannot be read, TimeoutError if the comparison takes too long.
    """
    gold_text, given_text = normalise(gold), normalise(given)
    if gold_text == given_text:
        return True
    if _INTEGER.fullmatch(gold_text) or (exact_form(gold_text) and exact_form(given_text)):
        return exact_form(gold_text) == exact_form(given_text)
    gold_expression = parse(gold)
    with interrupted_after(SECONDS, "the comparison"):
        try:
            return same_value(gold_expression, parse(given))
        except _SYMPY_ERRORS:  # over text of the model: whatever sympy cannot digest is no right answer
            return False


def is_computable(expression: Any) -> bool:
    """Whether a parsed, unevaluated expression is small enough to be simplified: `9^{9^{9}}` is a short text."""
    if not isinstance(expression, sympy.Basic):
        return True  # a matrix: its entries were read by the same parser, and a comparison is entry by entry
    nodes = list(islice(sympy.preorder_traversal(expression), MAX_NODES + 1))
    is_small = len(nodes) <= MAX_NODES and not any(isinstance(node, _ENDLESS) for node in nodes)
    return is_small and digits_of(expression) <= MAX_DIGITS


def digits_of(node: sympy.Basic) -> float:
    """An upper bound of the decimal digits that evaluating `node` writes down; infinite when it is hopeless."""
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
    if digits > 9:
        return math.inf
    size = abs(node.evalf(15))
    return max(1.0, float(size)) if size.is_number and size.is_finite else 1.0


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""Return 1 if the stated answer has the value of the row's `answer`; 0 otherwise, also if none is stated.

    Raises:
        ValueError: the row's answer is missing, empty or unreadable; or this is not the main thread.
        TimeoutError: the comparison did not come to an end.

    >>> score({"completion": r"so \boxed{\sqrt{8}}", "answer": r"2\sqrt{2}"})
    {'reward': 1.0}
    """
    gold = gold_answer(sample)
    answer = stated_answer(completion_text(sample))
    if not answer or len(answer) > MAX_CHARACTERS:
        return {"reward": 0.0}
    gold_brackets, gold_elements = split_elements(clean(gold))
    brackets, elements = split_elements(clean(answer))
    if gold_brackets != brackets or len(gold_elements) != len(elements):
        return {"reward": 0.0}
    return {"reward": float(all(map(equal_elements, gold_elements, elements)))}
