r"""Equality by the library math-verify: LaTeX, sets, intervals, equations, units, percentages, plain numbers.

If there is a \boxed{}, it counts and nothing else (see `stated_answer`). Without one it is the one <answer>, else what
follows "####" as in GSM8K, else "the answer is ...", else the last formula or number; a thought does not count. Of an
equation the right side counts, and numbers agree to six decimals. LaTeX is read by a grammar; the library hands to sympy's
parser nothing but digits and + - * / ^ ( ).
Time is limited by a signal: outside a main thread this adapter raises. The library's own limits are off, because they make
a wrong answer of one that took too long.
"""

import logging
import re
import unicodedata
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from async_grpo.processes.deadline import interrupted_after
from async_grpo.rewards.builtin.answers import (
    completion_text,
    gold_answer,
    stated_answer,
    ungrouped,
    without_layout,
)
from async_grpo.rewards.builtin.sympy import is_computable

MAX_CHARACTERS = 20_000  # of a box, or of the end of a completion without one: patterns over more cost time
SECONDS = 5.0  # for one parse or one comparison; then there is no judgement

_OTHER_CHARACTERS = re.compile(r"[^\t\n\r\x20-\x7e]")
# Numbers side by side, and the slash behind them if they end in a fraction. With a look ahead from each of them to that
# slash, babble of numbers would take quadratic time
_NUMBERS = re.compile(r"[\d\s]++/?")
_GAP = re.compile(r"(?<=\d)[ \t]+(?=\d)")
_DELIMITER = re.compile(r"\$|\\[(\[]")  # of a formula
_COMMAND = re.compile(r"\\[a-zA-Z]+")
# Words, units, bold letters and signs such as that of a currency: of these the library looks for numbers among words
_PROSE = re.compile(r"[a-zA-Z]{2}|\*\*|\d\s+\([a-zA-Z]\)|[^\x00-\x7f]")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# It warns of each of its limits that is off
logging.getLogger("math_verify").setLevel(logging.ERROR)
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def readable(text: str) -> str:
    """The text without what the library misreads: digits of other scripts, control characters (it passes over both)
    and two numbers side by side (it adds them, as if the second were a fraction).

    >>> readable("\u0663 - 5"), readable("1 2, 1 1/2")
    ('3 - 5', '1, 2, 1 1/2')
    """

    def readable_character(match: re.Match[str]) -> str:
        is_control = unicodedata.category(match[0]) == "Cc"
        return str(unicodedata.decimal(match[0], " " if is_control else match[0]))

    def separated_numbers(match: re.Match[str]) -> str:
        return match[0] if match[0].endswith("/") else _GAP.sub(", ", match[0])

    return _NUMBERS.sub(separated_numbers, _OTHER_CHARACTERS.sub(readable_character, text))


def parsed(text: str, what: str) -> list[Any]:
    """Return the answers that the library finds. Raises TimeoutError if that takes too long."""
    with interrupted_after(SECONDS, f"reading {what}"):
        answers: list[Any] = parse(text, _EXTRACTION, parsing_timeout=None)
    return answers


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""Return 1 if the answer in the completion equals the row's `answer`, else 0.

    Raises:
        ValueError: the row's answer is missing, empty or unreadable; or this is not the main thread.
        TimeoutError: one of the answers could not be read, or compared, in time.

    >>> score({"completion": r"so \boxed{\frac{2}{4}}", "answer": "... #### 0.5"})
    {'reward': 1.0}
    """
    gold = ungrouped(gold_answer(sample).replace(r"\$", "").strip())
    marked = gold if "$" in gold else f"${gold}$"
    gold_answers = parsed(marked, "the row's answer")
    if not gold_answers:
        raise ValueError(f"math-verify finds no answer in the row's answer {gold!r}")
    answers = parsed(_answer_to_parse(completion_text(sample)), "the answer")
    answers = [answer for answer in answers if isinstance(answer, str) or is_computable(answer)]
    with interrupted_after(SECONDS, "the comparison"):
        return {"reward": float(verify(gold_answers, answers, timeout_seconds=None))}


def _is_bare_formula(text: str) -> bool:
    """Return whether all of a text is a formula without delimiters, which the library would not find in it."""
    if len(text) > MAX_CHARACTERS or _DELIMITER.search(text) or not _has_balanced_braces(text):
        return False
    return _PROSE.search(_COMMAND.sub(" ", text)) is None


def _has_balanced_braces(text: str) -> bool:
    depth = 0
    for brace in _BRACE.findall(text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def _answer_to_parse(text: str) -> str:
    """Return the part of a completion in which the library looks for the answer; "" if it states none."""
    boxed = stated_answer(text, ("box",))
    if boxed is not None:
        return readable(rf"\boxed{{{ungrouped(boxed)}}}") if len(boxed) <= MAX_CHARACTERS else ""
    marked = stated_answer(text, ("box", "block", "marker"))
    if marked is not None and _is_bare_formula(marked):
        formula = without_layout(marked.rstrip(" .,;:"))
        return readable(rf"\boxed{{{ungrouped(formula)}}}")
    answer = marked if marked is not None else stated_answer(text, ("box", "rest")) or ""
    return readable(answer[-MAX_CHARACTERS - 8 :])
