"""Messages between a verifier and its adapter's process: a line of JSON each; no pickle."""

import json
from collections.abc import Iterator
from typing import Any


def encode(message: Any, max_bytes: int) -> bytes:
    """As JSON, which holds no line end. Raises ValueError if it is too large, or TypeError for what JSON cannot hold.

    >>> encode({"a": "1\\n"}, max_bytes=100)
    b'{"a":"1\\\\n"}'
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > max_bytes:
        raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {max_bytes}")
    return body


class Lines:
    """Puts the pieces of a stream together.

    >>> lines = Lines(max_bytes=100)
    >>> list(lines.feed(b'{"a":1}\\n{"b"')), list(lines.feed(b':2}\\n'))
    ([{'a': 1}], [{'b': 2}])
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._length = max_bytes, 0
        self._pieces: list[bytes] = []  # of the line that has not ended

    def feed(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """The messages that end with this piece. Raises ValueError for what is no message."""
        first, *others = piece.split(b"\n")
        self._pieces.append(first)
        self._length += len(first)
        if self._length > self._max_bytes:
            raise ValueError(f"a message of more than {self._max_bytes} bytes")
        if not others:
            return
        lines = [b"".join(self._pieces), *others[:-1]]
        self._pieces, self._length = [others[-1]], len(others[-1])
        for line in lines:
            try:
                message = json.loads(line)
            except RecursionError as error:
                raise ValueError("a message is nested too deeply") from error
            if not isinstance(message, dict):
                raise ValueError(f"a message is a JSON object, not a {type(message).__name__}")
            yield message
