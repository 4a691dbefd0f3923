r"""Equality by the library math-verify: LaTeX, sets, intervals, equations, units, percentages, plain numbers.

If there is a \boxed{}, it is the answer (see `stated_answer`). Otherwise the answer is the only <answer>, else the text
behind "####" as in GSM8K, else "the answer is ...", else the last formula or number. A thought does not count. The right
side of an equation counts. Numbers must agree to six decimals, and numbers below a thousandth must also agree to 1 %.

A grammar reads the LaTeX. The library gives sympy's parser nothing but digits and + - * / ^ ( ).

A signal limits the time, so this adapter raises outside of a main thread. The library's own limits are off, because they
count an answer that takes too long as wrong.
"""

import logging
import re
import unicodedata
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from async_grpo.processes.deadline import interrupted_after
from async_grpo.rewards.builtin.answers import (
    completion_text,
    gold_answer,
    stated_answer,
    ungrouped,
    without_layout,
)
from async_grpo.rewards.builtin.math_notation import as_latex, number_before_unit
from async_grpo.rewards.builtin.sympy import is_computable

MAX_CHARACTERS = 20_000  # of a box, or of the end of a completion without a box; longer texts take too long
BOX_CHARACTERS = len(r"\boxed{}")
TINY = 1e-3  # numbers below it may agree to six decimals and still differ much
TINY_TOLERANCE = 0.01  # largest relative difference of tiny numbers
SECONDS = 5.0  # limit of one parse or one comparison; after that the sample has no verdict

_OTHER_CHARACTERS = re.compile(r"[^\t\n\r\x20-\x7e]")
# Numbers side by side, and the slash behind them if they end in a fraction. With a look ahead from each of them to that
# slash, babble of numbers would take quadratic time
_NUMBERS = re.compile(r"[\d\s]++/?")
_GAP = re.compile(r"(?<=\d)[ \t]+(?=\d)")
_DELIMITER = re.compile(r"(?<!\\)\$|\\[(\[]")  # of a formula
# What letters may mean in a formula beside single variables
_FORMULA_WORD = re.compile(
    r"\\(?:begin|end)\{[a-z]+\*?\}|\\text\{\s{0,8}(?:and|or)\s{0,8}\}|\\[a-zA-Z]+"
    r"|(?<![a-zA-Z])(?:and|or|sqrt|pi|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|arc(?:sin|cos|tan)|[abcxyz]{2,3})"
    r"(?![a-zA-Z])"
)
_END_OF_SENTENCE = re.compile(r"(?<=[\w)\]}%])(?<!\\right)(?<!\\left)[\s.,;:]{1,20}\Z")
# Words, units, bold letters and signs such as that of a currency: of these the library looks for numbers among words.
# Greek letters and mathematical operators are parts of formulas
_PROSE = re.compile(r"[a-zA-Z]{2}|\*\*|\d\s+\([a-zA-Z]\)|[^\x00-\x7f\u0391-\u03c9\u2200-\u22ff]")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# The library warns of each of its time limits that is off
logging.getLogger("math_verify").setLevel(logging.ERROR)
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def readable(text: str) -> str:
    """Return the text without characters that the library misreads.

    It ignores digits of other scripts and control characters. It adds two numbers that stand side by side, as if the second
    were a fraction.

    >>> readable("\u0663 - 5"), readable("1 2, 1 1/2")
    ('3 - 5', '1, 2, 1 1/2')
    """

    def readable_character(match: re.Match[str]) -> str:
        is_control = unicodedata.category(match[0]) == "Cc"
        return str(unicodedata.decimal(match[0], " " if is_control else match[0]))

    def separated_numbers(match: re.Match[str]) -> str:
        return match[0] if match[0].endswith("/") else _GAP.sub(", ", match[0])

    return _NUMBERS.sub(separated_numbers, _OTHER_CHARACTERS.sub(readable_character, text))


