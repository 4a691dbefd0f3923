"""A wrong row is refused by `async-grpo run` before it starts a worker, with file and line, and nothing is written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from early_starts import nothing_early
from real_runs import left_behind

from async_grpo.__main__ import main
from async_grpo.data import TINY_MODEL
from async_grpo.launch import local_run

GOOD = {"prompt": "3 + 4 = ", "answer": "7"}
USER = [{"role": "user", "content": "3 + 4?"}]
QUESTION = {"--prompt-column": "question"}
TRUTH = {"--answer-column": "reward_model.ground_truth"}

# Kind -> the wrong row, as a value or as the text of its line; what the message says; options of the run
ROWS = {
    "no JSON": ("{broken", "not JSON", {}),
    "half an object": ('{"prompt": "a"', "not JSON", {}),
    "two objects": ('{"prompt": "a"}{"prompt": "b"}', "not JSON", {}),
    "Python instead of JSON": ("{'prompt': 'a'}", "not JSON", {}),
    "another encoding": ('{"prompt": "é"}'.encode("cp1252"), "not UTF-8", {}),
    "a byte order mark": ('{"prompt": "a"}'.encode("utf-8-sig"), "BOM", {}),
    "a list": ([1, 2], "a row must be an object, not list", {}),
    "a text": ("a", "a row must be an object, not str", {}),
    "a number": (7, "a row must be an object, not int", {}),
    "a null": (None, "a row must be an object, not NoneType", {}),
    "brackets nested deeply": ('{"prompt": ' + "[" * 200 + "]" * 200 + "}", "nested deeper", {}),
    "no columns": ({}, "a row needs input_token_ids", {}),
    "an answer alone": ({"answer": "7"}, "its columns are answer", {}),
    "GSM8K's row": ({"question": "a", "answer": "7"}, "--prompt-column question", {}),
    "DeepScaleR's row": ({"problem": "a", "answer": "7", "solution": "b"}, "--prompt-column problem", {}),
    "NeMo's row": ({"problem": "a", "expected_answer": "7"}, "--answer-column expected_answer", {}),
    "OpenRLHF's row": ({"context_messages": USER, "label": "7"}, "--prompt-column context_messages", {}),
    "Alpaca's row": ({"instruction": "a", "output": "7"}, "--prompt-column instruction", {}),
    "ShareGPT's row": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "7"}]},
        "--prompt-column conversations --answer-column conversations.-1.value",
        {},
    ),
    "null prompts": ({"input": None, "prompt": None, "answer": "7"}, "a row needs input_token_ids", {}),
    "the NaN of pandas as a prompt": ('{"prompt": NaN}', "a row needs input_token_ids", {}),
    "an answer that is NaN": ('{"prompt": "a", "answer": NaN}', "answer is NaN", {}),
    "an answer that is infinite": ('{"prompt": "a", "answer": -1e999}', "answer is -Infinity", {}),
    "answers with a NaN": ('{"prompt": "a", "answers": ["1", NaN]}', "answers is NaN", {}),
    "messages that Python printed": ({"prompt": str(USER)}, "a list of messages as Python prints it", {}),
    "half of a surrogate pair": ('{"prompt": "a \\ud83d b"}', "half of a surrogate pair", {}),
    "an empty prompt": ({"prompt": ""}, "a prompt of 0 tokens", {}),
    "a prompt that is too long": ({"prompt": "a" * 2000}, "a prompt of 2000 tokens", {}),
    "a prompt of megabytes": ({"prompt": "a" * (3 << 20)}, "a prompt of 3145728 characters", {}),
    "token ids that are texts": (
        {"input_token_ids": ["1"]},
        "input_token_ids must be a list of integers",
        {},
    ),
    "no token ids": ({"input_token_ids": []}, "a prompt of 0 tokens", {}),
    "token ids of another model": ({"input_token_ids": [10**6]}, "outside the model's vocabulary", {}),
    "messages that are none": ({"messages": [1]}, "messages must be a list of objects", {}),
    "no messages": ({"messages": []}, "messages must be a list of objects", {}),
    "messages without text": (
        {"messages": [{"role": "user", "content": " "}]},
        "the messages have no text, so there is no question",
        {},
    ),
    "an answer of several numbers": (
        {"prompt": "a", "answer": "5..7"},
        "of the row's answer '5..7', only the number 5 can be read",
        {"--reward-fns": "math_verify"},
    ),
    "an answer that is JSON": (
        {"prompt": "a", "answer": '{"ground_truth": "7"}'},
        "is a JSON object: name the field that holds the value",
        {"--reward-fns": "math_verify"},
    ),
    "an answer that is prose": (
        {"prompt": "a", "answer": "It has 3 sides. They are equal."},
        "is prose, in which no value can be found",
        {"--reward-fns": "math_verify"},
    ),
    "a test that is no Python": (
        {"prompt": "a", "tests": [{"assert": "assert f(1) = 2"}]},
        "cannot be run, because it is not valid Python",
        {"--reward-fns": "code"},
    ),
    "a test of numpy": (
        {"prompt": "a", "tests": ["import numpy\nassert f(1) == 2"]},
        "imports numpy, but tests can import only",
        {"--reward-fns": "code"},
    ),
    "no such column": (GOOD, "question is not in this row, which has prompt, answer", QUESTION),
    "a null in the column": ({"question": None}, "question is null in this row", QUESTION),
    "an empty text in the column": ({"question": " "}, "the text there is empty", QUESTION),
    "a number in the column": ({"question": 7}, "a prompt must be a text", QUESTION),
    "no answer there": (GOOD, "reward_model.ground_truth is not in this row", TRUTH),
    "no part of that name": (
        GOOD | {"reward_model": {"style": "rule"}},
        "which has style in reward_model",
        TRUTH,
    ),
    "a null answer there": (
        GOOD | {"reward_model": {"ground_truth": None}},
        "reward_model.ground_truth is null in this row",
        TRUTH,
    ),
    "a NaN there": (
        '{"prompt": "a", "reward_model": {"ground_truth": NaN}}',
        "reward_model.ground_truth is NaN in this row",
        TRUTH,
    ),
}
# All good rows of these tests have every column that the options name
COMPLETE = GOOD | {
    "question": "3 + 4?",
    "reward_model": {"ground_truth": "7"},
    "tests": ["assert f(1) == 2"],
}


def as_line(row: object) -> bytes:
    if isinstance(row, bytes):
        return row
    is_line = isinstance(row, str) and row != "a"
    return (row if is_line else json.dumps(row)).encode()


def arguments(folder: Path, path: Path, held_out: Path | None, options: dict[str, str]) -> list[str]:
    files = {"--data-path": path, "--output-dir": folder / "out", "--model-name-or-path": TINY_MODEL}
    if held_out is not None:
        files["--eval-data-path"] = held_out
    sizes = {"--batch-size": 4, "--samples-per-question": 4, "--max-generation-tokens": 24}
    settings = files | sizes | {"--reward-fns": "exact"} | options
    return ["run", *(f"{name}={value}" for name, value in settings.items())]


def write(folder: Path, row: object) -> tuple[Path, Path]:
    """Write a file of good rows, and one whose line 4 is wrong."""
    good_line = json.dumps(COMPLETE).encode()
    good, wrong = folder / "good.jsonl", folder / "wrong.jsonl"
    good.write_bytes(good_line + b"\n")
    wrong.write_bytes(b"\n".join([good_line, b"", good_line, as_line(row), good_line]) + b"\n")
    return good, wrong


@pytest.mark.parametrize("kind", ["a null answer there", "no such column"])
def test_a_wrong_row_among_those_held_out_is_refused_too(tmp_path, monkeypatch, capsys, kind):
    check_refusal(tmp_path, monkeypatch, capsys, kind, is_held_out=True)


def test_there_are_forty_kinds():
    assert len(ROWS) >= 40


@pytest.mark.parametrize(
    "is_held_out",
    [False, pytest.param(True, marks=pytest.mark.exhaustive)],
    ids=["training", "held-out"],
)
@pytest.mark.parametrize("kind", ROWS)
def test_a_wrong_row_is_refused_with_file_and_line(tmp_path, monkeypatch, capsys, kind, is_held_out):
    check_refusal(tmp_path, monkeypatch, capsys, kind, is_held_out)


def check_refusal(tmp_path, monkeypatch, capsys, kind: str, is_held_out: bool) -> None:
    monkeypatch.setattr(local_run, "early_start", nothing_early)
    row, message, options = ROWS[kind]
    good, wrong = write(tmp_path, row)
    with pytest.raises(SystemExit) as ended:
        main(arguments(tmp_path, good if is_held_out else wrong, wrong if is_held_out else None, options))
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"{wrong}, line 4: " in error and message in error, error
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_a_wrong_row_before_it_starts_workers_and_ends_what_it_has_started(tmp_path):
    """All kinds are refused above; a program starts Ray meanwhile, and checks the rows in another process."""
    row, message, options = ROWS["a null answer there"]
    _, wrong = write(tmp_path, row)
    command = [sys.executable, "-m", "async_grpo", *arguments(tmp_path, wrong, None, options)]
    environment = {**os.environ, "RUN_MARK": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2 and f"{wrong}, line 4: " in done.stderr and message in done.stderr, (
        done.stderr
    )
    assert "starting workers" not in done.stderr
    assert left_behind(tmp_path) == [] and not (tmp_path / "out").exists()
