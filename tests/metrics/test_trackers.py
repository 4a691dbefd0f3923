"""Trackers get every line, in a thread; one that fails or hangs is named, and costs the run nothing."""

import http.client
import logging
import socket
import threading
import time
import urllib.request

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.metrics import trackers as module
from async_grpo.metrics.trackers import PrometheusPage, Trackers, parse_trackers, trackers_of


class Kept:
    def __init__(self):
        self.lines, self.finished = [], False

    def log(self, values, step):
        self.lines.append((step, values))

    def finish(self):
        self.finished = True


class Failing(Kept):
    def log(self, values, step):
        if step == 2:
            raise OSError("the network is gone")
        super().log(values, step)


def test_every_tracker_gets_every_line_and_one_that_fails_is_named_once_and_left(caplog):
    kept, failing = Kept(), Failing()

    def unable():
        raise ImportError("No module named 'wandb'")

    with caplog.at_level(logging.ERROR, "async_grpo"):
        trackers = Trackers({"first": lambda: kept, "second": lambda: failing, "wandb": unable})
        for step in range(1, 5):
            trackers.log({"step": step, "reward": 0.5, "verifiers": {"math": {"ok": 3}}, "alarms": ["x"]})
        trackers.close()
    assert [step for step, _ in kept.lines] == [1, 2, 3, 4] and kept.finished
    assert kept.lines[0][1] == {"step": 1.0, "reward": 0.5, "verifiers/math/ok": 3.0}
    assert [step for step, _ in failing.lines] == [1] and not failing.finished
    said = sorted(record.getMessage() for record in caplog.records)
    assert len(said) == 2 and "the network is gone" in said[0] and "--track wandb fails" in said[1]


def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_its_end_nor_another_tracker(monkeypatch, caplog):
    monkeypatch.setattr(module, "WAITING_LINES", 3)
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    never = threading.Event()

    class Hanging(Kept):
        def log(self, values, step):
            never.wait()

    with caplog.at_level(logging.ERROR, "async_grpo"):
        begun, kept = time.monotonic(), Kept()
        trackers = Trackers({"hanging": Hanging, "other": lambda: kept})
        for step in range(10):
            trackers.log({"step": step})
        trackers.close()
    assert time.monotonic() - begun < 1.0 and kept.finished
    assert "lines are left out from step" in caplog.text and "the trackers do not answer" in caplog.text
    never.set()


def test_prometheus_reads_the_last_step_on_the_loopback_interface():
    page = PrometheusPage(0)
    page.log({"avg_reward": 0.25, "verifiers/math/ok": 7.0}, 1)
    page.log({"avg_reward": 0.75}, 2)
    host, port = page._server.server_address[:2]
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    page.finish()
    assert host == "127.0.0.1"
    assert "async_grpo_avg_reward 0.75" in text and "async_grpo_verifiers_math_ok 7.0" in text


def test_the_page_for_prometheus_lets_go_of_a_client_that_says_nothing(monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 0.3)
    page = PrometheusPage(0)
    try:
        for said in (b"", b"GET /metr"):
            with socket.create_connection(page._server.server_address[:2], timeout=20) as silent:
                silent.sendall(said)
                assert silent.recv(1000) == b""  # closed
    finally:
        page.finish()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", 200),
        ("localhost:9464", 200),
        ("[::1]:9464", 200),
        ("evil.example:9464", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_prometheus_is_answered_under_an_address_and_not_a_name_that_a_foreign_page_made_point_here(
    host, status
):
    page = PrometheusPage(0)
    page.log({"avg_reward": 0.25}, 1)
    client = http.client.HTTPConnection(*page._server.server_address[:2], timeout=10)
    client.putrequest("GET", "/metrics", skip_host=True)
    client.putheader("Host", host)
    client.endheaders()
    answer = client.getresponse()
    text = answer.read().decode()
    page.finish()
    assert answer.status == status and ("avg_reward" in text) is (status == 200)


def test_tensorboard_through_accelerate_gets_what_the_file_gets(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    trackers = trackers_of(["tensorboard"], None, tmp_path, "my-run", {"learning_rate": 1e-6, "nested": {}})
    for step in (1, 2):
        trackers.log({"step": step, "avg_reward": step / 4})
    trackers.close()
    found = []
    for path in (tmp_path / "tensorboard" / "my-run").glob("events*"):
        content = path.read_bytes()
        while content:  # records: length, its checksum, an event, its checksum
            length = int.from_bytes(content[:8], "little")
            event, content = Event.FromString(content[12 : 12 + length]), content[length + 16 :]
            values = event.summary.value
            found += [(event.step, one.simple_value) for one in values if one.tag == "avg_reward"]
    assert found == [(1, 0.25), (2, 0.5)]


def test_an_unknown_tracker_is_refused():
    assert parse_trackers("tensorboard, tensorboard") == ("tensorboard",) * 2 and parse_trackers("") == ()
    with pytest.raises(ConfigurationError, match="--track mlflow: pip install mlflow"):
        parse_trackers("mlflow")
    with pytest.raises(
        ConfigurationError, match="unknown wandbb; known: tensorboard, wandb, trackio, mlflow"
    ):
        parse_trackers("wandbb")
