"""`Endpoint` (the addresses and `Limits` of a remote judge), `Deadline`, and the errors that a call can raise.

No error message contains the API key.
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

WINDOW_S = 60.0  # length of the time window for limits per minute, in seconds
CHARACTERS_PER_TOKEN = 4  # used to estimate the tokens of a request, until its reply reports the number


def require_all(*rules: tuple[object, str]) -> None:
    """Raise ConfigurationError with the message of the first pair (condition, message) whose condition is false."""
    for is_kept, message in rules:
        if not is_kept:
            raise ConfigurationError(message)


def check_field(settings: object, name: str, fits: Callable[[Any], bool], requirement: str) -> None:
    """Raise ConfigurationError if `fits` is false for the field's value. `requirement` completes "NAME must ..."."""
    value = getattr(settings, name)
    require_all((fits(value), f"{name} must {requirement}: {value}"))


class JudgeError(AsyncGrpoError, RuntimeError):
    """A remote judge gave no usable answer. `spent` contains the cost of the call (`judge_tokens`, `judge_cost`)."""

    spent: dict[str, float] = {}  # noqa: RUF012 - errors replace the dict and never change it


class JudgeTimeout(JudgeError, TimeoutError):
    """The deadline passed while the call waited for a permit or for the server's reply."""


class JudgeUnavailable(JudgeError):
    """All attempts failed, or every replica is out of service until after the deadline. A later call may succeed."""


class BadReply(JudgeError, ValueError):
    """The judge's replies were unusable: not a JSON object, too large, or without a readable score."""


class JudgeRefused(JudgeError):
    """The judge refused the request with a 4xx status or a redirect. Another attempt would fail as well."""


@dataclass(frozen=True)
class Limits:
    """Rate limits for the requests to one judge. None means no limit.

    Args:
        concurrency: Maximum number of requests at the same time.
        requests_per_minute: Maximum number of requests that start per minute, spread evenly over the minute.
        tokens_per_minute: Maximum number of tokens in the requests that start per minute, spread evenly over the
            minute.
        burst_s: After a pause or a late timer, the requests that the rate allows in this many seconds may start at
            once. At least one may start.
        slack_s: Expected maximum delay from a permit to the start of its request. To allow for it, the limiter uses 60
            / (60 + slack_s) of the limits per minute.

    Raises:
        ConfigurationError: A limit is not a number, or would allow no request.
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

    def over(self, defaults: "Limits") -> "Limits":
        """Return these limits, with the values of `defaults` for fields that still have their default value.

        >>> Limits(concurrency=8).over(Limits(concurrency=2, requests_per_minute=60)).requests_per_minute
        60
        """
        changed = {name: value for name, value in vars(self).items() if value != getattr(Limits, name)}
        return replace(defaults, **changed)


class Deadline:
    """The deadline of a call, shared by its requests. Waits in queues extend it. Times are from `time.monotonic`.

    Args:
        timeout_s: Seconds until the deadline, not counting waits in queues.
        queue_s: Maximum number of seconds by which waits extend the deadline.
    """

    def __init__(self, timeout_s: float, queue_s: float = math.inf) -> None:
        self._at = time.monotonic() + timeout_s  # deadline if there are no waits
        self.latest = self._at + queue_s
        self._num_waits = 0  # number of current waits, which may overlap
        self._waits_since = 0.0
        self._past_waits_s = 0.0

    @property
    def queue_s(self) -> float:
        """Return the number of seconds that waits have taken so far."""
        current_wait_s = time.monotonic() - self._waits_since if self._num_waits else 0.0
        return self._past_waits_s + current_wait_s

    @property
    def at(self) -> float:
        """Return the time of the deadline, including the extensions so far."""
        return min(self._at + self.queue_s, self.latest)

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return self.at - time.monotonic()

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Extend the deadline by the time that the `with` block takes."""
        if not self._num_waits:
            self._waits_since = time.monotonic()
        self._num_waits += 1
        try:
            yield
        finally:
            self._num_waits -= 1
            if not self._num_waits:
                self._past_waits_s += time.monotonic() - self._waits_since


