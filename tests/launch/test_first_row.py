"""The rewards of the user score the first row before a run starts, and are refused if they always fail."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config.preflight import prepare
from async_grpo.data import TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.launch import first_row
from async_grpo.launch.local_config import LocalConfig

REWARDS = """
import json
import re
import time
from async_grpo.rewards.adapter.decorators import batch, rows_checked_by

def reads_answer(sample):
    return float(sample["answer"] in sample["completion"])

def reads_other_column(sample):
    return float(sample["solution"] in sample["completion"])

def unknown_name(sample):
    return length_of(sample["completion"])

def lacks_module(sample):
    import no_such_package
    return 1.0

def refuses_row(sample):
    raise ValueError("the row has no difficulty")

def returns_text(sample):
    return "good"

def returns_nan(sample):
    return float("nan")

def needs_form(sample):
    return float(re.fullmatch(r"Result: (.*)", sample["completion"]).group(1) == sample["answer"])

def needs_json(sample):
    return float(json.loads(sample["completion"]) == 7)

def needs_tag(sample):
    if "<answer>" not in sample["completion"]:
        raise ValueError("no tag")
    return 1.0

def abstains(sample):
    return {"abstain": "I have nothing to say"}

def takes_option(sample, column="solution"):
    return float(sample[column] == "7")

@batch(max_samples=4)
def batched(samples):
    return [float(sample["solution"] == "7") for sample in samples]

class Counts:
    def __call__(self, sample):
        return float(sample["solution"] == "7")

@rows_checked_by(lambda row: None)
def checks_itself(sample):
    return float(sample["solution"] == "7")

def sleeps(sample):
    time.sleep(60)
"""


def try_reward(folder: Path, name: str, **options: Any) -> None:
    (folder / "mine.py").write_text(REWARDS)
    data = folder / "data.jsonl"
    data.write_text(json.dumps({"input": "3+4=", "answer": "7"}) + "\n")
    config = LocalConfig(
        model_name_or_path=str(TINY_MODEL),
        data_path=str(data),
        reward_fns=",".join(f"{folder / 'mine.py'}:{part}" for part in name.split(",")),
        max_generation_tokens=24,
        output_dir=str(folder / "out"),
        **options,
    )
    first_row.try_first_row(config, prepare(config))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("reads_other_column", "KeyError: 'solution'"),
        ("unknown_name", "NameError: name 'length_of' is not defined"),
        ("lacks_module", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("refuses_row", "ValueError: the row has no difficulty"),
        ("returns_text", "returned a str"),
        ("returns_nan", "nan"),
        ("batched", "KeyError: 'solution'"),
        ("Counts", "KeyError: 'solution'"),
        ("takes_option", "KeyError: 'solution'"),
    ],
)
def test_a_reward_that_fails_on_the_first_row_is_refused_by_file_line_and_reason(tmp_path, name, reason):
    with pytest.raises(ConfigurationError) as refusal:
        try_reward(tmp_path, name)
    message = str(refusal.value)
    assert "data.jsonl, line 1: " in message and f"the reward {name} fails on this row" in message
    assert reason in message and "Correct the reward or the row" in message


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reads_answer", {}),
        ("needs_tag", {}),
        ("needs_json", {}),
        ("abstains", {}),
        ("checks_itself", {}),
        ("takes_option", {"reward_options": "column=answer"}),
        ("reads_answer,takes_option", {"reward_options": "column=answer"}),
        ("reads_other_column", {"reward_fallback": "reads_other_column=format"}),
    ],
)
def test_a_reward_that_can_score_the_first_row_is_not_refused(tmp_path, name, options):
    try_reward(tmp_path, name, **options)


def test_a_reward_that_may_only_miss_the_form_of_the_completion_is_warned_of(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        try_reward(tmp_path, "needs_form")
    assert "data.jsonl, line 1: the reward needs_form fails on this row" in caplog.text


def test_a_slow_reward_delays_the_start_by_seconds_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(first_row, "TRIAL_S", 2.0)
    began_s = time.monotonic()
    try_reward(tmp_path, "sleeps")
    assert time.monotonic() - began_s < 10.0


@pytest.mark.parametrize("name", ["countdown", "format", "exact", "math_verify"])
def test_shipped_rewards_start_no_process_for_the_trial(tmp_path, monkeypatch, name):
    monkeypatch.setattr(first_row.asyncio, "run", lambda *_: pytest.fail("a trial was started"))
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input": "3+4=", "answer": "7", "nums": [3, 4]}) + "\n")
    config = LocalConfig(
        model_name_or_path=str(TINY_MODEL),
        data_path=str(data),
        reward_fns=name,
        max_generation_tokens=24,
        output_dir=str(tmp_path / "out"),
    )
    first_row.try_first_row(config, prepare(config))
