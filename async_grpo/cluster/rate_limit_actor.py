"""`RemoteRateLimiter`: limits that hold over all processes and nodes of a cluster, kept by one `RateLimitActor`.

The actor belongs to the cluster and not to a run, because the limits of a judge hold for all runs together. It ends with
the process that made it, and the next call makes another one. The new actor begins without a burst, so that the rates
hold across the change. But it does not know the permits that are out: until they end, more than `concurrency` calls may
run.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from async_grpo.cluster.channel import Channel, ChannelServer
from async_grpo.cluster.ray_session import zero_cpu_actor
from async_grpo.errors import WorkerLost
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.http.rate_limiter import Limiter

NAMESPACE = "async-grpo-traffic"
NAME = "traffic"
SILENCE_S = 30.0  # silence after which a caller counts as gone, and its permits are given back
POLLS_PER_SILENCE = 6
PAUSE_S = 0.5  # before another actor is made

log = logging.getLogger(__name__)


class RateLimitActor(ChannelServer):
    """The actor that holds the cluster's `Limiter`.

    Args:
        resumed: Another actor held the limits before, so the limiter begins without a burst.
        silence_s: Silence after which a caller counts as gone.
    """

    # Short, because a permit on its way is a slot that is not used
    answer_delay_s = 0.01

    def __init__(self, resumed: bool, silence_s: float) -> None:
        self._limiter = Limiter(resumed=resumed)
        self.poll_s = silence_s / POLLS_PER_SILENCE
        self.forget_s = silence_s
        self.serve({"hold": self._hold, "release": self._release, "stats": self._limiter.stats})

    async def _hold(self, key: str, limits: Limits, tokens: float, phase: str) -> AsyncGenerator[int]:
        """Yield a permit, and hold it until the call is cancelled: by its caller, or because the caller is silent."""
        permit = await self._limiter.acquire(key, limits, tokens=tokens, phase=phase)
        try:
            yield permit
            await asyncio.Event().wait()
        finally:
            await self._release(key, permit, None)

    async def _release(self, key: str, permit: int, used_tokens: float | None) -> None:
        # The permit may have been given back before
        with contextlib.suppress(ValueError):
            await self._limiter.release(key, permit, used_tokens=used_tokens)


@dataclass
class _HeldPermit:
    """A permit that is out."""

    key: str
    permit: int  # the actor's number of it
    hold: AsyncGenerator[int]  # the call that holds it
    channel: Channel  # to the actor that gave it

    async def give_back(self, used_tokens: float | None) -> None:
        """Release the permit and end the call that holds it."""
        # A lost actor has forgotten the permit
        with contextlib.suppress(WorkerLost):
            async with contextlib.aclosing(self.hold):
                await self.channel.call("release", self.key, self.permit, used_tokens)


class RemoteRateLimiter:
    """`RateLimiter` through an actor of the cluster, for one event loop.

    Args:
        name: Name of the actor.
        silence_s: Silence after which this process counts as gone. Its permits are then given back, as if it had died.
    """

    def __init__(self, name: str = NAME, *, silence_s: float = SILENCE_S) -> None:
        self._name = name
        self._silence_s = silence_s
        self._tickets = itertools.count(1)
        self._permits: dict[int, _HeldPermit] = {}  # by ticket
        self._channel: Channel | None = None
        self._releases: set[asyncio.Task[None]] = set()

    async def acquire(self, key: str, limits: Limits, *, tokens: float = 0.0, phase: str = "train") -> int:
        """Wait for a permit; see `RateLimiter`.

        If the actor dies, the wait continues at the end of the next actor's queue.
        """
        while True:
            channel = self._connected()
            hold = channel.stream("hold", key, limits, tokens, phase)
            try:
                permit = await anext(hold)
            except WorkerLost as error:
                log.warning("the rate limiter is asked again: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            ticket = next(self._tickets)
            self._permits[ticket] = _HeldPermit(key, permit, hold, channel)
            return ticket

    async def release(self, key: str, permit: int, *, used_tokens: float | None = None) -> None:
        """Give a permit back without waiting for the actor; see `RateLimiter`.

        Raises:
            ValueError: The permit is not out.
        """
        held_permit = self._permits.get(permit)
        if held_permit is None or held_permit.key != key:
            raise ValueError(f"permit {permit} of {key!r} is not out: it was never given, or released before")
        del self._permits[permit]
        release = asyncio.create_task(held_permit.give_back(used_tokens))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def stats(self) -> dict[str, dict[str, Any]]:
        """Return the cluster's numbers; see `Limiter.stats`."""
        return await self._connected().call("stats")

    async def close(self) -> None:
        """Give all permits back."""
        if self._channel is not None:
            self._channel.close()
        self._permits.clear()

    def _connected(self) -> Channel:
        """Return the channel to the actor, which is found or made."""
        if self._channel is None or self._channel.lost:
            actor = zero_cpu_actor(RateLimitActor, name=self._name, namespace=NAMESPACE, get_if_exists=True)
            is_resumed = self._channel is not None
            self._channel = Channel(actor.remote(is_resumed, self._silence_s), "rate limiter")
        return self._channel
