"""The picture of a sample, if the policy draws: as text on the way to a reward, and as a picture for the reward."""

import base64
import io
from collections.abc import Mapping
from typing import Any

# Column with a list of one picture, base64 of a PNG file. Scorers take it (`HTTPScorer(images="drawn_pictures")`)
PICTURES_KEY = "drawn_pictures"
# Column with the picture as a `PIL.Image`, for functions
PICTURE_KEY = "picture"


def picture_columns(png: bytes) -> dict[str, Any]:
    """Return the columns that a sample gets from its picture, as JSON; {} without a picture."""
    return {PICTURES_KEY: [base64.b64encode(png).decode()]} if png else {}


def with_decoded_picture(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a sample. If the policy drew it, the copy has its picture as a `PIL.Image` in `picture`.

    `numpy.asarray(sample["picture"])` is an array (height, width) uint8 for a gray picture, or (height, width, 3).
    """
    copied = dict(sample)
    pictures = sample.get(PICTURES_KEY)
    # A column of the user's rows may have the same name, and other contents
    if PICTURE_KEY in copied or not isinstance(pictures, list) or len(pictures) != 1:
        return copied
    # Pillow is imported only here, so that the processes of other rewards start faster
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(base64.b64decode(pictures[0])), formats=["PNG"])
        picture.load()
    except (ValueError, TypeError, OSError, SyntaxError, Image.DecompressionBombError):
        # Pillow raises SyntaxError for some files whose beginning is that of a PNG file
        return copied
    copied[PICTURE_KEY] = picture
    return copied
