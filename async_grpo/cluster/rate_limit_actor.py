"""`RemoteRateLimiter`: limits that hold over all processes and nodes of a cluster, kept by one `RateLimitActor`.

The actor is the cluster's, not a run's: a judge does not care which run asks. It ends with the process that made it,
and the next call makes another. The new one begins without a burst, so that the rates hold across the change, but it
does not know the permits that are out: until they are over, more than `concurrency` calls may run.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator
from typing import Any

from async_grpo.cluster.channel import Channel, ChannelServer
from async_grpo.cluster.ray_session import zero_cpu_actor
from async_grpo.errors import WorkerLost
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.http.rate_limiter import Limiter

NAMESPACE, NAME = "async-grpo-traffic", "traffic"
SILENCE_S = 30.0  # a caller that says nothing for so long is gone: its permits are given back
PAUSE_S = 0.5  # before another actor is made

log = logging.getLogger(__name__)


class RateLimitActor(ChannelServer):
    """One `Limiter`."""

    def __init__(self, resumed: bool, silence_s: float) -> None:
        self._limiter = Limiter(resumed=resumed)
        self.poll_s, self.forget_s = silence_s / 6, silence_s
        self.answer_delay_s = 0.01  # a permit that travels is a slot that is not used
        self.serve({"hold": self._hold, "release": self._release, "stats": self._limiter.stats})

    async def _hold(self, key: str, limits: Limits, tokens: float, phase: str) -> AsyncGenerator[int]:
        """Yield a permit, and keep it until the call is ended: by whoever has it, or by its silence."""
        permit = await self._limiter.acquire(key, limits, tokens=tokens, phase=phase)
        try:
            yield permit
            await asyncio.Event().wait()
        finally:
            await self._release(key, permit, None)

    async def _release(self, key: str, permit: int, used_tokens: float | None) -> None:
        with contextlib.suppress(ValueError):  # it was given back before
            await self._limiter.release(key, permit, used_tokens=used_tokens)


class RemoteRateLimiter:
    """`RateLimiter` through the cluster's actor called `name`, for one event loop. A process that dies, or is silent for
    `silence_s`, gives its permits back."""

    def __init__(self, name: str = NAME, *, silence_s: float = SILENCE_S) -> None:
        self._name, self._silence_s = name, silence_s
        self._tickets = itertools.count(1)
        self._held: dict[int, tuple[str, int, AsyncGenerator[int], Channel]] = {}
        self._channel: Channel | None = None
        self._releases: set[asyncio.Task[None]] = set()

    async def acquire(self, key: str, limits: Limits, *, tokens: float = 0.0, phase: str = "train") -> int:
        """See `RateLimiter`. If the actor dies, the wait goes on at the end of the next one's queue."""
        while True:
            channel = self._connected()
            hold = channel.stream("hold", key, limits, tokens, phase)
            try:
                permit = await anext(hold)
            except WorkerLost as lost:
                log.warning("the rate limiter is asked anew: %s", lost)
                await asyncio.sleep(PAUSE_S)
                continue
            ticket = next(self._tickets)
            self._held[ticket] = key, permit, hold, channel
            return ticket

    async def release(self, key: str, permit: int, *, used_tokens: float | None = None) -> None:
        """See `RateLimiter`; does not wait for the actor's word.

        ValueError: the permit is not out.
        """
        if permit not in self._held or self._held[permit][0] != key:
            raise ValueError(f"permit {permit} of {key!r} is not out: it was never given, or released before")
        release = asyncio.create_task(self._give_back(*self._held.pop(permit), used_tokens))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def _give_back(
        self, key: str, permit: int, hold: AsyncGenerator[int], channel: Channel, used_tokens: float | None
    ) -> None:
        with contextlib.suppress(WorkerLost):  # a lost actor has forgotten what it is about
            async with contextlib.aclosing(hold):
                await channel.call("release", key, permit, used_tokens)

    async def stats(self) -> dict[str, dict[str, Any]]:
        """The cluster's; see `Limiter.stats`."""
        return await self._connected().call("stats")

    async def close(self) -> None:
        """Give everything back."""
        if self._channel:
            self._channel.close()
        self._held.clear()

    def _connected(self) -> Channel:
        """The channel to the actor, which is found or made."""
        if self._channel is None or self._channel.lost:
            options = dict(name=self._name, namespace=NAMESPACE, get_if_exists=True)
            resumed = self._channel is not None
            actor = zero_cpu_actor(RateLimitActor, **options).remote(resumed, self._silence_s)
            self._channel = Channel(actor, "rate limiter")
        return self._channel
