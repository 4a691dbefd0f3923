"""Messages between a reward's process and its parent: one line of JSON each."""

import json
import sys
from collections.abc import Iterator
from typing import Any

# Exit code of a reward's process after the reward has closed the process's end of the channel
CHANNEL_CLOSED = 114

Message = dict[str, Any]


def encode_line(message: Any, max_bytes: int = sys.maxsize) -> bytes:
    """Return the message as one line of JSON, without a line end.

    Raises:
        ValueError: The message is too large.
        TypeError: JSON cannot represent the message.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > max_bytes:
        raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {max_bytes}")
    return body


class Lines:
    r"""Splits a stream that arrives in pieces into messages.

    >>> lines = Lines()
    >>> list(lines.feed(b'{"a":1}\n{"b"')), list(lines.feed(b':2}\n'))
    ([{'a': 1}], [{'b': 2}])
    """

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()  # beginning of a line whose end has not arrived yet

    def feed(self, piece: bytes) -> Iterator[Message]:
        """Yield the messages that end in this piece.

        Raises:
            ValueError: A line is too long, or is not JSON.
        """
        self._rest += piece
        if b"\n" in piece:
            *lines, self._rest = self._rest.split(b"\n")
            yield from map(json.loads, lines)
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"a message of more than {self._max_bytes} bytes")
