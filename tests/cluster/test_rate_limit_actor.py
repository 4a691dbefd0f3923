"""Limits over processes, on a real Ray cluster: they are global, and nobody's death or silence keeps a permit."""

import asyncio
import os
import random
import signal
import time
import uuid
from collections.abc import Iterator

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.http.rate_limiter import CATCH_UP_FACTOR

ray = pytest.importorskip("ray")
from async_grpo.cluster.rate_limit_actor import NAMESPACE, RemoteRateLimiter  # noqa: E402 - after the check
from async_grpo.cluster.ray_session import zero_cpu_actor  # noqa: E402

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    here = os.path.dirname(__file__)  # workers unpickle the actor classes of this file by name
    paths = {"PYTHONPATH": os.pathsep.join([here, os.path.dirname(here)])}
    ray.init(
        address="local",  # never a cluster that happens to run here
        include_dashboard=False,
        log_to_driver=False,
        namespace="test-traffic",
        runtime_env={"env_vars": paths},
    )
    yield
    ray.shutdown()


@pytest.fixture
def name() -> str:
    return f"traffic-{uuid.uuid4().hex[:8]}"


def traffic_of(name: str) -> RemoteRateLimiter:
    return RemoteRateLimiter(name, silence_s=1.5)


class Caller:
    """A process of its own, with many calls under way."""

    def __init__(self, name: str) -> None:
        self._rate_limiter = traffic_of(name)

    async def run(self, calls: int, limits: Limits, lasts: float) -> list[tuple[float, float]]:
        """(start, end) of each call, on the clock that all processes of a machine share."""

        async def call() -> tuple[float, float]:
            permit = await self._rate_limiter.acquire("judge", limits, tokens=5)
            start = time.monotonic()
            await asyncio.sleep(lasts)
            end = time.monotonic()
            await self._rate_limiter.release("judge", permit, used_tokens=5)
            return start, end

        return await asyncio.gather(*(call() for _ in range(calls)))

    async def take(self, limits: Limits) -> int:
        await self._rate_limiter.acquire("judge", limits)
        return os.getpid()

    async def actor_pid(self) -> int:
        return os.getpid()


async def settled(rate_limiter: RemoteRateLimiter, in_flight: int, within_s: float = 10.0) -> dict:
    """The stats of "judge" once so many permits are out and nobody waits."""
    give_up = time.monotonic() + within_s
    while True:
        stats = (await rate_limiter.stats())["judge"]
        if stats["in_flight"] == in_flight and not stats["waiting"]:
            return stats
        assert time.monotonic() < give_up, stats
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


async def test_the_permits_of_a_killed_process_are_given_back(name):
    limits = Limits(concurrency=2)
    rate_limiter, doomed = traffic_of(name), zero_cpu_actor(Caller).remote(name)
    await rate_limiter.release(
        "judge", await rate_limiter.acquire("judge", limits)
    )  # this process owns the actor
    pid = await doomed.take.remote(limits)
    await doomed.take.remote(limits)
    wait = asyncio.ensure_future(rate_limiter.acquire("judge", limits))
    await asyncio.sleep(0.5)
    assert not wait.done()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await rate_limiter.release("judge", await wait)
    await rate_limiter.close()


async def test_the_permits_of_a_silent_process_are_given_back_and_what_it_says_later_does_no_harm(name):
    limits = Limits(concurrency=1)
    keeper = traffic_of(name)
    permit = await keeper.acquire("judge", limits)  # makes the actor here: it must outlive the silent process
    await keeper.release("judge", permit)
    await settled(keeper, 0)
    silent = zero_cpu_actor(Caller).remote(name)
    run = silent.run.remote(1, limits, 3.0)
    while not (await keeper.stats())["judge"]["in_flight"]:
        await asyncio.sleep(0.05)
    pid = await silent.actor_pid.remote()
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            permit = await keeper.acquire("judge", limits)
    finally:
        os.kill(pid, signal.SIGCONT)
    await run  # it releases what was given back long ago
    stats = await settled(keeper, 1)
    assert stats["granted"] == 3
    await keeper.release("judge", permit)
    await settled(keeper, 0)
    await keeper.close()


async def test_cancelled_waits_leave_nothing_behind_whenever_they_are_cancelled(name):
    """Some are cancelled before their call leaves, some in the queue, some with their permit on its way to them."""
    rate_limiter, limits, draw = traffic_of(name), Limits(concurrency=3), random.Random(3)
    granted = 0

    async def impatient() -> None:
        nonlocal granted
        try:
            async with asyncio.timeout(draw.choice([0.0, 0.001, draw.uniform(0, 0.3)])):
                permit = await rate_limiter.acquire("judge", limits, tokens=1)
        except TimeoutError:
            return
        granted += 1
        await asyncio.sleep(draw.choice([0.0, 0.002]))
        await rate_limiter.release("judge", permit)

    await rate_limiter.release("judge", await rate_limiter.acquire("judge", limits))  # the actor is there now
    for _ in range(10):
        await asyncio.gather(*(impatient() for _ in range(60)))
    await settled(rate_limiter, 0)
    assert 0 < granted < 600
    permits = [await rate_limiter.acquire("judge", limits) for _ in range(3)]
    assert len(set(permits)) == 3
    await rate_limiter.close()


async def test_after_the_death_of_the_actor_another_one_goes_on_and_old_permits_are_forgotten(name):
    rate_limiter, other, limits = traffic_of(name), traffic_of(name), Limits(concurrency=1)
    old = await rate_limiter.acquire("judge", limits)
    waits = [asyncio.ensure_future(t.acquire("judge", limits)) for t in (rate_limiter, other)]
    await asyncio.sleep(0.5)
    ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    async with asyncio.timeout(30):
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1  # one slot, also with the new actor
        await rate_limiter.release("judge", old)  # says nothing to the new one, which does not know it
        await asyncio.sleep(0.5)
        assert sum(wait.done() for wait in waits) == 1
        for holder, wait in ((rate_limiter, waits[0]), (other, waits[1])):
            if wait in done:
                await holder.release("judge", wait.result())
        await asyncio.gather(*waits)
    await rate_limiter.close()
    await other.close()


async def test_closing_gives_everything_back(name):
    rate_limiter, other, limits = traffic_of(name), traffic_of(name), Limits(concurrency=1)
    permit = await rate_limiter.acquire("judge", limits)
    wait = asyncio.ensure_future(other.acquire("judge", limits))
    await asyncio.sleep(0.2)
    assert not wait.done()
    await rate_limiter.close()
    async with asyncio.timeout(5):
        await other.release("judge", await wait)
    with pytest.raises(ValueError, match=f"permit {permit}"):
        await rate_limiter.release("judge", permit)
    await other.close()


async def test_mistakes_are_reported_to_whoever_makes_them(name):
    rate_limiter, limits = traffic_of(name), Limits(concurrency=1)
    permit = await rate_limiter.acquire("judge", limits)
    with pytest.raises(ConfigurationError, match="concurrency=2"):
        await rate_limiter.acquire("judge", Limits(concurrency=2))
    with pytest.raises(ValueError, match=f"permit {permit} of 'another'"):
        await rate_limiter.release("another", permit)
    await rate_limiter.release("judge", permit)
    with pytest.raises(ValueError, match=f"permit {permit} of 'judge' is not out"):
        await rate_limiter.release("judge", permit)
    await rate_limiter.close()
