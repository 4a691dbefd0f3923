"""Samples that a worker is given ahead: it is never idle, and none of them pays for another one."""

import asyncio
import itertools
import random
import textwrap
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

from processes import process_maker

from async_grpo.errors import WorkerLost
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.adapter_queue import TAKE_BACK_S
from async_grpo.rewards.isolation.child_process import ChildProcess
from async_grpo.rewards.pool import VerifierPool
from async_grpo.rewards.verifier_worker import MAX_PREFETCH
from async_grpo.types import AdapterResult, RewardStatus
from tests.helpers.one_worker import OneWorker

OK, FAILED, TIMED_OUT, ABSTAINED = RewardStatus

PAGE = textwrap.dedent(
    """
    import os, signal, time

    def obeys(sample):
        with open(sample["journal"], "a") as file:
            file.write(f"{sample['id']} {os.getpid()}\\n")
        if sample["act"] == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(sample["act"])
        return float(sample["id"])

    class SlowToBuild:
        def __init__(self):
            time.sleep(0.8)

        def __call__(self, sample):
            time.sleep(sample["act"])
            return 1.0

    REWARD_ADAPTERS = {"obeys": obeys, "slow_to_build": SlowToBuild}
    """
)
SOURCE = RewardRegistrySource("page_of_obedience", PAGE)


class Process:
    """A queue with one process that has been quick so far, and which samples were served by which process."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal"
        self.worker = OneWorker(SOURCE, "obeys")
        self.ids = itertools.count()

    async def __aenter__(self) -> "Process":
        await self.worker.start()
        for _ in range(3):
            await self.ask(0.0)
        self.ids = itertools.count()
        self.journal.unlink()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.worker.close()

    def ask(self, act: float | str, timeout_s: float = 20.0) -> asyncio.Task[AdapterResult]:
        sample = {"id": next(self.ids), "act": act, "journal": str(self.journal)}
        return asyncio.create_task(self.worker.score(sample, timeout_s))

    @property
    def served(self) -> list[tuple[int, int]]:
        """(sample, process), in the order in which they were begun."""
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [(int(number), int(pid)) for number, pid in map(str.split, lines)]


def outcomes(results: list[AdapterResult]) -> list[tuple[RewardStatus, int]]:
    return [(result.status, result.attempts) for result in results]


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_the_next_sample_is_begun_before_anybody_heard_of_the_last_answer(tmp_path):
    """This event loop is held up while the process finishes one sample: the next lies in its pipe."""
    async with Process(tmp_path) as process:
        tasks = [process.ask(0.1), process.ask(0.0)]
        await until(lambda: process.served)
        time.sleep(0.5)
        assert [number for number, _ in process.served] == [0, 1]
        assert [(await task).reward for task in tasks] == [0.0, 1.0]


async def test_the_time_of_a_sample_begins_when_the_one_before_it_is_done(tmp_path):
    async with Process(tmp_path) as process:
        tasks = [process.ask(0.3, timeout_s=0.6) for _ in range(4)]
        assert outcomes([await task for task in tasks]) == [(OK, 1)] * 4


async def test_a_sample_that_is_cancelled_ahead_of_its_turn_is_never_served(tmp_path):
    async with Process(tmp_path) as process:
        first, second, third = (process.ask(0.15) for _ in range(3))
        await until(lambda: process.served)
        second.cancel()
        results = [await first, await third]
        assert outcomes(results) == [(OK, 1)] * 2 and [r.reward for r in results] == [0.0, 2.0]
        assert second.cancelled() and [number for number, _ in process.served] == [0, 2]
        assert len({pid for _, pid in process.served}) == 1


async def test_a_cancellation_that_comes_too_late_costs_the_others_nothing(tmp_path, monkeypatch):
    """Its process begins it all the same: it is ended with the sample's time, and the next ones go to another."""
    monkeypatch.setattr(ChildProcess, "_withdraw", lambda self, request: None)
    async with Process(tmp_path) as process:
        first, hang = process.ask(0.1), process.ask(600, timeout_s=0.3)
        await until(lambda: process.served)
        hang.cancel()
        following = [process.ask(0.0, timeout_s=0.5) for _ in range(3)]
        assert outcomes([await task for task in (first, *following)]) == [(OK, 1)] * 4
        numbers, (one, same, *others) = zip(*process.served, strict=True)
        assert numbers == (0, 1, 2, 3, 4) and one == same and len({*others} - {one}) == 1


