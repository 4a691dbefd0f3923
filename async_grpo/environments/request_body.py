"""The body of a request, bounded before it is parsed: one request must not hold up the run.

Each limit is a constant here or in `openai_api`, and an error names the value and the limit. Reading JSON takes time by the
number of its values rather than by its bytes, so both are limited.
"""

import asyncio
from typing import Any

from aiohttp import web

from async_grpo.processes.untrusted_files import parse_json

BASE_BYTES = 256 * 1024  # for tools' schemas, and what a chat template leaves out
BYTES_PER_TOKEN = 64  # of the context; text has about 4, or 12 where JSON escapes it
MAX_BYTES = 16 * 2**20
MAX_VALUES = 100_000  # objects, lists and what is in them; token ids of a prompt beside these
BODY_WITHIN_S = 60.0  # from the end of the request's head
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")  # names of UTF-8 and of a part of it


def max_body_bytes(context_tokens: int) -> int:
    """Return the longest body that a request may have whose conversation fits so many tokens."""
    return min(MAX_BYTES, BASE_BYTES + BYTES_PER_TOKEN * context_tokens)


async def read_body(request: web.Request, context_tokens: int) -> bytes:
    """Return the body as it came.

    HTTPRequestEntityTooLarge, HTTPRequestTimeout, HTTPUnsupportedMediaType: it is too long, late, or not UTF-8.
    """
    charset = _charset_of(request)
    if charset not in CHARSETS:
        raise web.HTTPUnsupportedMediaType(text=f"the body's charset is {charset[:40]!r}: send UTF-8")
    limit = max_body_bytes(context_tokens)
    _refuse_longer(request.content_length or 0, limit, context_tokens)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for piece in request.content.iter_any():
                body += piece
                _refuse_longer(len(body), limit, context_tokens)
    except TimeoutError as error:
        said = f"the body was not here within {BODY_WITHIN_S:g} s: {len(body)} bytes were"
        raise web.HTTPRequestTimeout(text=said) from error
    return bytes(body)


def parsed_body(body: bytes, *, max_token_ids: int = 0) -> Any:
    """Return the JSON of a body.

    HTTPBadRequest: it is no JSON in UTF-8, is nested deeper than `parse_json` allows, or has more than MAX_VALUES values
    and `max_token_ids`.
    """
    limit = MAX_VALUES + max_token_ids
    count = count_values(body, limit)
    if count > limit:
        said = f"the body has {count} values; at most {limit} are taken"
        raise web.HTTPBadRequest(text=f"{said}: send fewer messages, parts, tools or fields")
    try:
        return parse_json(body)
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"the body cannot be read as JSON: {error}") from error


def count_values(body: bytes, limit: int = MAX_VALUES) -> int:
    """Return how many values JSON has at most; if it has more strings than `limit`, their number.

    Values are counted by the commas and opening brackets that stand in no string.

    >>> count_values(b'[1, {"a": ",,,[[[", "b": []}]')
    6
    """
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = without_escapes.count(b'"') // 2
    if strings > limit:  # cutting them out would take long
        return strings
    outside = b"".join(without_escapes.split(b'"')[::2])
    return sum(outside.count(mark) for mark in (b",", b"[", b"{")) + 1


def _refuse_longer(size: int, limit: int, context_tokens: int) -> None:
    if size > limit:
        said = f"the body has {size} bytes or more; at most {limit} are taken"
        why = f"for the {context_tokens} tokens of a sequence (--max-generation-tokens, and the prompt)"
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=size, text=f"{said} {why}")


def _charset_of(request: web.Request) -> str:
    return (request.charset or "utf-8").lower()
