"""`async-grpo verify` reads the files that training reads, and says what it cannot write."""

import json
import re
from pathlib import Path

import pytest
from data_packages import PACKAGES, are_there

from async_grpo.__main__ import main
from async_grpo.data import TINY_MODEL

ROWS = [
    {"completion": "The answer is \\boxed{7}.", "answer": "7", "label": True},
    {"completion": "", "answer": "7", "label": False},
    {"completion": 'a, "b"\nc \\boxed{8}', "answer": "7", "label": 0.0},
]
TABLE = 'completion,answer,label\nThe answer is \\boxed{7}.,7,TRUE\n,7,false\n"a, ""b""\nc \\boxed{8}",7,0\n'
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
# Name of a file -> its content
FILES = {
    "rows.jsonl": LINES,
    "rows.txt": LINES,
    "mark.jsonl": "\ufeff" + LINES,
    "rows.json": json.dumps(ROWS),
    "lines.json": LINES,
    "rows.csv": TABLE,
    "mark.csv": "\ufeff" + TABLE,
}


def verify(path: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(path), "--reward-fns", "mathd", "--workers", "1", *options])
    return ended.value.code or 0


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_training_reads_is_verified(tmp_path, name):
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    output = tmp_path / "out.jsonl"
    assert verify(tmp_path / name, "--output", str(output)) == 0
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["reward"], row["label"]) for row in results] == [(1, 1), (0, 0), (0, 0)]
    assert [row["completion"] for row in results] == [row["completion"] for row in ROWS]


@pytest.mark.skipif(not are_there(), reason="datasets is not there: scripts/setup_extras")
def test_a_parquet_file_is_verified(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(PACKAGES)
    import pyarrow
    import pyarrow.parquet

    rows = [row | {"label": float(row["label"])} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    output = tmp_path / "out.jsonl"
    assert verify(tmp_path / "rows.parquet", "--output", str(output)) == 0
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["line"], row["reward"], row["label"]) for row in results] == [
        (1, 1, 1),
        (2, 0, 0),
        (3, 0, 0),
    ]


WRONG_FILES = {
    "label.csv": ("completion,label\na,maybe\n", "line 2: the column label must be true, false or a number"),
    "cells.csv": ("completion,answer\na\n", "line 2: a row of 1 cells under 2 columns"),
    "list.json": ('{"a": 1}', "holds no list of rows, but a"),
    "row.json": ('[{"completion": 7}]', "row 1: the column completion must be text, not 7"),
    "label.jsonl": (
        '{"completion": "a", "label": "1"}',
        "line 1: the column label must be true, false or a number",
    ),
    "null.jsonl": ('{"completion": null}', "line 1: the column completion must be text, not None"),
    "rows.xlsx": ("PK", "a table of Excel: save it as CSV UTF-8"),
    "empty.csv": ("", "holds no completions"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_file_that_cannot_be_verified_is_refused_by_row(tmp_path, capsys, name):
    content, message = WRONG_FILES[name]
    (tmp_path / name).write_text(content)
    assert verify(tmp_path / name) == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_is_said_by_the_option_s_name(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(LINES)
    assert verify(tmp_path / "rows.jsonl", "--output", "/dev/full") == 1
    error = capsys.readouterr().err
    assert (
        "--output /dev/full cannot be written to the end (No space left" in error and "Traceback" not in error
    )


ASK = [{"role": "user", "content": "3+4?"}]
CHAT = "<|im_start|>user\n3+4?<|im_end|><|im_start|>assistant\n"
# Columns of a row -> the options, and the prompt that rewards get
PROMPTS = {
    "a question": ({"question": "3+4?"}, ["--prompt-column=question"], CHAT),
    "a whole prompt": ({"question": "3+4="}, ["--prompt-column=question", "--prompt-as=text"], "3+4="),
    "messages": ({"messages": ASK}, [], CHAT),
    "messages in a text": ({"messages": json.dumps(ASK)}, [], CHAT),
    "messages in a column": ({"turns": ASK}, ["--prompt-column=turns"], CHAT),
    "a text": ({"prompt": "3+4="}, [], "3+4="),
    "its own input": ({"input": "3+4=", "messages": ASK}, [], "3+4="),
    "a system prompt": (
        {"question": "3+4?"},
        ["--prompt-column=question", "--system-prompt=Add."],
        f"<|im_start|>system\nAdd.<|im_end|>{CHAT}",
    ),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_rewards_get_the_prompt_that_a_run_of_the_model_makes(tmp_path, kind):
    columns, options, expected = PROMPTS[kind]
    row = {**columns, "completion": "7", "answer": "7"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "mine.py").write_text(
        f"def same(sample):\n    return float(sample['input'] == {expected!r})\n"
    )
    output = tmp_path / "out.jsonl"
    arguments = [str(tmp_path / "rows.jsonl"), f"--reward-fns={tmp_path}/mine.py:same", f"--output={output}"]
    with pytest.raises(SystemExit):
        main(["verify", *arguments, f"--model-name-or-path={TINY_MODEL}", *options])
    assert [json.loads(line)["reward"] for line in output.read_text().splitlines()] == [1.0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"response": "7", "answer": "7"}, "the row has no completion, .* its columns are response, answer"),
        ({"completion": None, "answer": "7"}, "the column completion must be text, not None"),
    ],
)
def test_a_row_without_a_completion_is_refused_with_its_columns(tmp_path, capsys, row, words):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert verify(tmp_path / "rows.jsonl") == 2
    assert re.search(words, capsys.readouterr().err)
