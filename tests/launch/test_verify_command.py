"""`async-grpo verify`: what it counts against plain loops, in real processes, with rewards that misbehave."""

import asyncio
import json
import math
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.__main__ import main
from async_grpo.errors import ConfigurationError
from async_grpo.experience.data_files import raw_rows
from async_grpo.rewards.bench.completions import (
    LABEL,
    CompletionRow,
    read_completion_rows,
    sample_of,
    score_rows,
)
from async_grpo.rewards.bench.report import MAX_EXAMPLES, Report, histogram
from async_grpo.types import AdapterResult, RewardStatus, Verdict
from tests.helpers.hostile_server import HostileServer, reply

ROOT = Path(__file__).resolve().parents[2]
OK, FAILED, TIMED_OUT, ABSTAINED = RewardStatus

PAGE = textwrap.dedent(
    """
    import os, time
    from async_grpo.rewards.adapter.decorators import process_reward
    from async_grpo.rewards.adapter.decorators import post_process

    def share_of_the_group(group):
        total = sum(member["reward"] for member in group if member["status"] == "ok")
        return [{"reward": member["reward"] / total, "size": len(group)} if member["reward"] else None for member in group]

    @post_process(share_of_the_group)
    def shares(sample):
        return len(sample["completion"])

    def exact(sample):
        return {"reward": float(sample["completion"] == sample["answer"]), "length": len(sample["completion"])}

    def exact_length(sample):
        return len(sample["completion"])

    def kind(sample):
        return 0.75 if sample["completion"] else {"abstain": "nothing [bold]was[/bold] said"}

    def numbers_only(sample):
        return float(int(sample["completion"]) == int(sample["answer"]))

    def hangs_at_three(sample):
        if sample["completion"] == "3":
            open(sample.get("mark", os.devnull), "w").close()
            time.sleep(60)
        return 1.0

    def forgets(sample):
        with open(__import__("tempfile").gettempdir() + "/" + sample["mark"], "a") as file:
            file.write("x")
            return file.tell() % 2

    @process_reward
    def per_character(sample):
        return {"token_rewards": [0.5] * len(sample["completion_token_ids"])}
    """
)


@pytest.fixture
def files(tmp_path):
    """Writes a page and rows, and gives back the path of the rows and the beginning of the rewards' names."""
    (tmp_path / "mine.py").write_text(PAGE)

    def write(*rows: dict | str) -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", errors="surrogateescape")
        return str(tmp_path / "rows.jsonl")

    return write


def rewards(tmp_path: Path, *names: str) -> str:
    return ",".join(f"{tmp_path}/mine.py:{name}" for name in names)


def verify(*arguments: str) -> int:
    before = set(psutil.Process().children(recursive=True))  # other tests may keep a process of theirs
    with pytest.raises(SystemExit) as ended:
        main(["verify", *map(str, arguments)])
    assert set(psutil.Process().children(recursive=True)) <= before
    return ended.value.code


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- rows ---


