"""Find the images of a row, in the forms in which people write them (docs/images.md), and read their content."""

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.row_messages import IMAGE_PART, prompt_of
from async_grpo.experience.row_schemas import IMAGE_PLACEHOLDER
from async_grpo.options.fields import refuse
from async_grpo.processes.image_files import MAX_IMAGE_BYTES
from async_grpo.processes.untrusted_files import read_bytes

IMAGE_COLUMNS = ("images", "image")  # columns with the images of a row; the first that a row has is used
IMAGE_TEXT = IMAGE_PLACEHOLDER  # text in a message that stands for the next image of IMAGE_COLUMNS
# Values of `type` of the parts of a message that contain an image
IMAGE_KINDS = ("image", "image_url", "input_image")
# Fields of an image part that may contain the image. A part without any of them gets the next image of IMAGE_COLUMNS
IMAGE_FIELDS = ("image", "image_url", "url", "path", "bytes", "base64", "data")
DATA_URL = re.compile(r"data:([^;,]{0,100})(;base64)?,")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{1,20})://")
MAX_SHOWN = 60  # characters of a value that an error message shows
# Base64 has 4 characters for 3 bytes; line breaks may come in addition
MAX_BASE64_CHARACTERS = 3 * MAX_IMAGE_BYTES // 2


@dataclass(frozen=True)
class ImageRow:
    """The prompt of a row with images.

    Attributes:
        messages: The messages. The content of a message with images is a list of text parts and of IMAGE_PART; all other
            contents are as in the row.
        sources: The images in the order of their parts, in the form in which the row has them.
    """

    messages: list[dict[str, Any]]
    sources: list[Any]


def image_row(row: Mapping[str, Any]) -> ImageRow | None:
    """Return the prompt of a row with images, or None if the row has none.

    If the messages do not say where the images of a column belong, the images are put at the beginning of the first user
    message, as in TRL.

    Raises:
        ConfigurationError: The images and their places in the messages do not fit together, or the prompt is not a list
            of messages.
    """
    column = _column_images(row)
    prompt = None if row.get("input_token_ids") is not None else prompt_of(row)
    if not isinstance(prompt, list):
        refuse(
            bool(column),
            "the row has images, and its prompt is a text or token ids, which have no place for them: write messages, or "
            "name the column of the question with --prompt-column",
        )
        return None
    messages = [dict(message) if isinstance(message, Mapping) else message for message in prompt]
    if not any(_has_image_part(message) for message in messages):
        if not column:
            return None
        messages = _with_places(messages, len(column))
    sources: list[Any] = []
    remaining = list(column)
    for number, message in enumerate(messages, start=1):
        if not _has_image_part(message):
            continue
        refuse(
            message.get("role") != "user",
            f"message {number} of {len(messages)} has the role {message.get('role')!r:.{MAX_SHOWN}} and an image: only "
            "messages of the user may have images",
        )
        message["content"] = [_plain_part(part, remaining, sources) for part in message["content"]]
    refuse(
        bool(remaining),
        f"the row has {len(column)} images in the column {_column_name(row)}, and the messages have places for "
        f"{len(column) - len(remaining)}: write one part {IMAGE_PART} for each",
    )
    return ImageRow(messages, sources)


def first_image_kind(row: Mapping[str, Any]) -> str:
    """Return the `type` of the first image part in a row's messages; "" if there is no image part."""
    prompt = row.get("messages") or row.get("prompt")
    for message in prompt if isinstance(prompt, list) else ():
        if _has_image_part(message):
            return next(part["type"] for part in message["content"] if is_image_part(part))
    return ""


def _column_name(row: Mapping[str, Any]) -> str:
    return next((name for name in IMAGE_COLUMNS if row.get(name)), "")


