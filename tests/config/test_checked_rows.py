"""A row that a reward cannot score is refused before a run starts, with its file and line."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import row_checks
from async_grpo.config.preflight import prepare
from async_grpo.config.run import RunConfig
from async_grpo.data import TINY_MODEL
from async_grpo.errors import ConfigurationError

TESTS = [{"input": "1", "output": "1"}]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps({"input": "1+1=", **row}) + "\n" for row in rows))
    return str(path)


def check(tmp_path: Path, rows: list[dict[str, Any]], reward: str, **options: Any) -> None:
    data = write_rows(tmp_path / "data.jsonl", rows)
    prepare(
        RunConfig(
            model_name_or_path=str(TINY_MODEL),
            data_path=data,
            reward_fns=reward,
            max_generation_tokens=24,
            output_dir=str(tmp_path / "out"),
            **options,
        )
    )


# (reward, a row that it can score, a row that it cannot, a part of the reason)
WRONG_ROWS = [
    ("math_verify", {"answer": "#### 18"}, {"answer": None}, "must be text or a number"),
    ("math_verify", {"answer": r"\frac{1}{2}"}, {"answer": "  "}, "is empty"),
    ("math_verify", {"answer": "NaCl"}, {"answer": "NaN"}, "the value is missing"),
    ("math_verify", {"answer": r"1, 2, \ldots, n"}, {"answer": r"\boxed{1"}, "has no end"),
    ("mathd", {"answer": "Monday"}, {"answer": True}, "must be text or a number"),
    ("mathd", {"answer": 27.0}, {"answer": "$"}, "answer"),
    ("sympy", {"answer": "(1, x+1]"}, {"answer": r"\begin{nonsense"}, "cannot read"),
    ("sympy", {"answer": r"1, 2, \ldots, n"}, {"answer": [27]}, "must be text or a number"),
    ("exact", {"answers": ["C", "c)"]}, {"answers": []}, "must be a list"),
    ("exact", {"answer": "~/bin"}, {"answr": "C"}, "must be text or a number"),
    ("countdown", {"nums": [1, 2], "target": 3}, {"nums": [1, 2.5], "target": 3}, "whole numbers"),
    ("countdown_steps", {"nums": [1, 2], "answer": "3"}, {"nums": [1, 2]}, "whole numbers"),
    ("code", {"tests": TESTS}, {"tests": []}, "needs a list `tests`"),
    ("code", {"tests": [{"assert": "assert f(1) == 2"}]}, {"tests": [{"input": "1"}]}, "a test must have"),
    ("regex", {"pattern": "a+"}, {"pattern": "("}, "no regular expression"),
    ("regex", {"pattern": r"\d"}, {}, "needs a column or an option"),
    ("json_schema", {"schema": {"type": "integer"}}, {"schema": {"type": "whole"}}, "no JSON schema"),
    ("json_schema", {"schema": "true"}, {}, "needs a column or an option"),
    ("majority", {}, {"answer": " "}, "is empty"),
    ("majority", {"answer": "7"}, {"answer": True}, "must be text or a number"),
]


def more_options(reward: str) -> dict[str, Any]:
    return {"advantage_estimator": "grpo_process"} if reward == "countdown_steps" else {}


@pytest.mark.parametrize(("reward", "right", "wrong", "reason"), WRONG_ROWS)
def test_a_row_that_cannot_be_scored_is_refused_by_file_and_line(tmp_path, reward, right, wrong, reason):
    check(tmp_path, [right] * 3, reward, **more_options(reward))
    with pytest.raises(ConfigurationError) as refusal:
        check(tmp_path, [right, right, wrong, right], reward, **more_options(reward))
    message = str(refusal.value)
    assert "data.jsonl, line 3: " in message and f"the reward {reward} cannot score" in message
    assert reason in message and "Correct the row or drop it" in message


@pytest.mark.parametrize(
    ("reward", "right", "wrong"),
    [("math_verify", 1e-5, "NaN"), ("mathd", r"50\%", "Infinity"), ("exact", "NaN", "-Infinity")],
)
def test_an_answer_that_is_no_finite_number_is_refused_by_file_and_line(tmp_path, reward, right, wrong):
    check(tmp_path, [{"answer": right}], reward)
    with pytest.raises(
        ConfigurationError, match=rf"data\.jsonl, line 2: answer is {wrong}, which is no finite number"
    ):
        check(tmp_path, [{"answer": right}, {"answer": float(wrong)}], reward)


def test_held_out_rows_are_checked_as_well(tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"answer": "1"}, {"answer": ""}])
    with pytest.raises(ConfigurationError, match=r"held_out\.jsonl, line 2: .*math_verify"):
        check(tmp_path, [{"answer": "1"}], "math_verify", eval_data_path=held_out)


def test_options_of_the_reward_reach_its_check(tmp_path):
    check(tmp_path, [{}], "regex", reward_options="pattern=a+")
    rows = [{"answer": "2"}, {"answer": None}]
    check(tmp_path, rows, "length", reward_options="schedule=overlong")
    with pytest.raises(ConfigurationError, match="line 2: the reward length cannot score"):
        check(tmp_path, rows, "length", reward_options="schedule=cosine")


def test_only_the_rewards_that_a_row_names_check_it(tmp_path):
    rows = [{"answer": "1", "by": "mathd"}, {"tests": TESTS, "by": "code"}]
    check(tmp_path, rows, "mathd,code", reward_column="by")
    with pytest.raises(ConfigurationError, match="line 3: the reward code cannot score"):
        check(tmp_path, [*rows, {"answer": "1", "by": "code"}], "mathd,code", reward_column="by")


def test_a_reward_with_a_fallback_may_meet_rows_that_it_cannot_score(tmp_path):
    rows = [{"answer": "1"}, {"answer": None}]
    check(tmp_path, rows, "mathd", reward_fallback="mathd=format")


OWN_REWARDS = """
from async_grpo.rewards.adapter.decorators import rows_checked_by

