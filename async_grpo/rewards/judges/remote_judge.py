"""`RemoteJudge`: the settings that all judges share, and how they become an endpoint; and what a call has cost."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.result import is_finite_number
from async_grpo.rewards.http.endpoint import Endpoint, JudgeError
from async_grpo.rewards.http.limits import Limits

if TYPE_CHECKING:
    from async_grpo.rewards.http.http_client import EndpointClient

# Set by `async-grpo run --judge-model`, or by the user, and known to every process of a run:
JUDGE_URLS = "JUDGE_URLS"  # addresses of a judge's servers, comma separated
JUDGE_MODEL_ID = "JUDGE_MODEL_ID"  # tells their model from others, for the verdict cache: addresses change
JUDGE_SLEEP_S = "JUDGE_SLEEP_S"  # after which they are to sleep
CHARACTERS_PER_TOKEN = 4  # an estimate for the limiter, until the reply says what was used


@dataclass(frozen=True, kw_only=True)
class RemoteJudge:
    """Where a judge is asked, and how often.

    Args:
        url: the server's base URL, or those of several replicas, between which calls are balanced.
        path: of the request, appended to it; the default is the usual one.
        limits: of concurrency, requests and tokens; they hold for all processes of a run together.
        api_key_env: the *name* of the environment variable with the key; the key itself stands in no file.
        timeout_s: for one request; `attempts` of them are made before the call has failed.
        hedge_quantile: send a second request when the first takes longer than this quantile of the latencies.
        endpoint_options: further settings of `Endpoint`.

    Raises:
        ConfigurationError: the settings cannot work.
    """

    url: str | Sequence[str]
    path: str = ""
    limits: Limits = field(default_factory=Limits)
    api_key_env: str | None = None
    timeout_s: float = 60.0
    attempts: int = 5
    hedge_quantile: float | None = None
    endpoint_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            object.__setattr__(self, "url", tuple(self.url))
        object.__setattr__(self, "path", self.path or self.default_path())
        require(self.path.startswith("/"), f"path={self.path!r} must begin with a slash")
        try:
            self.endpoint()
        except TypeError as error:  # of the dataclass, for a name it does not know
            raise ConfigurationError(f"endpoint_options={dict(self.endpoint_options)}: {error}") from error

    @property
    def urls(self) -> tuple[str, ...]:
        """The base URLs of all replicas."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url)

    def default_path(self) -> str:
        """Where the server expects the judge's requests."""
        raise NotImplementedError

    def endpoint(self) -> Endpoint:
        """Where the judge's requests go, for the client that sends them."""
        return Endpoint(
            urls=self.urls,
            limits=self.limits,
            api_key_env=self.api_key_env,
            timeout_s=self.timeout_s,
            attempts=self.attempts,
            hedge_quantile=self.hedge_quantile,
            **self.endpoint_options,
        )


def judge_urls(default: str = "http://127.0.0.1:8000", variable: str = JUDGE_URLS) -> tuple[str, ...]:
    """The addresses in the environment variable (comma separated), else the default.

    HTTP_SCORER_URLS is another one that reaches every process of a run.

    >>> judge_urls("http://127.0.0.1:9") if JUDGE_URLS not in os.environ else ("http://127.0.0.1:9",)
    ('http://127.0.0.1:9',)
    """
    return tuple(os.environ.get(variable, default).split(","))


def is_run_judge(judge: Any) -> bool:
    """Whether the judge is asked at the servers that this run was told of in the environment."""
    return JUDGE_URLS in os.environ and getattr(judge, "urls", None) == judge_urls()


def require(condition: bool, message: str) -> None:
    """Raise ConfigurationError with the message unless the condition holds."""
    if not condition:
        raise ConfigurationError(message)


@dataclass
class Usage:
    """The tokens of one call, over all its requests, as the server counts them."""

    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    total_tokens: float = 0.0
    known: bool = True

    async def post(
        self,
        client: "EndpointClient",
        path: str,
        body: dict[str, Any],
        tokens: tuple[float, float],
        **asked: Any,
    ) -> dict[str, Any]:
        """`client.post`, and note what it takes; `tokens`: (prompt, completion) at most, also of an unanswered request."""
        prompt, completion = tokens

        def unanswered() -> None:
            self.prompt_tokens += prompt
            self.completion_tokens += completion
            self.total_tokens += prompt + completion

        reply = await client.post(
            path, body, tokens=prompt + completion, used_tokens=total_tokens, unanswered=unanswered, **asked
        )
        total = total_tokens(reply)
        if total is None:
            self.known = False
        else:
            self.total_tokens += total
            self.prompt_tokens += _count(reply["usage"].get("prompt_tokens")) or 0.0
            self.completion_tokens += _count(reply["usage"].get("completion_tokens")) or 0.0
        return reply

    def extras(self, price_per_million_tokens: tuple[float, float] | None) -> dict[str, float]:
        """`judge_tokens` and, with a price for (prompt, completion), `judge_cost`; nothing if a reply left it out."""
        if not self.known:
            return {}
        extras = {"judge_tokens": self.total_tokens}
        if price_per_million_tokens is not None:
            price_in, price_out = price_per_million_tokens
            cost = self.prompt_tokens * price_in + self.completion_tokens * price_out
            extras["judge_cost"] = cost / 1e6
        return extras


def total_tokens(reply: Mapping[str, Any]) -> float | None:
    """`usage.total_tokens` of a reply, None if it is not said.

    >>> total_tokens({"usage": {"total_tokens": 12}}), total_tokens({"usage": None})
    (12.0, None)
    """
    usage = reply.get("usage")
    return _count(usage.get("total_tokens")) if isinstance(usage, dict) else None


def _count(value: Any) -> float | None:
    return float(value) if fits(value) and value >= 0 else None


def with_spending(error: JudgeError, extras: Mapping[str, float]) -> JudgeError:
    """The error with what the call has cost by then as `spent`: a budget must count failed calls, too."""
    error.spent = dict(extras)  # type: ignore[attr-defined]
    return error


def fits(value: Any) -> bool:
    """Whether it is a number of JSON that a float can hold.

    >>> fits(3), fits(True), fits(10**400), fits("3")
    (True, False, False, False)
    """
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and is_finite_number(value)
    except OverflowError:  # JSON's integers have no end
        return False
