"""Ranks of one machine meet in a file: torchrun and they open nothing that another address can reach."""

import json
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from intruder import TCP_STORE, reply_to

from async_grpo.launch import process_variables
from async_grpo.training.distributed import RANKS_STORE, _store

RANK = """
import json, os, sys
from listening import listeners
from async_grpo.training.distributed import distributed_run, leave

with distributed_run("cpu", timeout_s=60) as ranks:
    total = ranks.sum([1.0 + ranks.rank])
    if ranks.is_main:
        found = [[one.address, one.port] for one in listeners(os.getppid())]
        json.dump({"total": total, "listening": found}, open(sys.argv[1], "w"))
    ranks.sum([1.0])  # until it has looked
leave()
"""


def is_torchs_store(port: int) -> bool:
    """Whether a store answers there, to whoever asks."""
    return TCP_STORE[-4:].decode("latin-1") in reply_to(["127.0.0.1", port], TCP_STORE)


def test_a_store_that_answers_whoever_asks_is_known_as_such():
    """Else the tests that find none would prove nothing."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    assert is_torchs_store(store.port)
    with socket.create_server(("127.0.0.1", 0)) as another:
        assert not is_torchs_store(another.getsockname()[1])


@pytest.mark.real
@pytest.mark.timeout(180)
def test_torchrun_and_its_ranks_listen_on_the_loopback_interface_alone_and_have_no_store_there(tmp_path):
    program, results = tmp_path / "rank.py", tmp_path / "results.json"
    program.write_text(RANK)
    variables = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | process_variables.torchrun_environment(tmp_path)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    torchrun = process_variables.torchrun_arguments(2, tmp_path)
    command = [sys.executable, *torchrun, str(program), str(results)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    seen = json.loads(results.read_text())
    assert seen["total"] == [3.0]
    assert seen["listening"]  # gloo's, of the pairs of ranks
    assert {address for address, _ in seen["listening"]} == {"127.0.0.1"}
    assert "torchrun-logs" in os.listdir(tmp_path)  # and not in /tmp, where it would stay


def test_ranks_that_are_given_a_file_meet_there_and_a_lonely_one_needs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(RANKS_STORE, str(tmp_path / "store"))
    assert process_variables.torchrun_environment(tmp_path)[RANKS_STORE] == str(tmp_path / "ranks-store")
    one, other = _store(2), _store(2)
    threading.Timer(0.1, one.set, ["address", "here"]).start()
    assert other.get("address") == b"here" and isinstance(one, dist.FileStore)
    assert isinstance(_store(1), dist.HashStore)
    monkeypatch.delenv(RANKS_STORE)
    assert _store(2) is None  # by MASTER_ADDR, as torchrun over several nodes has it
