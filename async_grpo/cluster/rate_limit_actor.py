"""`RemoteRateLimiter`: limits that hold over all processes and nodes of a cluster, kept by one `RateLimitActor`.

    rate_limiter = RemoteRateLimiter()                  # in each process; the first one makes the actor
    client = EndpointClient("judge", endpoint, rate_limiter)

The actor is the cluster's, not a run's: a judge does not care which run asks. It ends with the process that made it,
and the next call makes another. The new one begins without a burst, so that the rates hold across the change, but it
does not know the permits that are out: until they are over, more than `concurrency` calls may run.

Permits that travel for different times start their calls at other intervals than they were given at. One that took
`Limits.slack_s` longer than the quickest is handed back, and its call waits again: so that a process or a network that
stalls for a second does not start a second's worth of calls at once.
"""

import asyncio
import contextlib
import itertools
import logging
import uuid
from dataclasses import dataclass, field
from typing import Any

from async_grpo.cluster.actors import zero_cpu_actor
from async_grpo.cluster.channel import Channel, ChannelServer
from async_grpo.cluster.delay_estimator import DelayEstimator
from async_grpo.errors import WorkerLost
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.http.rate_limiter import Limiter

NAMESPACE, NAME = "async-grpo-traffic", "traffic"
BEAT_S = 5.0
SILENCE_S = 30.0  # a caller that says nothing for so long is gone: its permits are given back
PAUSE_S = 0.5  # before another actor is made
HAND_BACKS = 3  # by one call: where every permit is late, delay is the rule, and calls must go on

log = logging.getLogger(__name__)


class RateLimitActor(ChannelServer):
    """One `Limiter`, and for each caller what it waits for and holds.

    Args:
        resumed: another actor was there before; see `Limiter`.
        silence_s: after which a caller is gone.
    """

    def __init__(self, resumed: bool = False, silence_s: float = SILENCE_S) -> None:
        self._limiter, self._silence_s = Limiter(resumed=resumed), silence_s
        self._holders: dict[str, _Holder] = {}
        handlers = ("acquire", "withdraw", "refund", "release", "heartbeat", "leave", "stats")
        self.serve({name: getattr(self, f"_{name}") for name in handlers})

    async def _acquire(
        self, caller_id: str, ticket: int, key: str, limits: Limits, tokens: float, phase: str
    ) -> float | None:
        """When (on the actor's clock) the ticket got its permit; None: it was withdrawn, or its caller seemed gone."""
        holder = self._holder(caller_id)
        waiting = self._limiter.acquire(key, limits, tokens=tokens, phase=phase)
        wait = holder.waits[ticket] = asyncio.ensure_future(waiting)
        await asyncio.wait({wait})
        del holder.waits[ticket]
        if wait.cancelled():
            return None
        permit = wait.result()  # limits that contradict those in use raise here
        if holder.gone:
            self._limiter.refund(key, permit)
            return None
        holder.permits[ticket] = key, permit
        return asyncio.get_running_loop().time()

    async def _withdraw(self, caller_id: str, ticket: int) -> None:
        """The caller does not wait any more. A permit that is on its way to it is released when it arrives."""
        if wait := self._holder(caller_id).waits.get(ticket):
            wait.cancel()

    async def _refund(self, caller_id: str, ticket: int) -> None:
        if held := self._holder(caller_id).permits.pop(ticket, None):
            self._limiter.refund(*held)

    async def _release(self, caller_id: str, ticket: int, used_tokens: float | None) -> None:
        # None: its caller was silent for too long
        if held := self._holder(caller_id).permits.pop(ticket, None):
            await self._limiter.release(*held, used_tokens=used_tokens)

    async def _heartbeat(self, caller_id: str) -> None:
        self._holder(caller_id)
        now = asyncio.get_running_loop().time()
        for silent in [i for i, h in self._holders.items() if now - h.heard_at > self._silence_s]:
            holder = self._holders[silent]
            log.warning(
                "a caller was silent for %g s; permits given back: %d", self._silence_s, len(holder.permits)
            )
            await self._leave(silent)

    async def _leave(self, caller_id: str) -> None:
        """Everything of a caller is given back; what it was granted in this very moment `_acquire` gives back."""
        holder = self._holders.pop(caller_id, None)
        if holder is None:
            return
        holder.gone = True
        for wait in holder.waits.values():
            wait.cancel()
        for held in holder.permits.values():
            await self._limiter.release(*held)
        holder.permits.clear()

    async def _stats(self) -> dict[str, Any]:
        return self._limiter.stats()

    def _holder(self, caller_id: str) -> "_Holder":
        holder = self._holders.setdefault(caller_id, _Holder())
        holder.heard_at = asyncio.get_running_loop().time()
        return holder


@dataclass
class _Holder:
    """What one `RemoteRateLimiter` waits for and holds, by its ticket."""

    heard_at: float = 0.0
    waits: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    permits: dict[int, tuple[str, int]] = field(default_factory=dict)  # key, and the limiter's number
    gone: bool = False


