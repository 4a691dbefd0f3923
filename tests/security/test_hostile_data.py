"""A data file of somebody else's is read in bounded memory, and refused by name where it is no data."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_folders import command, link_to

from async_grpo.data import TINY_MODEL

pytestmark = pytest.mark.timeout(120)
GOOD = json.dumps({"input": "1 + 1", "answer": "2", "completion": "2"})


def of_text(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


def one_long_line(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"input": "')
        for _ in range(200):
            file.write(b"a b " * (1 << 18))
        file.write(b'"}\n')


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "half of a surrogate pair": (
        of_text(GOOD + '\n{"input": "\\ud800"}\n'),
        "line 2: input holds half of a surrogate",
    ),
    "half a pair in a message": (
        of_text('{"messages": [{"role": "user", "content": "a\\udfff"}]}\n'),
        "line 1: messages holds half",
    ),
    "brackets without end": (of_text(GOOD + "\n" + "[" * 10**6), "line 2: not JSON"),
    "deep brackets": (
        of_text(GOOD + "\n" + '{"input": ' + "[" * 200 + "]" * 200 + "}"),
        "nested deeper than 100",
    ),
    "a line of 200 MB": (one_long_line, "line 1: longer than 32 MB"),
    "a prompt of 20 MB": (
        of_text(json.dumps({"input": "a b " * (5 << 20)})),
        "a prompt of 20971520 characters",
    ),
    "a pipe": (os.mkfifo, "there is no such file"),
    "a device": (link_to("/dev/zero"), "there is no such file"),
    "bytes": (
        lambda path: path.write_bytes(bytes(range(256)) * 99),
        "line 1: not UTF-8 text, because it holds NUL bytes",
    ),
    "numbers": (of_text("1e999\n"), "a row must be an object"),
    "tokens beyond all": (
        of_text('{"input_token_ids": [' + "9" * 4000 + "]}"),
        "outside the model's vocabulary",
    ),
    "tokens that are text": (of_text('{"input_token_ids": ["1"]}'), "must be a list of integers"),
    "messages of another kind": (of_text('{"messages": [1]}'), "messages must be a list of objects"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_hostile_data_file_is_refused_by_name(tmp_path, capfd, kind):
    make, message = FILES[kind]
    make(tmp_path / "data.jsonl")
    folders = ["--model-name-or-path", TINY_MODEL, "--data-path", tmp_path / "data.jsonl"]
    more = ["--samples-per-question", "2", "--batch-size", "2", "--max-generation-tokens", "16", "--dry-run"]
    ended = command(capfd, "run", *folders, "--output-dir", tmp_path / "out", "--reward-fns", "format", *more)
    assert ended.is_named_error and message in ended.err, ended.text[-2000:]


COMPLETIONS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a line of 200 MB": (one_long_line, "longer than 32 MB"),
    "a pipe": (os.mkfifo, "is not a regular file"),
    "a device": (link_to("/dev/zero"), "is not a regular file"),
    "deep brackets": (of_text(GOOD + "\n" + "[" * 10**6), "line 2: not JSON"),
}


@pytest.mark.parametrize("kind", COMPLETIONS)
def test_a_hostile_file_of_completions_is_refused_by_name(tmp_path, capfd, kind):
    make, message = COMPLETIONS[kind]
    make(tmp_path / "completions.jsonl")
    ended = command(capfd, "verify", tmp_path / "completions.jsonl", "--reward-fns", "format")
    assert ended.is_named_error and message in ended.err, ended.text[-2000:]


def test_completions_with_half_pairs_of_surrogates_are_scored(tmp_path, capfd):
    """A reward sees what a model said; no row ends in a traceback."""
    rows = [{"input": "\ud800", "completion": "<answer>\udfff</answer>", "answer": "1", "\ud801": 1}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = command(
        capfd, "verify", tmp_path / "c.jsonl", "--reward-fns", "format", "--output", tmp_path / "out.jsonl"
    )
    assert ended.code == 0, ended.text
    assert json.loads((tmp_path / "out.jsonl").read_text())["reward"] >= 0


def test_a_configuration_file_that_is_none_is_refused(tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 10**6)
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 10**5)
    for name in ("pipe.json", "deep.json", "zero.toml", "deep.toml"):
        ended = command(capfd, "run", "--config", tmp_path / name)
        assert ended.is_named_error and "cannot be read" in ended.err, name
