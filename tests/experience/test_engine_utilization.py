"""What the engines were allowed to do, from one report to the next."""

from async_grpo.experience.step_metrics import EngineUtilization


def test_every_report_is_of_the_time_since_the_last_one_alone():
    now = 0.0
    utilization = EngineUtilization(lambda: now)
    now = 2.0
    utilization.set(sequences=0, free_slots=0)
    now = 3.0
    first = utilization.take(busy=[(0.5, 1.5)])
    assert first == {"engine_busy_s": 1.0, "engine_allowed_s": 2.0, "wait_generation_budget_s": 1.0}
    utilization.set(sequences=4, free_slots=0)
    now = 7.0
    second = utilization.take(busy=[(4.0, 5.0)])
    assert second == {"engine_busy_s": 1.0, "engine_allowed_s": 4.0, "wait_generation_budget_s": 0.0}
