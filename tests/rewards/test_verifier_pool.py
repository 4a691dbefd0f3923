"""The pool with scripted workers, once with real processes: nothing dropped or scored twice, no hang."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import AdapterResult, RewardStatus, Verdict

OK, FAILED, TIMED_OUT, ABSTAINED = RewardStatus
SILENT = "silent"  # never answers, but obeys a cancellation
DEAF = "deaf"  # never answers and ignores cancellations


class ScriptedWorker:
    """Follows the sample's own script: sample["acts"] has one act per attempt, the last one for good.

    An act is a reward, a RewardStatus, an AdapterResult, an exception, an asyncio.Event to wait for, SILENT or DEAF.
    """

    capacity = 1

    def __init__(self, adapter: str, journal: list[tuple[str, int]]) -> None:
        self.adapter, self.journal = adapter, journal
        self.busy, self.closed = 0, False

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        assert self.busy < self.capacity and not self.closed, (
            "a worker got a sample too much, or after its end"
        )
        self.busy += 1
        self.journal.append((self.adapter, sample["id"]))
        try:
            return await self._act(sample)
        finally:
            self.busy -= 1

    async def _act(self, sample: dict[str, Any]) -> AdapterResult:
        acts = sample["acts"][self.adapter] if isinstance(sample["acts"], dict) else sample["acts"]
        act = acts.pop(0) if len(acts) > 1 else acts[0]
        if isinstance(act, asyncio.Event):
            act = float(await act.wait())
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
    """Makes scripted workers of some kind; raises `mishap` instead after the first `healthy` ones."""

    def __init__(
        self,
        healthy: int = 10**6,
        mishap: Exception | None = None,
        kind: Callable[..., ScriptedWorker] = ScriptedWorker,
    ) -> None:
        self.healthy, self.mishap, self.num_mishaps, self.kind = healthy, mishap, 0, kind
        self.made: list[ScriptedWorker] = []
        self.journal: list[tuple[str, int]] = []

    async def make(self, adapter: str) -> ScriptedWorker:
        if len(self.made) >= self.healthy and self.mishap is not None:
            self.num_mishaps += 1
            raise self.mishap
        self.made.append(self.kind(adapter, self.journal))
        return self.made[-1]


@asynccontextmanager
async def scripted_pool(
    workshop: Workshop, adapters: tuple[str, ...] = ("a",), **options: Any
) -> AsyncIterator[VerifierPool]:
    options = {"timeout_s": 5.0, "grace_s": 0.2, "make_timeout_s": 0.1, "backoff_s": (0.0, 0.01)} | options
    pool = VerifierPool(adapters, workshop.make, **options)
    try:
        async with asyncio.timeout(20):
            await pool.start()
            yield pool
    finally:
        await pool.close()
        await asyncio.sleep(0)
        assert not [t for t in asyncio.all_tasks() if "AdapterQueue" in t.get_coro().__qualname__]
        assert all(worker.closed for worker in workshop.made)


def sample(number: int, *acts: Any) -> dict[str, Any]:
    return {"id": number, "acts": list(acts)}


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def asked(pool: VerifierPool, numbers: Iterable[int], *acts: Any) -> list[asyncio.Task[Verdict]]:
    """Samples under way."""
    return [asyncio.create_task(pool.verify(sample(number, *acts))) for number in numbers]


async def test_all_adapters_score_each_sample_at_once_and_a_slow_one_holds_up_no_other_ones_queue():
    async with scripted_pool(workshop := Workshop(), ("slow", "quick")) as pool:
        gate = asyncio.Event()
        acts = {"slow": [gate], "quick": [0.5]}
        verifications = [asyncio.create_task(pool.verify({"id": n, "acts": acts})) for n in range(5)]
        await until(lambda: ("quick", 4) in workshop.journal)
        assert Counter(adapter for adapter, _ in workshop.journal) == {"quick": 5, "slow": 1}
        gate.set()
        for verdict in await asyncio.gather(*verifications):
            assert [r.adapter for r in verdict.results] == ["slow", "quick"]
            assert (verdict.status, verdict.reward) == (OK, 1.0)


@pytest.mark.parametrize("failure_reason", [WorkerLost("gone"), OSError("no route"), SILENT, DEAF])
async def test_a_lost_worker_is_fenced_and_replaced_and_its_sample_scored_by_another(failure_reason):
    async with scripted_pool(workshop := Workshop(), timeout_s=0.05, grace_s=0.05) as pool:
        verdict = await pool.verify(sample(1, failure_reason, 0.5))
        assert (verdict.status, verdict.reward, verdict.results[0].attempts) == (OK, 0.5, 2)
        assert [worker.closed for worker in workshop.made] == [True, False]
        stats = pool.stats()["a"]
        counts = {name: stats[name] for name in ("ok", "failed", "retries", "workers_lost", "workers")}
        assert counts == {"ok": 1, "failed": 0, "retries": 1, "workers_lost": 1, "workers": 1}


async def test_a_sample_that_costs_two_workers_has_failed_before_the_next_one_is_scored():
    async with scripted_pool(workshop := Workshop()) as pool:
        poison, good = await asyncio.gather(
            pool.verify(sample(1, WorkerLost("gone"))), pool.verify(sample(2, 1.0))
        )
        assert (poison.status, poison.reward, poison.results[0].attempts) == (FAILED, None, 2)
        assert poison.results[0].reason == "2 workers of 'a' were lost over it, the last: WorkerLost: gone"
        assert good.reward == 1.0 and len(workshop.made) == 3
        assert [number for _, number in workshop.journal] == [1, 1, 2]  # back at the head of the queue


async def test_when_no_worker_can_be_made_any_more_all_samples_fail_with_the_reason_and_nobody_hangs():
    async with scripted_pool(workshop := Workshop(healthy=1, mishap=OSError("the node is gone"))) as pool:
        verdicts = await asyncio.gather(*(pool.verify(sample(n, WorkerLost("gone"), 1.0)) for n in range(5)))
        late = await pool.verify(sample(9, 1.0))
        reason = "no worker of 'a' can be made any more: OSError: the node is gone"
        for verdict in (*verdicts, late):
            assert verdict.status is FAILED and reason in verdict.results[0].reason
        assert workshop.num_mishaps == 2  # one per back-off, no more
        assert [verdict.results[0].attempts for verdict in (*verdicts, late)] == [1, 0, 0, 0, 0, 0]
        assert pool.stats()["a"]["failed"] == 6


async def test_a_pool_goes_on_with_the_workers_that_are_left_and_others_come_back_when_they_can_be_made():
    workshop = Workshop(healthy=2, mishap=OSError("the node is gone"))
    async with scripted_pool(workshop, workers=2, regrow_s=0.05) as pool:
        for workers_left in (1, 0):
            verdicts = [pool.verify(sample(0, WorkerLost("gone"), 1.0)), pool.verify(sample(1, 1.0))]
            statuses = [verdict.status for verdict in await asyncio.gather(*verdicts)]
            assert statuses == [OK, OK] if workers_left else FAILED in statuses
            await until(lambda left=workers_left: pool.stats()["a"]["workers"] == left)
        workshop.healthy = 4
        await until(lambda: pool.stats()["a"]["workers"] == 2)
        assert (await pool.verify(sample(2, 1.0))).reward == 1.0


async def test_a_worker_that_never_gets_ready_counts_as_not_made():
    async def make(adapter: str) -> ScriptedWorker:
        await asyncio.sleep(1000)
        raise AssertionError

    pool = VerifierPool(["a"], make, make_timeout_s=0.05, backoff_s=(0.0, 0.0))
    with pytest.raises(RuntimeError, match="before its start"):
        await pool.verify(sample(1, 1.0))
    with pytest.raises(WorkerLost, match="no worker of 'a' was ready within 0.05 s"):
        await pool.start()


async def test_a_start_that_fails_leaves_no_worker_behind():
    workshop = Workshop(healthy=3, mishap=ConfigurationError("unknown reward function"))
    with pytest.raises(ConfigurationError, match="unknown reward function"):
        await VerifierPool(["a", "b"], workshop.make, workers=2).start()
    assert len(workshop.made) == 3 and all(worker.closed for worker in workshop.made)
    assert workshop.num_mishaps == 1  # a user's mistake is not tried again


async def test_a_start_of_the_evaluation_that_fails_is_tried_again_and_makes_only_what_is_missing():
    workshop = Workshop(healthy=2, mishap=OSError("the node is full"))
    async with scripted_pool(workshop, evaluation_workers=3) as pool:
        for _ in range(2):
            with pytest.raises(OSError, match="the node is full"):
                await pool.verify(sample(1, 1.0), evaluation=True)
        workshop.healthy = 10
        for number in (2, 3):
            assert (await pool.verify(sample(number, 1.0), evaluation=True)).status is OK
        assert len(workshop.made) == 1 + 3 and pool.stats()["a (evaluation)"]["workers"] == 3


async def test_closing_while_the_evaluation_starts_leaves_no_worker_and_its_sample_has_failed():
    workshop = Workshop()
    being_made = asyncio.Event()

    async def slowly(adapter: str) -> ScriptedWorker:
        being_made.set()
        await asyncio.sleep(0.05)
        return await workshop.make(adapter)

    async with scripted_pool(workshop, make_evaluator=slowly) as pool:
        early = asyncio.create_task(pool.verify(sample(1, 1.0), evaluation=True))
        await being_made.wait()
        await pool.close()
        late = await pool.verify(sample(2, 1.0), evaluation=True)
        await asyncio.sleep(0.1)
        for verdict in (await early, late):
            assert verdict.status is FAILED and "closed" in verdict.results[0].reason
        assert len(workshop.made) == 1  # that of training


async def test_a_cancelled_verification_frees_its_worker_or_is_never_given_to_one():
    async with scripted_pool(workshop := Workshop()) as pool:
        stuck, waiting = asked(pool, (0, 1), SILENT)
        await until(lambda: workshop.journal)
        waiting.cancel()
        stuck.cancel()
        async with asyncio.timeout(3):  # less than timeout_s: nobody waits for the stuck call
            assert (await pool.verify(sample(2, 1.0))).results[0].extra == {"id": 2}
        assert len(workshop.made) == 1 and [number for _, number in workshop.journal] == [0, 2]


@pytest.mark.parametrize("evaluation", [False, True])
async def test_only_adapters_that_look_at_groups_are_asked_about_them(evaluation):
    def kind(adapter: str, journal: list) -> ScriptedWorker:
        return (Grouped if adapter == "grouped" else ScriptedWorker)(adapter, journal)

    group, verdicts = [sample(n, 0.5) for n in range(3)], []
    for _ in range(2):  # the second as after a restart of the one that gave the verdicts
        async with scripted_pool(Workshop(kind=kind), ("grouped", "alone")) as pool:
            verdicts = verdicts or [await pool.verify(s, evaluation=evaluation) for s in group]
            for verdict in await pool.post_process(group, verdicts, evaluation=evaluation):
                assert [(r.status, r.reward) for r in verdict.results] == [(OK, 3.0), (OK, 0.5)]
            assert pool.stats()["alone"]["workers_lost"] == 0


@pytest.mark.parametrize("evaluation", [False, True])
async def test_a_group_is_looked_at_by_the_workers_of_its_phase(evaluation):
    class Counted(Grouped):
        groups = 0

        async def post_process(self, samples, results, timeout_s) -> list[AdapterResult]:
            self.groups += 1
            return await super().post_process(samples, results, timeout_s)

    training, evaluating = Workshop(kind=Counted), Workshop(kind=Counted)
    group = [sample(n, 0.5) for n in range(3)]
    async with scripted_pool(training, ("grouped",), make_evaluator=evaluating.make) as pool:
        verdicts = [await pool.verify(member, evaluation=evaluation) for member in group]
        await pool.post_process(group, verdicts, evaluation=evaluation)
        counts = [sum(worker.groups for worker in shop.made) for shop in (training, evaluating)]
    assert counts == ([0, 1] if evaluation else [1, 0])


async def test_closing_fails_what_waits_and_ends_what_runs_even_if_a_worker_ignores_everything():
    class Immortal(ScriptedWorker):
        async def close(self) -> None:
            self.closed = True  # for the fake's own check
            await asyncio.sleep(1000)

    async with scripted_pool(workshop := Workshop(kind=Immortal), workers=2, grace_s=0.05) as pool:
        verifications = asked(pool, (0,), DEAF) + asked(pool, (1, 2), SILENT)
        await until(lambda: len(workshop.journal) == 2)
        await pool.close()
        for verdict in [*await asyncio.gather(*verifications), await pool.verify(sample(9, 1.0))]:
            assert verdict.status is FAILED and "closed" in verdict.results[0].reason


@pytest.mark.parametrize(
    ("adapters", "workers", "message"),
    [
        ([], 1, "at least one adapter"),
        (["a", "a"], 1, "none of them twice"),
        (["a"], 0, "at least one worker"),
        (["a"], {"b": 1}, "workers are named for b, but the adapters are"),
    ],
)
def test_impossible_settings_are_refused_with_their_values(adapters, workers, message):
    with pytest.raises(ConfigurationError, match=message):
        VerifierPool(adapters, Workshop().make, workers=workers)


async def test_statistics_count_by_adapter_and_status_and_begin_anew_when_taken():
    async with scripted_pool(workshop := Workshop()) as pool:
        for act in (1.0, 0.0, FAILED, TIMED_OUT, ABSTAINED, 1.0):
            assert (await pool.verify(sample(1, act))).results[0].attempts == 1
        assert len(workshop.made) == 1  # what an adapter says is no failure of its worker
        under_way = asked(pool, (7, 8), gate := asyncio.Event())
        await until(lambda: workshop.journal[-1] == ("a", 7))
        await asyncio.sleep(0.1)
        taken = pool.take_stats()["a"]
        assert counts(taken) == [3, 1, 1, 1]
        assert (taken["queue_depth"], taken["workers"], taken["retries"]) == (1, 1, 0)
        assert 0 < taken["latency_p50_s"] <= taken["latency_p95_s"] <= taken["latency_max_s"]
        gate.set()
        first, waited = (verdict.results[0] for verdict in await asyncio.gather(*under_way))
        assert first.queue_s < 0.05 < waited.queue_s <= waited.latency_s
        anew = pool.stats()["a"]
        assert counts(anew) == [2, 0, 0, 0] and anew["queue_depth"] == 0 < anew["busy_s"]
        assert pool.stats() == pool.stats()  # looking does not reset


def counts(stats: dict[str, Any]) -> list[int]:
    return [stats[status.value] for status in (OK, FAILED, TIMED_OUT, ABSTAINED)]


async def test_statistics_of_an_adapter_that_looks_at_groups_are_of_what_it_made_of_them():
    async def verify_group(size: int, wanted: RewardStatus) -> None:
        group = [sample(n, 0.0) | {"wanted": wanted} for n in range(size)]
        await pool.post_process(group, [await pool.verify(s) for s in group])

    async with scripted_pool(Workshop(kind=Grouped)) as pool:
        for size, wanted in ((4, OK), (3, FAILED), (2, ABSTAINED)):
            await verify_group(size, wanted)
        await pool.verify(sample(9, 0.0))  # its group never comes
        stats = pool.stats()["a"]
        assert counts(stats) == [5, 3, 0, 2] and stats["first_reason"] == "the hook's"
        assert (stats["rewards_so_far"], stats["only_reward_so_far"]) == (4, 4.0)
        await verify_group(2, OK)
        assert pool.stats()["a"]["only_reward_so_far"] is None


async def test_a_group_moves_no_count_of_what_was_taken_before_or_came_from_a_cache():
    async with scripted_pool(Workshop(kind=Grouped)) as pool:
        group = [sample(n, 0.0) | {"wanted": FAILED} for n in range(3)]
        verdicts = [await pool.verify(s) for s in group]
        assert counts(pool.take_stats()["a"]) == [3, 0, 0, 0]
        await pool.verify(sample(9, FAILED))
        await pool.post_process(group, verdicts)
        assert counts(pool.take_stats()["a"]) == [0, 1, 0, 0]
        verdicts = [await pool.verify(s) for s in group]
        cached = replace(verdicts[0], results=(replace(verdicts[0].results[0], attempts=0),))
        await pool.post_process(group, [cached, *verdicts[1:]])
        assert counts(pool.stats()["a"]) == [1, 2, 0, 0]


async def test_a_fallback_answers_in_the_name_of_the_adapter_that_failed():
    async with scripted_pool(Workshop(), ("judge",), fallbacks={"judge": "rule"}) as pool:
        verdict = await pool.verify({"id": 1, "acts": {"judge": [FAILED], "rule": [0.5]}})
        assert (verdict.status, verdict.reward) == (OK, 0.5) and verdict.results[0].adapter == "judge"
        assert "rule in place of judge, which failed: sample 1" in verdict.results[0].reason
        assert pool.stats()["judge"]["failed"] == 1 and pool.stats()["rule"]["ok"] == 1


async def test_a_worker_with_room_for_many_gets_many_at_once_and_if_it_breaks_is_replaced_once():
    class Roomy(ScriptedWorker):
        capacity = 4

    async with scripted_pool(workshop := Workshop(kind=Roomy)) as pool:
        lost = [pool.verify(sample(n, WorkerLost("gone"), float(n))) for n in range(4)]
        assert [verdict.reward for verdict in await asyncio.gather(*lost)] == [0.0, 1.0, 2.0, 3.0]
        assert len(workshop.made) == 2
        waiting = asked(pool, range(9), gate := asyncio.Event())
        await until(lambda: workshop.made[1].busy == 4)
        assert pool.stats()["a"]["queue_depth"] == 5
        gate.set()
        await asyncio.gather(*waiting)


async def test_evaluation_has_its_own_workers_and_does_not_wait_behind_training():
    async with scripted_pool(workshop := Workshop(), evaluation_workers=2) as pool:
        training = asked(pool, range(50), gate := asyncio.Event())
        await asyncio.sleep(0)
        async with asyncio.timeout(1):
            await asyncio.gather(*(pool.verify(sample(n, 1.0), evaluation=True) for n in range(20)))
        assert len(workshop.made) == 3 and pool.stats()["a (evaluation)"]["ok"] == 20
        gate.set()
        await asyncio.gather(*training)


async def test_in_chaos_every_sample_gets_exactly_one_verdict_and_that_of_its_own():
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

    async with scripted_pool(workshop, workers=4, timeout_s=0.02, grace_s=0.02) as pool:
        samples = [sample(number, *acts_of(number)) for number in range(num_samples)]
        expected = [s["acts"][-1] for s in samples]
        tasks = [asyncio.create_task(pool.verify(s)) for s in samples]
        cancelled = set(rng.sample(range(num_samples), 30))
        for number in sorted(cancelled):
            await asyncio.sleep(0.001)
            tasks[number].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for number, (outcome, act) in enumerate(zip(outcomes, expected, strict=True)):
            if isinstance(outcome, asyncio.CancelledError):
                assert number in cancelled
            elif isinstance(act, float):
                assert outcome.reward == act and outcome.results[0].extra == {"id": number}
            else:
                assert outcome.status is (act if isinstance(act, RewardStatus) else FAILED)
        stats = pool.stats()["a"]
        assert sum(counts(stats)) == sum(isinstance(outcome, Verdict) for outcome in outcomes)
        assert max(Counter(workshop.journal).values()) <= 2
        assert stats["workers"] == 4 and stats["queue_depth"] == 0
