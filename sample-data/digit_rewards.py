"""Rewards of drawn digits: is the picture read as the digit of the prompt, and are its strokes thick?"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from async_grpo.data.digits import DigitReader


@cache
def _reader() -> DigitReader:
    return DigitReader.load()


def _as_values(sample: Mapping[str, Any]) -> np.ndarray:
    """Return the picture (8, 8) of a sample, from -1 (paper) to 1 (ink)."""
    return np.asarray(sample["picture"], np.float32) / 127.5 - 1


def read_digit(sample: Mapping[str, Any]) -> dict[str, float]:
    """Return the probability that the reader sees the digit of the prompt, and whether it is the most probable digit."""
    probabilities = _reader().probabilities(_as_values(sample)[None])[0]
    digit = int(sample["answer"])
    return {"reward": float(probabilities[digit]), "is_read": float(probabilities.argmax() == digit)}


def read_text(picture: Any) -> str:
    """Return the digit that a picture shows."""
    return str(_reader().probabilities(_as_values({"picture": picture})[None])[0].argmax())


def thick_strokes(sample: Mapping[str, Any]) -> float:
    """Return the part of the picture that is ink, from 0 to 1."""
    return float((_as_values(sample).mean() + 1) / 2)
