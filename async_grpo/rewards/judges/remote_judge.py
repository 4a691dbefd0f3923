"""`RemoteJudge`, the base class of all judges: their settings, their endpoint and the cost of a call."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import (
    LIST,
    POSITIVE,
    Section,
    option,
)
from async_grpo.rewards.adapter.registry_source import parse_names
from async_grpo.rewards.http.endpoint import Deadline, Endpoint, JudgeError, Limits, require_all, said_tokens

if TYPE_CHECKING:
    from async_grpo.rewards.http.http_client import EndpointClient

COUNTED = ("prompt_tokens", "completion_tokens", "total_tokens")  # fields of `usage` in a reply
SCORER_URL = "http://127.0.0.1:8080"  # default address of `examples/http_scorer_server.py`
_judge = partial(option, panel="Judge")
# Token counts of one request, in the order of COUNTED. A count that the server does not report is None
Counts = tuple[float | None, ...]
# Sends a request body and returns the reply. The tuple contains the maximum numbers of (prompt, completion) tokens
Send = Callable[[dict[str, Any], tuple[float, float]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class JudgeAddresses(Section):
    """Server addresses for judges whose entry in the registry file has no `url`."""

    judge_urls: str = _judge(
        "",
        "Comma list of URLs of replicas that serve the judges whose registry entry names no URL.",
        form=LIST,
    )
    http_scorer_urls: str = _judge(
        "",
        "Comma list of URLs for http_scorer. The default is where examples/http_scorer_server.py listens.",
        form=LIST,
    )
    judge_model_id: str | None = _judge(
        None,
        "Name by which the verdict cache identifies the model behind --judge-urls. By default the URLs identify it.",
    )
    judge_idle_sleep_s: float | None = _judge(
        None,
        "Seconds without a call after which judge servers release their GPU memory until the next call. By default "
        "they keep it.",
        range=POSITIVE,
    )

    @property
    def model_urls(self) -> tuple[str, ...]:
        """Return the addresses in `judge_urls`, for judges that call a model."""
        return parse_names(self.judge_urls)

    def with_address(self, adapter: Any) -> Any:
        """Return the adapter. If it is a judge without an address, return a copy with the run's address.

        Raises:
            ConfigurationError: The run has no address for the judge.
        """
        if not isinstance(adapter, RemoteJudge) or adapter.url is not None:
            return adapter
        return replace(adapter, url=adapter.run_urls(self))

    def are_asked_by(self, judge: Any) -> bool:
        """Return whether the judge uses the servers of `judge_urls`."""
        return bool(self.model_urls) and getattr(judge, "urls", None) == self.model_urls


@dataclass(frozen=True, kw_only=True)
class RemoteJudge:
    """A judge that runs on a server: its address, and the limits for its requests.

    Args:
        url: The server's base URL, or the URLs of several replicas, which share the calls. None uses the run's servers
            (`--judge-urls` or `--judge-model`).
        path: Path of the requests. "" uses the default path of the judge's class.
        limits: Limits of concurrency, requests and tokens. They apply to all processes of a run together.
        api_key_env: Name of the environment variable that contains the API key. The key itself is not written to files.
        timeout_s: Time limit of one request, in seconds.
        attempts: Maximum number of requests before the call fails.
        hedge_quantile: Send a second request if the first takes longer than this quantile of the latencies.
        endpoint_options: Further arguments of `Endpoint`.

    Raises:
        ConfigurationError: The settings are invalid. All classes of judges raise this error.
    """

    url: str | Sequence[str] | None = None
    path: str = ""
    limits: Limits = field(default_factory=Limits)
    api_key_env: str | None = None
    timeout_s: float = 60.0
    attempts: int = 5
    hedge_quantile: float | None = None
    endpoint_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.url is not None:
            object.__setattr__(self, "url", self.url if isinstance(self.url, str) else tuple(self.url))
            object.__setattr__(self, "path", self.path or self.default_path())
        require_all((self.path[:1] in ("", "/"), f"path={self.path!r} must begin with a slash"))
        try:
            self._endpoint_at((SCORER_URL,) if self.url is None else self.urls)
        except TypeError as error:
            # `endpoint_options` contains a name that is not a field of `Endpoint`
            raise ConfigurationError(f"endpoint_options={dict(self.endpoint_options)}: {error}") from error

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the base URLs of all replicas, or () if the judge uses the run's servers."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())

    def run_urls(self, addresses: JudgeAddresses) -> tuple[str, ...]:
        """Return the run's addresses for this judge. They are used if the judge has no `url`."""
        if not addresses.model_urls:
            ways = "give --judge-urls, or `async-grpo run` --judge-model, or a url in the registry file"
            raise ConfigurationError(f"{type(self).__name__} has no address: {ways}")
        return addresses.model_urls

    def default_path(self) -> str:
        """Return the path of requests that is used if `path` is empty."""
        raise NotImplementedError

    def endpoint(self) -> Endpoint:
        """Return the endpoint of the judge's requests.

        Raises:
            ConfigurationError: The judge has no `url`, and no run has set one (see `JudgeAddresses.with_address`).
        """
        return self._endpoint_at(self.urls or self.run_urls(JudgeAddresses()))

    async def score(
        self, sample: Mapping[str, Any], client: "EndpointClient", *, phase: str, deadline: Deadline | float
    ) -> dict[str, Any]:
        """Return the judge's answer, with the cost of the call as extras (see the package `judges`).

        Raises:
            JudgeError: There is no answer. The error's `spent` contains the cost of the call.
        """
        counts: list[Counts] = []

        async def send(body: dict[str, Any], tokens: tuple[float, float]) -> dict[str, Any]:
            max_total = sum(tokens)
            reply = await client.post(
                self.path,
                body,
                tokens=max_total,
                phase=phase,
                deadline=deadline,
                # An unanswered request may have used the largest number of tokens, so that number is counted
                unanswered=partial(counts.append, (*tokens, max_total)),
            )
            counts.append(tuple(said_tokens(reply, name) for name in COUNTED))
            return reply

        try:
            return await self._score(sample, send) | self._spent(counts)
        except JudgeError as error:
            error.spent = self._spent(counts)
            raise

    async def _score(self, sample: Mapping[str, Any], send: Send) -> dict[str, Any]:
        """Return the answer without the cost. It raises the same errors as `score`."""
        raise NotImplementedError

    def _spent(self, counts: list[Counts]) -> dict[str, float]:
        """Return the cost of the requests as extras of an answer."""
        return {}

    def _endpoint_at(self, urls: tuple[str, ...]) -> Endpoint:
        return Endpoint(
            urls,
            limits=self.limits,
            api_key_env=self.api_key_env,
            timeout_s=self.timeout_s,
            attempts=self.attempts,
            hedge_quantile=self.hedge_quantile,
            **self.endpoint_options,
        )


