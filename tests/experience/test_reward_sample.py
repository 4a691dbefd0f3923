"""What a reward is told of a completion, column by column."""

from dataclasses import replace

import numpy as np

from async_grpo.experience.rollouts import reward_sample
from async_grpo.experience.step_metrics import readable_samples
from async_grpo.rewards.builtin.environment import environment_turns
from async_grpo.rewards.standalone import _samples
from async_grpo.testing import completion
from async_grpo.types import Group, Outcome, Prompt, RewardStatus, Sample, Turn, Verdict

PROMPT = Prompt(7, np.array([1, 2], np.int32), {"input": "q:", "answer": "5", "input_token_ids": [1, 2]})


def test_a_reward_is_told_what_the_row_and_the_completion_hold():
    for is_truncated in (False, True):
        made = replace(completion(3, truncated=is_truncated), text="so 5")
        assert reward_sample(PROMPT, made) == {
            "input": "q:",
            "answer": "5",
            "completion": "so 5",
            "sample_text": "q:so 5",
            "completion_token_ids": made.token_ids.tolist(),
            "completion_char_ends": made.char_ends.tolist(),
            "truncated": is_truncated,
            "group_id": 7,
        }


def test_a_reward_is_told_what_a_trajectory_earned_turn_by_turn():
    nothing = np.empty(0, np.int32)
    turns = (Turn(nothing, 2, True, "a?", "b"), Turn(nothing, 3, False, "c?", "d"))
    outcome = Outcome(1.5, turn_rewards=(0.5, 1.0))
    told = reward_sample(PROMPT, replace(completion(5), turns=turns, outcome=outcome, text="d"))
    assert told["turns"] == [["a?", "b"], ["c?", "d"]] and told["sample_text"] == "a?bc?d"
    assert told["turn_ends"] == [2, 5]
    assert told["turn_rewards"] == [0.5, 1.0] and told["environment_reward"] == 1.5


def test_turns_of_sequences_that_took_turns_are_told_in_time():
    """Turns 0 and 2 are one sequence, turn 1 is another, which ended first and so stands first."""
    nothing = np.empty(0, np.int32)
    turns = (
        Turn(nothing, 1, True, "second?", "b", number=1),
        Turn(nothing, 2, True, "first?", "a", number=0),
        Turn(nothing, 3, False, "third?", "c", number=2),
    )
    outcome = Outcome(6.0, turn_rewards=(20.0, 10.0, 30.0))  # as the turns stand
    made = replace(completion(6), turns=turns, outcome=outcome, text="c")
    told = reward_sample(PROMPT, made)
    in_time = [["first?", "a"], ["second?", "b"], ["third?", "c"]]
    assert told["turns"] == in_time and told["sample_text"] == "first?asecond?bthird?c"
    assert told["turn_rewards"] == [10.0, 20.0, 30.0]
    assert told["turn_ends"] == [3, 1, 6]  # of each turn, in the tokens, which stand by sequence
    steps = {step["token_end"]: step["reward"] for step in environment_turns(told)["step_rewards"]}
    assert steps == {3: 10.0, 1: 20.0, 6: 30.0}
    sample = Sample(PROMPT, made, Verdict(RewardStatus.OK, 6.0))
    (row,) = readable_samples([Group(PROMPT, (sample,), 0, 0)])
    assert row["turns"] == in_time


def test_a_reward_of_another_trainer_is_told_which_completions_were_truncated():
    told = _samples(["q", "q"], ["a", "b"], None, {"truncated": [False, True]})
    assert [sample["truncated"] for sample in told] == [False, True]
    assert [sample["truncated"] for sample in _samples(["q"], ["a"], None, {})] == [False]
