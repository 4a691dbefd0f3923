"""`Exchange`: one HTTP request and its reply, where every way to fail is a `RequestFailed` with the name of its kind."""

import asyncio
import contextlib
import http.cookiejar
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from async_grpo.rewards.http.deadline import Deadline
from async_grpo.rewards.http.endpoint import BadReply, JudgeUnavailable
from async_grpo.rewards.http.responses import excerpt, json_object, read_body
from async_grpo.rewards.http.retry import outcome_of, retry_after_s

OUTCOMES = ("ok", "429", "5xx", "timeout", "connection", "bad_reply", "refused", "cancelled")
ERROR_BODY_BYTES, ERROR_BODY_S = 2**16, 1.0
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Encoding": "gzip",
    "User-Agent": "async-grpo",
}


UsedTokens = Callable[[dict[str, Any]], float]

log = logging.getLogger(__name__)
for chatty in ("httpx", "httpcore"):  # a line per request, and at DEBUG the headers of every reply
    if logging.getLogger(chatty).level == logging.NOTSET:
        logging.getLogger(chatty).setLevel(logging.WARNING)


@dataclass
class Call:
    """What is to be answered by the deadline, in one request or several."""

    path: str
    content: bytes
    tokens: float
    lane: str
    deadline: Deadline
    used_tokens: UsedTokens | None = None
    unanswered: Callable[[], None] | None = (
        None  # told of each request that was sent, and what it took is unknown
    )
    tried: set[str] = field(default_factory=set)  # addresses that it was sent to

    @property
    def remaining_s(self) -> float:
        return self.deadline.left_s

    def used(self, reply: dict[str, Any]) -> float | None:
        """The tokens that the reply says it took; None (the estimate stands) if it says nothing sensible."""
        if self.used_tokens is None:
            return None
        try:
            used = float(self.used_tokens(reply))
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            log.debug("a reply without a count of its tokens: %r", error)
            return None
        return used if 0 <= used < math.inf else None


class RequestFailed(Exception):
    """One request came to nothing; `outcome` says how, `pause_s` for how long the server wants to be left alone."""

    def __init__(self, outcome: str, message: str, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.outcome, self.pause_s = outcome, pause_s


class Exchange:
    """A pool of connections. Follows no redirect, keeps no cookie, and has no limit on connections: permits are one.

    Args:
        key: sent as `Authorization: Bearer`; in every message, also of a server that repeats it, it reads ***.
        max_body_bytes: of a reply, decompressed.
    """

    def __init__(self, key: str | None, max_body_bytes: int) -> None:
        self._key, self._max_body_bytes = key, max_body_bytes
        self._http = httpx.AsyncClient(
            headers={**HEADERS, "Authorization": f"Bearer {key}"} if key else HEADERS,
            cookies=http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=[])),
            follow_redirects=False,
            timeout=None,  # each request has a deadline as a whole: one per read would let a slow loris live
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def post(self, url: str, content: bytes, allowed_s: float) -> dict[str, Any]:
        """The JSON object of a reply with status 200.

        Raises:
            RequestFailed: anything else came, or nothing within `allowed_s`.
            JudgeUnavailable: `close` was called.
        """
        shown, connected = url.partition("?")[0], False
        try:
            async with (
                asyncio.timeout(allowed_s),
                self._http.stream("POST", url, content=content) as response,
            ):
                connected = True
                if response.status_code != 200:
                    raise await self._failure_of(response, shown)
                body = await _body_of(response, self._max_body_bytes)
            return self._json_object(body)
        except TimeoutError:
            raise self._failed("timeout", f"{shown} did not answer within {allowed_s:.3g} s") from None
        except BadReply as error:
            raise self._failed("bad_reply", f"{shown}: {error}") from None
        except httpx.RemoteProtocolError as error:  # before the status it is any lost connection
            outcome = "bad_reply" if connected else "connection"
            raise self._failed(outcome, f"{shown}: the reply breaks off: {error}") from None
        except (httpx.HTTPError, OSError) as error:
            raise self._failed("connection", f"{shown}: {type(error).__name__}: {error}") from None
        except RuntimeError:
            if not self._http.is_closed:
                raise
            raise JudgeUnavailable(f"{shown}: the client was closed") from None

    async def close(self) -> None:
        await self._http.aclose()

    async def _failure_of(self, response: httpx.Response, shown: str) -> RequestFailed:
        """What a status other than 200 means, with the beginning of what the server says about it."""
        status, outcome = response.status_code, outcome_of(response.status_code)
        if 300 <= status < 400:
            target = _host(response.headers.get("location", ""))
            return self._failed(
                outcome, f"{shown} redirects to {target} (status {status}), which is not followed"
            )
        pause_s = retry_after_s(response.headers.get("retry-after")) if outcome in ("429", "5xx") else 0.0
        said = b""
        with contextlib.suppress(TimeoutError, BadReply, httpx.HTTPError):
            async with asyncio.timeout(ERROR_BODY_S):
                said = await _body_of(response, ERROR_BODY_BYTES)
        return self._failed(
            outcome, f"{shown} replied with status {status}: {excerpt(self._censored(said))}", pause_s
        )

    def _json_object(self, body: bytes) -> dict[str, Any]:
        try:
            return json_object(body)
        except BadReply as error:
            raise BadReply(f"{error}: {excerpt(self._censored(body))}") from None

    def _failed(self, outcome: str, message: str, pause_s: float = 0.0) -> RequestFailed:
        return RequestFailed(outcome, message.replace(self._key, "***") if self._key else message, pause_s)

    def _censored(self, text: bytes) -> bytes:
        """Before an excerpt is cut out of it, which could leave half of the key."""
        return text.replace(self._key.encode(), b"***") if self._key else text


async def _body_of(response: httpx.Response, max_bytes: int) -> bytes:
    return await read_body(response.aiter_raw(), response.headers.get("content-encoding", ""), max_bytes)


def _host(location: str) -> str:
    """The host that a `Location` header names: the rest may hold what is not for a log."""
    try:
        return excerpt((urlsplit(location).hostname or "another path of itself").encode())
    except ValueError:
        return "an impossible address"