@dataclass(frozen=True, kw_only=True)
class ModelJudge(RemoteJudge):
    """A judge that calls a model.

    Args:
        model: Name under which the server serves the model.
        extra_body: Further fields for the body of each request.
        price_per_million_tokens: Price of a million tokens, or a pair of prices for (prompt, completion) tokens, in any
            currency.
    """

    model: str
    extra_body: Mapping[str, Any] = field(default_factory=dict, hash=False)
    price_per_million_tokens: tuple[float, float] | float | None = None

    def _check_model(self, *reserved_fields: str) -> None:
        """Check the settings of the model.

        Args:
            reserved_fields: Fields of a request that `extra_body` must not contain.

        Raises:
            ConfigurationError: The settings are invalid.
        """
        reserved = {"model", "messages", *reserved_fields}
        conflicts = ", ".join(sorted(reserved & set(self.extra_body)))
        prices = self._prices
        are_prices_valid = len(prices) == 2 and all(0 <= price < math.inf for price in prices)
        require_all(
            (self.model, "model is empty: it must be the name under which the server serves the model"),
            (not conflicts, f"extra_body must not hold {conflicts}: the judge's other settings set them"),
            (
                are_prices_valid,
                f"price_per_million_tokens={self.price_per_million_tokens} must be 0 or more, and finite",
            ),
        )

    @property
    def _prices(self) -> tuple[float, float]:
        price = self.price_per_million_tokens or 0.0
        return (price, price) if isinstance(price, int | float) else price

    def _spent(self, counts: list[Counts]) -> dict[str, float]:
        """Return `judge_tokens` and, with a price, `judge_cost`. Return {} if a reply did not report its tokens."""
        if any(total is None for *_, total in counts):
            return {}
        num_prompt = 0.0
        num_completion = 0.0
        num_total = 0.0
        for prompt_tokens, completion_tokens, total_tokens in counts:
            num_prompt += prompt_tokens or 0.0
            num_completion += completion_tokens or 0.0
            num_total += total_tokens or 0.0
        usage = {"judge_tokens": num_total}
        if self.price_per_million_tokens is not None:
            prompt_price, completion_price = self._prices
            usage["judge_cost"] = (num_prompt * prompt_price + num_completion * completion_price) / 1e6
        return usage
