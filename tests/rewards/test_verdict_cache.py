"""The verdict cache against a dict, against kill -9, against other processes, and when its file breaks."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.cache.file import ENTRY_OVERHEAD_BYTES, AdapterEntries, CacheFile
from async_grpo.rewards.cache.verdicts import VerdictCache, key_of, version_of, version_of_judge
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.judges import HTTPScorer

ROOT = Path(__file__).resolve().parents[2]


def answer(reward: float = 1.0, status: str = "ok", **extra: float) -> dict[str, Any]:
    return {"status": status, "reward": reward, "extra": extra, "steps": [[3, 0.5]], "reason": "so"}


def caller(result: Any, journal: list | None = None) -> Callable[[], Awaitable[Any]]:
    async def call() -> Any:
        if journal is not None:
            journal.append(result)
        await asyncio.sleep(0)
        if isinstance(result, BaseException):
            raise result
        return result

    return call


# --- keys ---


def test_adapter_version_and_every_column_but_the_group_make_the_key_and_the_library_the_version(monkeypatch):
    one = {"answer": 1, "input": {"a": [1, "x"], "b": None}}
    assert key_of("a", "1", one) == key_of("a", "1", dict(reversed(one.items())) | {"group_id": 7})
    swapped = {"answer": 1, "input": {"a": ["x", 1], "b": None}}
    others = [one, {}, {"answer": "1"}, {"answer": True}, {"input": 1}, swapped]
    keys = [key_of(*asked) for asked in itertools.product(("a", "a:b", "b"), ("", "b", "1"), others)]
    assert len(set(keys)) == len(keys) and {key.rpartition(":")[0] for key in keys} == {"a", "a:b", "b"}
    before = version_of("page", {"b": 1, "a": 2})
    assert before == version_of("page", {"a": 2, "b": 1}) != version_of("page", {"b": 1, "a": 3})
    monkeypatch.setattr("async_grpo.rewards.cache.verdicts._library", lambda: "after an upgrade")
    assert before != version_of("page", {"b": 1, "a": 2})
    with pytest.raises(ValueError, match="no key of the verdict cache.*set is not JSON"):
        key_of("a", "1", {"answer": {1}})


@dataclass(frozen=True, kw_only=True)
class Judge:
    url: str | tuple[str, ...] = ("http://a", "http://b")
    model: str = "m"
    extra_body: dict = field(default_factory=dict)
    limits: Limits | None = None
    api_key_env: str | None = None


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"url": ("http://b", "http://a")}, True),
        ({"limits": Limits(), "api_key_env": "KEY"}, True),
        ({"url": "http://a"}, False),
        ({"model": "n"}, False),
        ({"extra_body": {"seed": 1}}, False),
    ],
)
def test_a_judge_is_another_one_by_what_it_asks_not_by_how(changes, same):
    assert (version_of_judge(Judge()) == version_of_judge(Judge(**changes))) == same


def test_a_judge_of_the_users_own_depends_on_its_code_and_one_of_ours_does_not():
    scorer = HTTPScorer(url="http://a")
    assert version_of_judge(scorer, "page 1") == version_of_judge(scorer, "page 2")
    assert version_of_judge(scorer) != version_of_judge(HTTPScorer(url="http://a", columns=["level"]))
    assert version_of_judge(Judge(), "page 1") != version_of_judge(Judge(), "page 2")
    plain = SimpleNamespace(model="m")
    assert version_of_judge(plain) == version_of_judge(SimpleNamespace(model="m"))
    with pytest.raises(
        ConfigurationError, match="two settings of SimpleNamespace apart .*without --verdict-cache"
    ):
        version_of_judge(SimpleNamespace(model=object()))


# --- the file ---


def test_an_entry_is_what_was_written_last_and_counts_its_uses(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("async_grpo.rewards.cache.file.time.time", lambda: now[0])
    file = CacheFile(tmp_path / "c.sqlite")
    for adapter, number in itertools.product("ab", range(4)):
        now[0] += 1
        file.put(f"{adapter}:{number}", "old", 9.0)
        file.put(f"{adapter}:{number}", "x" * number, 0.5)
    now[0] = 2000.0
    assert [file.get(f"a:{number}") for number in (1, 3, 4)] == [("x", 0.5), ("xxx", 0.5), None]
    file.close()  # and it is opened again
    size = 4 * (3 + ENTRY_OVERHEAD_BYTES) + 0 + 1 + 2 + 3
    a, b = file.entries()
    assert a == AdapterEntries("a", 4, 2, size, 1001.0, 1004.0, 1.0)
    assert b == AdapterEntries("b", 4, 0, size, 1005.0, 1008.0, 0.0)
    # The longest unused go first, a:1 and a:3 were used; then the old ones of one adapter
    assert file.prune(max_bytes=size + 3) == 4
    left = [key for key in ("a:0", "a:1", "a:2", "a:3", "b:0", "b:1", "b:2", "b:3") if file.get(key)]
    assert left == ["a:1", "a:3", "b:2", "b:3"]
    assert file.prune(unused_for_s=1.0, adapter="b") == 0
    now[0] += 1
    assert file.prune(unused_for_s=1.0, adapter="b") == 2
    assert file.prune(unused_for_s=1.0) == 2 and not file.entries()


# --- calls ---


async def test_answers_and_abstentions_are_kept_and_failures_asked_again(tmp_path):
    for status, calls in (("ok", 1), ("abstained", 1), ("failed", 2), ("timed_out", 2)):
        journal: list = []
        for _ in range(2):  # a new object: what it knows, it has from the file
            cache = VerdictCache(tmp_path / "c.sqlite")
            given = answer(0.5, status)
            assert await cache.get_or_call(f"a:{status}", caller(given, journal)) == given
            await cache.close()
            assert await cache.get_or_call(f"a:{status}", caller(given)) == given  # now it lets calls through
        assert len(journal) == calls, status


async def test_many_who_ask_the_same_at_once_share_one_call(tmp_path):
    cache, journal = VerdictCache(tmp_path / "c.sqlite"), []
    questions = [cache.get_or_call(f"a:{n % 3}", caller(answer(n % 3), journal)) for n in range(60)]
    answers = await asyncio.gather(*questions)
    assert [one["reward"] for one in answers] == [n % 3 for n in range(60)] and len(journal) == 3
    answers[0]["extra"]["mine"] = 1.0  # what one does to its answer is not seen by others
    assert answers[3] == answer(0)
    stats = cache.counts
    assert (stats["misses"], stats["shared"], stats["stored"], stats["hits"]) == (3, 57, 3, 0)
    await cache.close()


async def test_who_asks_while_the_answer_is_being_written_makes_no_call_of_its_own(tmp_path, monkeypatch):
    cache, journal = VerdictCache(tmp_path / "c.sqlite"), []
    is_writing, may_end = asyncio.Event(), asyncio.Event()
    keep = cache._keep

    async def slow_keep(*arguments: Any) -> None:
        is_writing.set()
        await may_end.wait()
        await keep(*arguments)

    monkeypatch.setattr(cache, "_keep", slow_keep)
    first = asyncio.create_task(cache.get_or_call("a:1", caller(answer(0.5), journal)))
    await is_writing.wait()
    second = await cache.get_or_call("a:1", caller(answer(0.25), journal))
    may_end.set()
    assert (await first)["reward"] == second["reward"] == 0.5 and len(journal) == 1
    await cache.close()


async def test_what_a_call_raises_reaches_all_who_wait_and_is_not_kept(tmp_path):
    cache, journal = VerdictCache(tmp_path / "c.sqlite"), []
    error = RuntimeError("the judge is ill")
    questions = [cache.get_or_call("a:1", caller(error, journal)) for _ in range(5)]
    assert await asyncio.gather(*questions, return_exceptions=True) == [error] * 5 and len(journal) == 1
    assert await cache.get_or_call("a:1", caller(answer(), journal)) == answer() and len(journal) == 2
    await cache.close()


async def test_if_the_first_is_cancelled_another_one_takes_over(tmp_path):
    cache, started = VerdictCache(tmp_path / "c.sqlite"), []

    def slow(name: int) -> Callable[[], Awaitable[dict]]:
        async def call() -> dict:
            started.append(name)
            await asyncio.sleep(0.05)
            return answer(name)

        return call

    tasks = [asyncio.create_task(cache.get_or_call("a:1", slow(n))) for n in range(4)]
    while not started:
        await asyncio.sleep(0.001)
    tasks[0].cancel()
    tasks[2].cancel()  # one that only waits: nothing happens to the others
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False, True, False]
    assert started == [0, 1] and results[1] == results[3] == answer(1)
    await cache.close()


async def test_a_cost_is_paid_once_and_counted_as_saved_afterwards(tmp_path):
    cache = VerdictCache(tmp_path / "c.sqlite")
    paid = answer(1.0, judge_cost=0.25, judge_tokens=7.0)
    together = await asyncio.gather(*(cache.get_or_call("judge:1", caller(paid)) for _ in range(3)))
    assert [one["extra"]["judge_cost"] for one in together] == [0.25, 0.0, 0.0]
    free = await cache.get_or_call("judge:1", caller(None))
    assert free["extra"] == {"judge_cost": 0.0, "judge_tokens": 7.0}
    assert cache.counts["cost_saved"] == 0.75
    await cache.close()
    (entries,) = CacheFile(tmp_path / "c.sqlite").entries()
    assert (entries.adapter, entries.count, entries.hits, entries.cost_saved) == ("judge", 1, 1, 0.25)


async def test_a_cache_with_limits_prunes_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("async_grpo.rewards.cache.verdicts.WRITES_PER_PRUNE", 10)
    cache = VerdictCache(tmp_path / "c.sqlite", max_bytes=3000)
    for number in range(200):
        await cache.get_or_call(f"a:{number}", caller(answer()))
    await cache.close()
    (entries,) = CacheFile(tmp_path / "c.sqlite").entries()
    assert entries.num_bytes <= 3000 + 10 * 300 and entries.count >= 8


# --- other threads and processes ---

WRITER = """
import sys
from async_grpo.rewards.cache.file import CacheFile
file, name, count = CacheFile(sys.argv[1], busy_s=20), sys.argv[2], int(sys.argv[3])
for number in range(count):
    file.put(f"{name}:{number}", str(number) * 50, 0.5)
    assert file.get(f"{name}:{number}")[0] == str(number) * 50
    print(number, flush=True)
