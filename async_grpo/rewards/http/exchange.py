"""`Exchange`: one HTTP request and its reply; every way to fail is a `RequestFailed` of some kind.

The library is aiohttp: it knows when a connection holds data that nothing asked for (`should_close`).
With httpx 0.28 the next sample would get the reply to another one.
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
ERROR_BODY_BYTES, ERROR_BODY_S = 2**16, 1.0
EXCERPT_CHARACTERS = 200
LARGE_BODY_BYTES = 2**16  # from which on a reply is parsed in a thread
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Encoding": "gzip",
    "User-Agent": "async-grpo",
}


class RequestFailed(Exception):
    """One request came to nothing, by one of OUTCOMES.

    Args:
        pause_s: for how long the server wants to be left alone.
        worked: whether the server may have done the work all the same, and used tokens.
    """

    def __init__(self, outcome: str, message: str, pause_s: float = 0.0, worked: bool = True) -> None:
        super().__init__(message)
        self.outcome, self.pause_s, self.worked = outcome, pause_s, worked


class Exchange:
    """A pool of connections, for one event loop. Follows no redirect, keeps no cookie, limits no connections.
    In every message, also of a server that repeats it, the key reads ***."""

    def __init__(self, key: str | None, max_body_bytes: int) -> None:
        self._key, self._max_body_bytes = key, max_body_bytes
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0),
            headers={**HEADERS, "Authorization": f"Bearer {key}"} if key else HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # `post` has one for all of it
        )
        self.close = self._session.close  # requests in flight fail

    async def post(self, url: str, content: bytes, allowed_s: float) -> dict[str, Any]:
        """The JSON object of a reply with status 200.

        Raises RequestFailed if anything else came, or nothing within `allowed_s`; JudgeUnavailable after `close`.
        """
        shown, began, body = url.partition("?")[0], False, b""
        if self._session.closed:
            raise JudgeUnavailable(f"{shown}: the client was closed")
        request = self._session.post(url, data=content, allow_redirects=False, proxy=_proxy_for(url))
        try:
            async with asyncio.timeout(allowed_s), request as response:
                began = True
                if response.status != 200:
                    raise await self._failure_of(response, shown)
                body = await self._body_of(response, self._max_body_bytes)
                return await call_beside(partial(json_object, body), len(body), LARGE_BODY_BYTES)
        except TimeoutError:
            raise RequestFailed("timeout", f"{shown} did not answer within {allowed_s:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            what = "the reply breaks off: " if began else ""
            # aiohttp does not say what the operating system calls it ("connection refused")
            number = getattr(error, "errno", None) or 0
            name = f"{os.strerror(number).lower()}: " if number > 0 else ""
            text = self._excerpt(f"{name}{type(error).__name__}: {error}".encode())
            # A ClientResponseError: something was replied
            worked = began or isinstance(error, aiohttp.ClientResponseError)
            raise RequestFailed("connection", f"{shown}: {what}{text}", worked=worked) from None
        except ValueError as error:
            said = f": {self._excerpt(body)}" if body else ""
            raise RequestFailed("bad_reply", f"{shown}: {error}{said}") from None

    async def _failure_of(self, response: aiohttp.ClientResponse, shown: str) -> RequestFailed:
        """What a status other than 200 means, with the beginning of what the server says about it."""
        status, said = response.status, b""
        other = "5xx" if status >= 500 else "bad_reply" if status < 300 else "refused"
        outcome = OUTCOME_OF_STATUS.get(status, other)
        with contextlib.suppress(TimeoutError, ValueError, aiohttp.ClientError):
            async with asyncio.timeout(ERROR_BODY_S):
                said = await self._body_of(response, ERROR_BODY_BYTES)
        if 300 <= status < 400:  # to where may hold what is not for a log, also in the body
            said = b"a redirect, which is not followed"
        message = f"{shown} replied with status {status}: {self._excerpt(said)}"
        pause_s = retry_after_s(response.headers.get("retry-after")) if outcome in ("429", "5xx") else 0.0
        return RequestFailed(outcome, message, pause_s, worked=outcome not in ("429", "refused"))

    async def _body_of(self, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        """The body, a chunk at a time; raises ValueError if it is larger, or in an unknown encoding."""
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", "deflate"):
            raise ValueError("the reply is encoded in a way that was not asked for")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk[: max_bytes + 1 - len(body)]
            if len(body) > max_bytes:
                raise ValueError(f"the reply is larger than {max_bytes} bytes")
        return bytes(body)

    def _excerpt(self, said: bytes) -> str:
        """The beginning, fit for a message. The key goes first: a cut could leave half of it."""
        said = said.replace(self._key.encode(), b"***") if self._key else said
        text = said[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace")
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + " ..."


class _Connector(aiohttp.TCPConnector):
    """Uses no connection again on which something came after the reply, at any later time."""

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        while True:
            connection = await super().connect(*arguments, **options)
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()


def retry_after_s(value: str | None, now: float | None = None) -> float:
    """Seconds that a `Retry-After` header asks for (RFC 9110, 10.2.3), by number or date; or 0.

    >>> retry_after_s("120"), retry_after_s("Thu, 01 Jan 1970 00:01:40 GMT", now=70.0), retry_after_s("soon")
    (120.0, 30.0, 0.0)
    """
    value, now = value or "", time.time() if now is None else now
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now
        except (ValueError, TypeError, OverflowError, IndexError):  # a server may send anything
            seconds = 0.0
    return (
        seconds if 0 < seconds < math.inf else 0.0
    )  # a NaN or 1e400 says nothing, and must not close the judge to all


def _proxy_for(url: str) -> str | None:
    """The environment's proxy for the address; aiohttp would read .netrc, too."""
    parts = urlsplit(url)
    bypassed = urllib.request.proxy_bypass(parts.netloc)
    return None if bypassed else urllib.request.getproxies().get(parts.scheme)


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, every number finite and every name in an object once.

    Raises ValueError if it holds something else, or is no UTF-8.
    """
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=finite, parse_float=finite, object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:  # also: 5000 digits, 100000 brackets
        raise ValueError(f"the reply is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the reply is no JSON object but a {type(value).__name__}")
    return value