@dataclass(frozen=True)
class Endpoint:
    """Connection settings for one remote judge. They contain the name of the API key's variable, never the key.

    Args:
        urls: http or https addresses of equivalent replicas. `EndpointClient.post` appends its path to them.
        limits: Limits for all replicas together. All callers of the same rate limiter share them.
        api_key_env: Environment variable that contains the API key. The key is sent as `Authorization: Bearer`.
        attempts: Maximum number of requests per call, not counting hedges. An unusable reply is retried only once.
        timeout_s: Time limit of one request, from its permit to the end of the reply.
        max_body_bytes: Size limit of a reply after decompression.
        hedge_quantile: Send a second request (a hedge) to another replica if the first one takes longer than this
            quantile of the latencies. None sends no hedges.
        breaker_failures: Number of consecutive failures after which a replica is out of service.
        breaker_reset_s: Maximum time between two probes of a replica that is out of service.
        backoff_s: Upper bound of the pause before the second attempt. The bound doubles with each attempt. The pause is
            drawn uniformly from 0 to the bound.
        backoff_max_s: Maximum of this upper bound.

    Raises:
        ConfigurationError: An address is invalid or contains a password, or a setting is invalid.
    """

    urls: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    api_key_env: str | None = None
    attempts: int = 5
    timeout_s: float = 60.0
    max_body_bytes: int = 4 * 2**20
    hedge_quantile: float | None = None
    breaker_failures: int = 5
    breaker_reset_s: float = 2.0  # short, because the server may recover within a call's time-out
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0

    def __post_init__(self) -> None:
        is_collection = bool(self.urls) and not isinstance(self.urls, str)
        is_distinct = is_collection and len(set(self.urls)) == len(self.urls)
        require_all(
            (is_distinct, f"urls must be a tuple of different addresses, at least one: {self.urls!r}")
        )
        for url in self.urls:
            check_url(url)
        object.__setattr__(self, "urls", tuple(url.rstrip("/") for url in self.urls))
        for name in ("attempts", "max_body_bytes", "breaker_failures"):
            check_field(self, name, lambda n: n == int(n) >= 1, "be 1 or more")
        for name in ("timeout_s", "breaker_reset_s", "backoff_s", "backoff_max_s"):
            check_field(self, name, lambda s: 0 < s < math.inf, "be above 0 and finite")
        check_field(self, "hedge_quantile", lambda q: q is None or 0 < q < 1, "lie between 0 and 1")

    def api_key(self) -> str | None:
        """Return the API key from the environment, or None if `api_key_env` is None.

        Raises:
            ConfigurationError: The variable is missing, or its value is not allowed in an HTTP header.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        fits_header = key != "" and key.isascii() and key.isprintable()
        if not fits_header:
            raise ConfigurationError(
                f"the variable {self.api_key_env} must hold the key of {', '.join(self.urls)}, in printable "
                "ASCII characters"
            )
        # Register the key's value, because its variable may not be recognizable as a secret by name
        register_secrets([key])
        return key


def check_url(url: str) -> None:
    """Raise ConfigurationError unless the address is a plain http or https URL, without user, query and fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"a judge's address cannot be read: {error}") from None
    has_secret = parts.username is not None or parts.password is not None
    is_plain = url.isascii() and url.isprintable() and " " not in url
    address = f"that at {parts.hostname}" if has_secret else repr(url)
    refusal = f"{address} is no judge's address: "
    require_all(
        (not has_secret, refusal + "it holds a user or password: use api_key_env"),
        (parts.scheme in ("http", "https"), refusal + "it must begin with http:// or https://"),
        (
            parts.hostname and port != 0 and is_plain,
            refusal + "it needs a host, and only printable ASCII without spaces",
        ),
        (not parts.query and not parts.fragment, refusal + "what follows ? or # belongs in `path`"),
    )


async def call_beside(function: Callable[[], Answer], size: int, large: int) -> Answer:
    """Return the function's result. Run it in a thread if `size` is at least `large`, so as not to block the loop."""
    import asyncio  # imported here, because registry files import this module and must load fast

    return function() if size < large else await asyncio.to_thread(function)


def said_tokens(reply: Mapping[str, Any], name: str) -> float | None:
    """Return a number of tokens from a reply's `usage`, or None if it contains no valid number of this name."""
    usage = reply.get("usage")
    value: Any = usage.get(name) if isinstance(usage, dict) else None
    return float(value) if is_number(value) and value >= 0 else None