file.close()
"""


def test_processes_that_write_at_once_lose_nothing_and_one_that_is_killed_nothing_that_it_had_written(
    tmp_path,
):
    def writer(name: str, count: int) -> subprocess.Popen:
        command = [sys.executable, "-c", WRITER, str(tmp_path / "new" / "c.sqlite"), name, str(count)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    killed, *others = writer("killed", 10**6), writer("a", 300), writer("b", 300), writer("a", 300)
    while int(killed.stdout.readline()) < 20:
        pass
    killed.send_signal(signal.SIGKILL)
    written = {"killed": 1 + int(killed.communicate(timeout=20)[0].rstrip("\n").rpartition("\n")[2] or 20)}
    for process in others:
        process.communicate(timeout=60)
        assert process.returncode == 0
    file = CacheFile(tmp_path / "new" / "c.sqlite")
    for name, count in (written | {"a": 300, "b": 300}).items():
        assert all(file.get(f"{name}:{n}") == (str(n) * 50, 0.5) for n in range(count))
    file.close()


def test_a_new_file_that_several_open_at_the_same_time_is_made_once_and_refused_to_nobody(tmp_path):
    at_once = threading.Barrier(4)

    def put_one(path: Path, name: str) -> None:
        file = CacheFile(path, busy_s=20)
        at_once.wait(20)
        file.put(f"{name}:0", name)
        file.close()

    with ThreadPoolExecutor(4) as threads:
        for number in range(40):
            path = tmp_path / f"{number}.sqlite"
            for done in [threads.submit(put_one, path, name) for name in "abcd"]:
                done.result(60)
            file = CacheFile(path)
            assert [file.get(f"{name}:0") for name in "abcd"] == [(name, 0.0) for name in "abcd"]
            file.close()


# --- files that cannot be used ---


def damage(path: Path, at: int, noise: bytes) -> None:
    path.write_bytes(path.read_bytes()[:at] + noise + path.read_bytes()[at + len(noise) :])


def filled(path: Path, count: int = 200) -> dict[str, str]:
    file, content = CacheFile(path), {f"a:{n}": json.dumps(answer(n / 7)) for n in range(count)}
    for key, text in content.items():
        file.put(key, text)
    file.close()
    return content


def test_an_answer_with_one_digit_changed_on_the_disk_is_asked_again(tmp_path):
    path = tmp_path / "c.sqlite"
    filled(path, 10)
    content = path.read_bytes()
    assert content.count(b'"reward": 1.0,') == 1  # of a:7
    path.write_bytes(content.replace(b'"reward": 1.0,', b'"reward": 9.0,'))
    file = CacheFile(path)
    assert file.get("a:7") is None and file.get("a:8") is not None
    file.close()


@pytest.mark.parametrize("where", [(4096, b"\xff" * 4096), (3300, b"\xb0" * 700)], ids=["tree", "schema"])
def test_a_damaged_cache_is_refused_when_the_run_starts_and_left_as_it_is(tmp_path, where):
    path = tmp_path / "c.sqlite"
    filled(path)
    damage(path, *where)
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match=r"c.sqlite is no .* or damaged \(.*delete this one"):
        VerdictCache(path)
    assert path.read_bytes() == before


def somebody_elses(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
        connection.commit()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.write_text('{"completion": "4"}\n' * 50), "is no verdict cache.*name another"),
        (lambda path: path.write_text("x"), "is no verdict cache"),
        (somebody_elses, "is no verdict cache of this version.*application id 0"),
        (lambda path: path.mkdir(), "cannot be written: .*Is a directory"),
    ],
)
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(tmp_path, prepare, message):
    path = tmp_path / "folder" / "c.sqlite"
    path.parent.mkdir()
    prepare(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigurationError, match=message):
        VerdictCache(path)
    assert before is None or path.read_bytes() == before


# --- when the file breaks during the run ---


@contextlib.contextmanager
def write_lock_on(path: Path):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


async def test_a_locked_file_costs_entries_but_no_answer_and_is_said_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("async_grpo.rewards.cache.verdicts.RETRY_S", 0.3)
    monkeypatch.setattr("async_grpo.rewards.cache.verdicts.CacheFile", partial(CacheFile, busy_s=0.05))
    cache = VerdictCache(tmp_path / "c.sqlite")
    await cache.get_or_call("a:old", caller(answer(2)))
    with write_lock_on(tmp_path / "c.sqlite"):
        assert await cache.get_or_call("a:old", caller(None)) == answer(2)  # reading goes on
        for number in range(20):
            assert await cache.get_or_call(f"a:{number}", caller(answer(number))) == answer(number)
    assert caplog.text.count("the run goes on without it") == 1 and "database is locked" in caplog.text
    stats = cache.counts
    assert stats["stored"] == 1 and stats["errors"] >= 1 and stats["misses"] == 21
    await asyncio.sleep(0.35)
    await cache.get_or_call("a:new", caller(answer(3)))
    await cache.close()
    assert CacheFile(tmp_path / "c.sqlite").get("a:new") and "works again" in caplog.text


@pytest.mark.parametrize("reason", ["database or disk is full", "or damaged"])
async def test_a_file_that_breaks_during_the_run_is_said_once_and_costs_no_answer(tmp_path, caplog, reason):
    cache = VerdictCache(tmp_path / "c.sqlite")
    await cache.get_or_call("a:0", caller(answer()))
    if reason == "or damaged":
        cache._file.close()  # as after an error
        damage(tmp_path / "c.sqlite", 4096, b"\xff" * 4096)
    else:
        cache._file.open().execute("PRAGMA max_page_count = 1")  # SQLite's own word for a full disk
    for number in range(1, 80):
        assert await cache.get_or_call(f"a:{number}", caller(answer(number))) == answer(number)
    assert reason in caplog.text and len(caplog.records) == 1
    assert cache.counts["errors"] == 1 and cache.counts["skipped"] > 10
    await cache.close()


async def test_a_hanging_disk_delays_one_look_up_and_blocks_no_loop(tmp_path, monkeypatch, caplog, request):
    monkeypatch.setattr("async_grpo.rewards.cache.verdicts.TIMEOUT_S", 0.1)
    cache = VerdictCache(tmp_path / "c.sqlite")
    released = threading.Event()
    request.addfinalizer(released.set)
    monkeypatch.setattr(cache._file, "get", lambda key: released.wait(60) and None)
    started = time.monotonic()
    for number in range(20):
        assert await cache.get_or_call(f"a:{number}", caller(answer())) == answer()
    assert time.monotonic() - started < 5 and cache.counts["skipped"] >= 19
    assert "no answer within 0.1 s" in caplog.text
    released.set()
    await cache.close()


@pytest.fixture(autouse=True)
def _hear_everything(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("async_grpo"), "propagate", True)  # a command line may have set it
    caplog.set_level(logging.WARNING, logger="async_grpo")
