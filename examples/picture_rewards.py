"""Rewards of pictures, for the examples of policies that draw."""

import numpy as np

from async_grpo.rewards.judges import HTTPScorer

CHANNELS = {"red": 0, "green": 1, "blue": 2}
LEAST_LEAD = 40  # by how much a channel must exceed the other two in a colored pixel, of 255


def color(sample):
    """Return the share of the picture that has the color in the column `color`."""
    pixels = np.asarray(sample["picture"].convert("RGB")).astype(int)
    channel = CHANNELS[sample["color"]]
    lead = pixels[:, :, channel] - np.delete(pixels, channel, axis=2).max(axis=2)
    return float((lead > LEAST_LEAD).mean())


# A preference model, or a reader of texts (OCR), behind HTTP. The request has the picture as base64 of a PNG file
preference = HTTPScorer(url="http://127.0.0.1:8080", images="drawn_pictures")
