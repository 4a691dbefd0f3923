"""Several adapters, one verdict: modes, gates, mixed data sets, and what stands in for a failure."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.combine import MODES, Combination
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import AdapterResult, RewardStatus

OK, FAILED, TIMED_OUT, ABSTAINED = RewardStatus


def results(**rewards):
    """A float is a reward, a status is itself."""
    return [
        AdapterResult(name, OK, value)
        if isinstance(value, float)
        else AdapterResult(name, value, reason="as scripted")
        for name, value in rewards.items()
    ]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("best", 3.0),
        ("sum", 2 * 0.5 + 3.0 - 1.0),
        ("mean", (2 * 0.5 + 3.0 - 1.0) / 4),
        ("product", 0.5 * 3.0 * -1.0),
    ],
)
def test_modes_by_hand(mode, expected):
    combination = Combination(("a", "b", "c"), mode, weights={"a": 2.0})
    assert combination.verdict(results(a=0.5, b=3.0, c=-1.0)).reward == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "weights", "reward"),
    [
        ("sum", {"logged": 0.0}, None),
        ("mean", {"logged": 0.0}, None),
        ("mean", {"logged": -0.5}, None),  # divided by -0.5, it would change its sign
        ("sum", {"logged": -0.5}, -0.35),
        ("best", {"logged": 0.0}, 0.7),  # has no weights
        ("mean", {"rule": 100.0}, 0.7),  # who abstained weighs nothing
    ],
)
def test_where_nobody_who_counts_has_answered_the_verdict_abstains(mode, weights, reward):
    verdict = Combination(("rule", "logged"), mode, weights=weights).verdict(
        results(rule=ABSTAINED, logged=0.7)
    )
    assert (verdict.status, verdict.reward) == (ABSTAINED if reward is None else OK, reward)


@pytest.mark.parametrize(
    ("mode", "rewards"),
    [
        ("product", {"a": 1e300, "b": 1e300}),
        ("product", {"a": 1e300, "b": 1e300, "c": 0.0}),
        ("sum", {"a": 1.7e308, "b": 1.7e308}),
        ("mean", {"a": 1.7e308, "b": 1.7e308, "c": -1.7e308}),
    ],
)
def test_a_combination_too_large_for_a_float_has_failed_and_says_so(mode, rewards):
    verdict = Combination(tuple("abc"), mode).verdict(results(**rewards))
    assert (verdict.status, verdict.reward) == (FAILED, None)
    assert f"the {mode} of the rewards {rewards} is" in verdict.results[0].reason


def test_a_constant_stands_in_for_a_failure_of_its_adapter_alone_and_the_verdict_says_so():
    combination = Combination(("a", "b"), "sum", constants={"a": 0.25})
    verdict = combination.verdict(results(a=TIMED_OUT, b=1.0))
    assert (verdict.status, verdict.reward, verdict.filled) == (OK, 1.25, True)
    assert verdict.results[0].status is TIMED_OUT and verdict.results[0].reward is None  # it is still counted
    assert combination.verdict(results(a=1.0, b=FAILED)).status is FAILED
    assert combination.verdict(results(a=1.0, b=1.0)).filled is False


def ask_in(journal, rewards):
    async def ask(name):
        journal.append(name)
        return results(**{name: rewards[name]})[0]

    return ask


@pytest.mark.parametrize(
    ("rewards", "asked", "reward"),
    [
        ({"rule": 0.0, "judge": 0.9}, ["rule"], 0.0),  # the cheap rule says no: the judge is never paid
        ({"rule": 1.0, "judge": 0.9}, ["rule", "judge"], 0.9),
        ({"rule": 0.5, "judge": 0.2}, ["rule", "judge"], 0.2),
        ({"rule": ABSTAINED, "judge": 0.9}, ["rule", "judge"], 0.9),
        ({"rule": FAILED, "judge": 1.0}, ["rule"], None),
    ],
)
def test_a_gate_asks_the_next_one_only_when_this_one_passed(rewards, asked, reward):
    journal = []
    combination = Combination(("rule", "judge"), "gate", threshold=0.5)
    verdict = asyncio.run(combination({}, ask_in(journal, rewards)))
    assert journal == asked and verdict.reward == reward


def test_a_column_of_the_row_chooses_who_judges_it():
    journal = []
    combination = Combination(("math", "code", "format"), column="source")
    asyncio.run(combination({"source": "code, format"}, ask_in(journal, {"code": 1.0, "format": 0.1})))
    assert sorted(journal) == ["code", "format"]
    assert combination.chosen({"source": "format,code,format"}) == ("format", "code")
    for row in ({}, {"source": "poetry"}, {"source": ""}, {"source": 3}):
        with pytest.raises(ConfigurationError, match="must name some of math, code, format"):
            combination.chosen(row)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapters": ()}, "at least one"),
        ({"mode": "median"}, "unknown reward combination 'median'"),
        ({"weights": {"c": 1.0}}, "a weight is given for c"),
        ({"constants": {"c": 1.0}}, "a constant is given for c"),
        ({"mode": "mean", "weights": {"a": 0.0, "b": 0.0}}, "positive sum"),
        ({"mode": "sum", "weights": {"a": 0.0, "b": 0.0}}, "a sum needs a weight that is not 0"),
    ],
)
def test_settings_that_cannot_be_combined_are_refused(settings, said):
    with pytest.raises(ConfigurationError, match=said):
        Combination(**({"adapters": ("a", "b")} | settings))


@given(
    st.sampled_from(MODES),
    st.lists(
        st.one_of(st.floats(-5, 5), st.sampled_from([FAILED, TIMED_OUT, ABSTAINED])), min_size=1, max_size=4
    ),
)
def test_a_reward_is_finite_and_there_exactly_when_the_verdict_is_ok(mode, outcomes):
    named = dict(zip("abcd", outcomes, strict=False))
    verdict = Combination(tuple("abcd"), mode).verdict(results(**named))
    statuses = set(outcomes) & {FAILED, TIMED_OUT}
    assert (verdict.reward is None) == (verdict.status is not OK)
    assert verdict.reward is None or math.isfinite(verdict.reward)
    assert bool(statuses) == (verdict.status in (FAILED, TIMED_OUT))
    assert FAILED not in statuses or verdict.status is FAILED  # goes before a time-out


class Scripted:
    """A worker that answers by its adapter's name, and counts how many samples it has at once."""

    def __init__(self, adapter, script, capacity=1):
        self.adapter, self.script, self.capacity = adapter, script, capacity
        self.now = self.most = 0

    async def score(self, sample, timeout_s):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            outcome = self.script(self.adapter, sample)
            return await outcome if asyncio.iscoroutine(outcome) else outcome
        finally:
            self.now -= 1

    async def close(self):
        pass


