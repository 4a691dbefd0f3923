"""A server that reads the text in pictures (OCR), for the judge `PictureReader`.

    pip install pytesseract                      # and Tesseract itself: apt-get install tesseract-ocr
    python examples/ocr_server.py --port 8080

    text_read = PictureReader(url="http://127.0.0.1:8080")       in a file of rewards; rows need a column `text`

Any function of an image of Pillow that returns a text can be the reader. For the digits of `scripts/demo --draw`:

    python examples/ocr_server.py --reader async_grpo.data.digit_rewards:read_text
"""

import base64
import importlib
import io
from collections.abc import Callable
from typing import Any

from http_scorer_server import Score, address_arguments, serve
from PIL import Image

Reader = Callable[[Image.Image], str]


def score_with(reader: Reader) -> Score:
    """Return a function that replies with the text in a sample's picture, in place of a reward."""

    def read(sample: dict[str, Any], images: list[str]) -> dict[str, Any]:
        (picture,) = images
        return {"text": reader(Image.open(io.BytesIO(base64.b64decode(picture)), formats=["PNG"]))}

    return read


def load_reader(name: str) -> Reader:
    """Return the function that MODULE:FUNCTION names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    parser = address_arguments("A server that reads the text in pictures.")
    parser.add_argument(
        "--reader",
        default="pytesseract:image_to_string",
        help="MODULE:FUNCTION that returns the text in an image of Pillow",
    )
    options = parser.parse_args()
    serve(options.host, options.port, score_with(load_reader(options.reader)))
