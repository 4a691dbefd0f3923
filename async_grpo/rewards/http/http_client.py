"""`EndpointClient`: POST JSON to a remote judge that may be slow, overloaded, broken or hostile.

    client = EndpointClient("judge", Endpoint(urls=("http://judge:8000/v1",)), Limiter())
    reply = await client.post("/chat/completions", {...}, tokens=800, deadline=time.monotonic() + 60)

One call is up to `attempts` requests, each under a permit of its own, taken just before it and given back whatever
happens. This is the one place where a request that failed on the network is sent again (tenacity decides when). Every
wait ends: for a replica in service, for the reply and before an attempt by the deadline; for a permit, or for a replica
that asked to be left alone, by the deadline's `latest`, for such a wait puts it off.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from async_grpo.rewards.http.deadline import Deadline
from async_grpo.rewards.http.endpoint import (
    BadReply,
    Endpoint,
    JudgeError,
    JudgeRefused,
    JudgeTimeout,
    JudgeUnavailable,
)
from async_grpo.rewards.http.exchange import OUTCOMES, Exchange, RequestFailed
from async_grpo.rewards.http.rate_limiter import RateLimiter
from async_grpo.rewards.http.replicas import Latencies, Lease, Replicas, first_answer

HEALTHY = {
    "ok": True,
    "429": True,
    "refused": True,
    "cancelled": None,
}  # the others are failures of the replica
BAD_REPLIES = 2  # of one call: a third one would be bad, too
UsedTokens = Callable[[dict[str, Any]], float | None]  # None: the reply does not say
log = logging.getLogger(__name__)


@dataclass
class _Call:
    """What is to be answered by the deadline, in one request or several."""

    path: str
    content: bytes
    tokens: float
    phase: str
    deadline: Deadline
    used_tokens: UsedTokens | None
    unanswered: Callable[[], None] | None
    tried: set[str] = field(default_factory=set)  # addresses that it was sent to
    bad_replies: int = 0
    last_failure: str = ""

    def used(self, reply: dict[str, Any]) -> float | None:
        """The tokens that the reply says it took; None (the estimate stands) if it says nothing sensible."""
        if self.used_tokens is None:
            return None
        try:
            said = self.used_tokens(reply)
            used = math.nan if said is None else float(said)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            log.debug("a reply without a count of its tokens: %r", error)
            return None
        return used if 0 <= used < math.inf else None

    def so_far(self) -> str:
        """For the message of a wait that came to nothing: what failed before it."""
        return f"; before that: {self.last_failure}" if self.last_failure else ""


@dataclass
class _Permit:
    """What to say at its release: 0 tokens if no request was sent, None if the estimate stands."""

    used_tokens: float | None = 0.0


class EndpointClient:
    """See the module. For one event loop; `close` it.

    Args:
        name: of the judge, in messages. Clients of the same name and addresses share its limits.
        endpoint: its settings.
        rate_limiter: where permits come from.

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

    def __repr__(self) -> str:
        return f"EndpointClient({self.name!r}, {self._endpoint!r})"

    async def post(
        self,
        path: str,
        payload: dict[str, Any],
        *,
        tokens: float = 0.0,
        phase: str = "train",
        deadline: Deadline | float,
        used_tokens: UsedTokens | None = None,
        unanswered: Callable[[], None] | None = None,
        lane: str | None = None,
    ) -> dict[str, Any]:
        """The JSON object that the judge replies with status 200.

        Args:
            path: appended to the address of a replica; begins with a slash.
            payload: sent as JSON.
            tokens: estimate for the limits; of a request that is done, `used_tokens(reply)` takes its place.
            phase: "train" or "eval": they share the limits fairly.
            deadline: the moment of `time.monotonic` by which this returns or raises; a `Deadline` is put off while
                this waits for a permit, or for a replica that asked to be left alone.
            unanswered: called for each request that was sent and not answered: it may have cost what an answer costs.
            lane: the old name of `phase`, accepted for one release.

        Raises:
            JudgeTimeout, JudgeUnavailable, BadReply, JudgeRefused: see `endpoint`; the message tells the last cause.
            ValueError: the payload is no JSON (NaN is none), or the path has no slash.
        """
        if not path.startswith("/"):
            raise ValueError(f"the path of a call begins with a slash: {path!r}")
        content = json.dumps(payload, allow_nan=False).encode()
        call = _Call(path, content, tokens, lane or phase, Deadline.of(deadline), used_tokens, unanswered)
        retrying = self._retrying(call)
        try:
            return await retrying(self._ask, call)
        except RequestFailed as failure:
            raise self._error(failure, retrying.statistics["attempt_number"], call) from None

    def stats(self) -> dict[str, Any]:
        """Counts since the start: `requests` that were sent = the sum of `outcomes` + `in_flight`; `retries`; `hedges`.

        `latency_p50_s` and `latency_p95_s` are of the last 500 good replies (None before the first), `breakers` the
        state of each replica, and `breakers_opened` how often one went out of service.
        """
        return {
            "requests": self._requests,
            "retries": self._retries,
            "hedges": self._hedges,
            "outcomes": dict(self._outcomes),
            "latency_p50_s": self._latencies.quantile(0.5, enough=1),
            "latency_p95_s": self._latencies.quantile(0.95, enough=1),
            "breakers": self._replicas.states(),
            "breakers_opened": self._replicas.num_opened,
            "in_flight": self._requests - sum(self._outcomes.values()),
        }

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""
        await self._exchange.close()

    def _retrying(self, call: _Call) -> AsyncRetrying:
        """Exponential pauses with full jitter (Brooker, "Exponential Backoff and Jitter", 2015): callers that failed
        together must not come back together."""

        def is_over(state: RetryCallState) -> bool:
            used_up = state.attempt_number >= self._endpoint.attempts
            return used_up or call.deadline.left_s <= state.upcoming_sleep

        def count(_: RetryCallState) -> None:
            self._retries += 1

        return AsyncRetrying(
            retry=retry_if_exception(lambda error: _is_worth_another(error, call)),
            wait=wait_random_exponential(
                multiplier=self._endpoint.backoff_s, max=self._endpoint.backoff_max_s
            ),
            stop=is_over,
            before_sleep=count,
            reraise=True,
        )

    async def _ask(self, call: _Call) -> dict[str, Any]:
        """One attempt, with a rival if it is slow."""
        share = self._endpoint.hedge_quantile
        patience_s = self._latencies.quantile(share) if share is not None else None
        try:
            if patience_s is None:
                return await self._request(call)
            return await first_answer(
                lambda sent: self._request(call, sent), lambda url: self._rival(call, url), patience_s
            )
        except RequestFailed as failure:
            call.last_failure = str(failure)
            call.bad_replies += failure.outcome == "bad_reply"
            raise

    async def _request(self, call: _Call, sent: asyncio.Future[str] | None = None) -> dict[str, Any]:
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

    async def _rival(self, call: _Call, url: str) -> dict[str, Any]:
        """The same request to another replica than `url`; a failure if there is none."""
        if self._replicas.has_other(url):
            async with self._permit(call) as permit:
                if lease := self._replicas.take(call.tried, never=url):
                    self._hedges += 1
                    return await self._send(call, lease, permit)
        raise RequestFailed("cancelled", "no other replica is in service")

    @contextlib.asynccontextmanager
    async def _permit(self, call: _Call) -> AsyncIterator[_Permit]:
        try:
            with call.deadline.put_off():
                async with asyncio.timeout(call.deadline.most_s):
                    number = await self._rate_limiter.acquire(
                        self.key, self._endpoint.limits, tokens=call.tokens, phase=call.phase
                    )
        except TimeoutError:
            why = f"no permit for a request before the deadline{call.so_far()}"
            raise JudgeTimeout(f"{self.name}: {why}") from None
        permit = _Permit()
        try:
            if (
                call.deadline.left_s <= 0
            ):  # it came in the last moment: a request would only be counted, not sent
                why = f"a permit for a request came only with the deadline{call.so_far()}"
                raise JudgeTimeout(f"{self.name}: {why}")
            yield permit
        finally:
            await self._rate_limiter.release(self.key, number, used_tokens=permit.used_tokens)

    async def _send(self, call: _Call, lease: Lease, permit: _Permit) -> dict[str, Any]:
        """Count, time and settle one exchange."""
        left_s = call.deadline.left_s
        # A probe must leave its call the time for another request, should the replica still be silent
        allowed_s = min(self._endpoint.timeout_s, left_s / 2 if lease.probe else left_s)
        started, outcome, why, hurried = time.monotonic(), "cancelled", "", False
        worked = True  # for all that is known of a request that is cancelled
        self._requests += 1
        call.tried.add(lease.replica.url)
        permit.used_tokens = None
        try:
            reply = await self._exchange.post(lease.replica.url + call.path, call.content, allowed_s)
            outcome, worked = "ok", False
            self._latencies.add(time.monotonic() - started)
            permit.used_tokens = call.used(reply)
            return reply
        except RequestFailed as failure:
            outcome, why, worked = failure.outcome, str(failure), failure.worked
            self._replicas.pause(lease.replica, failure.pause_s)
            permit.used_tokens = None if worked else 0.0
            usual_s = self._latencies.quantile(0.95) or 0.0
            hurried = outcome == "timeout" and allowed_s < min(self._endpoint.timeout_s, usual_s)
            raise
        finally:
            self._outcomes[outcome] += 1
            if worked and call.unanswered:
                call.unanswered()
            # A request whose permit came late had less time than others need: no fault of the replica.
            self._replicas.settle(lease, None if hurried else HEALTHY.get(outcome, False), why)

    def _error(self, failure: RequestFailed, attempts: int, call: _Call) -> JudgeError:
        late = attempts < self._endpoint.attempts and _is_worth_another(failure, call)
        timeout = JudgeTimeout if late else JudgeUnavailable
        kinds = {"refused": JudgeRefused, "bad_reply": BadReply, "timeout": timeout}
        why = ", and the deadline leaves no time for another" if late else ""
        message = f"{self.name}: {failure} (attempt {attempts} of {self._endpoint.attempts}{why})"
        return kinds.get(failure.outcome, JudgeUnavailable)(message)


def _is_worth_another(error: BaseException, call: _Call) -> bool:
    return isinstance(error, RequestFailed) and error.outcome != "refused" and call.bad_replies < BAD_REPLIES
