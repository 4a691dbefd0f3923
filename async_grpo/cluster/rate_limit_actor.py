"""`RemoteRateLimiter`: rate limits that apply to all processes of a cluster together, enforced by one `RateLimitActor`.

The actor belongs to the cluster and not to a run, because a judge's limits apply to all runs together. It ends with the
process that created it. Then the next call creates a new actor. The new actor starts without a burst, so that the rates
are kept. It does not know which permits the old actor has given. So until these permits are released, more than
`concurrency` calls may run.
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
SILENCE_S = 30.0  # seconds without a message of a caller after which its permits are released
POLLS_PER_SILENCE = 6  # a healthy caller polls at least this many times in `SILENCE_S`
PAUSE_S = 0.5  # pause in seconds before a lost actor is replaced

log = logging.getLogger(__name__)


class RateLimitActor(ChannelServer):
    """The actor with the `Limiter` of the whole cluster.

    Args:
        resumed: Whether another actor enforced the limits before. If so, the limiter starts without a burst.
        silence_s: Seconds of silence after which a caller's permits are released.
    """

    # Shorter than the default, because nobody can use a permit until it reaches its caller
    answer_delay_s = 0.01

    def __init__(self, resumed: bool, silence_s: float) -> None:
        self._limiter = Limiter(resumed=resumed)
        self.poll_s = silence_s / POLLS_PER_SILENCE
        self.forget_s = silence_s
        self.serve({"hold": self._hold, "release": self._release, "stats": self._limiter.stats})

    async def _hold(self, key: str, limits: Limits, tokens: float, phase: str) -> AsyncGenerator[int]:
        """Yield a permit, and keep it until the caller cancels this call, or was silent for too long."""
        permit = await self._limiter.acquire(key, limits, tokens=tokens, phase=phase)
        try:
            yield permit
            await asyncio.Event().wait()
        finally:
            await self._release(key, permit, None)

    async def _release(self, key: str, permit: int, used_tokens: float | None) -> None:
        # Releasing a permit twice raises ValueError. If the caller has already released this permit, that is no error
        # here
        with contextlib.suppress(ValueError):
            await self._limiter.release(key, permit, used_tokens=used_tokens)


@dataclass
class _HeldPermit:
    """A permit that was given to this process."""

    key: str
    permit: int  # the actor's number for the permit
    hold: AsyncGenerator[int]  # the call that keeps the permit in the actor
    channel: Channel  # channel to the actor that gave the permit

    async def give_back(self, used_tokens: float | None) -> None:
        """Release the permit and end the call that keeps it in the actor."""
        # If the actor is lost, its permits no longer exist
        with contextlib.suppress(WorkerLost):
            async with contextlib.aclosing(self.hold):
                await self.channel.call("release", self.key, self.permit, used_tokens)


class RemoteRateLimiter:
    """`RateLimiter` that uses the cluster's `RateLimitActor`. Use it in one event loop.

    Args:
        name: Name of the actor.
        silence_s: Seconds of silence after which the actor releases the permits of this process.
    """

    def __init__(self, name: str = NAME, *, silence_s: float = SILENCE_S) -> None:
        self._name = name
        self._silence_s = silence_s
        self._tickets = itertools.count(1)
        self._permits: dict[int, _HeldPermit] = {}  # by ticket, the number that `acquire` returns
        self._channel: Channel | None = None
        self._releases: set[asyncio.Task[None]] = set()

    async def acquire(self, key: str, limits: Limits, *, tokens: float = 0.0, phase: str = "train") -> int:
        """Wait for a permit, and return its number; see `RateLimiter`.

        If the actor dies, the request goes to the end of the queue of the next actor.
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
        """Release a permit without waiting for the actor; see `RateLimiter`.

        Raises:
            ValueError: The permit was never given, or is already released.
        """
        held_permit = self._permits.get(permit)
        if held_permit is None or held_permit.key != key:
            raise ValueError(f"permit {permit} of {key!r} is not out: it was never given, or released before")
        del self._permits[permit]
        release = asyncio.create_task(held_permit.give_back(used_tokens))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def stats(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of the whole cluster; see `Limiter.stats`."""
        return await self._connected().call("stats")

    async def close(self) -> None:
        """Release all permits of this process by closing the channel."""
        if self._channel is not None:
            self._channel.close()
        self._permits.clear()

    def _connected(self) -> Channel:
        """Return a channel to the actor. Create the actor if it does not exist."""
        if self._channel is None or self._channel.lost:
            actor = zero_cpu_actor(RateLimitActor, name=self._name, namespace=NAMESPACE, get_if_exists=True)
            is_resumed = self._channel is not None
            self._channel = Channel(actor.remote(is_resumed, self._silence_s), "rate limiter")
        return self._channel
