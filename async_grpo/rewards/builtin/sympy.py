r"""Equality of the last \boxed{} and the gold answer by sympy, element by element.

Both sides get the normalisation of `mathd`; a tuple or interval must agree in brackets and length. An integer
demands an integer and a fraction the same fraction, as in PRM800K (Lightman et al., "Let's Verify Step by
Step", 2023): "4/2" is an unfinished answer to "2". Everything else is equal when the numbers agree or
`sympy.simplify(a - b)` is 0.

The text is read by a LaTeX grammar (latex2sympy2-extended), never by sympy's own parser, which evaluates it.
"""

import re
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy

from async_grpo.rewards.builtin.answers import boxed_answer, completion_text, gold_answer
from async_grpo.rewards.builtin.limits import TooSlow, is_computable, time_limit
from async_grpo.rewards.builtin.mathd import MAX_CHARACTERS, clean, normalise

SECONDS = 5.0  # for one comparison, then the answers count as different
RELATIVE_TOLERANCE = 1e-12

_NORMALISATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_INTEGER = re.compile(r"-?\d+")
_FRACTION = re.compile(r"(-?)\\frac\{(-?)(\d+)\}\{(\d+)\}")
_BARE_NAME = re.compile(r"(?<![\\a-zA-Z])(pi|sin|cos|tan|log|ln)(?![a-zA-Z])")
_SYMPY_ERRORS = (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


def split_elements(text: str) -> tuple[str, list[str]]:
    """The enclosing brackets of a tuple or interval (else "") and its elements.

    >>> split_elements("(1, 2]"), split_elements("7")
    (('(]', ['1', '2']), ('', ['7']))
    """
    inner = text[1:-1]
    bracketed = text[:1] in tuple("([") and text[-1:] in tuple(")]")
    if not bracketed or "," not in inner or re.search(r"[()\[\]]", inner):
        return "", [text]
    return text[0] + text[-1], [element.strip() for element in inner.split(",")]


def parse(text: str) -> Any:
    """The text as a sympy expression, matrix, set or relation.

    Raises:
        ValueError: the grammar cannot read it, or nobody wants to compute it.
    """
    latex = _BARE_NAME.sub(r"\\\1", text)
    try:
        expression = latex2sympy(latex, is_real=True, normalization_config=_NORMALISATION)
    except Exception as error:  # the grammar raises plain Exception, its converter whatever sympy raises
        raise ValueError(f"cannot read {text!r}: {error}") from error
    if not is_computable(expression):
        raise ValueError(f"{text!r} is too large to compute")
    return expression


def exact_form(text: str) -> tuple[str, ...] | None:
    r"""What must agree literally if both answers have it: an integer, or sign and terms of a fraction.

    >>> exact_form("18"), exact_form(r"\frac{-1}{2}") == exact_form(r"-\frac{1}{2}"), exact_form(r"\pi")
    (('18',), True, None)
    """
    if _INTEGER.fullmatch(text):
        return (text,)
    fraction = _FRACTION.fullmatch(text)
    return (fraction[1] + fraction[2], fraction[3], fraction[4]) if fraction else None


def same_value(gold: Any, given: Any) -> bool:
    """Whether two are equal: numbers to 12 digits, formulas by `simplify`, sets and relations literally."""
    if not (isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr)):
        return bool(gold == given)
    if gold.is_infinite or given.is_infinite:  # a distance to infinity says nothing
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
    """Whether two elements have the same value; a given one that is unreadable or too slow is a wrong one.

    Raises:
        ValueError: the gold one cannot be read.

    >>> equal_elements("2", "4/2"), equal_elements("x^2-1", "(x-1)(x+1)")
    (False, True)
    """
    gold_text, given_text = normalise(gold), normalise(given)
    if gold_text == given_text:
        return True
    if _INTEGER.fullmatch(gold_text) or (exact_form(gold_text) and exact_form(given_text)):
        return exact_form(gold_text) == exact_form(given_text)
    gold_expression = parse(gold)
    try:
        with time_limit(SECONDS):
            return _has_value(given, gold_expression)
    except TooSlow:
        return False


def _has_value(given: str, gold: Any) -> bool:
    try:
        return same_value(gold, parse(given))
    except _SYMPY_ERRORS:  # over text of the model: whatever sympy cannot digest is no right answer
        return False


def equal(gold: str, given: str) -> bool:
    """Whether two answers agree in brackets, length and elements. ValueError if the gold is unreadable."""
    gold_brackets, gold_elements = split_elements(clean(gold))
    brackets, elements = split_elements(clean(given))
    if gold_brackets != brackets or len(gold_elements) != len(elements):
        return False
    return all(map(equal_elements, gold_elements, elements))


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""1 if the last \boxed{} has the value of the row's `answer`; 0 otherwise, also without a box.

    Raises:
        ValueError: the row's answer is missing or empty; or this is not the main thread.

    >>> score({"completion": r"so \boxed{\sqrt{8}}", "answer": r"2\sqrt{2}"})
    {'reward': 1.0}
    """
    gold = gold_answer(sample)
    boxed = boxed_answer(completion_text(sample))
    if not boxed or len(boxed) > MAX_CHARACTERS:
        return {"reward": 0.0}
    return {"reward": float(equal(gold, boxed))}
