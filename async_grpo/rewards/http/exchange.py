"""`Exchange` sends one HTTP request and returns its reply. If this fails, it raises `RequestFailed`.

It uses aiohttp, which notices if a connection contains data that belongs to no request (`should_close`). httpx 0.28
would take such data as the reply to the next request, so that a sample would get another sample's reply.
"""

import asyncio
import contextlib
import json
import math
import os
import time
import urllib.request
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from async_grpo.rewards.adapter.result import finite, unique_names
from async_grpo.rewards.http.endpoint import JudgeUnavailable, call_beside

OUTCOMES = ("ok", "429", "5xx", "timeout", "connection", "bad_reply", "refused", "cancelled")
OUTCOME_OF_STATUS = {408: "timeout", 425: "429", 429: "429"}  # 425: Too Early (RFC 8470)
ERROR_BODY_BYTES = 2**16  # size limit for the body of an error reply
ERROR_BODY_S = 1.0  # time limit for reading the body of an error reply, in seconds
EXCERPT_CHARACTERS = 200
MAX_BYTES_PER_CHARACTER = 4  # in UTF-8
LARGE_BODY_BYTES = 2**16  # replies of this size or more are parsed in a thread
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Encoding": "gzip",
    "User-Agent": "async-grpo",
}


class RequestFailed(Exception):
    """One request failed.

    Args:
        outcome: One of OUTCOMES.
        message: Description of the failure.
        pause_s: Length of the pause that the server requested, in seconds.
        worked: Whether the server may nevertheless have done the work and used tokens.
    """

    def __init__(self, outcome: str, message: str, pause_s: float = 0.0, worked: bool = True) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.pause_s = pause_s
        self.worked = worked


