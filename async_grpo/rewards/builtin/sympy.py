r"""Compares the stated answer with the gold answer by sympy, element by element.

Both answers are normalized as in `mathd`. Tuples and intervals must have the same brackets and the same length. As in
PRM800K (Lightman et al., "Let's Verify Step by Step", 2023), an answer must be computed to its end: "4/2" is wrong if the
gold answer is "2", and "2/4" if it is "1/2". So integers and fractions are compared literally. Other numbers must have
exactly the same value, except that a decimal may differ by `RELATIVE_TOLERANCE`.

A LaTeX grammar reads the text. sympy's own parser is never used, because it would evaluate text from a model as code.
"""

import math
import re
from itertools import islice
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy

from async_grpo.processes.deadline import interrupted_after
from async_grpo.rewards.answer_reading.choices import choice_with_value, compared_parts
from async_grpo.rewards.answer_reading.prose import equal_prose, equal_words, is_prose, without_introduction
from async_grpo.rewards.answer_reading.qualifiers import contradict
from async_grpo.rewards.answer_reading.sequences import DOTS, read_sequence
from async_grpo.rewards.builtin.answers import completion_text, mathematical_gold, stated_answer
from async_grpo.rewards.builtin.equal_numbers import (
    equal_numbers,
    exact_decimal,
    is_numeric,
    is_undefined,
    surely_differ,
    with_imaginary_unit,
)
from async_grpo.rewards.builtin.mathd import MAX_CHARACTERS, clean, normalise

# Maximum time of one comparison, after which the sample gets no reward. It is not counted as wrong, because the machine
# may just be busy
SECONDS = 5.0
RELATIVE_TOLERANCE = 1e-12  # a decimal counts as equal to a number up to this relative difference

# Limits on an expression, above which it is not computed
MAX_DIGITS = 10_000
MAX_NODES = 500
MAX_OPERAND_DIGITS = 9  # digits of an exponent, or of the argument of a factorial

_NORMALISATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_INTEGER = re.compile(r"-?\d+")
_FRACTION = re.compile(r"-{0,2}\\frac\{\d+\}\{\d+\}")
_BARE_NAME = re.compile(r"(?<![\\a-zA-Z])(pi|sin|cos|tan|log|ln)(?![a-zA-Z])")
# Expressions that may take forever to compute, however short they are
_ENDLESS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit)
SYMPY_ERRORS = (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


def split_elements(text: str) -> tuple[str, list[str]]:
    """Return the brackets and elements of a tuple, an interval or a sequence with dots.

    For other texts, return "" and the text itself.
    """
    sequence = read_sequence(text)
    if sequence:
        return sequence.brackets, sequence.terms
    inner = text[1:-1]
    has_brackets = text[:1] in ("(", "[") and text[-1:] in (")", "]")
    if not has_brackets or "," not in inner or re.search(r"[()\[\]]", inner):
        return "", [text]
    return text[0] + text[-1], [element.strip() for element in inner.split(",")]


def parse(text: str) -> Any:
    """Parse the text into a sympy expression, matrix, set or relation.

    Raises:
        ValueError: The text cannot be parsed, or the result is too large to compute.
    """
    latex = _BARE_NAME.sub(r"\\\1", text)
    try:
        expression = latex2sympy(latex, is_real=True, normalization_config=_NORMALISATION)
    except Exception as error:  # the grammar raises plain `Exception`, and sympy may raise others
        raise ValueError(f"cannot read {text!r}: {error}") from error
    if not is_computable(expression):
        raise ValueError(f"{text!r} is too large to compute")
    if isinstance(expression, sympy.Expr):
        expression = with_imaginary_unit(expression)
    return expression


def exact_form(text: str) -> str | None:
    """Return the text if it is an integer or a fraction, with the sign before the fraction, or None for other texts.

    Two integers or fractions are equal only if these forms are the same.
    """
    text = text.replace(r"\frac{-", r"-\frac{")
    return text if _INTEGER.fullmatch(text) or _FRACTION.fullmatch(text) else None


def same_value(gold: Any, answer: Any) -> bool:
    """Return whether two values are equal: numbers exactly, formulas after `simplify`, others by `==`.

    A decimal number may differ from another number by `RELATIVE_TOLERANCE`. A value that contains a division by zero is
    equal to nothing. Otherwise, 1/0 would equal 2/0.
    """
    if is_undefined(gold) or is_undefined(answer):
        return False
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        pairs = zip(gold.flat(), answer.flat(), strict=False)
        return bool(gold.shape == answer.shape) and all(same_value(*pair) for pair in pairs)
    are_formulas = isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)
    # The difference of infinite values is not meaningful
    if not are_formulas or gold.is_infinite or answer.is_infinite:
        return bool(gold == answer)
    if is_numeric(gold) and is_numeric(answer):
        return equal_numbers(gold, answer, RELATIVE_TOLERANCE)
    # Simplifying may take forever
    if surely_differ(gold, answer):
        return False
    return bool(sympy.simplify(gold - answer) == 0)


