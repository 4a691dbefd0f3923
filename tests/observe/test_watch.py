"""`async-grpo watch`: a real server over a run's files. What it shows, how it reads, and what it refuses."""

import asyncio
import base64
import hashlib
import itertools
import json
import logging
import os
import re
import socket
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError
from async_grpo.metrics.tail import spread_records
from async_grpo.observe.watch import POINTS, WatchConfig, application, watch
from async_grpo.processes.http_server import OneLinePerFault

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
OPTIONS = {"samples_per_question": 8, "batch_size": 4, "num_training_batches": 100}


def metrics_line(step: int, **more) -> str:
    plain = {"step": step, "timestamp": time.time(), "avg_reward": step / 100, "verifiers": {}, "alarms": []}
    return json.dumps(plain | more) + "\n"


@pytest.fixture
def run(tmp_path):
    """A run of ten steps."""
    (tmp_path / "training_params.json").write_text(json.dumps(OPTIONS))
    verifiers = {"math": {"ok": 30, "failed": 2, "latency_p50_s": None}, "judge": {"timed_out": 1}}
    more = {"verifiers": verifiers, "staleness_tokens": {"0": 90, "1": 10}, "alarms": [HOSTILE]}
    lines = [metrics_line(step, **more) for step in range(1, 11)]
    (tmp_path / "training_metrics.jsonl").write_text("".join(lines))
    return tmp_path


@asynccontextmanager
async def browser(folder, **more):
    async with TestClient(TestServer(application(WatchConfig(path=str(folder), **more)))) as client:
        yield client


async def data_of(client, since=0):
    return await (await client.get(f"/data?since={since}")).json()


async def test_the_page_needs_no_network_and_only_its_own_script_may_run(run):
    async with browser(run) as client:
        answer = await client.get("/")
        text, rules = await answer.text(), answer.headers["Content-Security-Policy"]
    (own,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in rules and "default-src 'none'" in rules
    assert "connect-src 'self'" in rules and "frame-ancestors 'none'" in rules
    assert text.count("<script") == 1 and not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert "innerHTML" not in own and "eval(" not in own and "insertAdjacent" not in own
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_the_data_are_those_of_the_files(run):
    (run / ".lock").write_text(str(os.getpid()))
    told = {"step": 8, "file": "aime", "eval_avg@4": 0.25, "eval_avg@4_ci": 0.125, "eval_version_min": 7}
    (run / "eval_metrics.jsonl").write_text(json.dumps(told) + "\n")
    spans = [("weights", "sync", 5.0, 6.0), ("engine g0", "generate", 1.0, 4.0)]
    keys = ("lane", "what", "begin", "end")
    rows = [{"step": 10} | dict(zip(keys, span, strict=True)) for span in spans]
    (run / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with browser(run) as client:
        found = await data_of(client)
    assert found["columns"]["step"] == list(range(1, 11))
    assert found["columns"]["avg_reward"] == [step / 100 for step in range(1, 11)]
    assert found["columns"]["verifiers/math/failed"] == [2] * 10
    assert "step 10 of 100, running" in found["headline"] and (found["step"], found["total"]) == (10, 100)
    assert found["staleness"] == {"0": 900, "1": 100} and found["recent"] == 10
    assert found["verifiers"] == {"math": [300, 20, 0, 0], "judge": [0, 0, 10, 0]}
    assert found["evaluations"] == [{"step": 8, "file": "aime", "means": {"eval_avg@4": [0.25, 0.125]}}]
    assert found["lanes"] == ["engine g0", "weights"]
    assert found["spans"] == [[1, "sync", 5.0, 6.0, 10], [0, "generate", 1.0, 4.0, 10]]


async def test_only_what_is_new_is_read_and_an_unfinished_line_waits(run):
    file = run / "training_metrics.jsonl"
    async with browser(run) as client:
        first = await data_of(client)
        assert (first["since"], first["next"]) == (0, file.stat().st_size)
        new = metrics_line(11) + metrics_line(12)
        with file.open("a") as end:
            end.write(new[:-5])
        second = await data_of(client, first["next"])
        assert second["columns"]["step"] == [11]
        with file.open("a") as end:
            end.write(new[-5:])
        third = await data_of(client, second["next"])
        assert third["columns"]["step"] == [12] and third["next"] == file.stat().st_size
        fourth = await data_of(client, third["next"])
        assert fourth["columns"] == {} and fourth["next"] == third["next"]
        file.write_text(metrics_line(1))  # the run was resumed
        again = await data_of(client, third["next"])
        assert (again["since"], again["columns"]["step"]) == (0, [1])


async def test_a_long_run_is_thinned_out_evenly(run):
    lines = [metrics_line(step, padding="x" * (step % 50)) for step in range(1, 20_001)]
    (run / "training_metrics.jsonl").write_text("".join(lines))
    async with browser(run) as client:
        found = await data_of(client)
        steps = found["columns"]["step"]
        gaps = [after - before for before, after in itertools.pairwise(steps)]
        assert 0.9 * POINTS <= len(steps) <= POINTS and steps[0] == 1 and steps == sorted(set(steps))
        assert max(gaps) <= 2 * 20_000 / POINTS and found["step"] == 20_000
        # What the selection left at the end comes with the next question, unless it ended with the last line
        rest = (await data_of(client, found["next"]))["columns"].get("step", [])
        assert (steps + rest)[-1] == 20_000 and steps + rest == sorted({*steps, *rest})


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 60), st.booleans())
def test_lines_come_once_in_order_and_the_few_of_them_all(tmp_path_factory, lengths, count, cut_short):
    lines = [json.dumps({"n": n, "x": "y" * length}) + "\n" for n, length in enumerate(lengths)]
    path = tmp_path_factory.mktemp("spread") / "lines.jsonl"
    path.write_text("".join(lines) + '{"n": 9' * cut_short)
    found, since = [], 0
    while some := list(spread_records(path, since, count)):
        assert len(some) <= count
        for record, end in some:
            assert end == sum(map(len, lines[: record["n"] + 1]))
        found += [record["n"] for record, _ in some]
        since = some[-1][1]
    assert found == sorted(set(found)) and (not lines or found[-1] == len(lines) - 1)
    if count >= sum(map(len, lines)):
        assert found == list(range(len(lines)))


