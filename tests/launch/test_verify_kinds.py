"""`async-grpo verify` says how many findings it does not show, and reports by kind of rows."""

import json
from typing import Any

import pytest
from rich.console import Console

from async_grpo.__main__ import main
from async_grpo.errors import ConfigurationError
from async_grpo.rewards.bench.completions import CompletionRow
from async_grpo.rewards.bench.kinds import MAX_KINDS, kind_column
from async_grpo.rewards.bench.report import Report
from async_grpo.types import AdapterResult, RewardStatus, Verdict


def row_of(line: int, label: float | None = None, **columns: Any) -> CompletionRow:
    return CompletionRow(line, {"completion": f"completion {line}", **columns}, label)


def report_of(rows: list[tuple[CompletionRow, float | None]], capsys, **options: Any) -> tuple[Report, str]:
    """Return the report of one reward `a`, and what it prints."""
    report = Report(["a"], threshold=0.5, with_label=any(row.label is not None for row, _ in rows), **options)
    for row, reward in rows:
        status = RewardStatus.FAILED if reward is None else RewardStatus.OK
        result = AdapterResult("a", status, reward, reason="" if reward is not None else f"reason {row.line}")
        report.add(row, [Verdict(status, reward, (result,))])
    report.print(Console(width=100), [row for row, _ in rows], repeat=1)
    return report, capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_differing", "max_examples", "num_shown", "rest"),
    [
        (0, 3, 0, ""),
        (3, 3, 3, ""),
        (4, 3, 3, "and 1 more rows (--examples 4 shows them, --output FILE has all)"),
        (4, 4, 4, ""),
        (12, 10, 10, "and 2 more rows (--examples 12 shows them"),
        (50, 1, 1, "and 49 more rows (--examples 50 shows them"),
    ],
)
def test_disagreements_are_shown_or_counted(num_differing, max_examples, num_shown, rest, capsys):
    rows = [(row_of(line, label=1.0), 0.0) for line in range(1, num_differing + 1)]
    rows.append((row_of(99, label=1.0), 1.0))
    _, text = report_of(rows, capsys, max_examples=max_examples)
    assert text.count(": a 0, label 1: ") == num_shown
    assert rest in text and ("more rows" in text) is bool(rest)


def test_failures_are_shown_or_counted(capsys):
    rows = [(row_of(line), None) for line in range(1, 6)]
    _, text = report_of(rows, capsys, max_examples=2)
    assert "failed, line 2: reason 2" in text and "reason 3" not in text
    assert "and 3 more (--examples 5 shows them)" in text


def test_each_kind_has_a_line_for_each_reward(capsys):
    rows = [
        (row_of(1, 1.0, kind="units"), 1.0),
        (row_of(2, 1.0, kind="units"), 0.0),
        (row_of(3, 0.0, kind="units"), None),
        (row_of(4, None, kind="a\x1b[31m\nb"), 0.25),
        (row_of(5, 1.0), 1.0),
        (row_of(6, 1.0, kind=None), 0.75),
        (row_of(7, 1.0, kind=3), 1.0),
    ]
    _, text = report_of(rows, capsys, kind_column="kind")
    _, table = text.split("by kind")
    lines = [line.split() for line in table.splitlines()]
    assert ["units", "a", "3", "1", "0.5", "1"] in lines
    assert ["a\\x1b[31m\\nb", "a", "1", "0", "0.25", "-"] in lines
    assert ["-", "a", "2", "0", "0.875", "0"] in lines
    assert ["3", "a", "1", "0", "1", "0"] in lines
    _, text = report_of(rows, capsys)
    assert "by kind" not in text


def test_very_many_kinds_are_counted(capsys):
    rows = [
        (row_of(line, kind="x" * 100 + str(line) if line == 1 else line), 1.0)
        for line in range(1, MAX_KINDS + 3)
    ]
    _, text = report_of(rows, capsys, kind_column="kind")
    assert "and 2 kinds more" in text and "x" * 45 + "..." in text


@pytest.mark.parametrize(
    ("columns", "by", "found"),
    [
        ([{"kind": "a"}, {}], None, "kind"),
        ([{}, {"kind": None}], None, "kind"),
        ([{"source": "a"}], None, None),
        ([{"source": "a"}], "source", "source"),
        ([{"source": "a", "kind": "b"}], "source", "source"),
        ([{}], None, None),
    ],
)
def test_the_column_of_kinds_is_found(columns, by, found):
    rows = [row_of(line, **row) for line, row in enumerate(columns, start=1)]
    assert kind_column(rows, by) == found


def test_a_column_that_no_row_has_is_refused():
    with pytest.raises(ConfigurationError, match="--by sort: no row has this column, only completion, kind"):
        kind_column([row_of(1, kind="a")], "sort")


def test_the_command_reports_by_kind(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    path = tmp_path / "rows.jsonl"
    rows = [
        {"completion": text, "label": True, "kind": kind, "task": "x"}
        for text, kind in (("", "a"), ("y", "b"))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "page.py").write_text("def f(sample): return float(bool(sample['completion']))\n")
    arguments = ["verify", str(path), "--reward-fns", f"{tmp_path / 'page.py'}:f"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "f", "1", "0", "0", "1"] in lines and ["b", "f", "1", "0", "1", "0"] in lines
    with pytest.raises(SystemExit):
        main([*arguments, "--by", "task"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["x", "f", "2", "0", "0.5", "1"] in lines
