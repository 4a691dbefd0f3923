"""Rewards of pictures, for the examples of policies that draw."""

import numpy as np

from async_grpo.rewards.judges import HTTPScorer

CHANNELS = {"red": 0, "green": 1, "blue": 2}
LEAST_LEAD = 40  # value from 0 to 255 by which a channel of a colored pixel must exceed the other two


def color(sample):
    """Return the fraction of the picture's pixels that have the color named in the column `color`."""
    pixels = np.asarray(sample["picture"].convert("RGB")).astype(int)
    channel = CHANNELS[sample["color"]]
    lead = pixels[:, :, channel] - np.delete(pixels, channel, axis=2).max(axis=2)
    return float((lead > LEAST_LEAD).mean())


# A server with a preference model or a text reader (OCR). Its requests contain the picture as a PNG file in base64
preference = HTTPScorer(url="http://127.0.0.1:8080", images="drawn_pictures")