def _column_images(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of the row's column, or [] if it has no such column."""
    name = _column_name(row)
    if not name:
        return []
    value = row[name]
    return list(value) if isinstance(value, list | tuple) else [value]


def _has_image_part(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list | tuple) and any(is_image_part(part) for part in content)


def is_image_part(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS


def _with_places(messages: Sequence[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Return the messages with an image part for each image of a column.

    The parts replace the text IMAGE_TEXT. Without this text, they are put at the beginning of the first user message.
    """
    texts = [_text_of_user(message) for message in messages]
    num_places = sum(text.count(IMAGE_TEXT) for text in texts)
    placed = list(messages)
    if num_places:
        refuse(
            num_places != num_images,
            f"the messages have {IMAGE_TEXT} {num_places} times, and the row has {num_images} images",
        )
        for number, text in enumerate(texts):
            if IMAGE_TEXT in text:
                placed[number] = {**messages[number], "content": _split_text(text)}
        return placed
    for number, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            parts = list(content) if isinstance(content, list | tuple) else _text_parts(str(content or ""))
            placed[number] = {**message, "content": [*[dict(IMAGE_PART)] * num_images, *parts]}
            return placed
    raise ConfigurationError("the row has images, and no message of the user in which they could stand")


def _text_of_user(message: Any) -> str:
    """Return the content of a message of the user, if it is a text, else ""."""
    if not isinstance(message, Mapping) or message.get("role") != "user":
        return ""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _split_text(text: str) -> list[dict[str, Any]]:
    """Return a text as parts, with an image part in the place of each IMAGE_TEXT."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(IMAGE_TEXT)):
        if number:
            parts.append(dict(IMAGE_PART))
        parts += _text_parts(piece)
    return parts


def _text_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _plain_part(part: Any, remaining: list[Any], sources: list[Any]) -> Any:
    """Return a part of a message in the form that chat templates expect, without its image.

    The image is appended to `sources`. It comes from the part itself, or else it is the next one of `remaining`, the
    images of the column that no part has used yet.
    """
    if not is_image_part(part):
        return part
    value = image_value(part)
    if value is None:
        refuse(
            not remaining,
            f"an image part names no image ({', '.join(IMAGE_FIELDS)}), and the row's column images has no further one",
        )
        sources.append(remaining.pop(0))
    else:
        sources.append(value)
    return dict(IMAGE_PART)


def image_value(part: Mapping[str, Any]) -> Any:
    """Return the image of an image part, unread: a path, a data URL, or an object with `bytes`. None if there is none."""
    name = next((name for name in IMAGE_FIELDS if part.get(name) is not None), None)
    if name is None:
        return None
    value = part[name]
    if name == "image_url" and isinstance(value, Mapping):
        return value.get("url")
    return {"bytes": value} if name in ("bytes", "base64", "data") else value


def image_path(source: Any, folder: Path) -> Path | None:
    """Return the path of an image that is a file; None if the row contains the image itself.

    Args:
        source: The image as it stands in the row.
        folder: Folder of the data file, in which relative paths begin. If the file does not exist there, the path is
            tried from the current folder.

    Raises:
        ConfigurationError: The image is at a remote address.
    """
    if isinstance(source, Mapping) and source.get("bytes") is None:
        source = source.get("path") or source.get("url")
    if not isinstance(source, str) or DATA_URL.match(source):
        return None
    scheme = SCHEME.match(source)
    if scheme is not None and scheme[1].lower() == "file":
        source = source.removeprefix(scheme[0])
    else:
        refuse(
            scheme is not None,
            f"the image {source!r:.{MAX_SHOWN}} is at a remote address, which is never fetched: give a file or a data URL",
        )
    path = folder / source
    return path if path.exists() else Path(os.path.abspath(source))


def image_content(source: Any, folder: Path) -> bytes:
    """Return the encoded content of an image.

    Args:
        source: The image as it stands in the row: a path, a data URL, or an object with `bytes` (base64) or `path`.
        folder: Folder of the data file, in which relative paths begin.

    Raises:
        ConfigurationError: The file does not exist or is too large, or the image has another form.
    """
    path = image_path(source, folder)
    if path is not None:
        refuse(not path.is_file(), f"there is no image {path}")
        try:
            return read_bytes(path, MAX_IMAGE_BYTES, follow_links=True)
        except OSError as error:
            raise ConfigurationError(
                f"the image {path} cannot be read ({error.strerror or error}; at most {MAX_IMAGE_BYTES:,} bytes)"
            ) from error
    text = source.get("bytes") if isinstance(source, Mapping) else source
    if not isinstance(text, str):
        raise ConfigurationError(
            f"an image must be a path, a data URL, or an object with bytes or path, not {source!r:.{MAX_SHOWN}}"
        )
    return _decoded_base64(text)


def content_of_data_url(text: str) -> bytes:
    """Return the encoded content of an image in a data URL. No file and no remote address is read.

    Raises:
        ConfigurationError: The text is another address, or is too long or not in base64.
    """
    refuse(
        DATA_URL.match(text) is None,
        f"the image {text!r:.{MAX_SHOWN}} is no data URL: files and remote addresses are not read here; send "
        "data:image/png;base64,...",
    )
    return _decoded_base64(text)


def _decoded_base64(text: str) -> bytes:
    """Return the bytes of a data URL, or of a text in base64."""
    header = DATA_URL.match(text)
    if header is not None:
        refuse(
            not header[2],
            f"the data URL {text!r:.{MAX_SHOWN}} is not in base64: write data:image/png;base64,...",
        )
    refuse(
        len(text) > MAX_BASE64_CHARACTERS,
        f"an image has {len(text):,} characters of base64; at most {MAX_IMAGE_BYTES:,} bytes are read",
    )
    encoded = text[header.end() :] if header is not None else text
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigurationError(
            f"the image {text!r:.{MAX_SHOWN}} is not in base64 ({error}): give a path, or data:image/png;base64,..."
        ) from error
