"""`Endpoint`: where a remote judge answers, within which `Limits`; `Deadline`; and the errors of asking it.

No error, and no text of one, holds the API key.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.options.fields import is_number
from async_grpo.options.redaction import register_secrets

Answer = TypeVar("Answer")

WINDOW_S = 60.0
CHARACTERS_PER_TOKEN = 4  # an estimate for the limiter, until the reply says what was used


def require_all(*rules: tuple[object, str]) -> None:
    """Raise ConfigurationError with the message of the first rule that does not hold."""
    for holds, message in rules:
        if not holds:
            raise ConfigurationError(message)


def check_field(settings: object, name: str, fits: Callable[[Any], bool], wanted: str) -> None:
    """Raise ConfigurationError, with what is wanted of the field and what it is, if that does not fit."""
    value = getattr(settings, name)
    require_all((fits(value), f"{name} must {wanted}: {value}"))


class JudgeError(AsyncGrpoError, RuntimeError):
    """A remote judge gave no usable answer. `spent`: what the call has cost by then (`judge_tokens`, `judge_cost`)."""

    spent: dict[str, float] = {}  # noqa: RUF012 - replaced, never changed


class JudgeTimeout(JudgeError, TimeoutError):
    """The deadline passed before an answer came, in the queue for a permit or on the wire."""


class JudgeUnavailable(JudgeError):
    """Attempts are used up, or every replica is out of order until after the deadline; later may work."""


class BadReply(JudgeError, ValueError):
    """The judge answered, but not with a JSON object of bearable size; twice."""


class JudgeRefused(JudgeError):
    """The judge will not take this request (4xx, redirect), however often it is sent."""


@dataclass(frozen=True)
class Limits:
    """What one key allows; None is no limit.

    Args:
        concurrency: permits out at the same time.
        requests_per_minute, tokens_per_minute: spread evenly over the minute.
        burst_s: after a lull (or a late timer) so many seconds' worth may start at once, and at least one call.
        slack_s: how much later than its permit a call may start; rates are 60 / (60 + slack_s) of the limit for it.

    Raises ConfigurationError for a limit that would let nothing through, or is no number.
    """

    concurrency: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    burst_s: float = 0.05
    slack_s: float = 0.5

    def __post_init__(self) -> None:
        whole = "be 1 or more, or None for no limit"
        check_field(self, "concurrency", lambda n: n is None or n == int(n) >= 1, whole)
        for name in ("requests_per_minute", "tokens_per_minute"):
            check_field(self, name, lambda n: n is None or 0 < n < math.inf, "be above 0 and finite, or None")
        for name in ("burst_s", "slack_s"):
            check_field(self, name, lambda s: 0 <= s < WINDOW_S, f"lie in [0, {WINDOW_S:g}) seconds")

    def over(self, others: "Limits") -> "Limits":
        """These, and the others where these say nothing.

        >>> Limits(concurrency=8).over(Limits(concurrency=2, requests_per_minute=60)).requests_per_minute
        60
        """
        return replace(others, **{n: value for n, value in vars(self).items() if value != getattr(Limits, n)})


class Deadline:
    """In so many seconds, put off by waits in a queue, `queue_s` at most; the requests of a call share it.

    `latest` is a moment of `time.monotonic`.
    """

    def __init__(self, timeout_s: float, queue_s: float = math.inf) -> None:
        self._at = time.monotonic() + timeout_s
        self.latest = self._at + queue_s
        self._waiting, self._since, self._queue_s = 0, 0.0, 0.0

    @property
    def queue_s(self) -> float:
        """Seconds that it was put off so far."""
        return self._queue_s + (time.monotonic() - self._since if self._waiting else 0.0)

    @property
    def at(self) -> float:
        """The moment, as it stands now."""
        return min(self._at + self.queue_s, self.latest)

    @property
    def left_s(self) -> float:
        return self.at - time.monotonic()

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """What is inside is a wait in a queue."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._queue_s += time.monotonic() - self._since


