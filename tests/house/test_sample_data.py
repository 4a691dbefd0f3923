"""The makers of sample data, and the files they shipped."""

import itertools
import json
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from typer.testing import CliRunner

from async_grpo.data import (
    CAPITALS_HELDOUT,
    CAPITALS_TRAIN,
    COUNTDOWN_HELDOUT,
    COUNTDOWN_TRAIN,
    FOLDER,
    TINY_MODEL,
    create_capitals,
    create_gsm8k,
)
from async_grpo.data import create_count_down as count_down
from async_grpo.data.create_count_down import Problem, ProblemSpace, find_problems, generate_problems
from async_grpo.data.reward_registry import regex

TOKENIZER = AutoTokenizer.from_pretrained(TINY_MODEL)


def run_cli(module: Any, *arguments: object) -> Any:
    app = typer.Typer()
    app.command()(module.main)
    # A wide terminal: wrapped and framed error messages could not be searched for a phrase.
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "1000", "NO_COLOR": "1"})


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@cache
def reachable(nums: tuple[int, ...], operators: str) -> frozenset[Fraction]:
    """Brute force: every way to split the numbers in two, every pair of values, every operator."""
    if len(nums) == 1:
        return frozenset([Fraction(nums[0])])
    values = set()
    for chosen in itertools.product([True, False], repeat=len(nums)):
        left = tuple(number for number, here in zip(nums, chosen, strict=True) if here)
        right = tuple(number for number, here in zip(nums, chosen, strict=True) if not here)
        if left and right:
            for a, b in itertools.product(reachable(left, operators), reachable(right, operators)):
                by_operator = {"+": a + b, "-": a - b, "*": a * b} | ({"/": a / b} if b else {})
                values |= {by_operator[operator] for operator in operators if operator in by_operator}
    return frozenset(values)


def problem_keys(rows: list[dict[str, Any]]) -> list[tuple[tuple[int, ...], int]]:
    return [(tuple(sorted(row["nums"])), row["target"]) for row in rows]


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    operators=st.sets(st.sampled_from("+-*/"), min_size=1).map(lambda chosen: "".join(sorted(chosen))),
    max_nums=st.integers(3, 4),
)
def test_every_generated_problem_is_solvable_with_the_allowed_operators(seed, operators, max_nums):
    for problem in generate_problems(ProblemSpace(2, max_nums, 1, 12, 0, 200, operators), 5, seed):
        assert problem.target in reachable(problem.nums, operators)
        assert 2 <= len(problem.nums) <= max_nums and set(problem.nums) <= set(range(1, 13))
        assert 0 <= problem.target <= 200


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    first, again, other = (generate_problems(ProblemSpace(), 20, seed) for seed in (1, 1, 2))
    assert first == again and {one.key for one in first} != {one.key for one in other}


