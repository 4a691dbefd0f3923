r"""Equality by the library math-verify: LaTeX, sets, intervals, equations, units, percentages, plain numbers.

If there is a \boxed{}, it counts and nothing else (see `stated_answer`). Without one it is the one <answer>, else what
follows "####" as in GSM8K, else "the answer is ...", else the last formula or number; a thought does not count. Of an
equation the right side counts, and numbers agree to six decimals. LaTeX is read by a grammar; the library hands to sympy's
parser nothing but digits and + - * / ^ ( ).
The library guards itself with `signal.alarm`: outside a main thread this adapter raises.
"""

import re
import unicodedata
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from async_grpo.rewards.builtin.answers import (
    completion_text,
    gold_answer,
    stated_answer,
    ungrouped,
)
from async_grpo.rewards.builtin.sympy import is_computable

MAX_CHARACTERS = 20_000  # of a box, or of the end of a completion without one: patterns over more cost time
SECONDS = 5  # for one parse or one comparison, then the answer counts as wrong

_OTHER_CHARACTERS = re.compile(r"[^\t\n\r\x20-\x7e]")
_NEIGHBOURS = re.compile(r"(?<=\d)[ \t]+(?=\d++(?![\d\s]*/))")
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

    return _NEIGHBOURS.sub(", ", _OTHER_CHARACTERS.sub(readable_character, text))


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""Return 1 if the answer in the completion equals the row's `answer`, else 0.

    Raises:
        ValueError: the row's answer is missing, empty or unreadable; or this is not the main thread.

    >>> score({"completion": r"so \boxed{\frac{2}{4}}", "answer": "... #### 0.5"})
    {'reward': 1.0}
    """
    gold = ungrouped(gold_answer(sample).replace(r"\$", "").strip())
    marked = gold if "$" in gold else f"${gold}$"
    parsed = parse(marked, _EXTRACTION, parsing_timeout=SECONDS)
    if not parsed:
        raise ValueError(f"math-verify finds no answer in the row's answer {gold!r}")
    found = parse(_answer_to_parse(completion_text(sample)), _EXTRACTION, parsing_timeout=SECONDS)
    found = [answer for answer in found if isinstance(answer, str) or is_computable(answer)]
    return {"reward": float(verify(parsed, found, timeout_seconds=SECONDS))}


def _answer_to_parse(text: str) -> str:
    """Return the part of a completion in which the library looks for the answer; "" if it states none."""
    boxed = stated_answer(text, ("box",))
    if boxed is not None:
        return readable(rf"\boxed{{{ungrouped(boxed)}}}") if len(boxed) <= MAX_CHARACTERS else ""
    answer = stated_answer(text, ("box", "block", "marker", "rest")) or ""
    return readable(answer[-MAX_CHARACTERS - 8 :])
