"""A worker that is told to end gets no more work, ends what it has, and what it cannot end goes on elsewhere."""

import asyncio

import numpy as np
import pytest
import virtual_time
from schedules import Event, Schedule
from simulated_run import run_through

from async_grpo.cluster.registered_workers import LogprobWorkers
from async_grpo.errors import WorkerLost
from async_grpo.experience.worker_registry import least_loaded
from async_grpo.messages import WorkerInfo

PIECE = [np.arange(3)], [1]


class Slow:
    """A link to a worker that takes so many seconds for a piece of work, and notes how many it was given."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.given, self.lost = seconds, 0, asyncio.Event()

    def connect(self, name, on_lost):
        return self

    async def call(self, method, *args):
        self.given += 1
        dying = asyncio.create_task(self.lost.wait())
        working = asyncio.create_task(asyncio.sleep(self.seconds))
        await asyncio.wait((dying, working), return_when="FIRST_COMPLETED")
        if self.lost.is_set():
            raise WorkerLost("closed")
        return self.seconds

    def close(self):
        self.lost.set()


async def two(first_s: float, second_s: float) -> tuple[LogprobWorkers, Slow, Slow]:
    workers = LogprobWorkers("reference", 60.0, lambda handle, *args: handle.connect(*args), least_loaded)
    both = Slow(first_s), Slow(second_s)
    for name, one in zip("ab", both, strict=True):
        await workers.register(WorkerInfo(name, "reference", 2, 1000), one)
    return workers, *both


def test_a_worker_that_drains_ends_what_it_has_and_gets_no_more():
    async def check() -> None:
        workers, first, second = await two(10.0, 1.0)
        asked = [asyncio.create_task(workers.logprobs(*PIECE)) for _ in range(2)]
        await asyncio.sleep(0.1)
        draining = asyncio.create_task(workers.drain("a", 30.0))
        gone = asyncio.create_task(workers.until_gone("a"))
        await asyncio.sleep(2)
        workers.registry.activate("a")  # weights land in the middle
        assert [await workers.logprobs(*PIECE) for _ in range(3)] == [1.0] * 3
        assert not draining.done() and (first.given, second.given) == (1, 4)
        assert await asyncio.gather(*asked) == [10.0, 1.0]
        assert await gone == "it was told to end, 0 sequences go on elsewhere"
        assert asyncio.get_running_loop().time() < 1012 and [
            m.worker_id for m in workers.registry.members()
        ] == ["b"]

    virtual_time.run(check(), 100)


def test_what_it_does_not_end_in_time_goes_on_elsewhere():
    async def check() -> None:
        workers, *_ = await two(100.0, 1.0)
        asked = [asyncio.create_task(workers.logprobs(*PIECE)) for _ in range(2)]
        await asyncio.sleep(0.1)
        gone = asyncio.create_task(workers.until_gone("a"))
        await workers.drain("a", 30.0)
        assert await asyncio.gather(*asked) == [1.0, 1.0]
        assert await gone == "it was told to end, 1 sequences go on elsewhere"
        await workers.drain("a", 30.0)  # it is told twice

    virtual_time.run(check(), 100)


@pytest.mark.parametrize("lasts", [0.0, 60.0])
def test_groups_of_a_worker_that_drains_are_trained_once(lasts):
    drained = tuple(Event(at, "drain", who=0, lasts=lasts) for at in (1.0, 3.0, 6.0))
    assert run_through(Schedule(3, workers=2, events=drained))["drain"] >= 2
