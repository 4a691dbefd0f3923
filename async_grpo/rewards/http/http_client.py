"""`EndpointClient` sends JSON to a remote judge that may be slow, overloaded, broken or hostile.

    client = EndpointClient("judge", Endpoint(urls=("http://judge:8000/v1",)), Limiter())
    reply = await client.post("/chat/completions", {...}, tokens=800, deadline=time.monotonic() + 60)

A call makes up to `attempts` requests. Each request takes its own permit just before it is sent, and always releases
it. Requests that failed on the network are repeated only in this module. tenacity schedules these attempts.
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

# Outcome of a request -> whether it shows that the replica works; None if it shows nothing. Outcomes that are not listed
# show that the replica does not work
HEALTHY = {"ok": True, "429": True, "refused": True, "cancelled": None}
BAD_REPLIES = 2  # a call fails after this many bad replies, because another request would probably not help
ENOUGH = 20  # number of latencies that a quantile needs
REMEMBERED = 500  # number of latencies that are kept


@dataclass
class _Call:
    """A call and its state. One call may need several requests."""

    path: str
    content: bytes
    tokens: float
    phase: str
    deadline: Deadline
    unanswered: Callable[[], None] | None
    tried: set[str] = field(default_factory=set)  # addresses to which a request was sent
    bad_replies: int = 0
    last_failure: str = ""  # the last failure, to be appended to the message of a time-out
    # Only in a hedged call: the address of its first request, set when the request is sent
    sent: asyncio.Future[str] | None = None

    def is_worth_another(self, error: BaseException) -> bool:
        """Return whether another request may succeed after this error."""
        is_repeatable = isinstance(error, RequestFailed) and error.outcome != "refused"
        return is_repeatable and self.bad_replies < BAD_REPLIES


class EndpointClient:
    """Calls a remote judge, with retries. Use it from one event loop, and call `close` at the end.

    Clients with the same rate limiter, name and addresses share their limits.

    Raises:
        ConfigurationError: The API key is not in the environment.
    """

    def __init__(self, name: str, endpoint: Endpoint, rate_limiter: RateLimiter) -> None:
        self.name = name
        # The key includes the addresses, because two runs that share a limiter may each have a judge of this name
        self.key = f"{name} at {', '.join(sorted(endpoint.urls))}"
        self._endpoint = endpoint
        self._rate_limiter = rate_limiter
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
        """Send a request to the judge, and return the JSON object of its reply.

        Args:
            path: Path to append to the address of a replica. It begins with a slash.
            payload: Content of the request.
            tokens: Estimated number of tokens, for the limits. The total in the reply's `usage` replaces it.
            phase: "train" or "eval". Waiting calls of the two phases take turns.
            deadline: Time by which the call must end, on the clock `time.monotonic`; or a `Deadline`, which is extended
                by the time that the call waits in queues.
            unanswered: Function to call for each request that was sent and not answered. Such a request may have cost
                as much as an answer.

        Raises:
            JudgeError: The call failed with a JudgeTimeout, JudgeUnavailable, BadReply or JudgeRefused (see
                `endpoint`).
            ValueError: The payload is not valid JSON, for example because of a NaN, or the path does not begin with a
                slash.
        """
        if not path.startswith("/"):
            raise ValueError(f"the path of a call begins with a slash: {path!r}")
        content = json.dumps(payload, allow_nan=False).encode()
        until = deadline if isinstance(deadline, Deadline) else Deadline(deadline - time.monotonic(), 0.0)
        call = _Call(path, content, tokens, phase, until, unanswered)
        # Pauses have full jitter (Brooker, "Exponential Backoff and Jitter", 2015), so that callers do not retry at once
        retrying = AsyncRetrying(
            retry=retry_if_exception(call.is_worth_another),
            wait=wait_random_exponential(self._endpoint.backoff_s, self._endpoint.backoff_max_s),
            stop=lambda state: (
                state.attempt_number >= self._endpoint.attempts or until.left_s <= state.upcoming_sleep
            ),
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
        """Return counts since the client was created.

        `requests` is the number of requests sent, which is the sum of `outcomes` and `in_flight`. `breakers_open` is
        the number of replicas that are out of service now. `breakers_opened` is how often a replica went out of
        service.
        """
        return {
            **self._counts,
            "outcomes": dict(self._outcomes),
            "breakers_open": self._replicas.num_open,
            "breakers_opened": self._replicas.num_opened,
            "in_flight": self._counts["requests"] - self._outcomes.total(),
        }

    async def _ask(self, call: _Call) -> dict[str, Any]:
        """Make one attempt. If it fails, record the failure in `call`."""
        hedge_quantile = self._endpoint.hedge_quantile
        try:
            if hedge_quantile is None or len(self._latencies) < ENOUGH:
                return await self._request(call)
            return await self._request_with_hedge(call, float(quantile(self._latencies, hedge_quantile)))
        except RequestFailed as failure:
            call.last_failure = f"; before that: {failure}"
            if failure.outcome == "bad_reply":
                call.bad_replies += 1
            raise

    async def _request_with_hedge(self, call: _Call, patience_s: float) -> dict[str, Any]:
        """Send a request, and after `patience_s` a second one to another replica. Return the first reply.

        See Dean and Barroso, "The Tail at Scale", 2013. If one request fails, the other one may still succeed. If both
        fail, the error of the first request is raised.
        """
        call.sent = asyncio.get_running_loop().create_future()
        first: asyncio.Future[Any] = asyncio.ensure_future(self._request(call))
        tasks: list[asyncio.Future[Any]] = [first]
        try:
            await asyncio.wait([first, call.sent], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(tasks, timeout=patience_s)
            if not first.done() and self._replicas.usable(never=call.sent.result()):
                hedge = self._request_with_permit(call, never=call.sent.result())
                tasks.append(asyncio.ensure_future(hedge))
            for task in asyncio.as_completed(tasks):
                with contextlib.suppress(Exception):  # the other request may still succeed
                    reply = await task
                    if reply is not None:
                        return reply
            return await first
        finally:
            for task in tasks:
                task.cancel()
            # The slower request must have released its permit when this function returns
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _request(self, call: _Call) -> dict[str, Any]:
        """Send a request as soon as a replica can serve it, and return the reply."""
        while True:
            await self._replicas.ready(call.deadline)
            reply = await self._request_with_permit(call)
            # None means that all replicas went out of service during the wait for the permit
            if reply is not None:
                return reply

    async def _request_with_permit(self, call: _Call, never: str | None = None) -> dict[str, Any] | None:
        """Wait for a permit and send a request. Return None if no replica can serve it when the permit is granted.

        Args:
            call: The call.
            never: Address that the request must not be sent to. For a hedge, this is the address of the first request.
        """
        try:
            with call.deadline.put_off(), waiting("permit", self.name, self.key):
                async with asyncio.timeout(call.deadline.latest - time.monotonic()):
                    permit = await self._rate_limiter.acquire(
                        self.key, self._endpoint.limits, tokens=call.tokens, phase=call.phase
                    )
        except TimeoutError:
            raise JudgeTimeout(f"no permit for a request before the deadline{call.last_failure}") from None
        used_tokens: float | None = 0.0  # nothing is used before the request is sent
        try:
            if call.deadline.left_s <= 0:
                # Check the time first, because a request would count as sent although there is no time left for it
                raise JudgeTimeout(f"a permit was granted only after the deadline{call.last_failure}")
            replica = self._replicas.take(call.tried, never)
            if replica is None:
                return None
            if call.sent and not call.sent.done():
                call.sent.set_result(replica.url)
            if never is not None:
                self._counts["hedges"] += 1
            used_tokens = None  # unknown, so the limiter keeps its estimate
            reply = await self._send(call, replica)
            used_tokens = said_tokens(reply, "total_tokens")
            return reply
        except BaseException as error:  # including a cancellation
            if isinstance(error, RequestFailed) and not error.worked:
                used_tokens = 0.0
            if used_tokens is None and call.unanswered:
                call.unanswered()
            raise
        finally:
            await self._rate_limiter.release(self.key, permit, used_tokens=used_tokens)

    async def _send(self, call: _Call, replica: Replica) -> dict[str, Any]:
        """Send a request to a replica, record its outcome, and return the reply."""
        is_probe = replica.is_probing
        left_s = call.deadline.left_s
        # A probed replica may not answer. The probe must leave its call enough time for a request to another replica
        allowed_s = min(self._endpoint.timeout_s, left_s / 2 if is_probe else left_s)
        started_at = time.monotonic()
        outcome = "cancelled"
        failure_text = ""
        self._counts["requests"] += 1
        call.tried.add(replica.url)
        try:
            with waiting("sent", self.name, replica.url):
                reply = await self._exchange.post(replica.url + call.path, call.content, allowed_s)
            outcome = "ok"
            self._latencies.append(time.monotonic() - started_at)
            return reply
        except RequestFailed as failure:
            outcome = failure.outcome
            failure_text = str(failure)
            self._replicas.pause(replica, failure.pause_s)
            raise
        finally:
            self._outcomes[outcome] += 1
            self._replicas.settle(replica, is_probe, HEALTHY.get(outcome, False), failure_text)

    def _error(self, failure: RequestFailed, num_attempts: int, call: _Call) -> JudgeError:
        """Return the error that the call raises after its last request failed."""
        is_late = num_attempts < self._endpoint.attempts and call.is_worth_another(failure)
        kinds = {
            "refused": JudgeRefused,
            "bad_reply": BadReply,
            "timeout": JudgeTimeout if is_late else JudgeUnavailable,
        }
        kind = kinds.get(failure.outcome, JudgeUnavailable)
        reason = ", and the deadline leaves no time for another" if is_late else ""
        return kind(f"{self.name}: {failure} (attempt {num_attempts} of {self._endpoint.attempts}{reason})")
