"""Alarms: evidence of several steps, and none from a reward that everybody earns."""

import pytest

from async_grpo.experience.alarms import StepAlarms
from async_grpo.experience.config import BatchConfig


def constant(value: float, num_rewards: int = 258, **more) -> dict:
    return {"judge": {"ok": 64, "only_reward_so_far": value, "rewards_so_far": num_rewards, **more}}


def test_a_reward_that_says_one_value_only_is_an_alarm_from_the_third_step_on():
    alarms = StepAlarms(BatchConfig(failure_alarm=1.0))
    said = [alarms.of_step([], constant(0.1, 100 * step)) for step in (1, 2, 3)]
    assert said == [[], [], ["judge: all of its 300 rewards so far are 0.1"]]
    assert alarms.of_step([], {"judge": {"ok": 64, "only_reward_so_far": None}}) == []


def test_a_few_rewards_are_no_evidence_in_however_many_steps():
    alarms = StepAlarms(BatchConfig(failure_alarm=1.0))
    assert not any(alarms.of_step([], constant(0.0, 49)) for _ in range(5))
    assert alarms.of_step([], constant(0.0, 50))


@pytest.mark.parametrize(("value", "more"), [(1.0, {}), (1.1, {}), (0.1, {"best_reward": 0.1})])
def test_a_constant_reward_that_is_the_best_possible_is_no_alarm(value, more):
    alarms = StepAlarms(BatchConfig(failure_alarm=1.0))
    assert not any(alarms.of_step([], constant(value, **more)) for _ in range(5))


def test_calls_that_fail_are_an_alarm_at_once():
    alarms = StepAlarms(BatchConfig(failure_alarm=0.1))
    assert alarms.of_step([], {"judge": {"ok": 9, "timed_out": 1}}) == []
    assert alarms.of_step([], {"judge": {"ok": 8, "timed_out": 2, "first_reason": "slow"}}) == [
        "judge: 2 of 10 calls failed (slow)"
    ]