def test_the_files_share_no_problem_and_repeat_none(tmp_path):
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    result = run_cli(
        count_down, "--tokenizer", TINY_MODEL, "--source", "generate", "--max-nums", 3,
        "--output", train, "--num-train", 60, "--heldout-output", heldout, "--num-heldout", 30,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    keys = problem_keys(read_jsonl(train)) + problem_keys(read_jsonl(heldout))
    assert len(keys) == len(set(keys)) == 90


def test_a_full_prompt_is_the_known_one_with_the_assistant_prefilled():
    row = count_down.to_record(Problem((44, 19, 35), 98), TOKENIZER, "full")
    assert list(row) == ["input", "input_token_ids", "answer", "nums", "target", "messages", "end_token"]
    assert [message["role"] for message in row["messages"]] == ["system", "user"]
    assert "Using the numbers [44, 19, 35], create an equation that equals 98. You can" in row["input"]
    assert row["input"].endswith("<|im_start|>assistant\nLet me solve this step by step.\n<think>")
    assert (row["answer"], row["target"], row["nums"]) == (98, 98, [44, 19, 35])
    assert row["end_token"] == "<|im_end|>" and TOKENIZER.decode(row["input_token_ids"]) == row["input"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-nums", 1], "need 2 <= min-nums <= max-nums <= 6, got 1 and 4"),
        (["--min-target", -1], "need 0 <= min-target <= max-target <= inf, got -1 and 99"),
        (["--operators", "+^"], "operators must be some of '+-*/', got '+^'"),
        (["--tokenizer", "/no/such/folder"], "no tokenizer at '/no/such/folder'"),
        (["--max-nums", 3, "--max-number", 1, "--max-target", 20], "but 0 were found"),
    ],
)
def test_an_impossible_option_ends_with_code_2_and_says_why(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(count_down, "STALLED_AFTER_DRAWS", 2_000)
    result = run_cli(count_down, "--tokenizer", TINY_MODEL, "--source", "generate", *options)
    assert result.exit_code == 2 and message in result.output and not list(tmp_path.iterdir())


class FakeHub:
    """Stands in for the package `datasets`: one split, with a repeated and a too large problem."""

    rows = (
        {"nums": [3, 7, 2], "target": 13},
        {"nums": [2, 3, 7], "target": 13},
        {"nums": [90, 5, 6], "target": 79},
        {"nums": [4, 6, 8], "target": 18},
    )

    def load_dataset(self, name: str, split: str) -> "FakeHub":
        assert (name, split) == ("Jiayi-Pan/Countdown-Tasks-3to4", "train")
        return self

    def shuffle(self, seed: int) -> tuple[dict[str, Any], ...]:
        return self.rows


def test_problems_of_a_reachable_hub_are_preferred_filtered_and_counted_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", FakeHub())
    monkeypatch.setattr(count_down, "why_not_hub", lambda space: None)
    space = ProblemSpace(max_number=9)
    assert find_problems("auto", space, 2, seed=0) == [Problem((3, 7, 2), 13), Problem((4, 6, 8), 18)]
    with pytest.raises(ValueError, match=r"3 problems asked for, but .* holds 2 distinct ones"):
        find_problems("hub", space, 3, seed=0)


@pytest.mark.parametrize(
    ("operators", "why"),
    [("+-*/", "http://127.0.0.1:9/api"), ("+-", "the hub's problems need all of '+-*/', not only '+-'")],
)
def test_auto_generates_and_says_why_where_the_hub_cannot_serve(operators, why, monkeypatch, capsys):
    monkeypatch.setattr(count_down.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens on the discard port
    space = ProblemSpace(operators=operators)
    assert find_problems("auto", space, 2, seed=0) == generate_problems(space, 2, seed=0)
    assert f"source: generate ({why}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--source hub is impossible"):
        find_problems("hub", space, 2, seed=0)


GSM8K_ROWS = [
    {"question": "How many clips?", "answer": "48/2 = <<48/2=24>>24.\n#### 72"},
    {"question": "What is left?", "answer": "It is #### here too.\n#### -1,234"},
]


def make_gsm8k(folder: Path, rows: list[Any], *options: object, tokenizer: Path = TINY_MODEL) -> Any:
    """The exit code and output, and the rows written."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    source.write_text("".join(line + "\n" for line in lines), "utf-8")
    result = run_cli(create_gsm8k, "--input", source, "--tokenizer", tokenizer, "--output", output, *options)
    return result, read_jsonl(output) if output.exists() else None


def test_gsm8k_rows_keep_the_number_and_ask_for_a_box(tmp_path):
    result, rows = make_gsm8k(tmp_path, GSM8K_ROWS)
    assert result.exit_code == 0, result.output
    assert [row["answer"] for row in rows] == ["72", "-1234"]
    assert list(rows[0]) == ["input", "input_token_ids", "answer", "question", "messages"]
    assert rows[0]["question"] == "How many clips?"
    assert "\\boxed{}" in rows[0]["input"] and rows[0]["input"].endswith("<|im_start|>assistant\n")
    assert TOKENIZER.decode(rows[0]["input_token_ids"]) == rows[0]["input"]


def test_gsm8k_without_a_chat_template_is_plain_and_says_so(tmp_path):
    plain = AutoTokenizer.from_pretrained(TINY_MODEL)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    result, rows = make_gsm8k(tmp_path, GSM8K_ROWS, tokenizer=tmp_path / "plain")
    assert result.exit_code == 0 and "no chat template" in result.output
    assert rows[0]["input"].startswith("Question: How many clips?\n")


@pytest.mark.parametrize(
    "bad_line", ["{", "[]", '{"question": "q"}', '{"question": "q", "answer": "#### many"}', ""]
)
def test_a_malformed_gsm8k_row_names_file_and_line(bad_line, tmp_path):
    result, rows = make_gsm8k(tmp_path, [*GSM8K_ROWS, bad_line])
    assert result.exit_code == 2 and f"{tmp_path / 'in.jsonl'}:3: " in result.output and rows is None


def test_gsm8k_limit_counts_the_rows_that_are_short_enough(tmp_path):
    long = {"question": "long " * 50, "answer": "#### 1"}
    _, rows = make_gsm8k(tmp_path, [long, *GSM8K_ROWS], "--limit", 1, "--max-prompt-tokens", 200)
    assert [row["question"] for row in rows] == ["How many clips?"]


def test_the_shipped_countdown_files_are_solvable_disjoint_and_made_for_the_tiny_model():
    train, heldout = read_jsonl(COUNTDOWN_TRAIN), read_jsonl(COUNTDOWN_HELDOUT)
    keys = problem_keys(train) + problem_keys(heldout)
    assert len(set(keys)) == len(keys) and len(heldout) >= 400
    assert all(target in reachable(nums, "+-") for nums, target in keys)
    for row in train + heldout:
        problem = Problem(tuple(row["nums"]), row["target"])
        assert row == count_down.to_record(problem, TOKENIZER, "short")


def test_the_shipped_gsm8k_sample_is_made_for_the_tiny_model_and_all_stays_small():
    rows = read_jsonl(FOLDER / "gsm8k_sample.jsonl")
    assert len(rows) == 64
    assert all(row == create_gsm8k.to_record(row["question"], row["answer"], TOKENIZER) for row in rows)
    assert sum(path.stat().st_size for path in FOLDER.glob("*.jsonl")) < 1_500_000
    assert sum(path.stat().st_size for path in TINY_MODEL.iterdir()) < 5_000_000


def test_the_shipped_capitals_are_what_their_command_writes_and_share_no_country(tmp_path):
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    result = run_cli(create_capitals, "--output", train, "--heldout-output", heldout)
    assert result.exit_code == 0, result.output
    assert train.read_bytes() == CAPITALS_TRAIN.read_bytes()
    assert heldout.read_bytes() == CAPITALS_HELDOUT.read_bytes()
    questions = [{row["messages"][0]["content"] for row in read_jsonl(path)} for path in (train, heldout)]
    assert (len(questions[0]), len(questions[1])) == (34, 16)
    assert not questions[0] & questions[1]
    answers = [row["answer"] for path in (train, heldout) for row in read_jsonl(path)]
    assert len(set(answers)) == len(create_capitals.CAPITALS) == 50


def test_a_capital_is_paid_for_its_name_alone_and_not_for_the_question():
    rows = read_jsonl(CAPITALS_TRAIN) + read_jsonl(CAPITALS_HELDOUT)
    for row in rows:
        question, capital = row["messages"][0]["content"], row["answer"]
        wrong = {other["answer"] for other in rows} - {capital}
        for completion, reward in (
            (f"The capital is {capital}.", 1.0),
            (capital.upper(), 1.0),
            (f"{capital}x", 0.0),
            (question, 0.0),
            (", ".join(wrong), 0.0),
            ("", 0.0),
        ):
            assert regex({**row, "completion": completion}, search=True)["reward"] == reward
