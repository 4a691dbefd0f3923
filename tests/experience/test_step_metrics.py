"""Alarms: evidence of several steps, and none from a reward that everybody earns. What engines were allowed."""

import pytest

from async_grpo.config.rewards import ResolvedRewards
from async_grpo.experience.config import BatchConfig
from async_grpo.experience.step_metrics import EngineUtilization, StepAlarms
from async_grpo.rewards.config import RewardConfig


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


@pytest.mark.parametrize(
    ("value", "best"), [(1.0, {}), (1.1, {}), (0.1, {"judge": 0.1}), (0.0, {"judge": 0.0})]
)
def test_a_constant_reward_that_is_the_best_possible_is_no_alarm(value, best):
    alarms = StepAlarms(BatchConfig(failure_alarm=1.0), best)
    evaluation = {"judge (evaluation)": constant(value)["judge"]}
    assert not any(alarms.of_step([], constant(value) | evaluation) for _ in range(5))


def test_the_shipped_rewards_whose_best_is_not_one_declare_it():
    def best(options: str) -> dict[str, float]:
        config = RewardConfig(reward_fns="format,length,exact", reward_options=options)
        return ResolvedRewards.of(config).facts(config, 0).best_rewards

    assert best("") == {"format": 0.1, "length": 0.0, "exact": 1.0}
    assert best("weight=0.5,schedule=cosine") == {"format": 0.5, "length": 2.0, "exact": 1.0}


def test_calls_that_fail_are_an_alarm_at_once():
    alarms = StepAlarms(BatchConfig(failure_alarm=0.1))
    assert alarms.of_step([], {"judge": {"ok": 9, "timed_out": 1}}) == []
    assert alarms.of_step([], {"judge": {"ok": 8, "timed_out": 2, "first_reason": "slow"}}) == [
        "judge: 2 of 10 calls failed (slow)"
    ]
    stopped = alarms.of_step([], {"judge": {"ok": 4, "breakers_opened": 1}})
    assert stopped == ["judge: a server of it went out of service 1 time(s)"]


def test_every_report_is_of_the_time_since_the_last_one_alone():
    now = 0.0
    utilization = EngineUtilization(lambda: now)
    now = 2.0
    utilization.set(sequences=0, free_slots=0)
    now = 3.0
    first = utilization.take(busy=[(0.5, 1.2), (1.0, 1.5)])
    assert first == {"engine_busy_s": 1.0, "engine_allowed_s": 2.0, "wait_generation_budget_s": 1.0}
    utilization.set(sequences=4, free_slots=0)
    now = 7.0
    second = utilization.take(busy=[(4.0, 5.0)])
    assert second == {"engine_busy_s": 1.0, "engine_allowed_s": 4.0, "wait_generation_budget_s": 0.0}
