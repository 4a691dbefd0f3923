"""`Exchange`: one HTTP request and its reply, where every way to fail is a `RequestFailed` with the name of its kind.

The library is aiohttp: it knows when a connection holds data that no request asked for (`should_close`), which httpx
0.28 does not tell, so that such a connection would give the next sample the reply to another one. What aiohttp leaves
to its callers stands here: a bound on the decompressed size, strict JSON, and a key that no message shows.
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
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp

from async_grpo.rewards.http.endpoint import BadReply, JudgeUnavailable

OUTCOMES = ("ok", "429", "5xx", "timeout", "connection", "bad_reply", "refused", "cancelled")
COME_LATER = (425, 429)  # 425 Too Early (RFC 8470), 429 Too Many Requests (RFC 6585)
ERROR_BODY_BYTES, ERROR_BODY_S = 2**16, 1.0
EXCERPT_CHARACTERS = 200
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Encoding": "gzip",
    "User-Agent": "async-grpo",
}


class RequestFailed(Exception):
    """One request came to nothing.

    Args:
        outcome: how, one of OUTCOMES.
        pause_s: for how long the server wants to be left alone.
        worked: whether the server may have done the work all the same, and used tokens.
    """

    def __init__(self, outcome: str, message: str, pause_s: float = 0.0, worked: bool = False) -> None:
        super().__init__(message)
        self.outcome, self.pause_s, self.worked = outcome, pause_s, worked


class Exchange:
    """A pool of connections. Follows no redirect, keeps no cookie, and has no limit on connections: permits are one.

    Args:
        key: sent as `Authorization: Bearer`; in every message, also of a server that repeats it, it reads ***.
        max_body_bytes: of a reply, decompressed.
    """

    def __init__(self, key: str | None, max_body_bytes: int) -> None:
        self._key, self._max_body_bytes = key, max_body_bytes
        self._session: aiohttp.ClientSession | None = None  # it can only be made in an event loop
        self._closed = False

    async def post(self, url: str, content: bytes, allowed_s: float) -> dict[str, Any]:
        """The JSON object of a reply with status 200.

        Raises:
            RequestFailed: anything else came, or nothing within `allowed_s`.
            JudgeUnavailable: `close` was called.
        """
        shown, began = url.partition("?")[0], False
        if self._closed:
            raise JudgeUnavailable(f"{shown}: the client was closed")
        try:
            async with (
                asyncio.timeout(allowed_s),
                self._connections().post(
                    url, data=content, allow_redirects=False, proxy=_proxy_for(url)
                ) as response,
            ):
                began = True
                if response.status != 200:
                    raise await self._failure_of(response, shown)
                body = await _body_of(response, self._max_body_bytes)
            return self._json_object(body)
        except TimeoutError:
            message = f"{shown} did not answer within {allowed_s:.3g} s"
            raise self._failed("timeout", message, worked=True) from None
        except BadReply as error:
            raise self._failed("bad_reply", f"{shown}: {error}", worked=True) from None
        except (aiohttp.ClientError, OSError) as error:
            what = "the reply breaks off: " if began else ""
            worked = began or isinstance(
                error, aiohttp.ClientResponseError
            )  # the latter: something was replied
            raise self._failed("connection", f"{shown}: {what}{_cause(error)}", worked=worked) from None

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_Connector(limit=0),
                headers={**HEADERS, "Authorization": f"Bearer {self._key}"} if self._key else HEADERS,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=None
                ),  # one per read lets a slow loris live
            )
        return self._session

    async def _failure_of(self, response: aiohttp.ClientResponse, shown: str) -> RequestFailed:
        """What a status other than 200 means, with the beginning of what the server says about it."""
        status, outcome = response.status, outcome_of(response.status)
        if 300 <= status < 400:
            target = _host(response.headers.get("location", ""))
            return self._failed(
                outcome, f"{shown} redirects to {target} (status {status}), which is not followed"
            )
        pause_s = retry_after_s(response.headers.get("retry-after")) if outcome in ("429", "5xx") else 0.0
        said = b""
        with contextlib.suppress(TimeoutError, BadReply, aiohttp.ClientError):
            async with asyncio.timeout(ERROR_BODY_S):
                said = await _body_of(response, ERROR_BODY_BYTES)
        message = f"{shown} replied with status {status}: {excerpt(self._censored(said))}"
        return self._failed(outcome, message, pause_s, worked=outcome not in ("429", "refused"))

    def _json_object(self, body: bytes) -> dict[str, Any]:
        try:
            return json_object(body)
        except BadReply as error:
            raise BadReply(f"{error}: {excerpt(self._censored(body))}") from None

    def _failed(
        self, outcome: str, message: str, pause_s: float = 0.0, worked: bool = False
    ) -> RequestFailed:
        message = message.replace(self._key, "***") if self._key else message
        return RequestFailed(outcome, message, pause_s, worked)

    def _censored(self, text: bytes) -> bytes:
        """Before an excerpt is cut out of it, which could leave half of the key."""
        return text.replace(self._key.encode(), b"***") if self._key else text


class _Connector(aiohttp.TCPConnector):
    """Never uses a connection again on which something came after the reply: aiohttp looks only when it is put back."""

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        while True:
            connection = await super().connect(*arguments, **options)
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()


def outcome_of(status: int) -> str:
    """The kind of reply: `ok`, `429`, `5xx`, `timeout` (all three worth a retry), `bad_reply` or `refused`.

    >>> [outcome_of(status) for status in (200, 429, 425, 503, 408, 204, 302, 404)]
    ['ok', '429', '429', '5xx', 'timeout', 'bad_reply', 'refused', 'refused']
    """
    if status == 200:
        return "ok"
    if status in COME_LATER:
        return "429"
    if status >= 500:
        return "5xx"
    if status == 408:
        return "timeout"
    return "bad_reply" if status < 300 else "refused"


def retry_after_s(value: str | None, now: float | None = None) -> float:
    """Seconds that a `Retry-After` header asks for (RFC 9110, 10.2.3): a number or a date; 0 if it says nothing.

    Args:
        value: the header, None if there was none.
        now: Unix time; of this moment if None.

    >>> retry_after_s("120"), retry_after_s("Thu, 01 Jan 1970 00:01:40 GMT", now=70.0), retry_after_s("soon")
    (120.0, 30.0, 0.0)
    """
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        seconds = _seconds_until(value, time.time() if now is None else now)
    return max(seconds, 0.0) if not math.isnan(seconds) else 0.0


def _seconds_until(date: str, now: float) -> float:
    try:
        moment = parsedate_to_datetime(date)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return moment.timestamp() - now
    except (ValueError, TypeError, OverflowError, IndexError):  # a server may send anything
        return 0.0


async def _body_of(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The decompressed body; aiohttp decompresses a chunk at a time, so that no more than this and one chunk is held."""
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", "gzip", "deflate"):
        raise BadReply(f"the reply is encoded as {encoding[:40]!r}, which was not asked for")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk[: max_bytes + 1 - len(body)]
        if len(body) > max_bytes:
            raise BadReply(f"the reply is larger than {max_bytes} bytes")
    return bytes(body)


def _cause(error: Exception) -> str:
    """The error in words, with what the operating system calls it ("connection refused"): aiohttp leaves that out."""
    number, text = getattr(error, "errno", None), excerpt(f"{type(error).__name__}: {error}".encode())
    name = os.strerror(number).lower() if number is not None and number > 0 else ""
    return text if not name or name in text.lower() else f"{name} ({text})"


def _proxy_for(url: str) -> str | None:
    """The environment's proxy for the address; aiohttp would read it in a thread for each request, and .netrc with it."""
    parts = urlsplit(url)
    return (
        None if urllib.request.proxy_bypass(parts.netloc) else urllib.request.getproxies().get(parts.scheme)
    )


def _host(location: str) -> str:
    """The host that a `Location` header names: the rest may hold what is not for a log."""
    try:
        return excerpt((urlsplit(location).hostname or "another path of itself").encode())
    except ValueError:
        return "an impossible address"


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


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is not finite")
    return number