def test_a_row_gets_every_column_that_a_run_would_give_it(files):
    path = files(
        {"completion": "ab", "answer": "x", "input": "p", "level": 3, "label": True},
        {"completion": "", "input": "p", "label": 0.25, "truncated": True},
        "",
        {"completion": "c", "completion_token_ids": [7, 8], "group_id": 5, "label": None},
        {"completion": "without a prompt"},
        {"completion": "without a prompt"},
    )
    rows = read_completion_rows(raw_rows(Path(path)), path)
    assert [(row.line, row.label) for row in rows[:3]] == [(1, 1.0), (2, 0.25), (4, None)]
    one, two, four, five, six = (sample_of(row.columns) for row in rows)
    assert five["group_id"] != six["group_id"]
    given = {"completion": "ab", "answer": "x", "input": "p", "level": 3}
    made_up = {"sample_text": "pab", "truncated": False, "group_id": two["group_id"]}
    assert one == given | made_up | {"completion_token_ids": [97, 98], "completion_char_ends": [1, 2]}
    assert two["truncated"] and four["group_id"] == 5
    assert four["completion_token_ids"] == [7, 8] and "completion_char_ends" not in four


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[" * 100_000, "line 2: not JSON"),
        ("\udcff", "line 2: not UTF-8 .*utf-8"),
        ("[1]", "line 2: a row must be an object, not list"),
        ({"completion": ["a"]}, r"line 2: the column completion must be text, not \['a'\]"),
        ({"completion": "", "input": 7}, "line 2: the column input must be text, not 7"),
        ({"completion": "", "label": "yes"}, "line 2: the column label must be true, false or a number, not 'yes'"),
        ({"completion": "", "label": math.inf}, "line 2: the column label"),
        ({"completion": "", "completion_token_ids": [True]}, "the column completion_token_ids must be a list"),
        ({"completion": "", "group_id": [1]}, r"the column group_id must be a whole number or text, not \[1\]"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_by_file_and_line(files, row, message):
    path = files({"completion": "a"}, row)
    with pytest.raises(ConfigurationError, match=f"{path}, .*{message}"):
        read_completion_rows(raw_rows(Path(path)), path)


# --- counting, against plain loops ---

results = st.one_of(
    st.floats(-2, 2).map(lambda reward: (OK, reward)),
    st.sampled_from([(OK, 0.0), (OK, 0.5), (OK, 1.0), (FAILED, None), (TIMED_OUT, None), (ABSTAINED, None)]),
)


@settings(deadline=None)
@given(st.lists(st.tuples(results, results, results, results, st.none() | st.floats(0, 1)), max_size=25))
def test_the_report_agrees_with_plain_loops(rows):
    report = Report(["a", "b"], threshold=0.5, with_label=True)
    calls: dict[str, list] = {"a": [], "b": []}
    pairs: dict[tuple[str, str], list[int]] = {("a", "b"): [], ("a", LABEL): [], ("b", LABEL): []}
    compared, unsteady = Counter(), Counter()
    for line, (a1, b1, a2, b2, label) in enumerate(rows, start=1):
        runs = [
            Verdict(
                OK, 0.0, tuple(AdapterResult(name, *one, latency_s=2.0, queue_s=1.5) for name, one in run)
            )
            for run in ([("a", a1), ("b", b1)], [("a", a2), ("b", b2)])
        ]
        report.add(CompletionRow(line, {"completion": f"completion {line}"}, label), runs)
        calls["a"] += [a1, a2]
        calls["b"] += [b1, b2]
        unsteady.update(a=a1 != a2, b=b1 != b2)
        opinions = {"a": a1[1], "b": b1[1], LABEL: label}
        for pair, differing in pairs.items():
            one, other = (opinions[name] for name in pair)
            if one is not None and other is not None:
                compared[pair] += 1
                if (one >= 0.5) is not (other >= 0.5):
                    differing.append(line)
    for name, card in report.scorecards.items():
        found = [reward for status, reward in calls[name] if status is OK]
        assert list(card.rewards) == found
        assert card.mean == (pytest.approx(sum(found) / len(found)) if found else None)
        assert card.statuses == Counter(status for status, _ in calls[name])
        assert card.num_unscored == sum(status in (FAILED, TIMED_OUT) for status, _ in calls[name])
        assert len(card.unsteady) == unsteady[name] and set(card.seconds) <= {0.5}
    assert report.compared == dict.fromkeys(pairs, 0) | compared
    assert report.differing == {pair: len(lines) for pair, lines in pairs.items()}
    assert set(report.examples) == {line for lines in pairs.values() for line in lines[:MAX_EXAMPLES]}


def test_a_histogram_counts_what_lies_in_equal_ranges_and_every_value_once():
    values = [-3.0, 5.0, *(n / 10 for n in range(40))]
    edges = pairwise([-3, -1, 1, 3, 5])
    expected = [sum(low <= value < high or value == high == 5 for value in values) for low, high in edges]
    bars = histogram(values, 4)
    assert [count for _, count in bars] == expected and bars[0][0] == "-3 to -1"
    assert histogram([0.1, 0.0, 0.1], 4) == [("0", 1), ("0.1", 2)] and histogram([]) == []
    far_apart, close_together = [-1.7e308, 0.0, 1.7e308], [number * 5e-324 for number in range(4)]
    assert [count for _, count in histogram(far_apart, 2)] == [1, 2]
    assert sum(count for _, count in histogram(close_together, 3)) == 4


async def test_rows_are_reported_in_their_order_and_only_so_many_are_under_way(monkeypatch):
    monkeypatch.setattr("async_grpo.rewards.bench.completions.IN_FLIGHT", 5)
    under_way, most, seen = 0, 0, []
    chance = random.Random(7)
    count_of_calls: Counter[int] = Counter()

    class SlowPool:
        async def verify(self, sample: dict) -> Verdict:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(chance.random() * 0.01)
            under_way -= 1
            count_of_calls[sample["number"]] += 1
            return Verdict(OK, 1.0, (AdapterResult("a", OK, 1.0),))

        async def post_process(self, samples: list[dict], verdicts: list[Verdict]) -> list[Verdict]:
            return list(verdicts)

    rows = [CompletionRow(n, {"completion": "", "number": n, "group_id": n}) for n in range(40)]

    def on_row(row: CompletionRow, verdicts: list[Verdict]) -> None:
        seen.append((row.line, len(verdicts)))

    await score_rows(SlowPool(), rows, on_row, 3)
    assert seen == [(n, 3) for n in range(40)] and most == 5
    assert set(count_of_calls.values()) == {3}


# --- the command ---


def test_the_command_tells_scores_and_disagreements_and_writes_every_result(files, tmp_path, capsys):
    nine = ({"completion": str(n % 3), "answer": "1", "label": n % 3 == 1} for n in range(9))
    path = files(*nine, {"completion": "", "answer": ""})
    output = tmp_path / "out.jsonl"
    names = rewards(tmp_path, "exact", "kind")
    assert verify(path, "--reward-fns", names, "--repeat=2", "--output", output, "--workers=1") == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines() if line.startswith((" exact ", " kind "))]
    assert [line[:6] + line[-1:] for line in lines[:2]] == [
        ["exact", "20", "0", "0", "0", "0.4", "yes"],
        ["kind", "18", "0", "0", "2", "0.75", "yes"],
    ]
    assert lines[2:] == [
        ["exact", "kind", "9", "6", "66.7%"],
        ["exact", "label", "9", "0", "0.0%"],
        ["kind", "label", "9", "6", "66.7%"],
    ]
    assert "abstained, line 10, 2 in all: nothing [bold]was[/bold] said" in said
    assert "line 1: exact 0, kind 0.75, label 0: '0'" in said
    written = rows_of(output)
    assert [row["line"] for row in written] == list(range(1, 11)) and written[1]["label"] == 1.0
    assert [run["reward"] for run in written[1]["results"]["exact"]] == [1.0, 1.0]
    assert written[1]["results"]["exact"][0]["extra"] == {"length": 1.0}
    assert [run["status"] for run in written[9]["results"]["kind"]] == ["abstained"] * 2
    assert (written[9]["status"], written[9]["reward"], written[9]["completion"]) == ("ok", 1.0, "")


def test_a_reward_that_fails_on_some_row_is_exit_code_1_with_reason_and_line(files, tmp_path, capsys):
    path = files(*({"completion": text, "answer": "3"} for text in ("1", "two", "3", "four")))
    names = rewards(tmp_path, "exact", "numbers_only", "hangs_at_three")
    assert verify(path, "--reward-fns", names, "--timeout-s=0.5") == 1
    said = capsys.readouterr()
    assert "failed, line 2: ValueError: invalid literal for int() with base 10: " in said.out
    assert "timed_out, line 3: no answer within 0.5 s" in said.out
    assert "numbers_only failed or timed out 2 times; hangs_at_three failed or timed out 1 times" in said.err


def test_a_reward_that_answers_otherwise_the_second_time_is_not_steady(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = files({"completion": "", "mark": "a"}, {"completion": "", "mark": "b"})
    assert verify(path, "--reward-fns", rewards(tmp_path, "forgets"), "--repeat=2") == 0
    said = capsys.readouterr().out
    assert "no: 2" in said and "not steady, line 2: 1, then 0" in said


def test_without_token_ids_a_process_reward_counts_characters(files, tmp_path, capsys):
    path = files({"completion": "abcd"}, {"completion": "abcd", "completion_token_ids": [5, 6]})
    output = tmp_path / "out.jsonl"
    assert verify(path, "--reward-fns", rewards(tmp_path, "per_character"), "--output", output) == 0
    assert [row["reward"] for row in rows_of(output)] == [2.0, 1.0]
    assert "without completion_token_ids, where characters count: 1" in capsys.readouterr().out


def test_a_module_beside_the_registry_file_is_named_for_other_nodes_would_not_find_it(
    files, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("VALUE = 0.5")
    (tmp_path / "reward_registry.py").write_text(
        "import json, numpy\nimport async_grpo.types\n"
        "def half(sample):\n    from helper import VALUE\n    return VALUE\n\nREWARD_ADAPTERS = {'half': half}\n"
    )
    path = files({"completion": "1", "answer": "1"})
    assert verify(path, "--reward-fns", "half") == 0
    said = capsys.readouterr().out
    assert "note: reward_registry.py imports helper from its own folder" in said and "numpy" not in said


def test_text_that_no_terminal_can_show_is_spelt_out(files, tmp_path, capsys):
    path = files(
        {"completion": "\ud800\x1b[31m", "answer": "1", "label": 1}, {"completion": "1", "answer": "1"}
    )
    output = tmp_path / "out.jsonl"
    verify(path, "--reward-fns", rewards(tmp_path, "exact"), "--output", output)
    said = capsys.readouterr().out
    assert r"'\ud800\x1b[31m'" in said and "\x1b" not in said
    assert rows_of(output)[0]["completion"] == "\ud800\x1b[31m"


def test_a_check_says_what_breaks_the_contract(files, tmp_path, capsys):
    path = files({"completion": "1", "answer": "1"}, {"completion": "2", "answer": "1"})
    assert verify(path, "--reward-fns", rewards(tmp_path, "exact"), "--check") == 0
    assert "check of exact: passed" in capsys.readouterr().out
    assert verify(path, "--reward-fns", rewards(tmp_path, "numbers_only"), "--check") == 1
    said = capsys.readouterr()
    assert "sample 0: an empty completion has failed: ValueError" in said.out
    assert "numbers_only did not pass its check" in said.err
    path = files({"completion": "1", "label": False})  # the reward calls it right, but it is not
    assert verify(path, "--reward-fns", rewards(tmp_path, "kind"), "--check") == 0
    assert "check of kind: skipped, it calls no row right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward-fns=mathd", "--workers=0"], "--workers must be above 0, not 0"),
        (["--reward-fns=,"], "no reward function is named"),
        (["--reward-fns=unheard_of"], "unknown reward function unheard_of: reward_registry knows code"),
        (["--reward-fns=format", "--reward-options=weigth=1"], "takes the option weigth"),
        (["--reward-fns=mathd", "--output=/no/x/y"], "--output /no/x/y cannot be written"),
        (["--reward-fns=mathd", "--reward-registry=/no/page.py"], "cannot read '/no/page.py'"),
        ([], "Missing option '--reward-fns'"),
    ],
)
def test_impossible_options_are_exit_code_2_and_refused_in_words_alone(files, capsys, arguments, message):
    assert verify(files({"completion": "1", "answer": "1"}), *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "raise " not in error and "ConfigurationError" not in error


def test_a_missing_or_empty_file_is_exit_code_2_and_the_output_never_overwrites_it(files, tmp_path, capsys):
    path = files({"completion": "1", "answer": "1"})
    new, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    old.write_text("of another day")
    for output in ([], ["--output", new], ["--output", old]):
        assert verify(tmp_path / "none", "--reward-fns=mathd", *output) == 2
        assert "none: there is no such file" in capsys.readouterr().err
    assert not new.exists() and old.read_text() == "of another day"
    assert verify(path, "--reward-fns=mathd", "--output", path) == 2
    assert verify(files(""), "--reward-fns=mathd") == 2
    said = capsys.readouterr().err
    assert "is also the file of completions" in said and "holds no completions" in said


def test_rewards_of_whole_groups_see_them_as_in_training(files, tmp_path, capsys):
    """Against a plain loop: groups that lie apart in the file, larger than what is scored at a time, and rows alone."""
    chance = random.Random(3)
    rows = [{"completion": "x" * chance.randrange(4), "group_id": chance.choice("ab")} for _ in range(600)]
    rows[100:100] = [{"completion": "xx"}, {"completion": "xxx"}, {"completion": "xx", "group_id": None}]
    totals = Counter()
    for row in rows:
        totals[row.get("group_id")] += len(row["completion"])
    expected = []
    for row in rows:
        total = totals[row["group_id"]] if row.get("group_id") else len(row["completion"])
        expected.append(len(row["completion"]) / total if row["completion"] else 0.0)
    names, output = rewards(tmp_path, "shares", "exact_length"), tmp_path / "out.jsonl"
    assert (
        verify(files(*rows), "--reward-fns", names, "--repeat=2", "--threshold=0.9", "--output", output) == 0
    )
    written = rows_of(output)
    assert [row["line"] for row in written] == list(range(1, 604))
    for row, one in zip(written, expected, strict=True):
        assert [run["reward"] for run in row["results"]["shares"]] == [one] * 2
    assert [row["results"]["shares"][0]["extra"].get("size") for row in written[100:103]] == [1.0] * 3
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    disagree = sum((one >= 0.9) != (row["completion"] != "") for one, row in zip(expected, rows, strict=True))
    assert ["shares", "exact_length", "603", str(disagree)] in lines


async def test_a_judge_is_asked_over_the_network(files, tmp_path, capsys):
    path, output = files({"completion": "7", "answer": "2"}), tmp_path / "out.jsonl"
    page = tmp_path / "judged.py"
    async with HostileServer(reply({"protocol": 1, "scores": [{"reward": 0.25}]})) as server:
        page.write_text(
            f"from async_grpo.rewards.judges import HTTPScorer\njudge = HTTPScorer(url='{server.url}')\n"
        )
        options = [f"--reward-fns={page}:judge", "--output", output, "--check"]
        assert await asyncio.to_thread(verify, path, *options) == 0
    assert [row["reward"] for row in rows_of(output)] == [0.25]
    assert [request.json["samples"][0]["completion"] for request in server.requests] == ["7"]
    assert "check of judge: skipped" in capsys.readouterr().out


def test_ctrl_c_ends_the_bench_and_its_processes(files, tmp_path):
    mark = tmp_path / "called"
    path = files(*({"completion": "3", "mark": str(mark)} for _ in range(4)))
    names = rewards(tmp_path, "hangs_at_three")
    command = [sys.executable, "-m", "async_grpo", "verify", path, "--reward-fns", names]
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job of a shell ignores it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes, preexec_fn=default) as bench:
        deadline = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        children = psutil.Process(bench.pid).children(recursive=True)
        bench.send_signal(signal.SIGINT)
        bench.communicate(timeout=60)
    assert bench.returncode not in (0, None)
    assert children and not psutil.wait_procs(children, timeout=30)[1]


