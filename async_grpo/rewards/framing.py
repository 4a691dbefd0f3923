"""Messages between a verifier and its adapter's process: four bytes of length, then JSON; no pickle."""

import json
import struct
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("!I")


class MessageTooLarge(ValueError):
    """A message is longer than the channel allows."""


def encode(message: dict[str, Any], max_bytes: int) -> bytes:
    """One frame. Raises MessageTooLarge, or TypeError for what JSON cannot hold.

    >>> encode({"a": 1}, max_bytes=100)
    b'\\x00\\x00\\x00\\x07{"a":1}'
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    check_length(len(body), max_bytes)
    return HEADER.pack(len(body)) + body


def check_length(num_bytes: int, max_bytes: int) -> None:
    """Raise MessageTooLarge for a body beyond the limit."""
    if num_bytes > max_bytes:
        raise MessageTooLarge(f"a message of {num_bytes} bytes exceeds the limit of {max_bytes}")


def read(receive: Callable[[int], bytes], max_bytes: int) -> dict[str, Any] | None:
    """The next message of a blocking stream, None at its end; `receive(n)` gives fewer bytes only there."""
    header = receive(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    check_length(length, max_bytes)
    body = receive(length)
    return json.loads(body) if len(body) == length else None
