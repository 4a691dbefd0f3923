"""Limits over processes, on a real Ray cluster: they are global, and nobody's death or silence keeps a permit."""

import asyncio
import os
import random
import signal
import time
import uuid
from functools import partial

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.http.rate_limiter import CATCH_UP_FACTOR

ray = pytest.importorskip("ray")
from async_grpo.cluster.rate_limit_actor import NAMESPACE, RemoteRateLimiter  # noqa: E402 - after the check
from async_grpo.cluster.ray_session import zero_cpu_actor  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("ray_cluster")]
ONE = Limits(concurrency=1)


@pytest.fixture
def name() -> str:
    return f"traffic-{uuid.uuid4().hex[:8]}"


traffic_of = partial(RemoteRateLimiter, silence_s=1.5)


@pytest.fixture
def limiter(name) -> RemoteRateLimiter:
    return traffic_of(name)


class Caller:
    """A process of its own, with many calls under way."""

    def __init__(self, name: str) -> None:
        self._limiter = traffic_of(name)

    async def run(self, calls: int, limits: Limits, lasts: float) -> list[tuple[float, float]]:
        """(start, end) of each call, on the clock that all processes of a machine share."""

        async def call() -> tuple[float, float]:
            permit = await self._limiter.acquire("judge", limits, tokens=5)
            start = time.monotonic()
            await asyncio.sleep(lasts)
            end = time.monotonic()
            await self._limiter.release("judge", permit, used_tokens=5)
            return start, end

        return await asyncio.gather(*(call() for _ in range(calls)))

    async def pid(self) -> int:
        return os.getpid()


async def settled(limiter: RemoteRateLimiter, in_flight: int, within_s: float = 10.0) -> dict:
    """The stats of "judge" once so many permits are out and nobody waits."""
    async with asyncio.timeout(within_s):
        while True:
            stats = (await limiter.stats())["judge"]
            if stats["in_flight"] == in_flight and not stats["waiting"]:
                return stats
            await asyncio.sleep(0.05)


async def test_slots_and_rate_are_shared_by_all_processes(name):
    """Four processes want 30 calls each; 3 slots and 40 per second. A limiter of each one's own would allow 12."""
    limits = Limits(concurrency=3, requests_per_minute=2400, tokens_per_minute=2400 * 5)
    callers = [zero_cpu_actor(Caller).remote(name) for _ in range(4)]
    spans = [s for r in await asyncio.gather(*(c.run.remote(30, limits, 0.01) for c in callers)) for s in r]
    starts = sorted(start for start, _ in spans)
    assert len(spans) == 120
    assert max(sum(s <= start < e for s, e in spans) for start in starts) <= 3
    assert starts[-1] - starts[0] >= 119 / 40 - limits.burst_s - limits.slack_s
    for i, first in enumerate(starts):
        in_a_second = sum(first <= start < first + 1.0 for start in starts[i:])
        assert in_a_second <= CATCH_UP_FACTOR * 40 * (1.0 + limits.burst_s + limits.slack_s) + 1
    for caller in callers:
        ray.kill(caller)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_permit_of_a_dead_or_silent_process_is_given_back_and_what_it_says_later_does_no_harm(
    name, limiter, signal_number
):
    await limiter.release("judge", await limiter.acquire("judge", ONE))  # this process owns the actor
    caller = zero_cpu_actor(Caller).remote(name)
    run, pid = caller.run.remote(1, ONE, 3.0), await caller.pid.remote()
    while not (await limiter.stats())["judge"]["in_flight"]:
        await asyncio.sleep(0.05)
    wait = asyncio.ensure_future(limiter.acquire("judge", ONE))
    await asyncio.sleep(0.3)
    assert not wait.done()
    os.kill(pid, signal_number)
    async with asyncio.timeout(20):
        permit = await wait
    if signal_number == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
        await run  # it releases what was given back long ago
        assert (await settled(limiter, 1))["granted"] == 3
    await limiter.release("judge", permit)
    await settled(limiter, 0)


async def test_cancelled_waits_leave_nothing_behind_whenever_they_are_cancelled(limiter):
    """Some are cancelled before their call leaves, some in the queue, some with their permit on its way to them."""
    limits, draw, granted = Limits(concurrency=3), random.Random(3), []

    async def impatient() -> None:
        try:
            async with asyncio.timeout(draw.choice([0.0, 0.001, draw.uniform(0, 0.3)])):
                permit = await limiter.acquire("judge", limits, tokens=1)
        except TimeoutError:
            return
        granted.append(permit)
        await asyncio.sleep(draw.choice([0.0, 0.002]))
        await limiter.release("judge", permit)

    await limiter.release("judge", await limiter.acquire("judge", limits))  # the actor is there now
    for _ in range(10):
        await asyncio.gather(*(impatient() for _ in range(60)))
    await settled(limiter, 0)
    assert 0 < len(granted) < 600
    assert len({await limiter.acquire("judge", limits) for _ in range(3)}) == 3


async def test_after_the_death_of_the_actor_another_one_goes_on_and_old_permits_are_forgotten(name, limiter):
    other = traffic_of(name)
    old = await limiter.acquire("judge", ONE)
    waits = [asyncio.ensure_future(t.acquire("judge", ONE)) for t in (limiter, other)]
    await asyncio.sleep(0.5)
    ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    async with asyncio.timeout(30):
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1  # one slot, also with the new actor
        await limiter.release("judge", old)  # says nothing to the new one, which does not know it
        await asyncio.sleep(0.5)
        assert sum(wait.done() for wait in waits) == 1
        for holder, wait in ((limiter, waits[0]), (other, waits[1])):
            if wait in done:
                await holder.release("judge", wait.result())
        await asyncio.gather(*waits)


async def test_closing_gives_everything_back_and_mistakes_are_reported_to_whoever_makes_them(name, limiter):
    other = traffic_of(name)
    permit = await limiter.acquire("judge", ONE)
    with pytest.raises(ConfigurationError, match="concurrency=2"):
        await limiter.acquire("judge", Limits(concurrency=2))
    with pytest.raises(ValueError, match=f"permit {permit} of 'another'"):
        await limiter.release("another", permit)
    wait = asyncio.ensure_future(other.acquire("judge", ONE))
    await asyncio.sleep(0.2)
    assert not wait.done()
    await limiter.close()
    async with asyncio.timeout(5):
        await wait
    with pytest.raises(ValueError, match=f"permit {permit} of 'judge' is not out"):
        await limiter.release("judge", permit)
