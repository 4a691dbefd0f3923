"""Whom a server without a key answers: its own user on this machine, under a name that nobody else can have chosen."""

import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import uvicorn
from aiohttp import web
from intruder import NOBODY

from async_grpo.observe.watch import WatchConfig, application
from async_grpo.processes.http_host import REFUSAL, _user_of, may_read
from async_grpo.rewards.judges.own_user import OwnUserOnly, refusal

INTRUDER = Path(__file__).resolve().parents[1] / "helpers" / "intruder.py"


@pytest.mark.parametrize(
    ("family", "bound", "dialled"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1"),  # the server sees ::ffff:127.0.0.1, the client 127.0.0.1
    ],
)
def test_the_user_at_the_other_end_is_the_one_that_the_kernel_names(family, bound, dialled):
    listening = socket.create_server((bound, 0), family=family, dualstack_ipv6=bound == "::")
    with listening, socket.create_connection((dialled, listening.getsockname()[1]), 5) as client:
        connection, peer = listening.accept()
        with connection:
            mine = [c for c in psutil.Process().net_connections() if c.laddr.port == client.getsockname()[1]]
            assert len(mine) == 1  # an independent reading of the same table
            ends = peer[:2], connection.getsockname()[:2]
            assert _user_of(*ends) == os.geteuid() and may_read(*ends)
    assert _user_of(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert not may_read(("127.0.0.1", 1), ("127.0.0.1", 2))  # what is not known is refused
    assert may_read(("192.0.2.7", 1), ("192.0.2.8", 2))  # who serves a network means it


def seen_by(uid: int, port: int) -> dict[str, str]:
    """What a user is answered, by its request or call."""
    order = {"uid": uid, "targets": [["127.0.0.1", port]], "files": [], "folders": [], "sockets": []}
    done = subprocess.run(
        [sys.executable, str(INTRUDER)], input=json.dumps(order), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["ports"][0][2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_of_the_machine_reads_no_run_by_the_page_that_watches_it(tmp_path):
    (tmp_path / "training_params.json").write_text(
        json.dumps({"samples_per_question": 2, "batch_size": 1, "num_training_batches": 9})
    )
    (tmp_path / "training_metrics.jsonl").write_text('{"step": 1, "avg_reward": 0.5}\n')
    runner = web.AppRunner(application(WatchConfig(path=str(tmp_path))))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        replies = await asyncio.to_thread(seen_by, 0, port)
        assert replies["GET /"].startswith("HTTP/1.1 200") and "avg_reward" in replies["GET /data?since=0"]
        replies = await asyncio.to_thread(seen_by, NOBODY, port)
        for path in ("/", "/data?since=0", "/metrics"):
            assert replies[f"GET {path}"].startswith("HTTP/1.1 403"), replies
    finally:
        await runner.cleanup()


ASKED: list[str] = []


async def judge(scope, receive, send):
    """A server that answers all that it is asked."""
    if scope["type"] == "lifespan":
        return
    ASKED.append(scope["path"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a verdict"})


@contextmanager
def served(application) -> Iterator[int]:
    """The port of a real server (uvicorn, as vLLM uses it)."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_has_nothing_judged():
    with served(OwnUserOnly(judge)) as port:
        assert "a verdict" in seen_by(0, port)["GET /v1/models"]
        ASKED.clear()
        replies = seen_by(NOBODY, port)
        assert {name: reply for name, reply in replies.items() if "200 OK" in reply} == {}
        assert replies["GET /v1/models"].startswith("HTTP/1.1 403") and ASKED == []


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1:8000", 200), ("localhost", 200), ("evil.example", 403)]
)
def test_a_judge_is_asked_under_an_address_and_not_a_name_that_a_foreign_page_made_point_here(host, status):
    with served(OwnUserOnly(judge)) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        client.request("POST", "/sleep", headers={"Host": host})
        assert client.getresponse().status == status


def test_what_says_nothing_of_where_it_comes_from_is_refused():
    ours = {"type": "http", "headers": [(b"host", b"127.0.0.1")], "client": None, "server": ("127.0.0.1", 1)}
    assert refusal(ours) and refusal(ours | {"headers": []})
    two_names = ours | {"headers": [(b"host", b"127.0.0.1"), (b"host", b"evil.example")]}
    assert refusal(two_names) == REFUSAL
