"""Rewards of pictures, for the examples of policies that draw."""

import numpy as np

from async_grpo.rewards.judges import HTTPScorer, PictureReader
from async_grpo.rewards.picture_text import text_reward

CHANNELS = {"red": 0, "green": 1, "blue": 2}
LEAST_LEAD = 40  # value from 0 to 255 by which a channel of a colored pixel must exceed the other two


def color(sample):
    """Return the fraction of the picture's pixels that have the color named in the column `color`."""
    pixels = np.asarray(sample["picture"].convert("RGB")).astype(int)
    channel = CHANNELS[sample["color"]]
    lead = pixels[:, :, channel] - np.delete(pixels, channel, axis=2).max(axis=2)
    return float((lead > LEAST_LEAD).mean())


def caption_read(sample):
    """Return how much of the text in the column `text` Tesseract reads in the picture (pip install pytesseract)."""
    import pytesseract  # only here, so that the other rewards do not need it

    return text_reward(pytesseract.image_to_string(sample["picture"]), sample["text"])


# The same reward with OCR on an HTTP server: examples/ocr_server.py
text_read = PictureReader(url="http://127.0.0.1:8081")

# A server with a preference model. Its requests contain the picture as a PNG file in base64
preference = HTTPScorer(url="http://127.0.0.1:8080", images="drawn_pictures")
