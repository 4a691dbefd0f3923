"""`RemoteJudge`: the settings that all judges share, and how they become an endpoint."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import Endpoint
from async_grpo.rewards.http.limits import Limits

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
