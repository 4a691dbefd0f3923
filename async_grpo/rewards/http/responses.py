"""Reading the reply of a server that may send anything: bounded in size, decompressed with care, strictly JSON."""

import json
import math
import zlib
from collections.abc import AsyncIterable
from typing import Any, NoReturn

from async_grpo.rewards.http.endpoint import BadReply

EXCERPT_CHARACTERS = 200
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


async def read_body(chunks: AsyncIterable[bytes], encoding: str, max_bytes: int) -> bytes:
    """The decompressed body; no more than `max_bytes` of it and one chunk is ever held.

    Args:
        chunks: as they come off the wire.
        encoding: the `Content-Encoding` header.

    Raises:
        BadReply: too large, in an encoding that was not asked for, or not what that encoding looks like.
    """
    decoder = _decoder(encoding)
    body = bytearray()
    async for chunk in chunks:
        body += decoder.decode(chunk, max_bytes + 1 - len(body))
        if len(body) > max_bytes:
            raise BadReply(f"the reply is larger than {max_bytes} bytes")
    decoder.finish()
    return bytes(body)


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, every number finite.

    >>> json_object(b'{"score": 0.5}')
    {'score': 0.5}
    >>> json_object(b'{"score": NaN}')
    Traceback (most recent call last):
    ...
    async_grpo.rewards.http.endpoint.BadReply: the reply is no JSON: NaN is no number

    Raises:
        BadReply: it holds something else.
    """
    try:
        value = json.loads(body, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:  # also: not UTF-8, 5000 digits, 100000 brackets
        raise BadReply(f"the reply is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadReply(f"the reply is no JSON object but a {type(value).__name__}")
    return value


def excerpt(body: bytes) -> str:
    """The beginning, fit for a message.

    >>> excerpt(b"<html>\\n\\x00hello")
    '<html> hello'
    """
    text = body[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace")
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + " ..."


class _Plain:
    def decode(self, chunk: bytes, max_bytes: int) -> bytes:
        return chunk[:max_bytes]

    def finish(self) -> None:
        pass


class _Inflate:
    """A few bytes may stand for gigabytes: never decompress more than is still wanted."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(GZIP_OR_ZLIB)

    def decode(self, chunk: bytes, max_bytes: int) -> bytes:
        try:
            decoded = self._zlib.decompress(chunk, max_bytes)
        except zlib.error as error:
            raise BadReply(f"the compressed reply cannot be read: {error}") from None
        if self._zlib.unused_data:  # zlib would go on collecting it
            raise BadReply("the compressed reply goes on after its end")
        return decoded

    def finish(self) -> None:
        if not self._zlib.eof:
            raise BadReply("the compressed reply breaks off")


def _decoder(encoding: str) -> _Plain | _Inflate:
    match encoding.strip().lower():
        case "" | "identity":
            return _Plain()
        case "gzip" | "x-gzip" | "deflate":
            return _Inflate()
    raise BadReply(f"the reply is encoded as {encoding[:40]!r}, which was not asked for")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is not finite")
    return number