async def test_in_chaos_only_the_guilty_fail(tmp_path):
    chance = random.Random(0)
    acts = [chance.choice([0.0, 0.0, 0.01, 0.01, "crash", 600]) for _ in range(14)]
    async with Process(tmp_path) as process:
        tasks = [process.ask(act, timeout_s=0.5) for act in acts]
        cancelled = set(chance.sample(range(len(acts)), 3))
        for number in sorted(cancelled):
            await asyncio.sleep(chance.uniform(0, 0.5))
            tasks[number].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, (act, result) in enumerate(zip(acts, results, strict=True)):
        if isinstance(result, asyncio.CancelledError):
            assert number in cancelled
            continue
        expected = {"crash": (FAILED, 2), 600: (TIMED_OUT, 1)}.get(act, (OK, 1))
        assert outcomes([result]) == [expected], (number, act, result)
        assert [served for served, _ in process.served].count(number) == expected[1]
        assert act in ("crash", 600) or result.reward == float(number)


class Counting:
    """A worker that serves one after the other; counts how many it holds."""

    def __init__(self, seconds: float = 0.0005, prefetch: bool = True) -> None:
        self.capacity, self.prefetch = 1, prefetch
        self.seconds, self.held, self.most = seconds, 0, 0
        self.ids: list[int] = []  # of the samples that were served
        self._turn = asyncio.Lock()

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        self.held += 1
        self.most = max(self.most, self.held)
        try:
            async with self._turn:
                await asyncio.sleep(sample["seconds"])
        finally:
            self.held -= 1
        self.ids.append(sample["id"])
        return AdapterResult("a", OK, 1.0)

    async def close(self) -> None: ...


async def verify_all(workers: list[Counting], count: int, slow: dict[int, float] | None = None):
    """The results of samples, some of which are slow, and the statistics."""
    made = iter(workers)

    async def make(_: str) -> Counting:
        return next(made)

    usual_s = workers[0].seconds
    samples = [{"id": number, "seconds": (slow or {}).get(number, usual_s)} for number in range(count)]
    async with VerifierPool(["a"], make, workers=len(workers)) as pool:
        verdicts = await asyncio.gather(*map(pool.verify, samples))
        return [verdict.results[0] for verdict in verdicts], pool.stats()["a"]


async def test_only_quick_workers_that_want_it_are_given_samples_ahead():
    quick, slow, strict = Counting(), Counting(0.15), Counting(prefetch=False)
    for worker, count in ((quick, 200), (slow, 3), (strict, 200)):
        await verify_all([worker], count)
    assert 1 < quick.most <= 1 + MAX_PREFETCH and slow.most == 1 and strict.most == 1


async def test_an_idle_worker_comes_before_a_place_in_another_ones_line():
    workers = [Counting() for _ in range(4)]
    for count, fewest in ((400, 50), (4, 51)):
        for worker in workers:
            worker.most = 0
        await verify_all(workers, count)
        assert min(len(worker.ids) for worker in workers) >= fewest
    assert [worker.most for worker in workers] == [1] * 4


async def test_what_waits_behind_a_slow_sample_is_taken_back_and_scored_once_by_another_worker():
    workers = [Counting(0.001) for _ in range(3)]
    results, stats = await verify_all(workers, 400, {200: 2.0})
    *others, slowest = sorted(result.latency_s for result in results)
    assert slowest >= 2.0 and others[-1] < 1.5
    assert set(outcomes(results)) == {(OK, 1)} and (stats["ok"], stats["retries"]) == (400, 0)
    assert max(result.queue_s for result in results) > TAKE_BACK_S  # it was waiting all the same
    assert sorted(number for worker in workers for number in worker.ids) == list(range(400))


async def test_what_is_taken_back_waits_for_the_only_worker_and_keeps_its_place():
    worker = Counting(0.001)
    await verify_all([worker], 100, {50: 0.5})
    assert worker.ids == list(range(100)) and worker.most > 1


async def test_a_process_that_takes_long_to_start_costs_no_worker():
    make = process_maker(SOURCE)
    async with VerifierPool(["slow_to_build"], make, timeout_s=0.3, grace_s=0.2) as pool:
        samples = [{"completion": "", "act": act} for act in (600, 0)]
        verdicts = await asyncio.gather(*map(pool.verify, samples))
        assert [verdict.status for verdict in verdicts] == [TIMED_OUT, OK]
        stats = pool.stats()["slow_to_build"]
        assert (stats["workers_lost"], stats["retries"]) == (0, 0)


class OnOneActor:
    capacity, is_lost = 2, False

    async def score(self, sample, timeout_s):
        await asyncio.sleep(0 if self.is_lost else 0.05)
        if self.is_lost:
            raise WorkerLost("the actor is gone")
        return AdapterResult("a", OK, 1.0)

    async def close(self): ...


async def test_workers_that_are_lost_together_cost_a_sample_one_attempt():
    made = [OnOneActor() for _ in range(8)]
    async with VerifierPool(["a"], AsyncMock(side_effect=made), workers=4) as pool:
        asyncio.get_running_loop().call_later(0.02, lambda: [setattr(w, "is_lost", True) for w in made[:4]])
        assert {v.status for v in await asyncio.gather(*(pool.verify({}) for _ in range(4)))} == {OK}
