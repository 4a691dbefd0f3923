"""`Endpoint`: the addresses and `Limits` of a remote judge; `Deadline`; and the errors of calling a judge.

No error contains the API key.
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

WINDOW_S = 60.0  # time to which the limits per minute apply
CHARACTERS_PER_TOKEN = 4  # an estimate for the rate limiter, until the reply reports the tokens used


def require_all(*rules: tuple[object, str]) -> None:
    """Raise ConfigurationError with the message of the first rule that does not hold."""
    for is_kept, message in rules:
        if not is_kept:
            raise ConfigurationError(message)


def check_field(settings: object, name: str, fits: Callable[[Any], bool], requirement: str) -> None:
    """Raise ConfigurationError if the field's value does not fit; `requirement` completes "NAME must ..."."""
    value = getattr(settings, name)
    require_all((fits(value), f"{name} must {requirement}: {value}"))


class JudgeError(AsyncGrpoError, RuntimeError):
    """A remote judge gave no usable answer. `spent` holds the cost of the call (`judge_tokens`, `judge_cost`)."""

    spent: dict[str, float] = {}  # noqa: RUF012 - replaced, never changed


class JudgeTimeout(JudgeError, TimeoutError):
    """The deadline passed before an answer came, while the call waited for a permit or for the server."""


class JudgeUnavailable(JudgeError):
    """All attempts failed, or every replica is out of service until after the deadline. A later call may work."""


class BadReply(JudgeError, ValueError):
    """The judge answered twice with something else than a JSON object of acceptable size."""


class JudgeRefused(JudgeError):
    """The judge refuses this request (4xx, redirect); another attempt would not help."""


@dataclass(frozen=True)
class Limits:
    """Limits of the calls of one key; None means no limit.

    Args:
        concurrency: Number of permits that may be out at the same time.
        requests_per_minute: Number of calls that may start per minute, spread evenly over the minute.
        tokens_per_minute: Number of tokens of the calls that may start per minute, spread evenly.
        burst_s: After a lull or a late timer, calls worth this many seconds may start at once, and at least one call.
        slack_s: Delay from a permit to the start of its call that the limits allow for. The rates are 60 / (60 + slack_s)
            of the limits.

    Raises:
        ConfigurationError: A limit is no number, or would let nothing through.
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
        """Return these limits, with the other ones where these have their default.

        >>> Limits(concurrency=8).over(Limits(concurrency=2, requests_per_minute=60)).requests_per_minute
        60
        """
        changed = {name: value for name, value in vars(self).items() if value != getattr(Limits, name)}
        return replace(defaults, **changed)


class Deadline:
    """The deadline of a call, shared by its requests. Waits in queues put it off. Moments are those of `time.monotonic`.

    Args:
        timeout_s: Seconds until the deadline, without waits.
        queue_s: Most seconds by which waits put it off.
    """

    def __init__(self, timeout_s: float, queue_s: float = math.inf) -> None:
        self._at = time.monotonic() + timeout_s  # without waits
        self.latest = self._at + queue_s
        self._num_waits = 0  # waits going on, which may overlap
        self._waits_since = 0.0
        self._past_waits_s = 0.0

    @property
    def queue_s(self) -> float:
        """Return the seconds by which the deadline was put off so far."""
        current_wait_s = time.monotonic() - self._waits_since if self._num_waits else 0.0
        return self._past_waits_s + current_wait_s

    @property
    def at(self) -> float:
        """Return the moment of the deadline as it stands now."""
        return min(self._at + self.queue_s, self.latest)

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return self.at - time.monotonic()

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Put the deadline off by the time that the block takes."""
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
    """Settings of one remote judge. They hold the name of the API key's variable, never the key.

    Args:
        urls: Addresses of equal replicas, http or https, to which `EndpointClient.post` appends its path.
        limits: Limits of all replicas together, and of all callers that share the rate limiter.
        api_key_env: Environment variable with the key, which is sent as `Authorization: Bearer`.
        attempts: Most requests per call, without hedges; a BadReply is retried once.
        timeout_s: Time limit of one request, from its permit to the end of the reply.
        max_body_bytes: Size limit of a reply, decompressed.
        hedge_quantile: Send a second request to another replica when the first one takes longer than this quantile of the
            latencies; None: never.
        breaker_failures: Number of failures in a row that take a replica out of service.
        breaker_reset_s: Longest time between two probes of a replica that is out of service.
        backoff_s: Upper bound of the pause before the second attempt. It doubles with each attempt; the pause is drawn
            uniformly from 0 to the bound.
        backoff_max_s: Largest upper bound of a pause.

    Raises:
        ConfigurationError: An address is none or contains a password, or a setting cannot work.
    """

    urls: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    api_key_env: str | None = None
    attempts: int = 5
    timeout_s: float = 60.0
    max_body_bytes: int = 4 * 2**20
    hedge_quantile: float | None = None
    breaker_failures: int = 5
    breaker_reset_s: float = 2.0  # a longer time would miss a server that recovers within a call's time-out
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
        """Return the key from the environment; None if the judge needs none.

        Raises:
            ConfigurationError: The variable is missing, or its value does not fit into a header.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        fits_header = key != "" and key.isascii() and key.isprintable()
        if not fits_header:
            raise ConfigurationError(
                f"the variable {self.api_key_env} must hold the key of {', '.join(self.urls)}, in plain characters"
            )
        # The key must be registered by value, because its variable may have any name
        register_secrets([key])
        return key


def check_url(url: str) -> None:
    """Raise ConfigurationError for anything but a plain http(s) address."""
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
        (parts.hostname and port != 0 and is_plain, refusal + "it needs a host, in plain characters"),
        (not parts.query and not parts.fragment, refusal + "what follows ? or # belongs into `path`"),
    )


async def call_beside(function: Callable[[], Answer], size: int, large: int) -> Answer:
    """Return the function's result. From the size `large` on, it runs in a thread, so that the event loop goes on."""
    import asyncio  # not at the top, because registry files import this module and must start fast

    return function() if size < large else await asyncio.to_thread(function)


def said_tokens(reply: Mapping[str, Any], name: str) -> float | None:
    """Return a number of tokens from a reply's `usage`; None if it has no usable number of this name."""
    usage = reply.get("usage")
    value: Any = usage.get(name) if isinstance(usage, dict) else None
    return float(value) if is_number(value) and value >= 0 else None
