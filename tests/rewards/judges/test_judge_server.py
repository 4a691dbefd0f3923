"""`JudgeServer` with programs that only look like vLLM: ready or not, killed, abandoned; nothing is ever left behind."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.rewards.judges import server as server_module
from async_grpo.rewards.judges.idle_sleep import server_reply, set_sleeping
from async_grpo.rewards.judges.server import JudgeServer

ROOT = Path(__file__).resolve().parents[3]

# Like vLLM's server it has an engine of its own, which outlives a killed server.
PROGRAM = """
import http.server, json, subprocess, sys, tempfile
mode, host, port, name = sys.argv[1:]
print("hello from", name, "on", port, flush=True)
if mode == "dies":
    raise MemoryError("no room for the model")
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # engine of " + port + __file__])
if mode == "hangs":
    engine.wait()
asleep = [False]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        temporary = {"temporary": tempfile.gettempdir()}
        self.say({"data": [{"id": name}], "is_sleeping": asleep[0]} | temporary)
    def do_POST(self):
        asleep[0] = self.path.startswith("/sleep") and mode != "restless"
        self.say({})
    def say(self, answer):
        body = json.dumps(answer).encode()
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): ...
http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever(0.02)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes JudgeServer start the program above; the list's item says what the program does."""
    path, mode = tmp_path / "program.py", ["works"]
    path.write_text(PROGRAM)

    def command(server: JudgeServer, port: int) -> list[str]:
        return [sys.executable, str(path), mode[0], "127.0.0.1", str(port), server.served_name]

    monkeypatch.setattr(JudgeServer, "_command", command)
    return mode


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    wait_until(lambda: not programs(str(tmp_path)), f"the end of {programs(str(tmp_path))}", 10.0)
    assert set(psutil.Process().children()) <= before  # no supervisor, not even a zombie


