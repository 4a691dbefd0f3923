"""Rewards of drawn digits: is the picture read as the prompt's digit, in the prompt's ink, and are its strokes thick?"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from async_grpo.data.digits import GRAY, GRAY_BRIGHTNESS, WHITE, DigitReader

# The ink is seen in the mean of the brightest pixels, from 0 to 1. In pictures of the data set it is at least 0.82 in white
# ink, and at most 0.5 in gray ink
NUM_BRIGHTEST = 6
WHITE_FROM = 2 / 3


@cache
def _reader() -> DigitReader:
    return DigitReader.load()


def _seen(picture: Any) -> tuple[str, np.ndarray]:
    """Return the ink of a picture (8, 8), and the picture in white ink, from -1 (paper) to 1 (ink)."""
    brightness = np.asarray(picture, np.float32) / 255
    ink = WHITE if np.sort(brightness, axis=None)[-NUM_BRIGHTEST:].mean() > WHITE_FROM else GRAY
    in_white = brightness if ink == WHITE else np.minimum(brightness / GRAY_BRIGHTNESS, 1)
    return ink, 2 * in_white - 1


def inked_digit(sample: Mapping[str, Any]) -> dict[str, float]:
    """Return the reward of a digit in an ink: the probability that the reader sees the prompt's digit; 0 in the other ink.

    `digit_read` says whether the prompt's digit is the most probable one, in whichever ink, and `ink_seen` whether the ink
    is the prompt's.
    """
    ink, values = _seen(sample["picture"])
    probabilities = _reader().probabilities(values[None])[0]
    digit = int(sample["digit"])
    is_ink_right = ink == sample["ink"]
    return {
        "reward": float(probabilities[digit]) if is_ink_right else 0.0,
        "digit_read": float(probabilities.argmax() == digit),
        "ink_seen": float(is_ink_right),
    }


def read_text(picture: Any) -> str:
    """Return what a picture shows, as words such as "gray 7"."""
    ink, values = _seen(picture)
    return f"{ink} {_reader().probabilities(values[None])[0].argmax()}"


def thick_strokes(sample: Mapping[str, Any]) -> float:
    """Return the part of the picture that is ink, from 0 to 1."""
    _, values = _seen(sample["picture"])
    return float((values.mean() + 1) / 2)