class RemoteRateLimiter:
    """`RateLimiter` through the cluster's `RateLimitActor`, for one event loop. A process that dies gives its permits back.

    Args:
        name: of the actor.
        beat_s, silence_s: how often this says that it is alive, and after how long without it counts as gone.
    """

    def __init__(self, name: str = NAME, *, beat_s: float = BEAT_S, silence_s: float = SILENCE_S) -> None:
        self._name, self._beat_s, self._silence_s = name, beat_s, silence_s
        self._caller_id = uuid.uuid4().hex
        self._tickets = itertools.count(1)
        self._held: dict[int, tuple[str, Channel]] = {}
        self._channel: Channel | None = None
        self._delays = DelayEstimator()
        self._heartbeat_task: asyncio.Task | None = None
        self._background_tasks: set[asyncio.Task] = set()

    async def acquire(self, key: str, limits: Limits, *, tokens: float = 0.0, phase: str = "train") -> int:
        """See `RateLimiter`. If the actor dies, the wait goes on at the end of the next one's queue."""
        hand_backs = 0
        while True:
            channel, ticket = self._connected(), next(self._tickets)
            call = asyncio.ensure_future(
                channel.call("acquire", self._caller_id, ticket, key, limits, tokens, phase)
            )
            try:
                given_at = await asyncio.shield(call)
            except asyncio.CancelledError:  # the answer may be on its way: only the actor knows
                self._run_in_background(self._withdraw(channel, ticket, call))
                raise
            except WorkerLost as lost:
                log.warning("the rate limiter is made anew: %s", lost)
                await asyncio.sleep(PAUSE_S)
                continue
            if given_at is None:
                continue
            if not self._is_late(given_at, limits) or hand_backs == HAND_BACKS:
                self._held[ticket] = (key, channel)
                return ticket
            hand_backs += 1
            self._run_in_background(channel.call("refund", self._caller_id, ticket))

    async def release(self, key: str, permit: int, *, used_tokens: float | None = None) -> None:
        """See `RateLimiter`; does not wait for the actor's word.

        Raises:
            ValueError: the permit is not out.
        """
        if self._held.get(permit, ("",))[0] != key:
            raise ValueError(f"permit {permit} of {key!r} is not out: it was never given, or released before")
        _, channel = self._held.pop(permit)
        self._run_in_background(channel.call("release", self._caller_id, permit, used_tokens))

    async def stats(self) -> dict[str, dict[str, Any]]:
        """The cluster's; see `Limiter.stats`."""
        return await self._connected().call("stats")

    async def close(self) -> None:
        """Give everything back."""
        if self._heartbeat_task:
            self._heartbeat_task.cancel()
        if self._channel and not self._channel.lost:
            with contextlib.suppress(WorkerLost, TimeoutError):
                async with asyncio.timeout(self._beat_s):
                    await self._channel.call("leave", self._caller_id)
            self._channel.close()
        self._held.clear()

    def _connected(self) -> Channel:
        """The channel to the actor, which is found or made."""
        if self._channel is None or self._channel.lost:
            resumed = self._channel is not None
            options = dict(name=self._name, namespace=NAMESPACE, get_if_exists=True)
            actor = zero_cpu_actor(RateLimitActor, **options).remote(resumed, self._silence_s)
            self._channel, self._delays = Channel(actor, "rate limiter"), DelayEstimator()
            if self._heartbeat_task:
                self._heartbeat_task.cancel()
            self._heartbeat_task = asyncio.ensure_future(self._heartbeat(self._channel))
        return self._channel

    async def _heartbeat(self, channel: Channel) -> None:
        with contextlib.suppress(WorkerLost):  # the next `acquire` makes another
            while True:
                await channel.call("heartbeat", self._caller_id)
                await asyncio.sleep(self._beat_s)

    def _is_late(self, given_at: float, limits: Limits) -> bool:
        extra_delay_s = self._delays.extra_delay_s(given_at, asyncio.get_running_loop().time())
        rated = limits.requests_per_minute is not None or limits.tokens_per_minute is not None
        return rated and extra_delay_s > limits.slack_s

    async def _withdraw(self, channel: Channel, ticket: int, call: asyncio.Future[float | None]) -> None:
        await channel.call("withdraw", self._caller_id, ticket)
        if await call is not None:
            await channel.call("refund", self._caller_id, ticket)

    def _run_in_background(self, call: Any) -> None:
        """Without waiting for the answer. A lost actor has forgotten what it is about."""
        task = asyncio.ensure_future(call)
        self._background_tasks.add(task)
        task.add_done_callback(self._ran)

    def _ran(self, task: asyncio.Task) -> None:
        self._background_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, WorkerLost):
            log.error("the rate limiter refused what it was told: %s: %s", type(error).__name__, error)
