"""Messages between a verifier and its adapter's process: four bytes of length, then a JSON object; no pickle."""

import json
import struct
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("!I")


class MessageTooLarge(ValueError):
    """A message is longer than the channel allows."""


def encode(message: dict[str, Any], max_bytes: int) -> bytes:
    """One frame. Raises MessageTooLarge, or TypeError for what JSON cannot hold.

    >>> encode({"a": 1}, max_bytes=100)
    b'\\x00\\x00\\x00\\x07{"a":1}'
    """
    return frame(dumps(message, max_bytes))


def dumps(value: Any, max_bytes: int) -> bytes:
    """A value as JSON. Raises as `encode` does."""
    body = json.dumps(value, separators=(",", ":")).encode()
    _check_length(len(body), max_bytes)
    return body


def frame(body: bytes) -> bytes:
    """A message whose body is JSON already."""
    return HEADER.pack(len(body)) + body


class Frames:
    """Puts the pieces of a stream together.

    >>> frames = Frames(max_bytes=100)
    >>> list(frames.feed(encode({"a": 1}, 100) + encode({"b": 2}, 100)[:9]))
    [{'a': 1}]
    >>> list(frames.feed(encode({"b": 2}, 100)[9:]))
    [{'b': 2}]
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()

    def feed(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """The messages that end with this piece. Raises ValueError for what is no message."""
        self._received += piece
        while len(self._received) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._received)
            _check_length(length, self._max_bytes)
            end = HEADER.size + length
            if len(self._received) < end:
                return
            body = self._received[HEADER.size : end]
            del self._received[:end]
            yield _decode(body)


def _check_length(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise MessageTooLarge(f"a message of {num_bytes} bytes exceeds the limit of {max_bytes}")


def _decode(body: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object, not a {type(message).__name__}")
    return message
