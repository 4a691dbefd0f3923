"""What an evaluation says: against every choice of k completions, the interval by hand, and votes counted by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import EvaluationConfig
from async_grpo.experience.evaluation import answer_of, evaluation_stats, pass_at_k
from async_grpo.testing import completion
from async_grpo.types import Group, Prompt, RewardStatus, Sample, Sampling, Verdict

FAILED = Verdict(RewardStatus.FAILED, None)


def group(number, rewards, texts=None, version=3):
    prompt = Prompt(-1 - number, np.array([1], np.int32), {"input": "q"})
    texts = texts or [f"answer {reward}" for reward in rewards]
    samples = tuple(
        Sample(
            prompt,
            replace(completion(2, version + member), text=text, member=member),
            FAILED if reward is None else Verdict(RewardStatus.OK, reward),
        )
        for member, (reward, text) in enumerate(zip(rewards, texts, strict=True))
    )
    return Group(prompt, samples, 0, -1)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_one_that_passes(passed, k):
    if k <= len(passed):
        choices = [any(choice) for choice in itertools.combinations(passed, k)]
        assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(np.mean(choices))


def test_means_are_over_questions_with_their_95_percent_interval():
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.5], [0.0, 0.0, 0.0, 0.0]]
    found = evaluation_stats([group(n, row) for n, row in enumerate(rewards)], 1.0)
    shares = [0.25, 0.75, 0.0]
    assert found["avg@4"] == pytest.approx(np.mean(shares))
    assert found["avg@4_ci"] == pytest.approx(1.96 * np.std(shares, ddof=1) / np.sqrt(3))
    assert found["avg_reward"] == pytest.approx(np.mean(rewards))
    assert found["pass@1"] == found["avg@4"] and found["pass@4"] == pytest.approx(2 / 3)
    assert found["pass@2"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert (found["num_questions"], found["num_samples"]) == (3, 12)
    assert (found["version_min"], found["version_max"]) == (3, 6)


def test_the_majority_is_counted_by_answers_and_a_tie_counts_its_share():
    boxed = [r"\boxed{4}", r"well, \boxed{4}", r"\boxed{5}", r"\boxed{6}"]
    right, wrong = group(0, [1.0, 1.0, 0.0, 0.0], boxed), group(1, [0.0, 0.0, 1.0, 0.0], boxed)
    tied = group(2, [1.0, 0.0, 1.0, 0.0], ["a", "b", "a", "b"])
    assert evaluation_stats([right, wrong], 1.0)["majority@4"] == 0.5
    assert evaluation_stats([tied], 1.0)["majority@4"] == 0.5


def test_the_majority_reads_whole_boxes_and_counts_none_that_is_cut_off():
    votes = [r"\boxed{12}", r"\boxed{12}, as $\frac{24}{2}$", r"\boxed{\frac{24}{", r"\boxed{1", r"\boxed{"]
    right = group(0, [1.0, 1.0, 0.0, 0.0, 0.0], votes)
    assert evaluation_stats([right], 1.0)["majority@5"] == 1.0
    nothing = group(1, [0.0, 0.0, 0.0], [r"\boxed{1", "", r"\boxed"])
    assert evaluation_stats([right, nothing], 1.0)["majority@5"] == 0.5


def test_what_could_not_be_scored_says_nothing_and_one_question_has_no_interval():
    found = evaluation_stats([group(0, [1.0, None]), group(1, [None, None])], 1.0)
    assert found["avg@2"] == 1.0 and found["avg@2_ci"] is None and found["num_reward_failed"] == 3
    assert evaluation_stats([group(0, [None])], 1.0)["avg_reward"] is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1 + 2</answer>", "1 + 2"),
        ("no\n\n  7\n", "7"),
        ("", None),
        (r"\boxed{1}, no: \boxed{2}", "2"),
    ],
)
def test_an_answer_is_what_stands_last(text, answer):
    assert answer_of(text) == answer


def test_an_evaluation_samples_as_its_options_say():
    assert EvaluationConfig().sampling == Sampling(None, None)
    assert EvaluationConfig(eval_temperature=0.5, eval_max_tokens=7).sampling == Sampling(0.5, 7)


def test_held_out_files_may_have_names():
    assert EvaluationConfig().eval_files == {}
    assert EvaluationConfig(eval_data_path="a.jsonl").eval_files == {"": "a.jsonl"}
    two = EvaluationConfig(eval_data_path="easy=a.jsonl, hard=b.jsonl").eval_files
    assert two == {"easy": "a.jsonl", "hard": "b.jsonl"}
    for wrong in ("a=b,a=c", "a=b,c", "=b"):
        with pytest.raises(ConfigurationError, match="NAME=FILE,NAME=FILE"):
            EvaluationConfig(eval_data_path=wrong).eval_files  # noqa: B018
