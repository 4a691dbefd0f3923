"""A reward that differs between most completions, so that there is something to learn from the first step on."""

from typing import Any


def varied(sample: dict[str, Any]) -> float:
    """Return a number from 0 to 1 that depends on the length of the text."""
    return len(sample["completion"]) % 8 / 7
