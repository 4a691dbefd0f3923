"""What a reward is told of a completion, column by column."""

from dataclasses import replace

import numpy as np

from async_grpo.experience.rollouts import reward_sample
from async_grpo.rewards.standalone import _samples
from async_grpo.testing import completion
from async_grpo.types import Outcome, Prompt, Turn

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


def test_a_reward_of_another_trainer_is_told_which_completions_were_truncated():
    told = _samples(["q", "q"], ["a", "b"], None, {"truncated": [False, True]})
    assert [sample["truncated"] for sample in told] == [False, True]
    assert [sample["truncated"] for sample in _samples(["q"], ["a"], None, {})] == [False]
