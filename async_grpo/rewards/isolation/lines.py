"""Messages between a process and its parent: a line of JSON each."""

import json
import sys
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]


def encode_line(message: Any, max_bytes: int = sys.maxsize) -> bytes:
    """As JSON, which holds no line end. Raises ValueError if it is too large, or TypeError for what JSON cannot hold."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > max_bytes:
        raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {max_bytes}")
    return body


class Lines:
    """Puts the pieces of a stream together.

    >>> lines = Lines()
    >>> list(lines.feed(b'{"a":1}\\n{"b"')), list(lines.feed(b':2}\\n'))
    ([{'a': 1}], [{'b': 2}])
    """

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()  # of the line that has not ended

    def feed(self, piece: bytes) -> Iterator[Message]:
        """The messages that end with this piece. Raises ValueError for a line that is too long or no JSON."""
        self._rest += piece
        if b"\n" in piece:
            *lines, self._rest = self._rest.split(b"\n")
            yield from map(json.loads, lines)
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"a message of more than {self._max_bytes} bytes")
