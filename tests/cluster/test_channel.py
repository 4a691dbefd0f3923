"""Many small calls over few messages, on a real Ray cluster: answers, errors, cancellation, deaths."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from async_grpo.errors import ConfigurationError, RunFailed, WorkerLost

ray = pytest.importorskip("ray")
from async_grpo.cluster.channel import Channel, ChannelServer  # noqa: E402 - after the check that ray is there
from async_grpo.cluster.ray_session import zero_cpu_actor  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("ray_cluster")]


class NotPortable(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


class Echo(ChannelServer):
    """Counts its messages, so that a test can see how many a burst of calls took."""

    def __init__(self):
        self.messages, self.running, self.cancelled = 0, 0, 0
        self.serve({name: getattr(self, name) for name in ("echo", "sleep", "fail", "counts", "items")})

    async def exchange(self, caller_id, calls, waits):
        self.messages += bool(calls)
        return await super().exchange(caller_id, calls, waits)

    def echo(self, value):
        return value

    async def sleep(self, seconds: float) -> str:
        self.running += 1
        try:
            await asyncio.sleep(seconds)
            return "slept"
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def items(self, last_after_s: float):
        yield 0
        yield await self.sleep(last_after_s)
        raise ConfigurationError("no more")

    async def fail(self, portable: bool) -> None:
        raise ConfigurationError("as asked") if portable else NotPortable("as asked")

    async def counts(self) -> tuple[int, int, int]:
        return self.messages, self.running, self.cancelled

    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def echo() -> Iterator:
    actor = zero_cpu_actor(Echo).remote()
    yield actor
    ray.kill(actor)


async def test_a_burst_of_calls_is_answered_in_full_and_travels_in_one_message(echo):
    channel = Channel(echo, "echo")
    assert await asyncio.gather(*(channel.call("echo", i) for i in range(500))) == list(range(500))
    messages, _, _ = await channel.call("counts")
    assert messages == 2  # the burst, and the question itself


async def test_answers_come_to_their_callers_as_they_are_ready_not_in_the_order_of_asking(echo):
    one, other = Channel(echo, "echo"), Channel(echo, "echo")
    slow, quick = map(asyncio.ensure_future, (one.call("sleep", 1.0), one.call("echo", 1)))
    assert await other.call("echo", 2) == 2
    done, _ = await asyncio.wait({slow, quick}, return_when="FIRST_COMPLETED")
    assert done == {quick} and quick.result() == 1 and await slow == "slept"


async def test_an_error_of_the_actor_is_raised_as_itself(echo):
    channel = Channel(echo, "echo")
    with pytest.raises(ConfigurationError, match="as asked"):
        await channel.call("fail", True)
    with pytest.raises(RunFailed, match="NotPortable: as asked"):
        await channel.call("fail", False)
    with pytest.raises(TypeError, match="cannot be pickled"):
        await channel.call("echo", NotPortable())
    assert await channel.call("echo", "still here") == "still here"


async def test_a_cancelled_call_and_a_stream_that_is_closed_are_cancelled_in_the_actor(echo):
    channel = Channel(echo, "echo")

    async def until_running(count: int) -> None:
        while (await channel.call("counts"))[1] != count:
            await asyncio.sleep(0.01)

    call = asyncio.ensure_future(channel.call("sleep", 60))
    await until_running(1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until_running(0)
    assert (await channel.call("counts"))[2] == 1
    async with contextlib.aclosing(channel.stream("items", 600.0)) as items:
        assert await anext(items) == 0
        await until_running(1)
    await until_running(0)


async def test_items_come_as_they_are_ready_and_then_what_the_handler_raised(echo):
    items = Channel(echo, "echo").stream("items", 1.0)
    assert await anext(items) == 0
    started = time.monotonic()
    assert await anext(items) == "slept" and time.monotonic() - started > 0.5
    with pytest.raises(ConfigurationError, match="no more"):
        await anext(items)


async def test_the_death_of_an_actor_fails_every_call_in_flight_and_every_later_one(echo):
    channel = Channel(echo, "worker g7")
    calls = [asyncio.ensure_future(channel.call("sleep", 60)) for _ in range(3)]
    os.kill(await echo.pid.remote(), signal.SIGKILL)
    started = time.monotonic()
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, WorkerLost) and "worker g7 died" in str(outcome)
    assert time.monotonic() - started < 20
    with pytest.raises(WorkerLost):
        await channel.call("echo", 1)


async def test_an_actor_that_stops_answering_is_lost_after_the_deadline(echo, monkeypatch):
    for name, value in (("POLL_S", 1.5), ("GRACE_S", 0.5)):
        monkeypatch.setattr(f"async_grpo.cluster.channel.{name}", value)
    pid = await echo.pid.remote()  # it has started
    channel = Channel(echo, "stuck worker")
    assert await channel.call("echo", 1) == 1
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerLost, match="stuck worker did not answer for 2 s"):
            await channel.call("sleep", 60)
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_caller_that_was_forgotten_is_told_so_instead_of_waiting_for_ever():
    """Without Ray: the actor's half alone."""
    server = ChannelServer()
    server.poll_s, server.forget_s = 0.01, 0.05
    server.serve({"sleep": asyncio.sleep})
    await server.exchange("stalled", [(1, "sleep", (60,))], False)
    await asyncio.sleep(0.1)
    await server.exchange("another", [], True)
    for _ in range(2):
        with pytest.raises(WorkerLost, match="silent for 0.05 s is forgotten"):
            await server.exchange("stalled", [], True)
