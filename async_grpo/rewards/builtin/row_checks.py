"""Check whether the shipped rewards can score a row, before a run starts: one function for each reward.

Each function takes a row of the data, without a completion, and raises an exception if no completion of it could be
scored. It imports the reward's module when it is called, because some modules import large packages.
"""

import math
import re
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

# Reading LaTeX takes milliseconds, and most gold answers are plain numbers, which every reward can read
_PLAIN_NUMBER = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?")
_MISSING_VALUE = "nan"  # what other programs write instead of a number that is missing


def check_math_verify_row(row: Row) -> None:
    """Raise ValueError if `math_verify` cannot read the row's `answer`."""
    if _is_plain_number(row):
        return
    from async_grpo.rewards.builtin.math_verify import check_row

    check_row(row)


def check_sympy_row(row: Row) -> None:
    """Raise ValueError if `sympy` cannot read the row's `answer`."""
    if _is_plain_number(row):
        return
    from async_grpo.rewards.builtin.sympy import check_row

    check_row(row)


def check_mathd_row(row: Row) -> None:
    """Raise ValueError if the row has no `answer` that `mathd` can compare."""
    if _is_plain_number(row):
        return
    from async_grpo.rewards.builtin.answers import mathematical_gold
    from async_grpo.rewards.builtin.mathd import normalise

    if not normalise(mathematical_gold(row)):
        raise ValueError(f"nothing is left of the row's answer {row['answer']!r} after normalisation")


def check_majority_row(row: Row) -> None:
    """Raise ValueError if the row has an `answer` that cannot be compared. A row without one can be scored."""
    if row.get("answer") is not None:
        check_mathd_row(row)


def check_exact_row(row: Row) -> None:
    """Raise ValueError if the row has no `answer` or `answers` that can be compared."""
    from async_grpo.rewards.builtin.text import exact

    golds = row.get("answers")
    for gold in golds if isinstance(golds, list) else [row.get("answer")]:
        _refuse_infinite(gold)
    exact({**row, "completion": ""})


def check_code_row(row: Row) -> None:
    """Raise ValueError if the row has no usable `tests`."""
    from async_grpo.rewards.builtin.code_tests import tests_of

    tests_of(row)


def check_regex_row(row: Row, pattern: str | None = None, search: bool = False) -> None:
    """Raise ValueError if the row has no valid `pattern`, and the option gives none either."""
    from async_grpo.rewards.builtin.text import regex

    regex({**row, "completion": ""}, pattern, search)


def check_json_schema_row(row: Row, schema: str | None = None) -> None:
    """Raise ValueError if the row has no valid `schema`, and the option gives none either."""
    from async_grpo.rewards.builtin.json_schema import score

    score({**row, "completion": ""}, schema)


def check_length_row(row: Row, schedule: str = "overlong", judge: str = "math_verify") -> None:
    """Raise ValueError if the `judge` of the cosine schedule cannot score the row."""
    if schedule == "cosine" and judge in _CHECKS_OF_JUDGES:
        _CHECKS_OF_JUDGES[judge](row)


def check_countdown_row(row: Row) -> None:
    """Raise ValueError if the row has no usable `nums` or `target`."""
    from async_grpo.rewards.builtin.countdown import check_row

    check_row(row)


_CHECKS_OF_JUDGES: dict[str, Callable[[Row], None]] = {
    "math_verify": check_math_verify_row,
    "mathd": check_mathd_row,
    "sympy": check_sympy_row,
    "countdown": check_countdown_row,
    "exact": check_exact_row,
}


def _is_plain_number(row: Row) -> bool:
    """Return whether the gold answer is a plain number.

    Raises:
        ValueError: The row has no answer, or its answer is the text "nan", which stands for a missing number.
    """
    from async_grpo.rewards.builtin.answers import gold_answer

    _refuse_infinite(row.get("answer"))
    gold = gold_answer(row)
    if gold.lower() == _MISSING_VALUE:
        raise ValueError(f"the row's answer {row['answer']!r} is no number: the value is missing")
    return _PLAIN_NUMBER.fullmatch(gold) is not None


def _refuse_infinite(gold: Any) -> None:
    if isinstance(gold, float) and not math.isfinite(gold):
        raise ValueError(f"the row's answer is {gold!r}, and no completion can be compared with this number")
