"""Read the images of prompts. Their size is checked before any pixel is decoded."""

import hashlib
import io
import string
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from async_grpo.errors import ConfigurationError, ImagesDiffer
from async_grpo.processes.untrusted_files import read_bytes
from async_grpo.types import ImageReference

# Values of `model_type` of the model families for which packed forward and engines compute the same from images
IMAGE_MODEL_TYPES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl")
RUN_IMAGES = "images"  # name of the folder with the images of a run's prompts, in the run's output folder
DIGEST_LENGTH = 64  # number of hexadecimal digits of a sha256
MAX_IMAGE_BYTES = 32 << 20  # maximum size of an encoded image
MAX_IMAGE_PIXELS = 1 << 26  # maximum number of pixels of an image, such as 8192 x 8192
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Formats of files that say how the camera was held. To find this out for a PNG file, Pillow would have to decode it.
# Pillow calls a JPEG file with further pictures MPO, as many phones write it
ORIENTED_FORMATS = ("JPEG", "MPO", "WEBP")
ORIENTATION_TAG = 0x0112  # EXIF tag that says how the camera was held
ORIENTATIONS_ON_THE_SIDE = (5, 6, 7, 8)  # values of ORIENTATION_TAG that exchange width and height
TURNS = {  # value of ORIENTATION_TAG -> what turns the image upright; all other values mean that it is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
GRAYS_OF_16_BITS = "I"  # the names of Pillow's modes for 16-bit grays begin with this
WHITE = (255, 255, 255, 255)


def digest_of_image(content: bytes) -> str:
    """Return the digest that identifies an image: the sha256 (hex) of its encoded content."""
    return hashlib.sha256(content).hexdigest()


def is_digest(value: Any) -> bool:
    """Return whether a value from an untrusted file is a digest of an image, which is also the name of its file.

    >>> is_digest("0" * 64), is_digest("../" + "0" * 61)
    (True, False)
    """
    return isinstance(value, str) and len(value) == DIGEST_LENGTH and set(value) <= set(string.hexdigits)


def image_size(content: bytes) -> tuple[int, int]:
    """Return width and height of an encoded image in pixels, without decoding it.

    Raises:
        ConfigurationError: The content is no image of a known format, or has too many pixels or bytes.
    """
    if len(content) > MAX_IMAGE_BYTES:
        raise ConfigurationError(
            f"the image has {len(content):,} bytes; at most {MAX_IMAGE_BYTES:,} are read: make it smaller"
        )
    with _opened(content) as image:
        width, height = image.size
        if _orientation(image) in ORIENTATIONS_ON_THE_SIDE:
            return height, width
        return width, height


def decoded_image(content: bytes) -> Image.Image:
    """Return an image as RGB, rotated as its file says. Engines and trainer both use exactly these pixels.

    Transparent pixels are drawn over white, as on a page. The first picture of an animation is taken.

    Raises:
        ConfigurationError: The content cannot be decoded. See `image_size`.
    """
    image_size(content)
    with _opened(content) as image:
        image.load()
        orientation = _orientation(image)
        upright = image.transpose(TURNS[orientation]) if orientation in TURNS else image
        return _as_rgb(upright)


def _as_rgb(image: Image.Image) -> Image.Image:
    """Return an image as RGB."""
    if image.mode.startswith(GRAYS_OF_16_BITS):
        # Pillow would make all values above 255 white
        grays = np.asarray(image).astype(np.float64) * 255 / 65535
        return Image.fromarray(np.round(grays).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        # Without their transparency, the pixels would get the colors behind it, which are often black like the text
        page = Image.new("RGBA", image.size, WHITE)
        page.alpha_composite(image.convert("RGBA"))
        return page.convert("RGB")
    return image.convert("RGB")


def read_image(reference: ImageReference) -> Image.Image:
    """Read and decode the image of a prompt.

    Raises:
        ConfigurationError: The file cannot be read on this node, or cannot be decoded.
        ImagesDiffer: The file is not the same as when the run began.
    """
    path = Path(reference.path)
    try:
        content = read_bytes(path, MAX_IMAGE_BYTES)
    except OSError as error:
        raise ConfigurationError(
            f"the image {path} cannot be read on this node ({error.strerror or error}): the folder of the run must be "
            "visible at the same path on every node"
        ) from error
    digest = digest_of_image(content)
    if digest != reference.digest:
        raise ImagesDiffer(
            f"{path} holds another image than at the start of the run (sha256 {digest[:12]}, not "
            f"{reference.digest[:12]}): engines and trainer would see different images. Restore the file"
        )
    try:
        return decoded_image(content)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """Yield the image, whose pixels are not decoded yet.

    Raises:
        ConfigurationError: The content is no image of a known format, has too many pixels, or is broken.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns about large images, which the limit below refuses, and about metadata, which nothing reads
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_IMAGE_PIXELS:
                    raise ConfigurationError(
                        f"the image has {width} x {height} pixels; at most {MAX_IMAGE_PIXELS:,} are decoded: make it "
                        "smaller"
                    )
                yield image
    except ConfigurationError:
        raise
    except Image.DecompressionBombError as error:
        raise ConfigurationError(f"the image has too many pixels: {error}") from error
    except Exception as error:  # Pillow raises any exception for broken files
        raise ConfigurationError(
            f"the image cannot be decoded ({error}): give one of the formats {', '.join(FORMATS)}"
        ) from error


def _orientation(image: Image.Image) -> int:
    """Return the value of ORIENTATION_TAG. Without this tag, or with a value that is no number, return 1 (upright)."""
    if image.format not in ORIENTED_FORMATS:
        return 1
    value = image.getexif().get(ORIENTATION_TAG)
    return value if isinstance(value, int) else 1
