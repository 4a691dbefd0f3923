"""The budget of the judges: exact sums, no overspending beyond the calls in flight, and nobody waits for nothing."""

import asyncio
import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError
from async_grpo.rewards import middleware
from async_grpo.rewards.middleware import Budget, BudgetExhausted


@pytest.fixture(autouse=True)
def _hear_everything(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("async_grpo"), "propagate", True)  # a command line may have set it
    caplog.set_level(logging.WARNING, logger="async_grpo")


async def spend(budget: Budget, judge: str, estimate: float, real: float) -> None:
    await budget.reserve(judge, estimate)
    budget.settle(judge, estimate, real)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_limit_is_spent_to_the_last_unit_however_small_the_calls_and_without_one_it_only_counts():
    budget, unlimited = Budget(0.3, policy="fallback"), Budget(None)
    for _ in range(3):
        await spend(budget, "judge", 0.1, 0.1)  # 3 * 0.1 > 0.3 in binary fractions
        await spend(unlimited, "judge", 1e6, 1e5)
    with pytest.raises(BudgetExhausted, match=r"a call of judge needs 1e-06 and 0.3 of 0.3 is spent"):
        await budget.reserve("judge", 1e-6)
    stats = budget.stats()
    assert (pytest.approx(stats["spent"]), stats["reserved"], stats["refused"]) == (0.3, 0.0, 1)
    assert (stats["spent_by_judge"], stats["calls_by_judge"]) == ({"judge": pytest.approx(0.3)}, {"judge": 3})
    assert unlimited.spent == 3e5 and unlimited.stats()["limit"] is None


async def test_pause_waits_until_the_limit_is_raised_and_says_so_once(caplog):
    budget = Budget(1.0)
    await spend(budget, "judge", 1.0, 1.0)
    waiting = [asyncio.create_task(budget.reserve("judge", 0.4)) for _ in range(3)]
    await turns()
    assert not any(task.done() for task in waiting)
    assert (budget.stats()["waiting"], budget.stats()["paused"]) == (3, True)
    assert caplog.text.count("the judges are paused until the limit is raised") == 1
    assert "needs 0.4 and 1 of 1 is spent. To raise the limit: see Budget.set_limit" in caplog.text
    budget.set_limit(1.8)
    await turns()
    assert [task.done() for task in waiting] == [True, True, False] and not budget.stats()["paused"]
    assert "the judges go on (1 is spent)" in caplog.text
    budget.settle("judge", 0.4, 0.3)
    budget.settle("judge", 0.4, 0.1)
    await asyncio.wait_for(waiting[2], 1)
    assert caplog.text.count("paused") == 1


async def test_a_large_call_is_not_starved_by_small_ones():
    budget = Budget(1.0)
    await budget.reserve("judge", 0.5)
    large, small = (asyncio.create_task(budget.reserve("judge", cost)) for cost in (0.8, 0.1))
    await turns()
    assert not large.done() and not small.done()  # 0.5 + 0.1 would fit, but the large one came first
    budget.settle("judge", 0.5, 0.0)
    await asyncio.wait_for(asyncio.gather(large, small), 1)


@pytest.mark.parametrize("cost", [-0.1, float("nan"), float("inf")])
async def test_only_a_finite_cost_of_0_or_more_is_one(cost):
    budget = Budget(1.0)
    await budget.reserve("judge", 0.5)
    with pytest.raises(ValueError, match="must be finite and not negative"):
        budget.settle("judge", 0.5, cost)
    with pytest.raises(ValueError, match="must be finite and not negative"):
        await budget.reserve("judge", cost)
    assert (budget.spent, budget.stats()["reserved"]) == (0.0, 0.5)


