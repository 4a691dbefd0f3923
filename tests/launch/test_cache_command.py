"""`async-grpo cache`: what it shows is what is there, and it deletes what it is told to and no more."""

import contextlib
import re
import sqlite3
import time
from pathlib import Path

import pytest

from async_grpo.__main__ import main
from async_grpo.rewards.cache.file import ENTRY_OVERHEAD_BYTES, CacheFile

DAY_S = 86_400.0
ENTRY_BYTES = len("judge:000") + 1000 + ENTRY_OVERHEAD_BYTES


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """100 entries of `judge`, the n-th n days old; 10 of `rule`, all of today and used."""
    path = tmp_path / "verdicts.sqlite"
    file, now_s = CacheFile(path), time.time()
    for days in range(100):
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda: now_s - days * DAY_S)  # noqa: B023
            file.put(f"judge:{days:03}", "x" * 1000, cost=0.5)
    for number in range(10):
        file.put(f"rule:{number}", "y")
        assert file.get(f"rule:{number}")
    for _ in range(3):
        assert file.get("judge:000")
    file.close()
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["cache", *map(str, arguments)])
    return ended.value.code


def counts(path: Path) -> dict[str, int]:
    file = CacheFile(path)
    found = {one.adapter: one.count for one in file.entries()}
    file.close()
    return found


def test_it_shows_what_each_reward_has(path, capsys):
    before = counts(path)
    assert run(path) == 0
    said = capsys.readouterr().out
    judge, rule = (line.split() for line in said.splitlines() if re.match(" *(judge|rule) ", line))
    oldest = time.strftime("%Y-%m-%d", time.localtime(time.time() - 99 * DAY_S))
    assert judge[:4] == ["judge", "100", "3", f"{100 * ENTRY_BYTES / 2**20:.2f}"]
    assert (judge[4], judge[-1]) == (oldest, "1.5") and rule[:3] == ["rule", "10", "10"] and rule[-1] == "0"
    assert f"verdicts.sqlite: {path.stat().st_size / 2**20:.1f} MB" in said and counts(path) == before


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--prune-older-than-days=29.5"], {"judge": 30, "rule": 10}),
        (["--prune-adapter=judge"], {"rule": 10}),
        (["--prune-adapter=rule", "--prune-older-than-days=29.5"], {"judge": 100, "rule": 10}),
        (["--prune-adapter=judge", "--prune-older-than-days=9.5"], {"judge": 10, "rule": 10}),
        (
            [f"--max-mb={(20 * ENTRY_BYTES + 10 * (7 + ENTRY_OVERHEAD_BYTES)) / 2**20}"],
            {"judge": 20, "rule": 10},
        ),
        (["--prune-older-than-days=0"], {}),
    ],
)
def test_it_deletes_what_it_is_told_to(path, capsys, options, left):
    before = path.stat().st_size
    assert run(path, *options) == 0
    assert counts(path) == left and (path.stat().st_size < before) == (left.get("judge") != 100)
    said = capsys.readouterr().out
    assert f"{110 - sum(left.values())} entries deleted" in said and ("no entries" in said) == (not left)


def test_a_missing_file_another_one_a_wrong_name_and_a_wrong_number_are_refused(path, tmp_path, capsys):
    assert run(tmp_path / "none") == 2 and not (tmp_path / "none").exists()
    (tmp_path / "rows.jsonl").write_text('{"completion": "4"}\n' * 60)
    assert run(tmp_path / "rows.jsonl", "--max-mb=0") == 2
    assert run(path, "--prune-adapter=jugde") == 2
    assert run(path, "--max-mb=-1") == 2
    said = capsys.readouterr().err
    assert "there is no such verdict cache" in said and "rows.jsonl is no verdict cache" in said
    assert "--max-mb cannot be negative, not -1.0" in said
    assert "--prune-adapter jugde: the cache holds entries of judge, rule" in said
    assert counts(path) == {"judge": 100, "rule": 10}


def test_a_file_that_somebody_else_is_writing_is_exit_code_1(path, capsys, monkeypatch):
    monkeypatch.setattr("async_grpo.launch.cache.BUSY_S", 0.1)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert run(path) == 0  # to look is always possible
        assert run(path, "--prune-adapter=judge") == 1
    assert "cannot be used now: database is locked" in capsys.readouterr().err
    assert counts(path)["judge"] == 100