def pool_of(script, adapters, capacity=1, **settings):
    made = []

    async def make(adapter):
        made.append(Scripted(adapter, script, capacity))
        return made[-1]

    return VerifierPool(adapters, make, **settings), made


async def test_a_fallback_answers_in_the_name_of_the_adapter_that_failed():
    def script(adapter, sample):
        return results(judge=FAILED)[0] if adapter == "judge" else results(rule=0.5)[0]

    pool, _ = pool_of(script, ["judge"], fallbacks={"judge": "rule"})
    await pool.start()
    verdict = await pool.verify({})
    assert (verdict.status, verdict.reward) == (OK, 0.5) and verdict.results[0].adapter == "judge"
    assert "rule in place of judge, which failed: as scripted" in verdict.results[0].reason
    assert pool.stats()["judge"]["failed"] == 1 and pool.stats()["rule"]["ok"] == 1
    await pool.close()


async def test_a_worker_with_room_for_many_gets_many_at_once_and_never_more():
    async def slow(adapter):
        await asyncio.sleep(0.02)
        return results(**{adapter: 1.0})[0]

    pool, made = pool_of(lambda adapter, sample: slow(adapter), ["judge"], capacity=5)
    await pool.start()
    await asyncio.gather(*(pool.verify({}) for _ in range(23)))
    assert [worker.most for worker in made] == [5]
    await pool.close()


async def test_a_shared_worker_that_breaks_is_replaced_once_and_every_sample_is_scored():
    broken = []

    async def breaks_once(adapter, sample):
        await asyncio.sleep(0.01)
        if len(broken) < 4:  # all four that are in flight with the first worker
            broken.append(sample["n"])
            raise ConnectionError("the process died")
        return results(**{adapter: float(sample["n"])})[0]

    pool, made = pool_of(breaks_once, ["judge"], capacity=4, backoff_s=(0.0,))
    await pool.start()
    verdicts = await asyncio.gather(*(pool.verify({"n": n}) for n in range(9)))
    assert [verdict.reward for verdict in verdicts] == [float(n) for n in range(9)]
    assert len(made) == 2
    await pool.close()


async def test_evaluation_has_its_own_workers_and_does_not_wait_behind_training():
    gate = asyncio.Event()

    async def training_waits(adapter, sample):
        if sample["kind"] == "training":
            await gate.wait()
        return results(**{adapter: 1.0})[0]

    pool, made = pool_of(training_waits, ["judge"], evaluation_workers=2)
    await pool.start()
    training = [asyncio.create_task(pool.verify({"kind": "training"})) for _ in range(50)]
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        await asyncio.gather(*(pool.verify({"kind": "evaluation"}, evaluation=True) for _ in range(20)))
    assert len(made) == 3 and pool.stats()["judge (evaluation)"]["ok"] == 20
    gate.set()
    await asyncio.gather(*training)
    await pool.close()


async def test_workers_that_could_not_be_made_come_back_when_they_can_be():
    state = {"works": True}

    def script(adapter, sample):
        if not state["works"]:
            raise ConnectionError("gone")
        return results(**{adapter: 1.0})[0]

    made = []

    async def make(adapter):
        if not state["works"]:
            raise OSError("no machine")
        made.append(Scripted(adapter, script))
        return made[-1]

    pool = VerifierPool(["judge"], make, backoff_s=(0.0,), regrow_s=0.05)
    await pool.start()
    state["works"] = False
    assert (await pool.verify({})).status is FAILED
    state["works"] = True
    await asyncio.sleep(0.3)
    assert (await pool.verify({})).reward == 1.0 and pool.stats()["judge"]["workers"] == 1
    await pool.close()
