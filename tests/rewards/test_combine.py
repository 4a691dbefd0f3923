"""Several adapters, one verdict: modes, gates, mixed data sets, and what stands in for a failure."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.combine import MODES, Combination
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
    ("mode", "expected"), [("best", 3.0), ("sum", 3.0), ("mean", 0.75), ("product", -1.5)]
)
def test_modes_by_hand(mode, expected):
    """The sum is 2 * 0.5 + 3 - 1."""
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
    combination = Combination(("rule", "logged"), mode, weights=weights)
    verdict = combination.verdict(results(rule=ABSTAINED, logged=0.7))
    assert (verdict.status, verdict.reward) == (ABSTAINED if reward is None else OK, reward)


@pytest.mark.parametrize(
    ("mode", "rewards"),
    [
        ("product", {"a": 1e300, "b": 1e300, "c": 0.0}),
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
