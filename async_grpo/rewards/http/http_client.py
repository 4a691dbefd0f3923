"""`EndpointClient`: POST JSON to a remote judge that may be slow, overloaded, broken or hostile.

    client = EndpointClient("judge", Endpoint(urls=("http://judge:8000/v1",)), Limiter())
    reply = await client.post("/chat/completions", {...}, tokens=800, deadline=time.monotonic() + 60)

One call is up to `attempts` requests, each under a permit of its own, taken just before it and given back whatever
happens. This is the one place where a request that failed on the network is sent again (tenacity decides when).
"""

import asyncio
import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

from async_grpo.processes.waits import waiting
from async_grpo.rewards.http.endpoint import (
    BadReply,
    Deadline,
    Endpoint,
    JudgeError,
    JudgeRefused,
    JudgeTimeout,
    JudgeUnavailable,
    said_tokens,
)
from async_grpo.rewards.http.exchange import OUTCOMES, Exchange, RequestFailed
from async_grpo.rewards.http.rate_limiter import RateLimiter
from async_grpo.rewards.http.replicas import Replica, Replicas
from async_grpo.rewards.verifier_worker import quantile

HEALTHY = {"ok": True, "429": True, "refused": True, "cancelled": None}  # others are failures of the replica
BAD_REPLIES = 2  # of one call: a third one would be bad, too
ENOUGH, REMEMBERED = 20, 500  # latencies before a quantile of them means anything, and at most


@dataclass
class _Call:
    """What is to be answered by the deadline, in one request or several."""

    path: str
    content: bytes
    tokens: float
    phase: str
    deadline: Deadline
    unanswered: Callable[[], None] | None
    tried: set[str] = field(default_factory=set)  # addresses that it was sent to
    bad_replies: int = 0
    last_failure: str = ""  # what is said of it after a time-out
    sent: asyncio.Future[str] | None = None  # to where a request that may get a rival went

    def is_worth_another(self, error: BaseException) -> bool:
        retried = isinstance(error, RequestFailed) and error.outcome != "refused"
        return retried and self.bad_replies < BAD_REPLIES