def test_a_line_that_is_no_object_is_passed_over(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"n": 1}\n[2]\nnonsense\n\n{"n": 3}\n')
    assert [record["n"] for record, _ in spread_records(path, 0, 99)] == [1, 3]
    assert list(spread_records(tmp_path / "none", 0, 99)) == []


async def status_of(client, request: str, host: str | None = None) -> int:
    """Of a request exactly as it is spelled."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    named = f"{client.host}:{client.port}" if host is None else host
    writer.write(
        f"{request} HTTP/1.1\r\nHost: {named}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
    )
    answer = await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    return int(answer.split()[1])


async def test_it_can_only_be_read_and_nothing_beside_the_run_s_pages(run):
    async with browser(run) as client:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert await status_of(client, f"{method} /data") == 405
        for path in (
            "/training_params.json",
            "/../training_params.json",
            "/%2e%2e/etc/passwd",
            "//data",
            "/data/",
        ):
            assert await status_of(client, f"GET {path}") in (400, 404)
        for since in ("-1", "x", "1e3", "0x10"):
            assert await status_of(client, f"GET /data?since={since}") == 400
        assert await status_of(client, "GET /data?since=99999999999999999999") == 200


async def test_a_name_that_a_foreign_page_has_made_point_here_gets_nothing(run):
    async with browser(run, host="box.example") as client:
        for host in (
            "evil.example",
            "evil.example:80",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "[::",
        ):
            for path in ("/", "/data", "/samples", "/none"):
                assert await status_of(client, f"GET {path}", host) in (400, 403), host
        for host in (
            "localhost",
            "localhost:8765",
            "127.0.0.1",
            "[::1]:8765",
            "192.168.1.5:1",
            "box.example:8765",
        ):
            assert await status_of(client, "GET /data", host) == 200, host


async def test_a_completion_with_script_in_it_is_data_on_the_samples_page(run):
    async with browser(run) as client:
        answer = await client.get("/samples")
        assert answer.status == 404 and "--keep-sample-groups" in await answer.text()
        (run / "training_params.json").write_text(json.dumps(OPTIONS | {"dump_samples_filename": "s.jsonl"}))
        row = {"step": 1, "group": 0, "member": 0, "input": HOSTILE, "completion": HOSTILE, "answer": "2"}
        row |= {"reward": 1.0, "status": "ok", "components": {}, "finish_reason": "stop", "advantage": 0.0}
        (run / "s.jsonl").write_text(json.dumps(row) + "\n")
        answer = await client.get("/samples")
        text, rules = await answer.text(), answer.headers["Content-Security-Policy"]
    assert "alert(1)" in text and "<script>alert" not in text and "<img" not in text
    own = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(own) == 1
    assert f"'sha256-{base64.b64encode(hashlib.sha256(own[0].encode()).digest()).decode()}'" in rules


async def test_what_the_run_says_of_itself_comes_as_json_that_no_browser_takes_for_a_page(run):
    async with browser(run) as client:
        answer = await client.get("/data")
        assert answer.content_type == "application/json" and (await answer.json())["alarms"] == [HOSTILE]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


async def test_before_its_first_step_a_run_shows_the_end_of_its_log(run):
    (run / "training_metrics.jsonl").write_text("")
    (run / "logs").mkdir()
    (run / "logs" / "trainer.log").write_text("waiting for workers to load\n")
    async with browser(run) as client:
        found = await data_of(client)
    assert found["log"] == ["waiting for workers to load"] and found["columns"] == {} and found["step"] == 0


def test_a_folder_without_a_run_and_an_address_that_is_taken_are_refused(run, tmp_path_factory):
    with pytest.raises(ConfigurationError, match="holds no run"):
        watch(WatchConfig(path=str(tmp_path_factory.mktemp("none"))))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"--port {port} cannot be listened on .*choose another"
        ):
            watch(WatchConfig(path=str(run), port=port))
    with pytest.raises(ConfigurationError, match="--port 70000 cannot be listened on"):
        watch(WatchConfig(path=str(run), port=70000))


def test_a_client_that_says_nothing_is_let_go_of(run, monkeypatch):
    """And what is no HTTP costs a line of the log, not a traceback."""
    given = {}
    monkeypatch.setattr(
        "async_grpo.observe.watch.web.run_app", lambda served, **options: given.update(options)
    )
    watch(WatchConfig(path=str(run)))
    assert given["keepalive_timeout"] <= 120.0
    for name in ("aiohttp.server", "asyncio"):
        kinds = [type(entry).__name__ for entry in logging.getLogger(name).filters]
        assert kinds.count("OneLinePerFault") == 1


async def test_malformed_requests_fill_no_log_and_are_no_fault_of_ours(run, caplog):
    requests = (
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"\x00\xff garbage\r\n\r\n",
        b"GET /data?since=" + b"9" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /data?since=-1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    async with browser(run) as client:
        for entry in logging.getLogger("aiohttp.server").filters:
            if isinstance(entry, OneLinePerFault):
                entry._next_at.clear()
        for request in requests * 20:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(request)
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 60)
            writer.close()
    records = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert len(records) <= 20 and all(record.exc_info is None for record in records)