class Exchange:
    """An HTTP client with a pool of connections. Use it from one event loop.

    It follows no redirects, keeps no cookies and does not limit the number of connections. Error messages show ***
    instead of the API key, even if a server repeats the key.

    Args:
        key: API key to send with every request.
        max_body_bytes: Size limit of a reply after decompression.
    """

    def __init__(self, key: str | None, max_body_bytes: int) -> None:
        self._key = key
        self._max_body_bytes = max_body_bytes
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0),
            headers={**HEADERS, "Authorization": f"Bearer {key}"} if key else HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            # No time limits here, because `post` limits the total time of a request
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )
        self.close = self._session.close  # closing makes the requests in flight fail

    async def post(self, url: str, content: bytes, allowed_s: float) -> dict[str, Any]:
        """Send a POST request and return the JSON object of its reply.

        Raises:
            RequestFailed: The reply did not arrive within `allowed_s`, has another status than 200, or is not a JSON
                object.
            JudgeUnavailable: The pool is closed.
        """
        address = url.partition("?")[0]  # without the query, which may contain a secret
        if self._session.closed:
            raise JudgeUnavailable(f"{address}: the client was closed")
        has_reply_begun = False
        body = b""
        request = self._session.post(url, data=content, allow_redirects=False, proxy=_proxy_for(url))
        try:
            async with asyncio.timeout(allowed_s), request as response:
                has_reply_begun = True
                if response.status != 200:
                    raise await self._failure_of(response, address)
                body = await self._body_of(response, self._max_body_bytes)
                return await call_beside(partial(json_object, body), len(body), LARGE_BODY_BYTES)
        except TimeoutError:
            raise RequestFailed("timeout", f"{address} did not answer within {allowed_s:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._connection_failure(error, address, has_reply_begun) from None
        except ValueError as error:
            reply_text = f": {self._excerpt(body)}" if body else ""
            raise RequestFailed("bad_reply", f"{address}: {error}{reply_text}") from None

    def _connection_failure(self, error: Exception, address: str, has_reply_begun: bool) -> RequestFailed:
        """Return the error for a connection that could not be made, or that broke."""
        prefix = "the reply breaks off: " if has_reply_begun else ""
        # aiohttp's message lacks the operating system's description of the error, such as "connection refused"
        error_number = getattr(error, "errno", None) or 0
        error_name = f"{os.strerror(error_number).lower()}: " if error_number > 0 else ""
        text = self._excerpt(f"{error_name}{type(error).__name__}: {error}".encode())
        # aiohttp raises ClientResponseError only if the server has sent something
        has_replied = has_reply_begun or isinstance(error, aiohttp.ClientResponseError)
        return RequestFailed("connection", f"{address}: {prefix}{text}", worked=has_replied)

    async def _failure_of(self, response: aiohttp.ClientResponse, address: str) -> RequestFailed:
        """Return the error for a status other than 200, with the beginning of the server's explanation."""
        status = response.status
        outcome = _outcome_of(status)
        explanation = b""
        with contextlib.suppress(TimeoutError, ValueError, aiohttp.ClientError):
            async with asyncio.timeout(ERROR_BODY_S):
                explanation = await self._body_of(response, ERROR_BODY_BYTES)
        if 300 <= status < 400:
            # The body may contain the target of the redirect, which may contain a secret
            explanation = b"a redirect, which is not followed"
        message = f"{address} replied with status {status}: {self._excerpt(explanation)}"
        pause_s = retry_after_s(response.headers.get("retry-after")) if outcome in ("429", "5xx") else 0.0
        return RequestFailed(outcome, message, pause_s, worked=outcome not in ("429", "refused"))

    async def _body_of(self, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        """Read the body chunk by chunk, and return it.

        Raises:
            ValueError: The body is too large or has an unknown encoding.
        """
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", "deflate"):
            raise ValueError("the reply is encoded in a way that was not asked for")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk[: max_bytes + 1 - len(body)]
            if len(body) > max_bytes:
                raise ValueError(f"the reply is larger than {max_bytes} bytes")
        return bytes(body)

    def _excerpt(self, content: bytes) -> str:
        """Return the beginning of a text, without the key, on one line."""
        if self._key:
            # Replace the key before truncating the text, which could leave a part of the key
            content = content.replace(self._key.encode(), b"***")
        text = content[: MAX_BYTES_PER_CHARACTER * EXCERPT_CHARACTERS].decode("utf-8", "replace")
        printable = "".join(character if character.isprintable() else " " for character in text)
        line = " ".join(printable.split())
        return line if len(line) <= EXCERPT_CHARACTERS else line[:EXCERPT_CHARACTERS] + " ..."


def _outcome_of(status: int) -> str:
    """Return the entry of OUTCOMES for a status other than 200."""
    if status in OUTCOME_OF_STATUS:
        return OUTCOME_OF_STATUS[status]
    if status >= 500:
        return "5xx"
    return "bad_reply" if status < 300 else "refused"


class _Connector(aiohttp.TCPConnector):
    """Does not reuse a connection on which more data arrived after the reply."""

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        """Return a connection without unread data. aiohttp calls this method."""
        while True:
            connection = await super().connect(*arguments, **options)
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()


def retry_after_s(value: str | None, now: float | None = None) -> float:
    """Return the seconds that a `Retry-After` header requests. Return 0 if the header cannot be read.

    The header is a number or a date (RFC 9110, 10.2.3).

    >>> retry_after_s("120"), retry_after_s("Thu, 01 Jan 1970 00:01:40 GMT", now=70.0), retry_after_s("soon")
    (120.0, 30.0, 0.0)
    """
    value = value or ""
    try:
        seconds = float(value)
    except ValueError:
        seconds = _seconds_until(value, time.time() if now is None else now)
    # A NaN or 1e400, which is read as infinity, must not stop all calls of the judge
    return seconds if 0 < seconds < math.inf else 0.0


def _seconds_until(date: str, now: float) -> float:
    """Return the seconds from `now` (Unix time) to an HTTP date; 0 if it cannot be read."""
    try:
        moment = parsedate_to_datetime(date)
        if not moment.tzinfo:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp() - now
    except (ValueError, TypeError, OverflowError, IndexError):  # a server may send anything
        return 0.0


def _proxy_for(url: str) -> str | None:
    """Return the proxy for the address from the environment. aiohttp's own look-up would also read .netrc."""
    parts = urlsplit(url)
    bypassed = urllib.request.proxy_bypass(parts.netloc)
    return None if bypassed else urllib.request.getproxies().get(parts.scheme)


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Its numbers must be finite, and the names in each object must be distinct.

    Raises:
        ValueError: The body is something else, or is not UTF-8.
    """
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=finite, parse_float=finite, object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:  # RecursionError for deeply nested brackets
        raise ValueError(f"the reply is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the reply is no JSON object but a {type(value).__name__}")
    return value
