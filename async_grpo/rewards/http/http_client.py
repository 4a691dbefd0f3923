"""`EndpointClient`: POST JSON to a remote judge that may be slow, overloaded, broken or hostile.

    client = EndpointClient("judge", Endpoint(urls=("http://judge:8000/v1",)), Limiter())
    reply = await client.post("/chat/completions", {...}, tokens=800, deadline=time.monotonic() + 60)

One call is up to `attempts` requests, each under a permit of its own, taken just before it and given back whatever
happens. Every wait ends: for a replica in service, for the reply and before an attempt by the deadline; for a permit, or
for a replica that asked to be left alone, by the deadline's `latest`, for such a wait puts it off.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from async_grpo.rewards.http.deadline import Deadline
from async_grpo.rewards.http.endpoint import (
    BadReply,
    Endpoint,
    JudgeError,
    JudgeRefused,
    JudgeTimeout,
    JudgeUnavailable,
)
from async_grpo.rewards.http.exchange import OUTCOMES, Call, Exchange, RequestFailed, UsedTokens
from async_grpo.rewards.http.hedging import Latencies, first_answer
from async_grpo.rewards.http.rate_limiter import RateLimiter
from async_grpo.rewards.http.replicas import Lease, Replicas
from async_grpo.rewards.http.retry import backoff_delay

__all__ = [
    "BadReply",
    "Endpoint",
    "EndpointClient",
    "JudgeError",
    "JudgeRefused",
    "JudgeTimeout",
    "JudgeUnavailable",
]

HEALTHY = {
    "ok": True,
    "429": True,
    "refused": True,
    "cancelled": None,
}  # the others are failures of the replica
UNUSED = ("429", "refused", "connection")  # the judge did no work: no tokens were used


@dataclass
class _Permit:
    """What to say at its release: 0 tokens if no request was sent, None if the estimate stands."""

    used_tokens: float | None = 0.0


class EndpointClient:
    """See the module. For one event loop; `close` it.

    Args:
        name: of the judge, in messages. Clients of the same name and addresses share its limits.
        endpoint: its settings.
        traffic: where permits come from.

    Raises:
        ConfigurationError: the key is not in the environment.
    """

    def __init__(self, name: str, endpoint: Endpoint, rate_limiter: RateLimiter) -> None:
        self.name, self._endpoint, self._rate_limiter = name, endpoint, rate_limiter
        self.key = (
            f"{name} at {', '.join(sorted(endpoint.urls))}"  # two runs may each have a judge of that name
        )
        self._exchange = Exchange(endpoint.api_key(), endpoint.max_body_bytes)
        self._replicas = Replicas(endpoint.urls, endpoint.breaker_failures, endpoint.breaker_reset_s)
        self._latencies = Latencies()
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self._requests = self._retries = self._hedges = 0
        self._random = random.Random()

    def __repr__(self) -> str:
        return f"EndpointClient({self.name!r}, {self._endpoint!r})"

    async def post(
        self,
        path: str,
        payload: dict[str, Any],
        *,
        tokens: float = 0.0,
        lane: str = "train",
        deadline: Deadline | float,
        used_tokens: UsedTokens | None = None,
        unanswered: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """The JSON object that the judge replies with status 200.

        Args:
            path: appended to the address of a replica; begins with a slash.
            payload: sent as JSON.
            tokens: estimate for the limits; of a request that is done, `used_tokens(reply)` takes its place.
            lane: "train" or "eval": they share the limits fairly.
            deadline: the moment of `time.monotonic` by which this returns or raises; a `Deadline` is put off while
                this waits for a permit, or for a replica that asked to be left alone.
            unanswered: called for each request that was sent and not answered: it may have cost what an answer costs.

        Raises:
            JudgeTimeout, JudgeUnavailable, BadReply, JudgeRefused: see `endpoint`.
            ValueError: the payload is no JSON (NaN is none), or the path has no slash.
        """
        if not path.startswith("/"):
            raise ValueError(f"the path of a call begins with a slash: {path!r}")
        content = json.dumps(payload, allow_nan=False).encode()
        call = Call(path, content, tokens, lane, Deadline.of(deadline), used_tokens, unanswered)
        bad_replies = 0
        for attempt in range(1, self._endpoint.attempts + 1):
            try:
                return await self._ask(call)
            except RequestFailed as failure:
                bad_replies += failure.outcome == "bad_reply"
                final = attempt == self._endpoint.attempts or failure.outcome == "refused" or bad_replies == 2
                delay_s = 0.0 if final else self._backoff_s(attempt)
                late = call.remaining_s <= delay_s
                if final or late:
                    raise self._error(failure, attempt, late) from None
            await asyncio.sleep(delay_s)
            self._retries += 1
        raise AssertionError("the last attempt returns or raises")

    def stats(self) -> dict[str, Any]:
        """Counts since the start: `requests` that were sent = the sum of `outcomes` + `in_flight`; `retries`; `hedges`.

        `latency_p50_s` and `latency_p95_s` are of the last 500 good replies (None before the first), `breakers` the
        state of each replica.
        """
        return {
            "requests": self._requests,
            "retries": self._retries,
            "hedges": self._hedges,
            "outcomes": dict(self._outcomes),
            "latency_p50_s": self._latencies.quantile(0.5, enough=1),
            "latency_p95_s": self._latencies.quantile(0.95, enough=1),
            "breakers": self._replicas.states(),
            "in_flight": self._requests - sum(self._outcomes.values()),
        }

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""
        await self._exchange.close()

    async def _ask(self, call: Call) -> dict[str, Any]:
        """One attempt, with a rival if it is slow."""
        share = self._endpoint.hedge_quantile
        patience_s = self._latencies.quantile(share) if share is not None else None
        if patience_s is None:
            return await self._request(call)
        return await first_answer(
            lambda sent: self._request(call, sent), lambda url: self._rival(call, url), patience_s
        )

    async def _request(self, call: Call, sent: asyncio.Future[str] | None = None) -> dict[str, Any]:
        """One request to the best replica, as soon as there is one, and a permit."""
        while True:
            try:
                lease = await self._replicas.ready(call.deadline)
            except JudgeUnavailable as error:
                raise JudgeUnavailable(f"{self.name}: {error}") from None
            try:
                async with self._permit(call) as permit:
                    lease = lease or self._replicas.take(call.tried)
                    if lease:  # else all went out of service while we waited
                        if sent:
                            sent.set_result(lease.replica.url)
                        return await self._send(call, lease, permit)
            finally:
                if lease:
                    self._replicas.settle(lease, None)

    async def _rival(self, call: Call, url: str) -> dict[str, Any]:
        """The same request to another replica than `url`; a failure if there is none."""
        if self._replicas.has_other(url):
            async with self._permit(call) as permit:
                if lease := self._replicas.take(call.tried, never=url):
                    self._hedges += 1
                    return await self._send(call, lease, permit)
        raise RequestFailed("cancelled", "no other replica is in service")

    @contextlib.asynccontextmanager
    async def _permit(self, call: Call) -> AsyncIterator[_Permit]:
        try:
            with call.deadline.put_off():
                async with asyncio.timeout(call.deadline.most_s):
                    number = await self._rate_limiter.acquire(
                        self.key, self._endpoint.limits, tokens=call.tokens, lane=call.lane
                    )
        except TimeoutError:
            raise JudgeTimeout(f"{self.name}: no permit for a request before the deadline") from None
        permit = _Permit()
        try:
            if call.remaining_s <= 0:  # it came in the last moment: a request would only be counted, not sent
                raise JudgeTimeout(f"{self.name}: a permit for a request came only with the deadline")
            yield permit
        finally:
            await self._rate_limiter.release(self.key, number, used_tokens=permit.used_tokens)

    async def _send(self, call: Call, lease: Lease, permit: _Permit) -> dict[str, Any]:
        """Count, time and settle one exchange."""
        allowed_s = min(self._endpoint.timeout_s, call.remaining_s)
        started, outcome, hurried = time.monotonic(), "cancelled", False
        self._requests += 1
        call.tried.add(lease.replica.url)
        permit.used_tokens = None
        try:
            reply = await self._exchange.post(lease.replica.url + call.path, call.content, allowed_s)
            outcome = "ok"
            self._latencies.add(time.monotonic() - started)
            permit.used_tokens = call.used(reply)
            return reply
        except RequestFailed as failure:
            outcome = failure.outcome
            self._replicas.pause(lease.replica, failure.pause_s)
            permit.used_tokens = 0.0 if outcome in UNUSED else None
            usual_s = self._latencies.quantile(0.95) or 0.0
            hurried = outcome == "timeout" and allowed_s < min(self._endpoint.timeout_s, usual_s)
            raise
        finally:
            self._outcomes[outcome] += 1
            if outcome not in ("ok", *UNUSED) and call.unanswered:
                call.unanswered()
            # A request whose permit came late had less time than others need: no fault of the replica.
            self._replicas.settle(lease, None if hurried else HEALTHY.get(outcome, False))

    def _backoff_s(self, failures: int) -> float:
        return backoff_delay(failures, self._endpoint.backoff_s, self._endpoint.backoff_max_s, self._random)

    def _error(self, failure: RequestFailed, attempts: int, late: bool) -> JudgeError:
        timeout = JudgeTimeout if late else JudgeUnavailable
        kinds = {"refused": JudgeRefused, "bad_reply": BadReply, "timeout": timeout}
        why = ", and the deadline leaves no time for another" if late else ""
        message = f"{self.name}: {failure} (attempt {attempts} of {self._endpoint.attempts}{why})"
        return kinds.get(failure.outcome, JudgeUnavailable)(message)
