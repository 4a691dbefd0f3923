"""A run whose environment fails in every trajectory ends at its first groups, with the reason; other runs go on."""

from dataclasses import replace

import numpy as np
import pytest

from async_grpo.errors import EnvironmentNeverWorked
from async_grpo.experience.first_trajectories import FirstTrajectories
from async_grpo.testing import completion
from async_grpo.types import Group, Outcome, Prompt, RewardStatus, Sample, Verdict

REASON = 'AgentFailed: the agent ended with exit status 1; it said: Traceback ...\n  File "agent.py", line 1'
FAILED = replace(completion(0), outcome=Outcome(failure=REASON))
PLAYED = replace(completion(3), outcome=Outcome(reward=0.0))


def group_of(number: int, *completions) -> Group:
    prompt = Prompt(number, np.array([5], np.int32), {"input": "x"})
    verdict = Verdict(RewardStatus.FAILED, None)
    samples = tuple(Sample(prompt, one, verdict) for one in completions)
    return Group(prompt, samples, 0, number)


def finish(first: FirstTrajectories, *groups: Group) -> None:
    for group in groups:
        for sample in group.samples:
            first.ended(sample.completion)
        first.check(group)


def test_two_groups_of_failures_end_the_run_and_show_the_first_reason_whole():
    other = replace(FAILED, outcome=Outcome(failure="EnvironmentFailed: no board"))
    first = FirstTrajectories(groups_per_step=4, samples_per_question=4)
    finish(first, group_of(1, FAILED, other))
    with pytest.raises(EnvironmentNeverWorked) as error:
        finish(first, group_of(0, other, other))
    text = str(error.value)
    assert "all 4 trajectories of the first 2 groups failed (3 EnvironmentFailed, 1 AgentFailed)" in text
    assert REASON in text and "async-grpo try-environment" in text


def test_with_one_trajectory_per_group_eight_groups_must_fail():
    first = FirstTrajectories(groups_per_step=100, samples_per_question=1)
    finish(first, *(group_of(number, FAILED) for number in range(7)))
    with pytest.raises(EnvironmentNeverWorked, match="all 8 trajectories of the first 8 groups failed"):
        finish(first, group_of(7, FAILED))


def test_a_step_of_one_group_needs_only_one():
    with pytest.raises(EnvironmentNeverWorked):
        finish(FirstTrajectories(groups_per_step=1, samples_per_question=4), group_of(0, FAILED))


@pytest.mark.parametrize(
    "groups",
    [
        [group_of(0, FAILED, PLAYED), group_of(1, FAILED, FAILED)],  # one trajectory has worked
        [group_of(0, FAILED), group_of(7, PLAYED), group_of(1, FAILED)],  # another group has
        [group_of(5, FAILED), group_of(6, FAILED), group_of(7, FAILED)],  # later rows are bad, and end first
        [group_of(0, FAILED), group_of(0, FAILED)],  # the same group again, in place of the first
        [group_of(8, FAILED), group_of(9, FAILED)],  # a resumed run goes on with later groups
    ],
)
def test_runs_in_which_the_environment_may_work_go_on(groups):
    finish(FirstTrajectories(groups_per_step=4, samples_per_question=4), *groups)


def test_a_success_in_an_unfinished_group_counts():
    first = FirstTrajectories(groups_per_step=4, samples_per_question=4)
    first.ended(PLAYED)
    finish(first, group_of(0, FAILED), group_of(1, FAILED))


def test_a_run_without_an_environment_never_fails_here():
    first = FirstTrajectories(groups_per_step=1, samples_per_question=4)
    finish(first, group_of(0, completion(3)))
