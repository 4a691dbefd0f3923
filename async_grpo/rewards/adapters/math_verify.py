r"""Equality by the library math-verify: LaTeX, sets, intervals, equations, units, percentages, plain numbers.

The last \boxed{} is preferred (boxes close to each other are read as one set, the library's rule), then "####
18" of GSM8K, then "the answer is ...", then the last formula or number. Of an equation the right side counts, and
numbers agree to six decimals. LaTeX is read by a grammar; the only text that the library hands to sympy's parser is
made of digits and + - * / ^ ( ).

The library guards itself with `signal.alarm`, which works in a main thread only: everywhere else this adapter
raises.
"""

import re
import unicodedata
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from async_grpo.rewards.adapters.answers import completion_text, gold_answer
from async_grpo.rewards.adapters.magnitude import is_computable

MAX_CHARACTERS = 20_000  # of the completion's end: the answer is there, and patterns over more cost time
SECONDS = 5  # for one parse or one comparison, then the answer counts as wrong

_OTHER_SCRIPTS = re.compile(r"[^\x00-\x7f]")
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def parse_gold(gold: str) -> list[Any]:
    """The gold answer as the library reads it. Raises ValueError for an answer in which it finds nothing."""
    marked = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
    parsed: list[Any] = parse(marked, _EXTRACTION, parsing_timeout=SECONDS)
    if not parsed:
        raise ValueError(f"math-verify finds no answer in the row's answer {gold!r}")
    return parsed


def parse_prediction(text: str) -> list[Any]:
    """The answer in the model's text; empty if there is none, or none that can be computed in time."""
    if "\\boxed" not in text and "####" in text:
        text = text.rpartition("####")[2].strip().partition("\n")[0]
    # The library passes over digits of other scripts: it would read -5 in an Arabic "3 - 5".
    text = _OTHER_SCRIPTS.sub(
        lambda match: str(unicodedata.decimal(match[0], match[0])), text[-MAX_CHARACTERS:]
    )
    parsed = parse(text, _EXTRACTION, parsing_timeout=SECONDS)
    return [expression for expression in parsed if isinstance(expression, str) or is_computable(expression)]


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""1 if the answer in the completion equals the row's `answer`, else 0.

    Raises:
        ValueError: the row's answer is missing, empty or unreadable; or this is not the main thread.

    >>> score({"completion": r"so \boxed{\frac{2}{4}}", "answer": "... #### 0.5"})
    {'reward': 1.0}
    """
    gold = parse_gold(gold_answer(sample))
    prediction = parse_prediction(completion_text(sample))
    return {"reward": float(verify(gold, prediction, timeout_seconds=SECONDS))}