# --- columns with other names ---

COLUMNS = {
    "verl's": (
        {
            "prompt": [{"role": "user", "content": "3 + 4?"}],
            "reward_model": {"ground_truth": "7"},
            "completion": "7",
        },
        ["--prompt-column=prompt", "--answer-column=reward_model.ground_truth"],
    ),
    "GSM8K's": (
        {"question": "3 + 4?", "answer": "7", "completion": "7"},
        ["--prompt-column=question"],
    ),
    "OpenRLHF's": ({"input": "3 + 4?", "label_key": "7", "completion": "7"}, ["--answer-column=label_key"]),
    "ours": ({"input": "3 + 4?", "answer": "7", "completion": "7"}, []),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_prompt_and_answer_come_from_the_columns_that_the_options_name(tmp_path, kind):
    row, options = COLUMNS[kind]
    (tmp_path / "mine.py").write_text(
        "def both(sample):\n    return float(sample['input'] == '3 + 4?' and sample['answer'] == '7')\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    output = tmp_path / "out.jsonl"
    named = f"--reward-fns={tmp_path}/mine.py:both"
    assert verify(tmp_path / "rows.jsonl", named, f"--output={output}", *options) == 0
    assert rows_of(output)[0]["reward"] == 1.0


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"completion": "a"},
            ["--answer-column=label_key"],
            "line 1: --answer-column label_key: .* is not in",
        ),
        ({"completion": "a", "answer": None}, ["--answer-column=answer"], "line 1: .* answer is null"),
        ({"completion": "a"}, ["--prompt-column=question"], "line 1: --prompt-column question: "),
        ({"completion": "a", "answer": math.nan}, [], "line 1: answer is NaN, which is no finite number"),
        ({"completion": "a"}, ["--answer-column=a..b"], "give the name of a column"),
    ],
)
def test_a_row_without_the_named_column_is_refused(files, capsys, row, options, message):
    assert verify(files(row), "--reward-fns=exact", *options) == 2
    assert re.search(message, capsys.readouterr().err)
