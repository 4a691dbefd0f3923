"""A regular expression decides: the row's `pattern`, else the option's.

The pattern is Python's. It must match the whole text behind the thought, or with `search` some part of it. One that
backtracks for ever is a time-out, not a hang, and no judgement on the completion: the sample fails.
"""

import re
from functools import lru_cache
from typing import Any

from async_grpo.rewards.builtin.answers import completion_text
from async_grpo.rewards.builtin.limits import TooSlow, time_limit

SECONDS = 2.0
MAX_CHARACTERS = 100_000


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """Raises ValueError for what is no regular expression."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r:.200} is no regular expression: {error}") from error


def score(sample: dict[str, Any], pattern: str | None = None, search: bool = False) -> dict[str, float]:
    r"""1 if the text matches, else 0; 0 too for a text beyond 100,000 characters.

    Raises:
        ValueError: there is no pattern, or it is no regular expression.
        TimeoutError: it did not come to an end.

    >>> score({"completion": "so</think> 12 apples"}, r"\d+ \w+"), score({"completion": "12", "pattern": "[a-z]"})
    ({'reward': 1.0}, {'reward': 0.0})
    """
    pattern = sample.get("pattern") or pattern
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"`regex` needs a column or an option `pattern`, not {pattern!r:.200}")
    expression = compiled(pattern)
    text = completion_text(sample).rpartition("</think>")[2].strip()
    if len(text) > MAX_CHARACTERS:
        return {"reward": 0.0}
    try:
        with time_limit(SECONDS):
            match = expression.search(text) if search else expression.fullmatch(text)
    except TooSlow as error:
        raise TimeoutError(
            f"the pattern {pattern!r:.200} takes more than {SECONDS:g} s on this text"
        ) from error
    return {"reward": float(match is not None)}