class EndpointClient:
    """See the module. For one event loop; `close` it. Clients of the same name and addresses share their limits.
    Raises ConfigurationError if the key is not in the environment."""

    def __init__(self, name: str, endpoint: Endpoint, rate_limiter: RateLimiter) -> None:
        self.name, self._endpoint, self._rate_limiter = name, endpoint, rate_limiter
        # Two runs may each have a judge of that name
        self.key = f"{name} at {', '.join(sorted(endpoint.urls))}"
        self._exchange = Exchange(endpoint.api_key(), endpoint.max_body_bytes)
        self.close = self._exchange.close
        self._replicas = Replicas(endpoint.urls, endpoint.breaker_failures, endpoint.breaker_reset_s)
        self._latencies: deque[float] = deque(maxlen=REMEMBERED)
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self._counts = Counter(requests=0, retries=0, hedges=0)

    async def post(
        self,
        path: str,
        payload: dict[str, Any],
        *,
        tokens: float = 0.0,
        phase: str = "train",
        deadline: Deadline | float,
        unanswered: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """The JSON object that the judge replies with status 200.

        Args:
            path: appended to the address of a replica; begins with a slash.
            tokens: estimate for the limits; once there is a reply, its `usage` takes its place if it says the total.
            phase: "train" or "eval": they share the limits fairly.
            deadline: a moment of `time.monotonic`; a `Deadline` is put off by waits.
            unanswered: called for each request that was sent and not answered: it may have cost what an answer costs.

        JudgeTimeout, JudgeUnavailable, BadReply, JudgeRefused: see `endpoint`; the message tells the last cause.
        ValueError: the payload is no JSON (NaN is none), or the path has no slash.
        """
        if not path.startswith("/"):
            raise ValueError(f"the path of a call begins with a slash: {path!r}")
        content = json.dumps(payload, allow_nan=False).encode()
        until = deadline if isinstance(deadline, Deadline) else Deadline(deadline - time.monotonic(), 0.0)
        call = _Call(path, content, tokens, phase, until, unanswered)
        # With full jitter (Brooker, "Exponential Backoff and Jitter", 2015), or callers come back together
        retrying = AsyncRetrying(
            retry=retry_if_exception(call.is_worth_another),
            wait=wait_random_exponential(self._endpoint.backoff_s, self._endpoint.backoff_max_s),
            stop=lambda s: s.attempt_number >= self._endpoint.attempts or until.left_s <= s.upcoming_sleep,
            before_sleep=lambda _: self._counts.update(["retries"]),
            reraise=True,
        )
        try:
            return await retrying(self._ask, call)
        except RequestFailed as failure:
            raise self._error(failure, retrying.statistics["attempt_number"], call) from None
        except (JudgeTimeout, JudgeUnavailable) as error:
            raise type(error)(f"{self.name}: {error}") from None

    def stats(self) -> dict[str, Any]:
        """Counts since the start: `requests` that were sent = the sum of `outcomes` + `in_flight`; `retries`; `hedges`.

        `breakers_open`: replicas that are out of service now; `breakers_opened`: how often one went.
        """
        return {
            **self._counts,
            "outcomes": dict(self._outcomes),
            "breakers_open": self._replicas.num_open,
            "breakers_opened": self._replicas.num_opened,
            "in_flight": self._counts["requests"] - self._outcomes.total(),
        }

    async def _ask(self, call: _Call) -> dict[str, Any]:
        share = self._endpoint.hedge_quantile
        try:
            if share is None or len(self._latencies) < ENOUGH:
                return await self._request(call)
            return await self._hedged(call, float(quantile(self._latencies, share)))
        except RequestFailed as failure:
            call.last_failure = f"; before that: {failure}"
            call.bad_replies += failure.outcome == "bad_reply"
            raise

    async def _hedged(self, call: _Call, patience_s: float) -> dict[str, Any]:
        """What takes longer gets a rival elsewhere (Dean and Barroso, "The Tail at Scale", 2013); the first answer wins.
        One that fails leaves it to the other; if both fail, the error is that of the first."""
        call.sent = asyncio.get_running_loop().create_future()
        first: asyncio.Future[Any] = asyncio.ensure_future(self._request(call))
        tasks: list[asyncio.Future[Any]] = [first]
        try:
            await asyncio.wait([first, call.sent], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(tasks, timeout=patience_s)
            if not first.done() and self._replicas.usable(never=call.sent.result()):
                tasks.append(asyncio.ensure_future(self._permitted(call, never=call.sent.result())))
            for task in asyncio.as_completed(tasks):
                with contextlib.suppress(Exception):  # the other one may still answer
                    if (reply := await task) is not None:
                        return reply
            return await first
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # the loser's permit is back before we are

    async def _request(self, call: _Call) -> dict[str, Any]:
        while True:  # all may go out of service while we wait for a permit
            await self._replicas.ready(call.deadline)
            if (reply := await self._permitted(call)) is not None:
                return reply

    async def _permitted(self, call: _Call, never: str | None = None) -> dict[str, Any] | None:
        """The reply to a request that has a permit; None if no replica may be asked when that comes."""
        try:
            with call.deadline.put_off(), waiting("permit", self.name, self.key):
                async with asyncio.timeout(call.deadline.latest - time.monotonic()):
                    permit = await self._rate_limiter.acquire(
                        self.key, self._endpoint.limits, tokens=call.tokens, phase=call.phase
                    )
        except TimeoutError:
            raise JudgeTimeout(f"no permit for a request before the deadline{call.last_failure}") from None
        used: float | None = 0.0  # as long as nothing is sent
        try:
            if call.deadline.left_s <= 0:  # the request would only be counted, not sent
                raise JudgeTimeout(f"a permit for a request came only with the deadline{call.last_failure}")
            if (replica := self._replicas.take(call.tried, never)) is None:
                return None
            if call.sent and not call.sent.done():
                call.sent.set_result(replica.url)
            self._counts["hedges"] += never is not None
            used = None  # for all that is known
            reply = await self._send(call, replica)
            used = said_tokens(reply, "total_tokens")
            return reply
        except BaseException as error:  # also when it is cancelled
            if isinstance(error, RequestFailed) and not error.worked:
                used = 0.0
            if used is None and call.unanswered:
                call.unanswered()
            raise
        finally:
            await self._rate_limiter.release(self.key, permit, used_tokens=used)

    async def _send(self, call: _Call, replica: Replica) -> dict[str, Any]:
        probe, left_s = replica.probing, call.deadline.left_s
        # A probe must leave its call the time for another request, should the replica still be silent
        allowed_s = min(self._endpoint.timeout_s, left_s / 2 if probe else left_s)
        started, outcome, why = time.monotonic(), "cancelled", ""
        self._counts["requests"] += 1
        call.tried.add(replica.url)
        try:
            with waiting("sent", self.name, replica.url):
                reply = await self._exchange.post(replica.url + call.path, call.content, allowed_s)
            outcome = "ok"
            self._latencies.append(time.monotonic() - started)
            return reply
        except RequestFailed as failure:
            outcome, why = failure.outcome, str(failure)
            self._replicas.pause(replica, failure.pause_s)
            raise
        finally:
            self._outcomes[outcome] += 1
            self._replicas.settle(replica, probe, HEALTHY.get(outcome, False), why)

    def _error(self, failure: RequestFailed, attempts: int, call: _Call) -> JudgeError:
        late = attempts < self._endpoint.attempts and call.is_worth_another(failure)
        timeout = JudgeTimeout if late else JudgeUnavailable
        kinds = {"refused": JudgeRefused, "bad_reply": BadReply, "timeout": timeout}
        why = ", and the deadline leaves no time for another" if late else ""
        message = f"{self.name}: {failure} (attempt {attempts} of {self._endpoint.attempts}{why})"
        return kinds.get(failure.outcome, JudgeUnavailable)(message)
