"""The pool with scripted workers, once with real processes: nothing dropped or scored twice, no hang."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.combine import Combination
from async_grpo.rewards.isolation.adapter_process import process_maker
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import AdapterResult, RewardStatus

OK, FAILED, TIMED_OUT, ABSTAINED = RewardStatus
SILENT = "silent"  # never answers, but obeys a cancellation
DEAF = "deaf"  # never answers and ignores cancellations


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await coroutine

    return asyncio.run(bounded())


class ScriptedWorker:
    """Follows the sample's own script: sample["acts"] has one act per attempt, the last one for good.

    An act is a reward, a RewardStatus, an AdapterResult, an exception, an asyncio.Event to wait for, SILENT or DEAF.
    """

    capacity = 1

    def __init__(self, adapter: str, journal: list[tuple[str, int]]) -> None:
        self.adapter, self.journal = adapter, journal
        self.busy = self.closed = False

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        assert not self.busy and not self.closed, "a worker got a second sample, or one after its end"
        self.busy = True
        self.journal.append((self.adapter, sample["id"]))
        try:
            return await self._act(sample)
        finally:
            self.busy = False

    async def _act(self, sample: dict[str, Any]) -> AdapterResult:
        acts = sample["acts"][self.adapter] if isinstance(sample["acts"], dict) else sample["acts"]
        act = acts.pop(0) if len(acts) > 1 else acts[0]
        if isinstance(act, asyncio.Event):
            await act.wait()
            act = 1.0
        if act == SILENT:
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.01)  # stopping takes time, and the worker stays busy meanwhile
        while act == DEAF and not self.closed:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue
        if isinstance(act, BaseException):
            raise act
        if isinstance(act, RewardStatus):
            return AdapterResult(self.adapter, act, reason=f"sample {sample['id']}")
        if isinstance(act, AdapterResult):
            return act
        return AdapterResult(self.adapter, OK, act, extra={"id": sample["id"]})

    async def close(self) -> None:
        self.closed = True


class Grouped(ScriptedWorker):
    """Looks at groups: each member of one is worth its size, or has the status that it is made with."""

    has_post_process = True

    async def post_process(self, samples, results, timeout_s) -> list[AdapterResult]:
        wanted = samples[0].get("wanted", OK)
        worth = float(len(samples)) if wanted is OK else None
        return [replace(result, status=wanted, reward=worth, reason="the hook's") for result in results]


class Workshop:
    """Makes scripted workers; raises `mishap` instead after the first `healthy` ones."""

    def __init__(self, healthy: int = 10**6, mishap: Exception | None = None) -> None:
        self.made: list[ScriptedWorker] = []
        self.journal: list[tuple[str, int]] = []
        self.healthy, self.mishap, self.num_mishaps = healthy, mishap, 0

    async def make(self, adapter: str) -> ScriptedWorker:
        if len(self.made) >= self.healthy and self.mishap is not None:
            self.num_mishaps += 1
            raise self.mishap
        self.made.append(ScriptedWorker(adapter, self.journal))
        return self.made[-1]


def with_pool(
    test: Callable[[VerifierPool], Coroutine[Any, Any, None]],
    workshop: Workshop,
    adapters: tuple[str, ...] = ("a",),
    **options: Any,
) -> None:
    options = {"timeout_s": 5.0, "grace_s": 0.2, "make_timeout_s": 0.1, "backoff_s": (0.0, 0.01)} | options

    async def main() -> None:
        pool = VerifierPool(adapters, workshop.make, **options)
        await pool.start()
        try:
            await test(pool)
        finally:
            await pool.close()
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if "AdapterQueue" in task.get_coro().__qualname__]
        assert all(worker.closed for worker in workshop.made)

    run(main())


def sample(number: int, *acts: Any) -> dict[str, Any]:
    return {"id": number, "acts": list(acts)}


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def result(status: RewardStatus, reward: float | None = None) -> AdapterResult:
    return AdapterResult("a", status, reward)


@pytest.mark.parametrize(
    ("results", "status", "reward"),
    [
        ([result(OK, 0.0)], OK, 0.0),
        ([result(OK, 0.0), result(OK, 1.1), result(OK, -1.0)], OK, 1.1),
        ([result(OK, -2.0), result(ABSTAINED)], OK, -2.0),
        ([result(ABSTAINED), result(ABSTAINED)], ABSTAINED, None),
        ([result(OK, 1.0), result(FAILED)], FAILED, None),
        ([result(OK, 1.0), result(TIMED_OUT)], TIMED_OUT, None),
        ([result(TIMED_OUT), result(FAILED), result(ABSTAINED)], FAILED, None),
    ],
)
def test_the_best_reward_wins_unless_one_is_unknown(results, status, reward):
    results = tuple(replace(result, adapter=name) for name, result in zip("abc", results, strict=False))
    verdict = Combination(("a", "b", "c")).verdict(results)
    assert (verdict.status, verdict.reward, verdict.results) == (status, reward, results)


def test_combining_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        Combination(())


def test_all_adapters_score_each_sample_at_the_same_time():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        gate = asyncio.Event()
        verification = asyncio.create_task(pool.verify(sample(1, gate)))
        await until(lambda: len(workshop.journal) == 3)  # nobody answered yet
        gate.set()
        verdict = await verification
        assert [r.adapter for r in verdict.results] == ["a", "b", "c"]
        assert (verdict.status, verdict.reward) == (OK, 1.0)

    with_pool(test, workshop, ("a", "b", "c"))


def test_samples_are_taken_in_the_order_in_which_they_came():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        verdicts = await asyncio.gather(*(pool.verify(sample(number, float(number))) for number in range(20)))
        assert [verdict.reward for verdict in verdicts] == list(range(20))
        assert [number for _, number in workshop.journal] == list(range(20))

    with_pool(test, workshop)


def test_a_slow_adapter_does_not_hold_up_another_ones_queue():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        gate = asyncio.Event()
        acts = {"slow": [gate], "quick": [1.0]}
        verifications = [
            asyncio.create_task(pool.verify({"id": number, "acts": acts})) for number in range(5)
        ]
        await until(lambda: ("quick", 4) in workshop.journal)
        assert Counter(adapter for adapter, _ in workshop.journal) == {"quick": 5, "slow": 1}
        gate.set()
        assert all(verdict.status is OK for verdict in await asyncio.gather(*verifications))

    with_pool(test, workshop, ("slow", "quick"))


def test_queueing_is_measured_apart_and_does_not_count_against_the_deadline():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        gate = asyncio.Event()
        first = asyncio.create_task(pool.verify(sample(1, gate)))
        await until(lambda: workshop.journal)
        second = asyncio.create_task(pool.verify(sample(2, 1.0)))
        await asyncio.sleep(0.3)  # longer than timeout_s, but shorter than timeout_s + grace_s
        gate.set()
        (fast,), (waited,) = (await first).results, (await second).results
        assert fast.queue_s < 0.2 < waited.queue_s <= waited.latency_s
        assert waited.status is OK and waited.attempts == 1

    with_pool(test, workshop, timeout_s=0.1, grace_s=5.0)


@pytest.mark.parametrize("failure_reason", [WorkerLost("gone"), OSError("no route"), SILENT, DEAF])
def test_a_lost_worker_is_fenced_and_replaced_and_its_sample_scored_by_another(failure_reason):
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        verdict = await pool.verify(sample(1, failure_reason, 0.5))
        assert (verdict.status, verdict.reward, verdict.results[0].attempts) == (OK, 0.5, 2)
        assert len(workshop.made) == 2
        assert workshop.made[0].closed and not workshop.made[1].closed
        stats = pool.stats()["a"]
        assert (stats["ok"], stats["failed"], stats["retries"], stats["workers_lost"], stats["workers"]) == (
            1,
            0,
            1,
            1,
            1,
        )

    with_pool(test, workshop, timeout_s=0.05, grace_s=0.05)


def test_a_sample_that_costs_two_workers_has_failed_and_the_next_one_is_scored():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        poison, good = await asyncio.gather(
            pool.verify(sample(1, WorkerLost("gone"))), pool.verify(sample(2, 1.0))
        )
        assert (poison.status, poison.reward) == (FAILED, None)
        assert poison.results[0].reason == "2 workers of 'a' were lost over it, the last: WorkerLost: gone"
        assert poison.results[0].attempts == 2
        assert good.reward == 1.0
        assert len(workshop.made) == 3

    with_pool(test, workshop)


def test_a_retried_sample_keeps_its_place_at_the_head_of_the_queue():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        await asyncio.gather(
            pool.verify(sample(1, WorkerLost("gone"), 1.0)), *(pool.verify(sample(n, 1.0)) for n in (2, 3))
        )
        assert [number for _, number in workshop.journal] == [1, 1, 2, 3]

    with_pool(test, workshop)


def test_when_no_worker_can_be_made_any_more_all_samples_fail_with_the_reason_and_nobody_hangs():
    workshop = Workshop(healthy=1, mishap=OSError("the node is gone"))

    async def test(pool: VerifierPool) -> None:
        verdicts = await asyncio.gather(*(pool.verify(sample(n, WorkerLost("gone"), 1.0)) for n in range(5)))
        late = await pool.verify(sample(9, 1.0))
        for verdict in (*verdicts, late):
            assert verdict.status is FAILED
            assert (
                "no worker of 'a' can be made any more: OSError: the node is gone"
                in verdict.results[0].reason
            )
        assert workshop.num_mishaps == 2  # one per back-off, no more
        assert [verdict.results[0].attempts for verdict in (*verdicts, late)] == [1, 0, 0, 0, 0, 0]
        assert pool.stats()["a"]["failed"] == 6

    with_pool(test, workshop)


def test_a_pool_goes_on_with_the_workers_that_are_left():
    workshop = Workshop(healthy=2, mishap=OSError("the node is gone"))

    async def test(pool: VerifierPool) -> None:
        verdicts = await asyncio.gather(
            pool.verify(sample(0, WorkerLost("gone"), 1.0)),
            *(pool.verify(sample(n, 1.0)) for n in range(1, 9)),
        )
        await until(lambda: workshop.num_mishaps == 2)
        await asyncio.sleep(0.01)  # the slot has ended by now
        assert pool.stats()["a"]["workers"] == 1
        assert all(verdict.status is OK for verdict in verdicts)
        assert (await pool.verify(sample(9, 1.0))).status is OK

    with_pool(test, workshop, workers=2)


def test_a_worker_that_never_gets_ready_counts_as_not_made():
    async def make(adapter: str) -> ScriptedWorker:
        await asyncio.sleep(1000)
        raise AssertionError

    async def main() -> None:
        pool = VerifierPool(["a"], make, make_timeout_s=0.05, backoff_s=(0.0, 0.0))
        with pytest.raises(WorkerLost, match="no worker of 'a' was ready within 0.05 s"):
            await pool.start()

    run(main())


def test_a_start_that_fails_leaves_no_worker_behind():
    workshop = Workshop(healthy=3, mishap=ConfigurationError("unknown reward function"))

    async def main() -> None:
        pool = VerifierPool(["a", "b"], workshop.make, workers=2)
        with pytest.raises(ConfigurationError, match="unknown reward function"):
            await pool.start()

    run(main())
    assert len(workshop.made) == 3 and all(worker.closed for worker in workshop.made)
    assert workshop.num_mishaps == 1  # a user's mistake is not tried again


def test_a_start_of_the_evaluation_that_fails_is_tried_again_and_makes_only_what_is_missing():
    workshop = Workshop(healthy=2, mishap=OSError("the node is full"))

    async def test(pool: VerifierPool) -> None:
        for _ in range(2):
            with pytest.raises(OSError, match="the node is full"):
                await pool.verify(sample(1, 1.0), evaluation=True)
        workshop.healthy = 10
        assert (await pool.verify(sample(2, 1.0), evaluation=True)).status is OK
        assert (await pool.verify(sample(3, 1.0), evaluation=True)).status is OK
        assert len(workshop.made) == 1 + 3 and pool.stats()["a (evaluation)"]["workers"] == 3

    with_pool(test, workshop, evaluation_workers=3)


def test_closing_while_the_evaluation_starts_leaves_no_worker_and_its_sample_has_failed():
    workshop = Workshop()
    being_made = asyncio.Event()

    async def slowly(adapter: str) -> ScriptedWorker:
        being_made.set()
        await asyncio.sleep(0.05)
        return await workshop.make(adapter)

    async def test(pool: VerifierPool) -> None:
        early = asyncio.create_task(pool.verify(sample(1, 1.0), evaluation=True))
        await being_made.wait()
        await pool.close()
        late = await pool.verify(sample(2, 1.0), evaluation=True)
        await asyncio.sleep(0.1)
        for verdict in (await early, late):
            assert verdict.status is FAILED and "closed" in verdict.results[0].reason
        assert len(workshop.made) == 1  # that of training

    with_pool(test, workshop, make_evaluator=slowly)


def test_a_pool_closed_before_its_evaluation_makes_no_worker_for_it():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        await pool.close()
        assert (await pool.verify(sample(1, 1.0), evaluation=True)).status is FAILED
        assert len(workshop.made) == 1

    with_pool(test, workshop)


def test_a_cancelled_verification_gives_the_worker_back_and_its_answer_reaches_nobody():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        gate = asyncio.Event()
        first = asyncio.create_task(pool.verify(sample(1, gate)))
        await until(lambda: workshop.journal)
        first.cancel()
        second = asyncio.create_task(pool.verify(sample(2, 0.25)))
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        (own,) = (await second).results
        assert (own.reward, own.extra) == (0.25, {"id": 2})
        assert (
            len(workshop.made) == 1 and not workshop.made[0].closed
        )  # the same worker, none the worse for it
        assert pool.stats()["a"]["ok"] == 1

    with_pool(test, workshop)


def test_a_cancelled_verification_stops_the_running_call_and_keeps_its_worker():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        for number in range(0, 10, 2):
            stuck = asyncio.create_task(pool.verify(sample(number, SILENT)))
            await until(lambda number=number: ("a", number) in workshop.journal)
            stuck.cancel()
            async with asyncio.timeout(3):  # less than timeout_s: nobody waits for the stuck call
                assert (await pool.verify(sample(number + 1, 1.0))).results[0].extra == {"id": number + 1}
        assert len(workshop.made) == 1
        assert pool.stats()["a"]["ok"] == 5

    with_pool(test, workshop)


def test_a_verification_cancelled_in_the_queue_is_never_given_to_a_worker():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        gate = asyncio.Event()
        first, second, third = (asyncio.create_task(pool.verify(sample(n, gate))) for n in (1, 2, 3))
        await until(lambda: workshop.journal)
        second.cancel()
        gate.set()
        await asyncio.gather(first, third)
        assert [number for _, number in workshop.journal] == [1, 3]

    with_pool(test, workshop)


def test_a_worker_that_ignores_a_cancellation_is_fenced():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        first = asyncio.create_task(pool.verify(sample(1, DEAF)))
        await until(lambda: workshop.journal)
        first.cancel()
        assert (await pool.verify(sample(2, 1.0))).reward == 1.0
        assert workshop.made[0].closed and len(workshop.made) == 2

    with_pool(test, workshop, grace_s=0.05)


def test_a_failure_of_the_adapter_is_no_failure_of_its_worker():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        for status in (FAILED, TIMED_OUT, ABSTAINED):
            verdict = await pool.verify(sample(1, status))
            assert (verdict.status, verdict.reward, verdict.results[0].attempts) == (status, None, 1)
        assert len(workshop.made) == 1

    with_pool(test, workshop)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_is_a_failure_wherever_it_comes_from(reward):
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        verdict = await pool.verify(sample(1, reward))
        assert (verdict.status, verdict.reward) == (FAILED, None)

    with_pool(test, workshop)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (((0, 0.5), (1, float("nan"))), "the step that ends in token 1 of 2 is worth nan"),
        (((0, float("-inf")),), "token 0 of 2 is worth -inf"),
        (((2, 1.0),), "token 2 of 2"),
        (((-1, 1.0),), "token -1 of 2"),
    ],
)
def test_a_step_without_a_finite_reward_or_a_token_is_a_failure_wherever_it_comes_from(steps, reason):
    async def test(pool: VerifierPool) -> None:
        tokens = {"completion_token_ids": [7, 8]}
        good = AdapterResult("a", OK, 1.0, steps=((0, 0.5), (1, 0.5)))
        assert (await pool.verify(sample(1, good) | tokens)).results[0].steps == good.steps
        verdict = await pool.verify(sample(2, AdapterResult("a", OK, 1.0, steps=steps)) | tokens)
        assert (verdict.status, verdict.reward, verdict.results[0].steps) == (FAILED, None, ())
        assert reason in verdict.results[0].reason

    with_pool(test, Workshop())


def test_an_answer_that_is_none_costs_its_worker_and_the_queue_is_served():
    class OneShort(Grouped):
        async def post_process(self, samples, results, timeout_s) -> list[AdapterResult]:
            return results[1:]

    async def main() -> None:
        made = []

        async def make(adapter: str) -> OneShort:
            made.append(OneShort(adapter, []))
            return made[-1]

        pool = VerifierPool(["a"], make, backoff_s=(0.0,))
        await pool.start()
        group = [sample(n, 1.0) for n in range(2)]
        verdicts = [await pool.verify(s) for s in group]
        changed, after = await asyncio.gather(pool.post_process(group, verdicts), pool.verify(sample(2, 0.5)))
        assert [verdict.status for verdict in changed] == [FAILED] * 2
        assert "2 workers of 'a' were lost over it, the last: ValueError" in changed[0].results[0].reason
        assert after.reward == 0.5 and [worker.closed for worker in made] == [True, True, False]
        await pool.close()

    run(main())


@pytest.mark.parametrize("evaluation", [False, True])
def test_only_adapters_that_look_at_groups_are_asked_about_them(evaluation):
    async def make(adapter: str) -> ScriptedWorker:
        return (Grouped if adapter == "grouped" else ScriptedWorker)(adapter, [])

    async def main() -> None:
        first, second = (VerifierPool(["grouped", "alone"], make) for _ in range(2))
        group = [sample(n, 0.5) for n in range(3)]
        for pool in (first, second):
            await pool.start()
        verdicts = [await first.verify(s, evaluation=evaluation) for s in group]
        for pool in (first, second):  # the second as after a restart of the one that gave the verdicts
            for verdict in await pool.post_process(group, verdicts, evaluation=evaluation):
                assert [(r.status, r.reward) for r in verdict.results] == [(OK, 3.0), (OK, 0.5)]
            assert pool.stats()["alone"]["workers_lost"] == 0
            await pool.close()

    run(main())


def test_closing_fails_what_waits_and_ends_what_runs():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        verifications = [asyncio.create_task(pool.verify(sample(n, SILENT))) for n in range(3)]
        await until(lambda: workshop.journal)
        await pool.close()
        for verdict in await asyncio.gather(*verifications):
            assert verdict.status is FAILED and "closed" in verdict.results[0].reason
        assert (await pool.verify(sample(9, 1.0))).status is FAILED

    with_pool(test, workshop)


def test_closing_is_bounded_even_if_a_worker_ignores_everything():
    class Immortal(ScriptedWorker):
        async def close(self) -> None:
            self.closed = True  # for the fake's own check
            await asyncio.sleep(1000)

    async def main() -> None:
        async def make(adapter: str) -> Immortal:
            return Immortal(adapter, [])

        pool = VerifierPool(["a"], make, grace_s=0.05)
        await pool.start()
        verification = asyncio.create_task(pool.verify(sample(1, DEAF)))
        await asyncio.sleep(0.02)
        await pool.close()
        assert (await verification).status is FAILED

    run(main())


def test_verifying_before_the_start_is_an_error():
    with pytest.raises(RuntimeError, match="before its start"):
        run(VerifierPool(["a"], Workshop().make).verify(sample(1, 1.0)))


@pytest.mark.parametrize(
    ("adapters", "workers", "message"),
    [
        ([], 1, "needs adapters"),
        (["a", "a"], 1, "each once"),
        (["a"], 0, "at least one worker"),
        (["a"], {"a": 0}, "at least one worker"),
        (["a"], {"b": 1}, "asked for b, but the adapters are"),
    ],
)
def test_impossible_settings_are_refused_with_their_values(adapters, workers, message):
    with pytest.raises(ConfigurationError, match=message):
        VerifierPool(adapters, Workshop().make, workers=workers)


def test_the_number_of_workers_can_differ_by_adapter():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        assert {name: lane["workers"] for name, lane in pool.stats().items()} == {"a": 3, "b": 1}

    with_pool(test, workshop, ("a", "b"), workers={"a": 3})


def test_statistics_count_by_adapter_and_status_and_begin_anew_when_taken():
    workshop = Workshop()

    async def test(pool: VerifierPool) -> None:
        for acts in ([1.0], [0.0], [FAILED], [TIMED_OUT], [ABSTAINED], [1.0]):
            await pool.verify(sample(1, *acts))
        gate = asyncio.Event()
        running, waiting = (asyncio.create_task(pool.verify(sample(n, gate))) for n in (7, 8))
        await until(lambda: workshop.journal[-1] == ("a", 7))
        taken = pool.take_stats()["a"]
        assert [taken[status.value] for status in (OK, FAILED, TIMED_OUT, ABSTAINED)] == [3, 1, 1, 1]
        assert (taken["queue_depth"], taken["workers"], taken["retries"]) == (1, 1, 0)
        assert 0 < taken["latency_p50_s"] <= taken["latency_p95_s"] <= taken["latency_max_s"]
        assert taken["busy_s"] > 0
        gate.set()
        await asyncio.gather(running, waiting)
        anew = pool.stats()["a"]
        assert (anew["ok"], anew["failed"], anew["queue_depth"]) == (2, 0, 0)
        assert pool.stats() == pool.stats()  # looking does not reset

    with_pool(test, workshop)


def with_grouped_pool(test: Callable[[VerifierPool], Coroutine[Any, Any, None]]) -> None:
    async def make(adapter: str) -> Grouped:
        return Grouped(adapter, [])

    async def main() -> None:
        pool = VerifierPool(["a"], make)
        await pool.start()
        await test(pool)
        await pool.close()

    run(main())


async def grouped_verdicts(pool: VerifierPool, size: int, wanted: RewardStatus) -> None:
    group = [sample(n, 0.0) | {"wanted": wanted} for n in range(size)]
    await pool.post_process(group, [await pool.verify(s) for s in group])


def test_statistics_of_an_adapter_that_looks_at_groups_are_of_what_it_made_of_them():
    async def test(pool: VerifierPool) -> None:
        await grouped_verdicts(pool, 4, OK)
        await grouped_verdicts(pool, 3, FAILED)
        await grouped_verdicts(pool, 2, ABSTAINED)
        await pool.verify(sample(9, 0.0))  # its group never comes
        stats = pool.stats()["a"]
        assert [stats[status.value] for status in (OK, FAILED, TIMED_OUT, ABSTAINED)] == [5, 3, 0, 2]
        assert stats["first_reason"] == "the hook's"
        assert (stats["rewards_so_far"], stats["only_reward_so_far"]) == (4, 4.0)
        assert len(pool._queues["train"]["a"].stats._latencies_s) == 10
        await grouped_verdicts(pool, 2, OK)
        assert pool.stats()["a"]["only_reward_so_far"] is None

    with_grouped_pool(test)


def test_no_count_is_negative_or_too_many_when_statistics_are_taken_before_a_group_is_looked_at():
    async def test(pool: VerifierPool) -> None:
        group = [sample(n, 0.0) | {"wanted": FAILED} for n in range(3)]
        verdicts = [await pool.verify(s) for s in group]
        taken = pool.take_stats()["a"]
        await pool.verify(sample(9, FAILED))
        await pool.post_process(group, verdicts)
        anew = pool.take_stats()["a"]
        assert [taken[status.value] for status in (OK, FAILED)] == [3, 0]
        assert [anew[status.value] for status in (OK, FAILED)] == [0, 1]

    with_grouped_pool(test)


def test_a_result_from_a_cache_moves_no_count():
    async def test(pool: VerifierPool) -> None:
        group = [sample(n, 0.0) | {"wanted": FAILED} for n in range(2)]
        verdicts = [await pool.verify(s) for s in group]
        cached = replace(verdicts[0], results=(replace(verdicts[0].results[0], attempts=0),))
        await pool.post_process(group, [cached, verdicts[1]])
        assert [pool.stats()["a"][status.value] for status in (OK, FAILED)] == [1, 1]

    with_grouped_pool(test)


def test_in_chaos_every_sample_gets_exactly_one_verdict_and_that_of_its_own():
    rng = random.Random(0)
    workshop = Workshop()
    num_samples = 300

    def acts_of(number: int) -> list[Any]:
        troubles = [WorkerLost("gone"), OSError("broken pipe"), SILENT, DEAF]
        kind = rng.random()
        if kind < 0.1:
            return [rng.choice(troubles), float(number)]
        if kind < 0.13:
            return [rng.choice(troubles[:2])]
        return [float(number)] if kind < 0.9 else [rng.choice([FAILED, TIMED_OUT, ABSTAINED])]

    async def test(pool: VerifierPool) -> None:
        samples = [sample(number, *acts_of(number)) for number in range(num_samples)]
        expected = [s["acts"][-1] for s in samples]
        tasks = [asyncio.create_task(pool.verify(s)) for s in samples]
        cancelled = set(rng.sample(range(num_samples), 30))
        for number in sorted(cancelled):
            await asyncio.sleep(0.001)
            tasks[number].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        heard = set()
        for number, (outcome, act) in enumerate(zip(outcomes, expected, strict=True)):
            if isinstance(outcome, asyncio.CancelledError):
                assert number in cancelled
                continue
            heard.add(number)
            if isinstance(act, float):
                assert outcome.reward == act and outcome.results[0].extra == {"id": number}
            else:
                assert outcome.status is (act if isinstance(act, RewardStatus) else FAILED)
        stats = pool.stats()["a"]
        assert sum(stats[status.value] for status in RewardStatus) == len(heard)
        assert max(Counter(workshop.journal).values()) <= 2
        assert stats["workers"] == 4 and stats["queue_depth"] == 0

    with_pool(test, workshop, workers=4, timeout_s=0.02, grace_s=0.02)


def test_with_real_processes_rewards_survive_a_killed_process():
    source = RewardRegistrySource.from_file(Path(__file__).parents[2] / "reward_registry.py")

    async def main() -> None:
        workers = []
        make = process_maker(source)

        async def remembered(adapter: str) -> Any:
            workers.append(await make(adapter))
            return workers[-1]

        pool = VerifierPool(["countdown", "format"], remembered, workers=2)
        await pool.start()
        right = {"completion": "so</think>\n<answer>3*(4+5)</answer>", "nums": [3, 4, 5], "target": 27}
        wrong = right | {"completion": "so</think>\n<answer>3+4+5</answer>"}
        verifications = [asyncio.create_task(pool.verify(right if n % 2 else wrong)) for n in range(40)]
        os.kill(workers[0].pid, signal.SIGKILL)
        verdicts = await asyncio.gather(*verifications)
        assert [verdict.reward for verdict in verdicts] == pytest.approx([0.1, 1.1] * 20)
        no_task = await pool.verify({"completion": "so"})
        assert no_task.status is FAILED
        by_adapter = {r.adapter: r for r in no_task.results}
        assert "needs a list `nums`" in by_adapter["countdown"].reason and by_adapter["format"].status is OK
        await pool.close()
        assert all(worker.pid is None for worker in workers)

    run(main())