def equal_elements(gold: str, answer: str) -> bool:
    """Return whether two elements have the same value. An answer that cannot be read differs.

    Raises:
        ValueError: The gold element cannot be parsed.
        TimeoutError: The comparison takes too long.
    """
    if DOTS in (gold, answer):
        return gold == answer
    gold_text = normalise(gold)
    answer_text = normalise(answer)
    if gold_text == answer_text:
        return True
    if _INTEGER.fullmatch(gold_text) or (exact_form(gold_text) and exact_form(answer_text)):
        return exact_form(gold_text) == exact_form(answer_text)
    gold_expression = parse(gold)
    with interrupted_after(SECONDS, "the comparison"):
        try:
            return same_value(gold_expression, parse(answer))
        except SYMPY_ERRORS:
            # The answer comes from the model, and an answer that sympy cannot compute counts as wrong
            return False


def check_row(row: dict[str, Any]) -> None:
    """Raise ValueError if the row's `answer` is missing, empty or unreadable."""
    gold = mathematical_gold(row)
    if is_prose(gold):
        return
    for part in choice_with_value(gold) or (gold,):
        _, gold_elements = split_elements(clean(part))
        for element in gold_elements:
            if element != DOTS and not exact_form(normalise(element)):
                parse(element)


def is_computable(expression: Any) -> bool:
    """Return whether a parsed expression is small enough to be computed. The value of a short `9^{9^{9}}` is not."""
    # An object of another type is a matrix, which is compared entry by entry
    if not isinstance(expression, sympy.Basic):
        return True
    nodes = list(islice(sympy.preorder_traversal(expression), MAX_NODES + 1))
    is_small = len(nodes) <= MAX_NODES and not any(isinstance(node, _ENDLESS) for node in nodes)
    return is_small and digits_of(expression) <= MAX_DIGITS


def digits_of(node: sympy.Basic) -> float:
    """Return an upper bound of the number of decimal digits in the value of `node`, which may be infinite."""
    if isinstance(node, sympy.Float):
        try:
            node = exact_decimal(node)
        except ValueError:
            return math.inf
    if isinstance(node, sympy.Rational):
        return 1.0 + math.floor(math.log10(max(abs(node.p), node.q)))
    parts = [digits_of(part) for part in node.args]
    if isinstance(node, sympy.Pow):
        return parts[0] * _size_of(node.exp, parts[1])
    if isinstance(node, sympy.factorial):
        return _size_of(node.args[0], parts[0]) * parts[0]
    return max(1.0, sum(parts))


def _size_of(node: sympy.Basic, digits: float) -> float:
    """Return the absolute value of a number (at least 1), or 1 for a symbol.

    Return infinity if the value may have more than `MAX_OPERAND_DIGITS` digits.

    Args:
        node: The number or symbol.
        digits: Upper bound of the number of its digits.
    """
    if digits > MAX_OPERAND_DIGITS:
        return math.inf
    size = abs(node.evalf(15))
    return max(1.0, float(size)) if size.is_number and size.is_finite else 1.0


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""Return 1 if the stated answer has the same value as the row's `answer`, and 0 otherwise.

    Raises:
        ValueError: The row's answer is missing, empty or unreadable, or this is not the main thread.
        TimeoutError: The comparison takes too long.

    >>> score({"completion": r"so \boxed{\sqrt{8}}", "answer": r"2\sqrt{2}"})
    {'reward': 1.0}
    """
    gold = mathematical_gold(sample)
    answer = without_introduction(stated_answer(completion_text(sample)) or "")
    if not answer or len(answer) > MAX_CHARACTERS or contradict(gold, answer):
        return {"reward": 0.0}
    has_equal_words = equal_prose(gold, answer)
    if has_equal_words is not None:
        return {"reward": float(has_equal_words)}
    are_equal = all(_equal_texts(gold_part, part) for gold_part, part in compared_parts(gold, answer))
    return {"reward": float(are_equal)}


def _equal_texts(gold: str, answer: str) -> bool:
    """Return whether two answers have the same brackets and equal elements, or the same words."""
    has_equal_words = equal_words(gold, answer)
    if has_equal_words is not None:
        return has_equal_words
    gold_brackets, gold_elements = split_elements(clean(gold))
    brackets, elements = split_elements(clean(answer))
    if gold_brackets != brackets or len(gold_elements) != len(elements):
        return False
    pairs = zip(gold_elements, elements, strict=True)
    return all(equal_elements(gold_element, element) for gold_element, element in pairs)
