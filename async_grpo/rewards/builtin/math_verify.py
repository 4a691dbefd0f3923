r"""Compares answers with the library math-verify: LaTeX, sets, intervals, equations, units, percentages, plain numbers.

The answer is the content of the last \boxed{} (see `stated_answer`). Without a box, it is the first of these that the
text after the thought contains: the content of the only <answer>, the text after "####" (as in GSM8K), the text after
"the answer is", or the last formula or number. If it is an equation, its right side is compared. Numbers are compared
exactly, except that a decimal may be rounded (`equal_answers`).

The text comes from a model, so it must not be evaluated as code: math-verify parses LaTeX with a grammar, and passes
only digits and + - * / ^ ( ) to sympy's own parser.

A signal limits the time, so this adapter raises an error outside of the main thread. The time limits of math-verify are
switched off, because it counts an answer that takes too long as wrong.
"""

import logging
import re
import unicodedata
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

from async_grpo.processes.deadline import interrupted_after
from async_grpo.rewards.answer_reading.arithmetic import arithmetic_value
from async_grpo.rewards.answer_reading.choices import choice_with_value, compared_parts
from async_grpo.rewards.answer_reading.free_text import stated_formula, stated_words
from async_grpo.rewards.answer_reading.notation import plain_notation, readings
from async_grpo.rewards.answer_reading.prose import (
    equal_prose,
    equal_words,
    is_prose,
    without_introduction,
    words_only,
)
from async_grpo.rewards.answer_reading.qualifiers import contradict
from async_grpo.rewards.answer_reading.sequences import DOTS, Sequence, read_sequence, values_of_tuple
from async_grpo.rewards.answer_reading.spellings import FONT, WORD_IN_FORMULA, as_latex
from async_grpo.rewards.answer_reading.units import number_before_unit
from async_grpo.rewards.builtin.answers import (
    boxed_answer,
    completion_text,
    mathematical_gold,
    stated_answer,
    without_layout,
)
from async_grpo.rewards.builtin.equal_answers import equal_answers

# Maximum length of a box
MAX_CHARACTERS = 20_000
SECONDS = 5.0  # maximum time of one parse or comparison, after which the sample gets no reward

# Largest number of digits of an integer that math-verify reads; Python refuses 4300 and more
MAX_READ_DIGITS = 4000