async def test_what_was_spent_is_remembered_and_a_torn_line_is_not(tmp_path):
    path = tmp_path / "new" / "spending.jsonl"
    budget = Budget(1.0, path=path)
    await asyncio.gather(spend(budget, "judge", 0.1, 0.15), spend(budget, "small", 0.1, 0.05))
    with path.open("ab") as file:
        file.write(b'{"judge": "jud')
    again = Budget(1.0, path=path)
    assert again.stats()["spent_by_judge"] == {"judge": 0.15, "small": 0.05}
    await spend(again, "judge", 0.2, 0.2)
    assert Budget(1.0, path=path).spent == pytest.approx(0.4)
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("policy", ["pause", "fallback"])
async def test_a_higher_limit_beside_the_record_holds_from_then_on(tmp_path, caplog, monkeypatch, policy):
    monkeypatch.setattr(middleware, "POLL_INTERVAL_S", 0.02)
    path, door = tmp_path / "judge_budget.jsonl", tmp_path / "judge_budget.limit"
    budget = Budget(1.0, policy=policy, path=path)
    await spend(budget, "judge", 1.0, 1.0)
    waiting = asyncio.create_task(budget.reserve("judge", 0.5))
    for text in ("plenty", "-3", "nan", "1.4"):  # the last is a number, and too low
        door.write_text(text)
        await asyncio.sleep(0.05)
        assert waiting.done() == (policy == "fallback")
    assert f"To raise the limit: write a number to {door}" in caplog.text
    door.write_text("1.6\n")
    if policy == "fallback":
        with pytest.raises(BudgetExhausted):
            await waiting
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(budget.reserve("judge", 0.5))
    await asyncio.wait_for(waiting, 5)
    assert f"{door} raises the limit of the judges from 1" in caplog.text
    caplog.clear()
    assert Budget(1.0, path=path).stats()["limit"] == 1.6  # a pool that was killed and started anew
    assert Budget(2.0, path=path).stats()["limit"] == 2.0


@pytest.mark.parametrize("text", ["my only copy", '{"judge": 1}\n', "\xff\n"])
def test_a_file_that_is_no_record_of_spending_is_refused_and_kept(tmp_path, text):
    path = tmp_path / "notes"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=r"notes, line 1: not a line of spending .*name another"):
        Budget(1.0, path=path)
    assert path.read_text(encoding="latin-1") == text


async def test_a_record_that_cannot_be_written_is_said_once_and_does_not_stop_the_run(tmp_path, caplog):
    path = tmp_path / "spending.jsonl"
    budget = Budget(1.0, path=path)
    path.unlink()
    path.symlink_to("/dev/full")
    for _ in range(3):
        await spend(budget, "judge", 0.1, 0.1)
    assert budget.spent == pytest.approx(0.3) and caplog.text.count("a resumed run will not know of it") == 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(["pause", "fallback"]), st.booleans())
def test_no_limit_is_exceeded_by_more_than_the_calls_in_flight_and_no_call_is_lost(seed, policy, honest):
    """Random calls, cancellations and raises, recomputed in whole thousandths at every moment of a grant."""
    chance = random.Random(seed)  # drawn from in the order of events, which is not hypothesis' to know
    limit, spent, reserved = 1000, 0, 0
    budget = Budget(1.0, policy=policy)

    async def call() -> str:
        nonlocal spent, reserved
        await turns(chance.randrange(30))
        estimate = chance.randrange(1, 400)
        try:
            await budget.reserve("judge", estimate / 1000)
        except BudgetExhausted:
            assert spent + estimate > limit
            return "refused"
        reserved += estimate
        assert not honest or spent + reserved <= limit
        real = chance.randrange(estimate + 1) if honest else estimate + chance.randrange(100)
        try:
            await turns(chance.randrange(30))
        finally:
            reserved -= estimate
            spent += real
            budget.settle("judge", estimate / 1000, real / 1000)
        return "made"

    async def main() -> None:
        nonlocal limit
        tasks = [asyncio.create_task(call()) for _ in range(25)]
        for task in chance.sample(tasks, 4):
            await turns(chance.randrange(10))
            task.cancel()
        await turns(200)  # until nothing goes on by itself
        # All could have been granted on the strength of their estimates, each 0.1 dearer at most
        assert spent <= limit + (0 if honest else 100 * len(tasks))
        while not all(task.done() for task in tasks):
            assert policy == "pause" and not reserved
            limit += 500
            budget.set_limit(limit / 1000)
            await turns(200)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert policy == "fallback" or outcomes.count("made") >= 21
        assert budget.spent == pytest.approx(spent / 1000)
        assert (budget.stats()["reserved"], budget.stats()["waiting"]) == (pytest.approx(0.0), 0)

    asyncio.run(asyncio.wait_for(main(), 30))
