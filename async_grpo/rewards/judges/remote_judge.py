"""`RemoteJudge`: the settings that all judges share, how they become an endpoint, and what a call has cost."""

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

COUNTED = ("prompt_tokens", "completion_tokens", "total_tokens")  # in the `usage` of a reply
SCORER_URL = "http://127.0.0.1:8080"  # where `examples/http_scorer_server.py` listens
_judge = partial(option, panel="Judge")
Counts = tuple[float | None, ...]  # of one request, as COUNTED; None: the server does not say
# The reply to a request, which takes (prompt, completion) tokens at most
Send = Callable[[dict[str, Any], tuple[float, float]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class JudgeAddresses(Section):
    """Where the judges are asked whose entry in the registry file says no `url`, and what is known of those servers."""

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
        """Of equal replicas, for the judges that ask a model."""
        return parse_names(self.judge_urls)

    def with_address(self, adapter: Any) -> Any:
        """The adapter; if a judge without address, with one. Raises ConfigurationError if none is known."""
        if not isinstance(adapter, RemoteJudge) or adapter.url is not None:
            return adapter
        return replace(adapter, url=adapter.run_urls(self))

    def are_asked_by(self, judge: Any) -> bool:
        """Whether the judge is asked at `judge_urls`."""
        return bool(self.model_urls) and getattr(judge, "urls", None) == self.model_urls


@dataclass(frozen=True, kw_only=True)
class RemoteJudge:
    """Where a judge is asked, and how often.

    Args:
        url: the server's base URL, or those of several replicas, between which calls are balanced; None: where the run
            says (`--judge-urls`, or the servers of `--judge-model`).
        path: of the request, appended to it; the default is the usual one.
        limits: of concurrency, requests and tokens; they hold for all processes of a run together.
        api_key_env: the *name* of the environment variable with the key; the key itself stands in no file.
        timeout_s: for one request; `attempts` of them are made before the call has failed.
        hedge_quantile: send a second request when the first takes longer than this quantile of the latencies.
        endpoint_options: further settings of `Endpoint`.

    Raises ConfigurationError, as every judge does, if the settings cannot work.
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
        except TypeError as error:  # of the dataclass, for a name it does not know
            raise ConfigurationError(f"endpoint_options={dict(self.endpoint_options)}: {error}") from error

    @property
    def urls(self) -> tuple[str, ...]:
        """The base URLs of all replicas; none where the run says them."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())

    def run_urls(self, addresses: JudgeAddresses) -> tuple[str, ...]:
        """Where a run asks this judge if it has no `url`."""
        if not addresses.model_urls:
            ways = "give --judge-urls, or `async-grpo run` --judge-model, or a url in the registry file"
            raise ConfigurationError(f"{type(self).__name__} has no address: {ways}")
        return addresses.model_urls

    def default_path(self) -> str:
        """Where the server expects the judge's requests."""
        raise NotImplementedError

    def endpoint(self) -> Endpoint:
        """Where the judge's requests go. Raises ConfigurationError if it has no `url`, be it of a run."""
        return self._endpoint_at(self.urls or self.run_urls(JudgeAddresses()))

    async def score(
        self, sample: Mapping[str, Any], client: "EndpointClient", *, phase: str, deadline: Deadline | float
    ) -> dict[str, Any]:
        """See `judges`. The `spent` of a JudgeError are the extras of what the call has cost."""
        counts: list[Counts] = []

        async def send(body: dict[str, Any], tokens: tuple[float, float]) -> dict[str, Any]:
            total = sum(tokens)
            unanswered = partial(counts.append, (*tokens, total))  # it may have cost all of that
            options: dict[str, Any] = {"phase": phase, "deadline": deadline, "unanswered": unanswered}
            reply = await client.post(self.path, body, tokens=total, **options)
            counts.append(tuple(said_tokens(reply, name) for name in COUNTED))
            return reply

        try:
            return await self._score(sample, send) | self._spent(counts)
        except JudgeError as error:
            error.spent = self._spent(counts)
            raise

    async def _score(self, sample: Mapping[str, Any], send: Send) -> dict[str, Any]:
        """The answer but for what it has cost; raises as `score` does."""
        raise NotImplementedError

    def _spent(self, counts: list[Counts]) -> dict[str, float]:
        """Extras of what requests have cost."""
        return {}

    def _endpoint_at(self, urls: tuple[str, ...]) -> Endpoint:
        shared = ("limits", "api_key_env", "timeout_s", "attempts", "hedge_quantile")
        return Endpoint(urls, **{name: getattr(self, name) for name in shared}, **self.endpoint_options)


@dataclass(frozen=True, kw_only=True)
class ModelJudge(RemoteJudge):
    """A judge that asks a model, which the server knows by the name `model`.

    Args:
        extra_body: further fields of the request.
        price_per_million_tokens: one price, or (prompt, completion); in any currency.
    """

    model: str
    extra_body: Mapping[str, Any] = field(default_factory=dict, hash=False)
    price_per_million_tokens: tuple[float, float] | float | None = None

    def _check_model(self, *ours: str) -> None:
        """Raise ConfigurationError for settings that cannot work, or if `extra_body` holds one of `ours`."""
        taken = ", ".join(sorted({"model", "messages", *ours} & set(self.extra_body)))
        price = self.price_per_million_tokens
        fine = len(self._prices) == 2 and all(0 <= one < math.inf for one in self._prices)
        require_all(
            (self.model, "model is empty: the server serves it under a name"),
            (not taken, f"extra_body must not hold {taken}: other settings of the judge decide"),
            (fine, f"price_per_million_tokens={price} must be 0 or more, and finite"),
        )

    @property
    def _prices(self) -> tuple[float, float]:
        price = self.price_per_million_tokens or 0.0
        return (price, price) if isinstance(price, int | float) else price

    def _spent(self, counts: list[Counts]) -> dict[str, float]:
        """`judge_tokens` and, with a price, `judge_cost`; nothing if a reply left it out."""
        if any(total is None for *_, total in counts):
            return {}
        prompt, completion, total = (sum(count[i] or 0.0 for count in counts) for i in range(3))
        price_in, price_out = self._prices
        spent = {"judge_tokens": total, "judge_cost": (prompt * price_in + completion * price_out) / 1e6}
        return spent if self.price_per_million_tokens is not None else {"judge_tokens": total}