@dataclass(frozen=True)
class Endpoint:
    """Settings of one remote judge. They hold the name of the key's variable, never the key.

    Args:
        urls: of equal replicas, http or https, up to where `EndpointClient.post`'s path begins.
        limits: on all replicas together, over all callers that share the traffic control.
        api_key_env: environment variable with the key that is sent as `Authorization: Bearer`.
        attempts: requests per call at most, hedges not counted; BadReply is retried once.
        timeout_s: for one request, from its permit to the end of the reply.
        max_body_bytes: of a reply, decompressed.
        hedge_quantile: a request that takes longer than this share of all gets a rival on another replica; None: never.
        breaker_failures, breaker_reset_s: so many failures in a row take a replica out of service for so long.
        backoff_s, backoff_max_s: before the second attempt, doubling up to the maximum; the real pause is drawn
            evenly from 0 to that.

    Raises ConfigurationError for an address that is none or holds a password, or a setting that cannot work.
    """

    urls: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    api_key_env: str | None = None
    attempts: int = 5
    timeout_s: float = 60.0
    max_body_bytes: int = 4 * 2**20
    hedge_quantile: float | None = None
    breaker_failures: int = 5
    breaker_reset_s: float = 2.0  # longer, and a server that is back within a time-out is asked too late
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0

    def __post_init__(self) -> None:
        several = bool(self.urls) and not isinstance(self.urls, str) and len(set(self.urls)) == len(self.urls)
        require_all((several, f"urls must be a tuple of different addresses, at least one: {self.urls!r}"))
        for url in self.urls:
            check_url(url)
        object.__setattr__(self, "urls", tuple(url.rstrip("/") for url in self.urls))
        for name in ("attempts", "max_body_bytes", "breaker_failures"):
            check_field(self, name, lambda n: n == int(n) >= 1, "be 1 or more")
        for name in ("timeout_s", "breaker_reset_s", "backoff_s", "backoff_max_s"):
            check_field(self, name, lambda s: 0 < s < math.inf, "be above 0 and finite")
        check_field(self, "hedge_quantile", lambda q: q is None or 0 < q < 1, "lie between 0 and 1")

    def api_key(self) -> str | None:
        """The key, from the environment. Raises ConfigurationError if it is missing, or fits no header."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        wanted = f"must hold the key of {', '.join(self.urls)}, in plain characters"
        fine = key and key.isascii() and key.isprintable()
        require_all((fine, f"the variable {self.api_key_env} {wanted}"))
        register_secrets([key])  # its variable may have any name
        return key


def check_url(url: str) -> None:
    """Raise ConfigurationError for what is no plain http(s) address."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"a judge's address cannot be read: {error}") from None
    secret = parts.username is not None or parts.password is not None
    plain = url.isascii() and url.isprintable() and " " not in url
    none = f"{f'that at {parts.hostname}' if secret else repr(url)} is no judge's address: "
    require_all(
        (not secret, none + "it holds a user or password: use api_key_env"),
        (parts.scheme in ("http", "https"), none + "it must begin with http:// or https://"),
        (parts.hostname and port != 0 and plain, none + "it needs a host, in plain characters"),
        (not parts.query and not parts.fragment, none + "what follows ? or # belongs into `path`"),
    )


async def call_beside(function: Callable[[], Answer], size: int, large: int) -> Answer:
    """Return what the function returns; from the size `large` on it runs in a thread, and the event loop goes on."""
    import asyncio  # here, because registry files import this module and must stay cheap

    return function() if size < large else await asyncio.to_thread(function)


def said_tokens(reply: Mapping[str, Any], name: str) -> float | None:
    """Of a reply's `usage`; None if it says nothing sensible."""
    usage = reply.get("usage")
    value: Any = usage.get(name) if isinstance(usage, dict) else None
    return float(value) if is_number(value) and value >= 0 else None
