"""Process rewards: from the adapter's answer to rewards of tokens, and through its process and the pool."""

import math
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import process_maker
from transformers import AutoTokenizer

from async_grpo.inference.char_ends import char_ends
from async_grpo.rewards.adapter.decorators import process_reward
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.builtin.countdown import NUMBERS_CREDIT
from async_grpo.rewards.builtin.countdown import score as countdown
from async_grpo.rewards.builtin.countdown import score_steps as countdown_steps
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import RewardStatus
from reward_registry import REWARD_ADAPTERS, RewardType
from tests.helpers.answers import answer_of

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "sample-data" / "tiny-model")
SAMPLE = {
    "completion": "3+4 is 7",
    "completion_token_ids": [9, 8, 7, 6],
    "completion_char_ends": [2, 2, 3, 6],  # the last token is the end token, the one before ends at "3+4 is"
}


def answer(returned: Any, sample: dict[str, Any] = SAMPLE, declared: bool = True) -> dict[str, Any]:
    """What becomes of an adapter's returned value."""

    def adapter(sample: dict[str, Any]) -> Any:
        return returned

    return answer_of(process_reward(adapter) if declared else adapter, sample, {})


def steps(*given: tuple[float, str, int]) -> dict[str, Any]:
    return {"step_rewards": [{"reward": reward, unit: end} for reward, unit, end in given]}


@pytest.mark.parametrize(
    ("returned", "placed", "reward"),
    [
        (steps((0.5, "token_end", 1), (0.25, "token_end", 4)), [[0, 0.5], [3, 0.25]], 0.75),
        (
            {"token_rewards": [0, 0.5, True, Fraction(-1, 4)]},
            [[0, 0.0], [1, 0.5], [2, 1.0], [3, -0.25]],
            1.25,
        ),
        ({"step_rewards": []}, [], 0.0),
    ],
)
def test_ends_are_exclusive_token_rewards_are_a_step_each_and_no_steps_are_steps_too(
    returned, placed, reward
):
    found = answer(returned)
    assert (found["status"], found["steps"], found["reward"], found["extra"]) == ("ok", placed, reward, {})


def test_a_completion_of_no_tokens_has_no_place_for_a_step():
    empty = {"completion": "", "completion_token_ids": [], "completion_char_ends": []}
    assert answer({"token_rewards": []}, empty)["status"] == "ok"
    assert "1..0" in answer(steps((1.0, "token_end", 1)), empty)["reason"]
    assert "1..0" in answer(steps((1.0, "char_end", 1)), empty)["reason"]


NAN = math.nan


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ({"reward": 1.0}, "must return either step_rewards or token_rewards, not only ['reward']"),
        ({"step_rewards": [], "token_rewards": [0.0] * 4}, "not both"),
        ({"step_rewards": "abc"}, "step_rewards is a str, not a list"),
        ({"step_rewards": [0.5]}, "step_rewards[0] is 0.5, not {"),
        ({"step_rewards": [{"token_end": 1}]}, "step_rewards[0] is {'token_end': 1}, not {"),
        ({"step_rewards": [{"reward": 1.0, "token_end": 1, "note": 1}]}, "'note': 1}, not {"),
        (steps((1.0, "token_end", 1), (NAN, "token_end", 1)), "step_rewards[1]: reward=nan: only finite"),
        (steps(("1", "token_end", 1)), "reward='1'"),
        (steps((1.0, "token_end", 0)), "token_end=0 is not one of 1..4: the completion has 4 tokens"),
        (steps((1.0, "char_end", 0)), "char_end=0 is not one of 1..8: the completion has 8 characters"),
        (steps((1.0, "token_end", True)), "token_end=True is not one of 1..4"),
        (
            steps((1e308, "token_end", 1)),
            "step_rewards[0]: reward=1e+308: a reward lies between -1e+06 and 1e+06",
        ),
        (
            steps(*[(6e5, "token_end", 1)] * 2),
            "the steps that end in token 0 add up to 1.2e+06: a reward lies",
        ),
        (steps((6e5, "token_end", 1), (6e5, "token_end", 2)), "reward=1200000.0: a reward lies between"),
        ({"token_rewards": [0.0] * 3}, "3 token_rewards for 4 tokens: there must be one for each"),
        ({"token_rewards": [0.0, 0.0, NAN, 0.0]}, "token_rewards[2]=nan: only finite"),
        ({"part": "x", "step_rewards": []}, "part='x'"),
        (1.0, "returned a float, not a dict"),
    ],
)
def test_anything_else_is_a_failure_that_names_the_value(returned, reason):
    found = answer(returned)
    assert (found["status"], found["reward"], found["steps"]) == ("failed", None, [])
    assert reason in found["reason"]