_INTEGER = re.compile(r"-?[1-9]\d*")
_TEXT_IN_FONT = re.compile(rf"{FONT}\s?\{{(?:[^{{}}]|\{{[^{{}}]{{0,20}}\}}){{0,200}}\}}")
_RELATION = re.compile(r"[=<>]|\\(?:to|implies|iff|approx|equiv|sim|[a-zA-Z]{0,20}arrow)(?![a-zA-Z])")
_PLAIN_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_OTHER_CHARACTERS = re.compile(r"[^\t\n\r\x20-\x7e]")
# Numbers separated only by white space, with the slash after them if there is one: then the last two numbers may be a mixed
# number, as in `1 1/2`. The match is possessive, so that the search for the slash takes linear time
_NUMBERS = re.compile(r"[\d\s]++/?")
_GAP = re.compile(r"(?<=\d)[ \t]+(?=\d)")
_DELIMITER = re.compile(r"(?<!\\)\$|\\[(\[]")  # opening delimiter of a formula
# The letters in a formula that are not single variables: commands, functions and products such as xy
_FORMULA_WORD = re.compile(
    r"\\(?:begin|end)\{[a-z]+\*?\}|\\text\{\s{0,8}(?:and|or)\s{0,8}\}|\\[a-zA-Z]+"
    rf"|(?<![a-zA-Z]){WORD_IN_FORMULA}(?![a-zA-Z])"
)
# Parts that show that a text is not only a formula: words, units, bold letters, and signs such as those of currencies.
# Greek letters and mathematical operators do not match, because they are parts of formulas
_PROSE = re.compile(r"[a-zA-Z]{2}|\*\*|\d\s+\([a-zA-Z]\)|[^\x00-\x7f\u0391-\u03c9\u2200-\u22ff]")
_TUPLE = re.compile(r"\([^()]*\)")
# A small letter at the end of a formula or of an element, where math-verify would remove it as a unit
_LAST_LETTER = re.compile(r"(?<=[\w}) +*/=^-])(?<![a-zA-Z\\])([a-z])(?=\s{0,8}(?:,|\Z))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# math-verify logs a warning for each of its time limits that is switched off
logging.getLogger("math_verify").setLevel(logging.ERROR)
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def readable(text: str) -> str:
    """Replace characters that math-verify misreads.

    math-verify ignores digits of other scripts, which become ASCII digits, and control characters, which become blanks.
    It adds two numbers that are separated by a blank, as in the mixed number "1 1/2", so a comma separates whole
    numbers.

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
    """Return the answers that math-verify finds in a text.

    Args:
        text: The text.
        text_name: What the text is, for error messages.

    Raises:
        TimeoutError: Parsing takes too long.
    """
    with interrupted_after(SECONDS, f"reading {text_name}"):
        answers: list[Any] = parse(text, _EXTRACTION, parsing_timeout=None)
    return answers


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""Return 1 if the answer in the completion equals the row's `answer`, and 0 otherwise.

    Raises:
        ValueError: The row's answer is missing, empty or unreadable, or this is not the main thread.
        TimeoutError: Parsing or comparing the answers takes too long.

    >>> score({"completion": r"so \boxed{\frac{2}{4}}", "answer": "... #### 0.5"})
    {'reward': 1.0}
    """
    gold = mathematical_gold(sample)
    text = completion_text(sample)
    gold_sequence = read_sequence(gold)
    sequence = read_sequence(stated_answer(text, ("box", "block")) or "")
    if gold_sequence or sequence:
        return {"reward": float(_equal_sequences(gold_sequence, sequence))}
    is_text = is_prose(gold) or words_only(gold) is not None
    if not is_prose(gold):
        for part in _parts_of_gold(gold):
            _parsed_gold(part)  # an unreadable answer of the row is an error, whatever the completion says
    answer = _stated_words(text) if is_text else _stated(text)
    if answer is None or contradict(gold, answer):
        return {"reward": 0.0}
    has_equal_words = equal_prose(gold, answer)
    if has_equal_words is not None:
        return {"reward": float(has_equal_words)}
    are_equal = all(_equal_texts(gold_part, part) for gold_part, part in compared_parts(gold, answer))
    return {"reward": float(are_equal)}


def _equal_texts(gold: str, answer: str) -> bool:
    """Return whether two answers are equal as texts, or as math-verify reads them."""
    if plain_notation(gold) == plain_notation(answer):
        return True
    has_equal_words = equal_words(gold, answer)
    if has_equal_words is not None:
        return has_equal_words
    if _TUPLE.fullmatch(without_layout(answer)):
        gold = values_of_tuple(gold) or gold  # math-verify would ignore the order of the values
    gold_answers = _parsed_gold(gold)
    for formula in _formulas(answer):
        answers = parsed(formula, "the answer") or _long_integer(boxed_answer(formula) or "")
        with interrupted_after(SECONDS, "the comparison"):
            if equal_answers(gold_answers, answers) and not _is_reduced(answer, answers[0]):
                return True
    return False


def check_row(row: dict[str, Any]) -> None:
    """Raise ValueError if the row's `answer` is missing, empty or unreadable."""
    gold = mathematical_gold(row)
    if read_sequence(gold) is None and not is_prose(gold):
        for part in _parts_of_gold(gold):
            _parsed_gold(part)


def _parts_of_gold(gold: str) -> tuple[str, ...]:
    """Return the letter and the value of a gold answer that states both, or else the answer."""
    return choice_with_value(gold) or (gold,)


def _parsed_gold(gold: str) -> list[Any]:
    gold_answers = parsed(_marked(gold), "the row's answer") or _long_integer(gold)
    if not gold_answers:
        raise ValueError(f"math-verify finds no answer in the row's answer {gold!r}")
    if _is_reduced(gold, gold_answers[0]):
        raise ValueError(
            f"of the row's answer {gold!r:.200}, only the number {gold_answers[0]} can be read: write only the value, with "
            "commas between several values"
        )
    return gold_answers


def _is_reduced(text: str, value: Any) -> bool:
    """Return whether a text has several numbers, of which math-verify has read only one, such as the 5 in "5..7"."""
    plain = _TEXT_IN_FONT.sub(" ", plain_notation(text))
    if _RELATION.search(plain):
        return False  # in a relation or a chain of steps, only the last side counts
    numbers = set(_PLAIN_NUMBER.findall(plain))
    is_one_of_many = isinstance(value, sympy.Number) and len(numbers) > 1 and str(value) in numbers
    # In an expression such as `4/2`, or a number with its base such as `1011_2`, all numbers belong to the value
    return is_one_of_many and "_" not in plain and arithmetic_value(plain) is None


def _long_integer(text: str) -> list[Any]:
    """Return [text] if the text is an integer of thousands of digits, which math-verify cannot read, else []."""
    text = text.strip()
    return [text] if len(text) > MAX_READ_DIGITS and _INTEGER.fullmatch(text) else []


def _equal_sequences(gold: Sequence | None, answer: Sequence | None) -> bool:
    """Return whether two sequences have equal terms, and have dots for left-out terms at the same places."""
    if gold is None or answer is None:
        return False
    if gold.brackets != answer.brackets or len(gold.terms) != len(answer.terms):
        return False
    return all(_equal_terms(*terms) for terms in zip(gold.terms, answer.terms, strict=True))


def _equal_terms(gold: str, answer: str) -> bool:
    if DOTS in (gold, answer) or gold == answer:
        return gold == answer
    gold_answers = parsed(_boxed(gold), "a term of the row's answer")
    answers = parsed(_boxed(answer), "a term of the answer")
    with interrupted_after(SECONDS, "the comparison"):
        return equal_answers(gold_answers, answers)


def _marked(gold: str) -> str:
    """Return the gold answer in the form that math-verify can parse: as a formula with its delimiters."""
    plain = plain_notation(gold)
    formula = plain if _is_bare_formula(plain) else as_latex(gold).replace(r"\$", "")
    return formula if "$" in formula else f"${_with_last_letter(formula)}$"


def _with_last_letter(formula: str) -> str:
    r"""Return a formula whose last letter math-verify does not remove as a unit, as in `\pi r^2 h`.

    A letter after a single number stays as it is, because it may be a unit.
    """
    return formula if number_before_unit(formula) is not None else _LAST_LETTER.sub(r"{\1}", formula)


def _is_bare_formula(text: str) -> bool:
    """Return whether a text is only a formula, without delimiters. math-verify finds a formula only between delimiters."""
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


def _stated(text: str) -> str | None:
    """Return the answer that a completion states, or None if it states none or its box is too long."""
    boxed = stated_answer(text, ("box",))
    if boxed is not None:
        return without_introduction(boxed) if len(boxed) <= MAX_CHARACTERS else None
    marked = stated_answer(text, ("box", "block", "marker"))
    if marked is not None and (_is_bare_formula(marked) or number_before_unit(without_layout(marked))):
        return marked
    return stated_formula(marked if marked is not None else stated_answer(text, ("box", "rest")) or "")


def _stated_words(text: str) -> str | None:
    """Return the answer that a completion states, if the gold answer consists of words."""
    marked = stated_answer(text, ("box", "block", "marker"))
    if marked is None:
        marked = stated_words(stated_answer(text, ("box", "rest")) or "")
    return marked if marked is not None and len(marked) <= MAX_CHARACTERS else None


def _formulas(answer: str) -> list[str]:
    """Return the texts that math-verify should parse to find an answer. An ambiguous answer has several such texts."""
    return [readable(rf"\boxed{{{_with_last_letter(reading)}}}") for reading in readings(answer) if reading]


def _boxed(formula: str) -> str:
    return readable(rf"\boxed{{{_with_last_letter(plain_notation(formula))}}}")
