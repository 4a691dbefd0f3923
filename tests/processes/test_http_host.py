"""Whom a server without a key answers: its own user on this machine, under a name that nobody else can have chosen."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from intruder import NOBODY

from async_grpo.processes.http_host import _user_of, may_read
from async_grpo.programs.watch import WatchConfig, application

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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_of_the_machine_reads_no_run_by_the_page_that_watches_it(tmp_path):
    (tmp_path / "training_params.json").write_text(
        json.dumps({"samples_per_question": 2, "batch_size": 1, "num_training_batches": 9})
    )
    (tmp_path / "training_metrics.jsonl").write_text('{"step": 1, "avg_reward": 0.5}\n')
    runner = web.AppRunner(application(WatchConfig(path=str(tmp_path))))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    target = ["127.0.0.1", runner.addresses[0][1]]

    def seen_by(uid: int) -> dict[str, str]:
        order = {"uid": uid, "targets": [target], "files": [], "folders": [], "sockets": []}
        done = subprocess.run(
            [sys.executable, str(INTRUDER)],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["ports"][0][2]

    try:
        replies = await asyncio.to_thread(seen_by, 0)
        assert replies["GET /"].startswith("HTTP/1.1 200") and "avg_reward" in replies["GET /data?since=0"]
        replies = await asyncio.to_thread(seen_by, NOBODY)
        for path in ("/", "/data?since=0", "/metrics"):
            assert replies[f"GET {path}"].startswith("HTTP/1.1 403"), replies
    finally:
        await runner.cleanup()
