"""Bad input: a clear error at start, exit code 2, and nothing started (`async-grpo run` refuses before it starts Ray)."""

import json

import psutil
import pytest
from early_starts import nothing_early

from async_grpo.__main__ import main
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.launch import local_run, trainer

GOOD = json.dumps({"input_token_ids": [1, 2, 3], "input": "abc", "answer": 1}) + "\n"
ROW = "line 3: the column 'judge' of a row says"


@pytest.fixture(autouse=True)
def inputs_are_checked_here(monkeypatch):
    """Start neither Ray nor the warm servers, which takes seconds."""
    monkeypatch.setattr(local_run, "early_start", nothing_early)


def refusal(capsys, command=main, **changes) -> str:
    """The message with which the command refuses these settings; it must end with code 2 and start no process."""
    options = {"model-name-or-path": TINY_MODEL, "data-path": COUNTDOWN_TRAIN, "reward-fns": "countdown"}
    options |= {"batch-size": 4, "samples-per-question": 4, "max-generation-tokens": 24, **changes}
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    before = set(psutil.Process().children(recursive=True))  # other tests may keep a process of theirs
    with pytest.raises(SystemExit) as ended:
        command((["run"] if command is main else []) + arguments)
    assert ended.value.code == 2
    assert set(psutil.Process().children(recursive=True)) <= before
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "{broken\n", "line 2: not JSON"),
        (GOOD * 2 + '{"answer": 3}\n', "line 3: a row needs input_token_ids, messages, or prompt/input text"),
        (json.dumps({"input_token_ids": [1] * 5000}) + "\n", "line 1: a prompt of 5000 tokens"),
        ('{"input_token_ids": [1000000]}\n', "line 1: token id 1000000 is outside the model's vocabulary"),
        ("", "holds no questions"),
        ('{"messages": [1, 2]}\n', "line 1: messages must be a list of objects"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(capsys, tmp_path, text, message):
    (tmp_path / "data.jsonl").write_text(text)
    error = refusal(capsys, **{"data-path": tmp_path / "data.jsonl", "output-dir": tmp_path / "out"})
    assert message in error and "data.jsonl" in error


@pytest.mark.parametrize(
    ("option", "judges", "combine", "message"),
    [
        ("data-path", None, "best", f"{ROW} None; it must name some of countdown, format, majority"),
        ("eval-data-path", "", "best", f"{ROW} ''"),
        ("data-path", "countdwn", "best", f"{ROW} 'countdwn'"),
        (
            *("eval-data-path", "majority,format", "gate"),
            "line 3: the column 'judge' says 'majority,format', but a gate decides before the gro",
        ),
    ],
)
def test_a_row_whose_column_does_not_say_who_judges_it(capsys, tmp_path, option, judges, combine, message):
    rows = [{"input_token_ids": [1], "judge": judge} for judge in ("countdown", "format,majority", judges)]
    right, wrong = tmp_path / "right.jsonl", tmp_path / "wrong.jsonl"
    right.write_text(json.dumps(rows[0]))
    wrong.write_text("\n".join(map(json.dumps, rows)))
    rewards = {"reward-fns": "countdown,format,majority", "reward-combine": combine, "reward-column": "judge"}
    error = refusal(capsys, **{"data-path": right, "output-dir": tmp_path / "out", **rewards, option: wrong})
    assert f"{wrong}, {message}" in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data-path": "none.jsonl"}, "none.jsonl: there is no such file"),
        ({"reward-fns": "countdwn"}, "countdwn: reward_registry knows code, countdown, countdown_steps, environment"),
        ({"reward-fns": ""}, "name the rewards of the run"),
        (
            {"samples-per-question": 32, "max-num-seqs": 16, "overhead-seqs": 8},
            "a group of 32 (--samples-per-question) does not fit an engine of 24",
        ),
        ({"max-tokens-per-gpu": 30}, "cannot fit --max-tokens-per-gpu 30"),
        ({"model-name-or-path": "/no/such/model"}, "/no/such/model"),
        ({"weight-transport": "nccl"}, "nccl needs GPUs"),
        ({"samples-per-question": "1"}, "a group of one has nothing to compare with"),
        ({"ray-address": "127.0.0.1:1"}, "nothing listens there"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work(capsys, tmp_path, changes, message):
    assert message in refusal(capsys, **{"output-dir": tmp_path, **changes})


def test_without_a_cluster_the_trainer_says_how_to_start_one(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    error = refusal(capsys, trainer.main, **{"output-dir": tmp_path})
    assert "no Ray cluster to join at RAY_ADDRESS 127.0.0.1:1" in error and "ray start --head" in error
    missing = {"output-dir": tmp_path, "data-path": "none.jsonl"}
    assert "none.jsonl: there is no such file" in refusal(capsys, trainer.main, **missing)