def parsed(text: str, text_name: str) -> list[Any]:
    """Return the answers that the library finds in a text.

    Args:
        text: The text.
        text_name: A name of the text, for the message of an error.

    Raises:
        TimeoutError: Reading takes too long.
    """
    with interrupted_after(SECONDS, f"reading {text_name}"):
        answers: list[Any] = parse(text, _EXTRACTION, parsing_timeout=None)
    return answers


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""Return 1 if the answer in the completion equals the row's `answer`, else 0.

    Raises:
        ValueError: The row's answer is missing, empty or unreadable, or this is not the main thread.
        TimeoutError: One of the answers could not be read, or compared, in time.

    >>> score({"completion": r"so \boxed{\frac{2}{4}}", "answer": "... #### 0.5"})
    {'reward': 1.0}
    """
    gold = ungrouped(gold_answer(sample).replace(r"\$", "").strip())
    marked = gold if "$" in gold else f"${as_latex(gold)}$"
    gold_answers = parsed(marked, "the row's answer")
    if not gold_answers:
        raise ValueError(f"math-verify finds no answer in the row's answer {gold!r}")
    for text in _answers_to_parse(completion_text(sample)):
        answers = parsed(text, "the answer")
        answers = [answer for answer in answers if isinstance(answer, str) or is_computable(answer)]
        with interrupted_after(SECONDS, "the comparison"):
            is_equal = verify(gold_answers, answers, timeout_seconds=None)
            if is_equal and not _are_different_tiny_numbers(gold_answers, answers):
                return {"reward": 1.0}
    return {"reward": 0.0}


def _are_different_tiny_numbers(gold_answers: list[Any], answers: list[Any]) -> bool:
    """Return whether two numbers differ that the library takes for 0, and so for equal."""
    numbers = (gold_answers[0], answers[0])
    if not all(isinstance(number, sympy.Expr) and is_computable(number) for number in numbers):
        return False
    # A percentage is a product with an unevaluated hundredth
    gold, answer = (number.doit() for number in numbers)
    if not gold.is_comparable or not answer.is_comparable or not 0 < abs(gold.evalf()) < TINY:
        return False
    ratio = (answer / gold).evalf()
    # The library takes a percentage for its number, and for its hundredth
    return all(abs(ratio * factor - 1) > TINY_TOLERANCE for factor in (1, 100, 0.01))


def _is_bare_formula(text: str) -> bool:
    """Return whether all of a text is a formula, which the library would not find in it, or not as a whole."""
    text = without_layout(text)
    if len(text) > MAX_CHARACTERS or _DELIMITER.search(text) or not _has_balanced_braces(text):
        return False
    return _PROSE.search(_FORMULA_WORD.sub(" ", as_latex(text))) is None


def _has_balanced_braces(text: str) -> bool:
    depth = 0
    for brace in _BRACE.findall(text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def _answers_to_parse(text: str) -> list[str]:
    """Return the texts in which the library looks for the answer of a completion; none if it states none.

    There are two where a letter may be a unit or a variable.
    """
    boxed = stated_answer(text, ("box",))
    if boxed is not None:
        return _formulas(boxed) if len(boxed) <= MAX_CHARACTERS else []
    marked = stated_answer(text, ("box", "block", "marker"))
    if marked is not None and (_is_bare_formula(marked) or number_before_unit(without_layout(marked))):
        return _formulas(marked)
    answer = marked if marked is not None else stated_answer(text, ("box", "rest")) or ""
    return [readable(answer[-MAX_CHARACTERS - BOX_CHARACTERS :])]


def _formulas(answer: str) -> list[str]:
    """Return the texts for the library of an answer that is a formula, perhaps with a unit."""
    formula = _END_OF_SENTENCE.sub("", without_layout(_END_OF_SENTENCE.sub("", answer)))
    readings = [formula, number_before_unit(formula)]
    return [readable(rf"\boxed{{{as_latex(ungrouped(reading))}}}") for reading in readings if reading]