def test_a_character_cannot_be_placed_in_a_run_that_records_none():
    sample = {key: value for key, value in SAMPLE.items() if key != "completion_char_ends"}
    refused = answer(steps((1.0, "char_end", 1)), sample)
    assert "the sample has no completion_char_ends; use token_end" in refused["reason"]
    assert answer(steps((1.0, "token_end", 1)), sample)["status"] == "ok"


@pytest.mark.parametrize("name", ["step_rewards", "token_rewards"])
def test_an_adapter_that_is_not_declared_must_not_return_steps(name):
    found = answer({"reward": 1.0, name: []}, declared=False)
    assert found["status"] == "failed" and found["reward"] is None
    assert f"returned {name}, but it is not declared to: decorate it with @process_reward" in found["reason"]


def test_an_adapter_that_rewrites_its_sample_is_measured_on_the_original():
    @process_reward
    def trims(sample: dict[str, Any]) -> dict[str, Any]:
        sample["completion"] = "3"
        sample["completion_token_ids"] = []
        return steps((1.0, "char_end", 8))

    assert answer_of(trims, SAMPLE, {})["steps"] == [[3, 1.0]]


@given(
    ends=st.lists(st.integers(0, 12), min_size=1, max_size=8).map(sorted),
    given_steps=st.lists(st.tuples(st.integers(-4, 4), st.booleans(), st.integers(1, 12)), max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_any_steps_are_placed_as_a_search_from_the_left_places_them(ends, given_steps):
    sample = {"completion": "x" * 12, "completion_token_ids": [0] * len(ends), "completion_char_ends": ends}
    returned, expected = [], [0.0] * len(ends)
    touched = set()
    for reward, by_token, end in given_steps:
        if by_token:
            token = min(end, len(ends)) - 1
            returned.append({"reward": reward, "token_end": token + 1})
        else:
            token = next((t for t, char_end in enumerate(ends) if char_end >= end), len(ends) - 1)
            returned.append({"reward": reward, "char_end": end})
        expected[token] += reward
        touched.add(token)
    found = answer({"step_rewards": returned}, sample)
    assert found["steps"] == [[token, expected[token]] for token in sorted(touched)]
    assert found["reward"] == sum(reward for reward, _, _ in given_steps)


PAGE = RewardRegistrySource(
    "page_with_steps",
    "from async_grpo.rewards.adapter.decorators import process_reward\n"
    "@process_reward\n"
    "def judge(sample): return {'step_rewards': sample['judged'], 'progress': 2}\n"
    "def plain(sample): return {'reward': 1.0}\n"
    "REWARD_ADAPTERS = {'judge': judge, 'plain': plain}\n",
)


async def test_steps_travel_from_the_adapters_process_to_the_verdict():
    pool = VerifierPool(["judge", "plain"], process_maker(PAGE))
    await pool.start()
    judged = steps((0.1 + 0.2, "char_end", 3), (-1.0, "token_end", 1))["step_rewards"]
    verdict = await pool.verify(SAMPLE | {"judged": judged})
    broken = await pool.verify(SAMPLE | {"judged": "none"})
    await pool.close()
    judge, plain = sorted(verdict.results, key=lambda result: result.adapter)
    assert judge.steps == ((0, -1.0), (2, 0.1 + 0.2)) and plain.steps == ()  # exactly: JSON keeps every bit
    assert judge.reward == pytest.approx(-0.7) and judge.extra == {"progress": 2.0}
    assert broken.status is RewardStatus.FAILED and broken.results[0].steps == ()
    assert pickle.loads(pickle.dumps(verdict)) == verdict  # as an actor sends it


CREDIT = NUMBERS_CREDIT / 3


def judged(
    text: str, nums: tuple[int, ...] = (3, 4, 5), target: int = 27, **columns: Any
) -> list[tuple[str, float]]:
    """The text up to the end of each step, and the step's reward."""
    found = countdown_steps({"completion": text, "nums": list(nums), "target": target, **columns})
    return [(text[: step["char_end"]], pytest.approx(step["reward"])) for step in found["step_rewards"]]


def test_a_right_answer_earns_for_each_number_and_for_its_close():
    text = "so</think>\n<answer>3*(4+5)</answer><|im_end|>"
    assert judged(text, end_token="<|im_end|>") == [
        ("so</think>\n<answer>3", CREDIT),
        ("so</think>\n<answer>3*(4", CREDIT),
        ("so</think>\n<answer>3*(4+5", CREDIT),
        ("so</think>\n<answer>3*(4+5)</answer>", 1.0),
    ]


WRONG = [
    # completion, rewards of its steps in credits
    ("</think><answer>3+4+5</answer>", [1, 1, 1]),  # the numbers, but not the value
    ("</think><answer>3*9</answer>", [1, -1]),
    ("</think><answer>3*3*3</answer>", [1, -1, -1]),  # each number is there once
    ("</think><answer>03*(4+5)</answer>", [-1, 1, 1]),
    ("</think><answer>three</answer>", []),
    ("</think><answer></answer>", []),
    ("</think><answer>3*(4", [1, 1]),  # cut off
    ("3*(4+5)</think>", []),
    ("<answer>3</answer></think>27", []),  # the thought may say what it likes
    ("</think><answer>3</answer><answer>4</answer>", []),  # two answers: which one is meant?
    ("</think><answer>3</answer>4</answer>", [1]),
    ("</think><answer>" + "7 " * 500, [-1] * 6),  # babble is not judged to its end
    ("", []),
]


@pytest.mark.parametrize(("text", "credits"), WRONG)
def test_other_answers_earn_and_lose_by_their_numbers_alone(text, credits):
    assert [reward for _, reward in judged(text)] == [pytest.approx(CREDIT * credit) for credit in credits]
    assert countdown({"completion": text, "nums": [3, 4, 5], "target": 27})["answer_reward"] == 0


def test_blanks_before_the_completion_do_not_shift_the_steps():
    assert [text for text, _ in judged(" \n <answer>3\n*(4+5) </answer> \n")][:1] == [" \n <answer>3"]


def test_the_steps_fall_on_the_tokens_of_the_tiny_model():
    text = "é</think>\n<answer>8+15-5</answer>"
    ids = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
    ends = char_ends(TOKENIZER, ids, text).tolist()
    sample = {"completion": text, "completion_token_ids": ids, "completion_char_ends": ends}
    found = answer_of(
        REWARD_ADAPTERS[RewardType.COUNTDOWN_STEPS], sample | {"nums": [8, 15, 5], "target": 18}, {}
    )
    assert [TOKENIZER.decode(ids[: token + 1])[-1] for token, _ in found["steps"]] == ["8", "5", "5", ">"]
    assert [reward for _, reward in found["steps"]] == pytest.approx([0.1, 0.1, 0.1, 1.0])
    assert found["extra"] == {"numbers_reward": pytest.approx(0.3), "answer_reward": 1.0}
