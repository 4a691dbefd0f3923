"""Reads and parses the bodies of requests. Limits are checked before parsing, so that one request cannot delay the run.

Each limit is a constant here or in `openai_api`, and an error names the value and the limit. The time to parse JSON
depends more on the number of values than on the number of bytes, so both are limited.
"""

import asyncio
from typing import Any

from aiohttp import web

from async_grpo.processes.untrusted_files import parse_json

BASE_BYTES = 256 * 1024  # allowance for schemas of tools, and for fields that a chat template does not use
BYTES_PER_TOKEN = 64  # allowance per token of context. A token has about 4 bytes, or 12 if JSON escapes it
MAX_BYTES = 16 * 2**20
MAX_BYTES_WITH_IMAGES = 32 * 2**20  # maximum size of a body if the model reads images, which are data URLs
MAX_VALUES = 100_000  # maximum number of JSON values in a body, not counting the token ids of a prompt
BODY_WITHIN_S = 60.0  # seconds in which the body must arrive after the request's head
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")  # names of UTF-8 and of ASCII, which is a subset of UTF-8


def max_body_bytes(context_tokens: int, *, has_images: bool = False) -> int:
    """Return the maximum size of a body in bytes.

    Args:
        context_tokens: Maximum number of tokens of the conversation in the body.
        has_images: Whether the conversation may have images.
    """
    if has_images:
        return MAX_BYTES_WITH_IMAGES
    return min(MAX_BYTES, BASE_BYTES + BYTES_PER_TOKEN * context_tokens)


async def read_body(request: web.Request, context_tokens: int, *, has_images: bool = False) -> bytes:
    """Return the unparsed body of a request.

    Args:
        request: The request.
        context_tokens: Maximum length of a sequence, in tokens.
        has_images: Whether the conversation may have images.

    Raises:
        HTTPRequestEntityTooLarge: The body is too long.
        HTTPRequestTimeout: The body did not arrive in time.
        HTTPUnsupportedMediaType: The body is not UTF-8.
    """
    charset = _charset_of(request)
    if charset not in CHARSETS:
        raise web.HTTPUnsupportedMediaType(text=f"the body's charset is {charset[:40]!r}: send UTF-8")
    limit = max_body_bytes(context_tokens, has_images=has_images)
    _refuse_longer(request.content_length or 0, limit, context_tokens)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for piece in request.content.iter_any():
                body += piece
                _refuse_longer(len(body), limit, context_tokens)
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_WITHIN_S:g} s: {len(body)} bytes were received"
        raise web.HTTPRequestTimeout(text=message) from error
    return bytes(body)


def parsed_body(body: bytes, *, max_token_ids: int = 0) -> Any:
    """Parse a body as JSON, and return its value.

    Args:
        body: The bytes of the body.
        max_token_ids: Number of values that are allowed in addition to `MAX_VALUES`.

    Raises:
        HTTPBadRequest: The body is not JSON in UTF-8, is nested deeper than `parse_json` allows, or has too many values.
    """
    limit = MAX_VALUES + max_token_ids
    count = count_values(body, limit)
    if count > limit:
        raise web.HTTPBadRequest(
            text=f"the body has {count} values, but at most {limit} are allowed: "
            "send fewer messages, parts, tools or fields"
        )
    try:
        return parse_json(body)
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"the body cannot be read as JSON: {error}") from error


def count_values(body: bytes, limit: int = MAX_VALUES) -> int:
    """Return an upper bound of the number of values in a JSON text.

    Commas and opening brackets outside of strings are counted. If the text has more than `limit` strings, only the
    number of strings is returned, which exceeds the limit.

    >>> count_values(b'[1, {"a": ",,,[[[", "b": []}]')
    6
    """
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = without_escapes.count(b'"') // 2
    # Splitting the text at more quotation marks than this would take long
    if num_strings > limit:
        return num_strings
    outside = b"".join(without_escapes.split(b'"')[::2])
    return sum(outside.count(mark) for mark in (b",", b"[", b"{")) + 1


def _refuse_longer(size: int, limit: int, context_tokens: int) -> None:
    if size > limit:
        message = (
            f"the body has {size} bytes or more, but at most {limit} are allowed "
            f"for the {context_tokens} tokens of a sequence (--max-generation-tokens, and the prompt)"
        )
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=size, text=message)


def _charset_of(request: web.Request) -> str:
    return (request.charset or "utf-8").lower()