def has_words(row, minimum=1):
    if len(row["words"]) < minimum:
        raise ValueError("too few words")

@rows_checked_by(has_words)
def function(sample, minimum=1):
    return 1.0

@rows_checked_by(has_words)
class Decorated:
    def __call__(self, sample, minimum=1):
        return 1.0

class WithMethod:
    def __call__(self, sample, minimum=1):
        return 1.0

    @staticmethod
    def check_row(row, minimum=1):
        has_words(row, minimum)
"""


@pytest.mark.parametrize("name", ["function", "Decorated", "WithMethod"])
@pytest.mark.parametrize(
    ("row", "reason"),
    [({"words": []}, ": too few words"), ({}, ": KeyError: 'words'"), ({"words": "ab"}, "")],
)
def test_rewards_of_the_user_may_check_rows(tmp_path, name, row, reason):
    file = tmp_path / "own_rewards.py"
    file.write_text(OWN_REWARDS)
    rows = [{"words": ["a", "b"]}, row]
    if not reason:
        check(tmp_path, rows, f"{file}:{name}", reward_options="minimum=2")
        return
    with pytest.raises(ConfigurationError) as refusal:
        check(tmp_path, rows, f"{file}:{name}", reward_options="minimum=2")
    assert f"data.jsonl, line 2: the reward {name} cannot score this row{reason}" in str(refusal.value)


def test_slow_checks_end_in_time(tmp_path, monkeypatch):
    file = tmp_path / "own_rewards.py"
    file.write_text(
        "import time\nclass Slow:\n    def __call__(self, sample):\n        return 1.0\n"
        "    @staticmethod\n    def check_row(row):\n        time.sleep(row['seconds'])\n"
    )
    monkeypatch.setattr(row_checks, "CHECK_S", 0.2)
    monkeypatch.setattr(row_checks, "ROW_S", 0.5)
    began_s = time.monotonic()
    check(tmp_path, [{"seconds": 0.05}] * 400, f"{file}:Slow")
    assert time.monotonic() - began_s < 10.0
    with pytest.raises(ConfigurationError, match=r"line 1: .*takes more than 0\.5 s"):
        check(tmp_path, [{"seconds": 60}], f"{file}:Slow")


@pytest.mark.parametrize("num_rows", [0, 1, 99, 100, 101, 350, 12_345])
def test_every_row_is_checked_once(num_rows):
    order = list(row_checks._order_of(num_rows))
    assert sorted(order) == list(range(num_rows))
    assert order[:100] == list(range(min(100, num_rows)))