def programs(word: str) -> list[psutil.Process]:
    """Our programs and their engines that run now and whose command line holds the word."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        arguments = process.info["cmdline"] or []
        line = " ".join(arguments) if server_module.KEEP not in arguments else ""
        if "program.py" in line and word in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def keepers(owner: int | None = None) -> list[psutil.Process]:
    """Of the judge servers of a process; of this one if none is given."""
    alive = [one for one in psutil.Process(owner).children() if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in alive if server_module.KEEP in one.cmdline()]


def server_of(folder: Path, **settings) -> JudgeServer:
    return JudgeServer(**{"model": folder, "log_folder": folder.parent / "logs", **settings})


def port_of(url: str) -> str:
    return url.rsplit(":", 1)[1]


def main_program(url: str) -> psutil.Process:
    (process,) = [one for one in programs(port_of(url)) if "# engine of" not in " ".join(one.cmdline())]
    return process


def wait_until(condition, what: str, timeout_s: float = 20.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def test_replicas_serve_on_ports_of_their_own_until_they_are_closed(model, program):
    with server_of(model, replicas=2) as server:
        assert len(set(server.urls)) == 2 and all(url.startswith("http://127.0.0.1:") for url in server.urls)
        for url in server.urls:
            assert len(programs(port_of(url))) == 2  # it and its engine
        server.check()
    assert not [one for url in server.urls for one in programs(port_of(url))]
    server.close()  # harmless
    with pytest.raises(WorkerLost, match="does not run"):
        server.check()


def test_the_sockets_of_a_server_lie_in_a_folder_that_only_we_can_enter_and_that_ends_with_it(model, program):
    with server_of(model) as server:
        folder = Path(server_reply(f"{server.urls[0]}/v1/models")["temporary"])
        assert folder.name.startswith("grpo-") and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_killed_replica_is_replaced_on_its_port_and_its_engine_ended(model, program, monkeypatch):
    with server_of(model, replicas=2, restarts=1) as server:
        url = server.urls[0]
        engine = next(one for one in programs(port_of(url)) if "# engine of" in " ".join(one.cmdline()))
        main_program(url).kill()
        wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, "its end")
        server.check()  # not for good
        wait_until(lambda: server._serves(url), "the new one")
        main_program(url).kill()
        with pytest.raises(WorkerLost, match=r"0 restart 1 was killed by SIGKILL(.|\n)*hello from judge on"):
            wait_until(server.check, "the news of the second death")
        assert server._serves(server.urls[1])  # the other one goes on


def test_a_server_that_dies_or_never_serves_at_the_start_says_its_last_words(model, program):
    program[0], words = "dies", r"0 ended with exit code 1(.|\n)*MemoryError: no room for the"
    with pytest.raises(WorkerLost, match=words):
        server_of(model).start(timeout_s=60)
    program[0], words = "hangs", r"did not serve on http.* within 5 s(.|\n)*hello from judge on"
    with pytest.raises(DeadlineExceeded, match=words):
        server_of(model).start(timeout_s=5)  # a busy machine needs more than one for two interpreters


def test_the_servers_end_with_their_owner_however_it_dies(model, program, tmp_path):
    owner = tmp_path / "owner.py"
    owner.write_text(
        textwrap.dedent(f"""
        import os, sys, threading, time
        from async_grpo.rewards.judges.server import JudgeServer
        JudgeServer._command = lambda server, port: [
            sys.executable, {str(tmp_path / "program.py")!r}, "works", "127.0.0.1", str(port), "judge"]
        server = JudgeServer({str(model)!r}, log_folder={str(tmp_path / "logs")!r})
        starter = threading.Thread(target=server.start)  # a thread that ends is not an owner that dies
        starter.start(); starter.join()
        time.sleep(1.0)
        other = os.fork()  # it inherits the pipe to the supervisor, and lives on
        if other:
            print(server.urls[0], other, flush=True)
        time.sleep(600)
        """)
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, owner], stdout=subprocess.PIPE, text=True, env=environment)
    url, other = process.stdout.readline().split()
    assert len(programs(port_of(url))) == 2
    (its_keeper,) = keepers(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    try:
        wait_until(lambda: not programs(port_of(url)) and not its_keeper.is_running(), "the servers' end")
    finally:
        os.kill(int(other), signal.SIGKILL)


def test_no_secret_travels(model, program, monkeypatch):
    monkeypatch.setenv("OTHER_TOKEN", "secret")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with server_of(model) as server:
        assert "secret" not in main_program(server.urls[0]).environ().values()


def test_sleep_and_wake_are_proven(model, program, monkeypatch):
    monkeypatch.setattr(server_module, "on_the_cpu", lambda: False)
    with server_of(model, sleep_mode=True) as server:
        assert main_program(server.urls[0]).environ()["VLLM_SERVER_DEV_MODE"] == "1"
        server.sleep()
        set_sleeping(server.urls[0], False)
    program[0] = "restless"
    with (
        server_of(model, sleep_mode=True) as server,
        pytest.raises(WorkerLost, match="it accepted the request, but did not obey"),
    ):
        server.sleep()


WRONG = [
    ({"model": "/nothing"}, r"no config\.json"),
    ({"replicas": 0}, "replicas=0"),
    ({"restarts": -1}, "restarts=-1"),
    ({"replicas": 2, "devices": ["0"]}, "devices=.*2 replicas"),
    ({"devices": "0"}, "devices='0' must be a list"),
    ({"options": {"host": "0.0.0.0"}}, "options must not hold host"),
    ({"options": {"served_model_name": "x"}}, "served-model-name"),
]


@pytest.mark.parametrize(("settings", "reason"), WRONG)
def test_impossible_settings_are_refused_with_their_values(model, settings, reason):
    with pytest.raises(ConfigurationError, match=reason):
        server_of(model, **settings)


def test_the_command_and_the_environment_of_a_server(model, monkeypatch):
    options = {"max-model-len": 512, "enforce_eager": True, "async-scheduling": False, "config": {"a": [1]}}
    given = ["--max-model-len=512", "--enforce-eager", "--no-async-scheduling", '--config={"a": [1]}']
    server = server_of(model, replicas=2, devices=["4,5", "6,7"], options=options)
    assert [server._environment(number)["CUDA_VISIBLE_DEVICES"] for number in (0, 1)] == ["4,5", "6,7"]
    fixed = f"--model={model} --host=127.0.0.1 --port=8000 --served-model-name=judge".split()
    guard = "--middleware=async_grpo.rewards.judges.own_user.OwnUserOnly"
    assert server._command(8000)[3:] == [*fixed, guard, "--runner=auto", *given]
    with pytest.raises(ConfigurationError, match="without sleep_mode"):
        server.sleep()
    monkeypatch.setattr(server_module, "on_the_cpu", lambda: True)
    with pytest.raises(ConfigurationError, match="needs a GPU"):
        server_of(model, sleep_mode=True)
