"""`RemoteJudge`: the settings that all judges share, the endpoint that they describe, and the cost of a call."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import POSITIVE, Section, option
from async_grpo.rewards.adapter.registry_source import parse_names
from async_grpo.rewards.http.endpoint import Deadline, Endpoint, JudgeError, Limits, require_all, said_tokens

if TYPE_CHECKING:
    from async_grpo.rewards.http.http_client import EndpointClient

COUNTED = ("prompt_tokens", "completion_tokens", "total_tokens")  # fields of the `usage` of a reply
SCORER_URL = "http://127.0.0.1:8080"  # where `examples/http_scorer_server.py` listens
_judge = partial(option, panel="Judge")
Counts = tuple[
    float | None, ...
]  # of one request, in the order of COUNTED; None if the server does not report it
# Sends a request, which takes (prompt, completion) tokens at most, and returns the reply
Send = Callable[[dict[str, Any], tuple[float, float]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class JudgeAddresses(Section):
    """Addresses of the servers for judges whose entry in the registry file has no `url`."""

    judge_urls: str = _judge(
        "", "Comma list of URLs of replicas that serve the judges whose registry entry names no URL."
    )
    http_scorer_urls: str = _judge(
        "", "Comma list of URLs for http_scorer. The default is where examples/http_scorer_server.py listens."
    )
    judge_model_id: str | None = _judge(
        None,
        "Name of the model behind --judge-urls, by which the verdict cache recognizes it. By default the URLs "
        "identify it.",
    )
    judge_idle_sleep_s: float | None = _judge(
        None,
        "Seconds without a call after which judge servers release their GPU memory until the next call. By default "
        "they keep it.",
        range=POSITIVE,
    )

    @property
    def model_urls(self) -> tuple[str, ...]:
        """Return the addresses of the replicas for judges that ask a model."""
        return parse_names(self.judge_urls)

    def with_address(self, adapter: Any) -> Any:
        """Return the adapter; a judge without an address receives one.

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
    """A judge behind a server: its address, and the limits of its requests.

    Args:
        url: The server's base URL, or those of several replicas, between which calls are balanced. None takes the run's
            (`--judge-urls`, or the servers of `--judge-model`).
        path: Path of the requests; "" takes the usual one.
        limits: Limits of concurrency, requests and tokens, which hold for all processes of a run together.
        api_key_env: *Name* of the environment variable with the key, which is in no file itself.
        timeout_s: Time limit of one request.
        attempts: Number of requests before the call has failed.
        hedge_quantile: A second request is sent when the first takes longer than this quantile of the latencies.
        endpoint_options: Further settings of `Endpoint`.

    Raises:
        ConfigurationError: The settings cannot work. All judges raise this.
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
            # `Endpoint` has no such field
            raise ConfigurationError(f"endpoint_options={dict(self.endpoint_options)}: {error}") from error

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the base URLs of all replicas; () for a judge that uses the run's."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())

    def run_urls(self, addresses: JudgeAddresses) -> tuple[str, ...]:
        """Return the run's addresses for this judge, which are used if it has no `url`."""
        if not addresses.model_urls:
            ways = "give --judge-urls, or `async-grpo run` --judge-model, or a url in the registry file"
            raise ConfigurationError(f"{type(self).__name__} has no address: {ways}")
        return addresses.model_urls

    def default_path(self) -> str:
        """Return the usual path of the judge's requests."""
        raise NotImplementedError

    def endpoint(self) -> Endpoint:
        """Return the endpoint of the judge's requests.

        Raises:
            ConfigurationError: The judge has no `url`, and no run has given it one.
        """
        return self._endpoint_at(self.urls or self.run_urls(JudgeAddresses()))

    async def score(
        self, sample: Mapping[str, Any], client: "EndpointClient", *, phase: str, deadline: Deadline | float
    ) -> dict[str, Any]:
        """Return the judge's answer, with the cost of the call as extras; see `judges`.

        Raises:
            JudgeError: There is no answer. Its `spent` are the extras with the cost of the call.
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
                # A request without an answer may have cost the largest number of tokens
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
        """Return the answer without the cost; raises the errors of `score`."""
        raise NotImplementedError

    def _spent(self, counts: list[Counts]) -> dict[str, float]:
        """Return the extras with the cost of requests."""
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
    """A judge that asks a model.

    Args:
        model: Name of the model at the server.
        extra_body: Further fields of the request.
        price_per_million_tokens: One price, or (prompt, completion) prices, in any currency.
    """

    model: str
    extra_body: Mapping[str, Any] = field(default_factory=dict, hash=False)
    price_per_million_tokens: tuple[float, float] | float | None = None

    def _check_model(self, *reserved_fields: str) -> None:
        """Check the settings.

        Args:
            reserved_fields: Fields of a request that `extra_body` must not contain.

        Raises:
            ConfigurationError: The settings cannot work.
        """
        reserved = {"model", "messages", *reserved_fields}
        conflicts = ", ".join(sorted(reserved & set(self.extra_body)))
        prices = self._prices
        are_prices_valid = len(prices) == 2 and all(0 <= price < math.inf for price in prices)
        require_all(
            (self.model, "model is empty: the server serves it under a name"),
            (not conflicts, f"extra_body must not hold {conflicts}: other settings of the judge decide"),
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
        """Return `judge_tokens` and, with a price, `judge_cost`; nothing if a reply did not report its tokens."""
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
