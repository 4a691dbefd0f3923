"""Turn the values of numpy, pyarrow and `datasets` into those of JSON."""

import base64
import datetime
import io
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from async_grpo.errors import ConfigurationError

NULLS_OF_PANDAS = ("NAType", "NaTType")
NARROW_NUMBERS = ("float16", "float32")  # types of numpy
TIMES = (datetime.date, datetime.time, datetime.datetime, datetime.timedelta)
# First bytes of an encoded image -> its media type
IMAGE_TYPES = {
    b"\x89PNG\r\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}


def plain_row(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a row of a table, with all values converted to JSON values.

    Arrow gives all objects of a list the same keys. A key that an object did not have gets the value null. Such nulls are
    removed, except for `content` of a message, where null is a valid value.

    Args:
        row: The columns of the row.
        place: File and number of the row, for messages.

    Raises:
        ConfigurationError: A value cannot be written as JSON. The message names its column.
    """
    columns = {}
    for name, value in row.items():
        try:
            columns[str(name)] = _without_filling(plain(value))
        except TypeError as error:
            raise ConfigurationError(
                f"{place}: the column {name} holds {error}, which is no text or number: leave the column out of the file, "
                "or write it as text"
            ) from error
    return columns


def plain(value: Any) -> Any:
    """Convert a value to dicts, lists, texts, numbers, booleans and None. Images become data URLs.

    Raises:
        TypeError: The value cannot be written as JSON. The message says what it is.

    >>> import numpy
    >>> plain({"a": numpy.array([1, 2]), "b": numpy.float32(0.1), "c": (True, None)})
    {'a': [1, 2], 'b': 0.1, 'c': [True, None]}
    """
    if type(value).__name__ in NULLS_OF_PANDAS:
        return None
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else str(value)
    if isinstance(value, TIMES):
        return str(value)
    if type(value).__name__ in NARROW_NUMBERS:
        # Convert by way of the shortest text. `float(value)` would make 0.10000000149011612 of the float32 0.1
        return float(str(value))
    image_url = _image_url(value)
    if image_url is not None:
        return image_url
    if hasattr(value, "tolist"):  # a number or an array of numpy, torch or pyarrow
        return plain(value.tolist())
    if isinstance(value, str | int | float):  # for example a member of a `str` enum
        return value
    raise TypeError(f"a {type(value).__name__}")


def _image_url(value: Any) -> str | None:
    """Return the data URL of an image of Pillow, or of an encoded image; None for any other value."""
    if isinstance(value, bytes):
        media_type = image_type(value)
        return None if media_type is None else data_url(value, media_type)
    if type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "save"):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return data_url(buffer.getvalue(), "image/png")
    return None


def image_type(content: bytes) -> str | None:
    """Return the media type of an encoded image by its first bytes, or None if the content is not an image.

    >>> image_type(b"GIF89a..."), image_type(b"RIFF....WAVE")
    ('image/gif', None)
    """
    kind = next((kind for begin, kind in IMAGE_TYPES.items() if content.startswith(begin)), None)
    # Sounds (WAV) and videos (AVI) begin with RIFF, too
    is_other_riff = kind == "image/webp" and content[8:12] != b"WEBP"
    return None if is_other_riff else kind


def data_url(content: bytes, media_type: str) -> str:
    """Return the data URL of a file's content.

    >>> data_url(b"GIF8", "image/gif")
    'data:image/gif;base64,R0lGOA=='
    """
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


def _without_filling(value: Any) -> Any:
    """Return the value without the nulls with which Arrow fills the objects in lists."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_filling(item) for name, item in value.items()}
    return value


def _without_nulls(value: Any) -> Any:
    """Return an object in a list without its nulls, at any depth."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    is_message = "role" in value
    return {
        name: _without_nulls(item)
        for name, item in value.items()
        if item is not None or (is_message and name == "content")
    }
