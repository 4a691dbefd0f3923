"""A real run, tried from another address and by another user of the machine: nothing of it answers without a key."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from intruder import NOBODY, RAY_METHODS, RAY_SERVICES, TCP_STORE
from listening import Listener, listeners, own_addresses

from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.launch.process_variables import free_port

pytestmark = [pytest.mark.real, pytest.mark.exhaustive, pytest.mark.timeout(300)]
INTRUDER = Path(__file__).resolve().parents[1] / "helpers" / "intruder.py"
READY_S, INTRUDER_S = 200.0, 120.0
HERE, THERE = "198.18.77.1", "198.18.77.2"  # of the range for tests of networks (RFC 2544)
AGENT = """
import json, os, sys, time, urllib.request

while os.path.exists(sys.argv[1]):
    time.sleep(0.1)
key, url = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]
row = json.load(sys.stdin)
for path, body in (
    ("chat/completions", {"model": "policy", "messages": [{"role": "user", "content": row["input"]}], "max_tokens": 8}),
    ("result", {"reward": 1.0}),
):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), headers), timeout=60)
"""


def need_namespaces() -> None:
    """Skip where there are none to be had, unless REQUIRE_NETNS says that there must be."""
    reasons = []
    if os.geteuid() != 0:
        reasons.append("only root can become another user")
    elif missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        reasons.append(f"{', '.join(missing)} not installed")
    elif (done := subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)).returncode:
        reasons.append(f"no network namespace: {done.stderr.strip()}")
    if reasons and os.environ.get("REQUIRE_NETNS"):
        pytest.fail(f"REQUIRE_NETNS is set, but {reasons[0]}")
    elif reasons:
        pytest.skip(reasons[0])


@contextmanager
def another_address() -> Iterator[list[str]]:
    """Yield the command prefix of programs that have an address of their own, THERE, and reach this machine's."""
    keeper = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    inside = ["nsenter", f"--net=/proc/{keeper.pid}/ns/net"]
    own = f"grpo{os.getpid()}"[:15]
    try:
        until(lambda: os.readlink(f"/proc/{keeper.pid}/ns/net") != os.readlink("/proc/self/ns/net"), 10)
        for command in (
            f"ip link add {own} type veth peer name far netns {keeper.pid}",
            f"ip addr add {HERE}/30 dev {own}",
            f"ip link set {own} up",
        ):
            subprocess.run(command.split(), check=True)
        for command in (
            "ip link set lo up",
            f"ip addr add {THERE}/30 dev far",
            "ip link set far up",
            f"ip route add default via {HERE}",
        ):
            subprocess.run([*inside, *command.split()], check=True)
        yield inside
    finally:
        subprocess.run(["ip", "link", "del", own], check=False)  # the other end goes with it
        keeper.kill()  # and the namespace with the last of its processes
        keeper.wait()


def until(is_true, within_s: float, output: Path | None = None) -> None:
    give_up = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < give_up, output.read_text()[-3000:] if output else "not in time"
        time.sleep(0.1)


def intruder(order: dict, prefix: list[str] = []) -> dict:  # noqa: B006
    """Return what `intruder.py` got."""
    order = {"uid": 0, "targets": [], "files": [], "folders": [], "sockets": []} | order
    done = subprocess.run(
        [*prefix, sys.executable, str(INTRUDER)],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        timeout=INTRUDER_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@dataclass(frozen=True)
class Attacked:
    """What a run had open, and what strangers got of it."""

    listening: list[Listener]
    from_afar: dict
    by_another_user: dict
    temporary: Path
    paths: list[Path]

    @property
    def ports(self) -> dict[int, str]:
        """The TCP ports of the run, with the command of whose they are."""
        return {one.port: one.command for one in self.listening if one.port}


def run_options(folder: Path) -> dict[str, object]:
    (folder / "agent.py").write_text(AGENT)
    return {
        "model-name-or-path": TINY_MODEL,
        "data-path": COUNTDOWN_TRAIN,
        "output-dir": folder / "run",
        "run-name": folder.name,
        "environment": f"agent:exec {sys.executable} {folder / 'agent.py'} {folder / 'pause'}",
        "num-training-batches": 100_000,
        "batch-size": 2,
        "samples-per-question": 2,
        "max-tokens-per-gpu": 1024,
        "max-generation-tokens": 64,
        "nproc-per-node": 2,
        "prometheus-port": free_port(),
        "grace-s": 5,
    }


@pytest.fixture(scope="module")
def attacked(tmp_path_factory) -> Iterator[Attacked]:
    """A run of two ranks with an engine, an agent's endpoint, metrics for Prometheus and a page that watches it."""
    need_namespaces()
    folder = tmp_path_factory.mktemp("run")
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name, another_address() as inside:
        temporary = Path(name)
        temporary.chmod(0o1777)  # as /tmp is
        environment = os.environ | {"TMPDIR": name}
        command = [sys.executable, "-m", "async_grpo"]
        options = [f"--{name}={value}" for name, value in run_options(folder).items()]
        with (folder / "output").open("w") as output:
            run = subprocess.Popen(
                [*command, "run", "--enforce-eager", *options], env=environment, stdout=output, stderr=output
            )
        programs = [run]
        try:
            metrics = folder / "run" / "training_metrics.jsonl"
            said = folder / "output"
            until(lambda: run.poll() is not None or (metrics.exists() and metrics.read_text()), READY_S, said)
            assert run.poll() is None, (folder / "output").read_text()[-3000:]
            (folder / "pause").touch()  # what is open stays open, and the strangers are served sooner
            port = free_port()
            programs.append(subprocess.Popen([*command, "watch", str(folder / "run"), f"--port={port}"]))
            until(lambda: listeners(programs[-1].pid), 60)
            found = listeners(run.pid) + listeners(programs[-1].pid)
            ports = sorted({one.port for one in found if one.port})
            paths = [*temporary.rglob("*"), *Path("/dev/shm").iterdir()]
            with socket.create_server(("0.0.0.0", 0)) as open_to_all:
                control = [HERE, open_to_all.getsockname()[1]]
                hosts = own_addresses()  # that of the pair is one of them
                targets = [[host, port] for host in hosts for port in ports]
                from_afar = intruder({"targets": [control, *targets]}, inside)
            assert from_afar["ports"].pop(0)[2]["nothing"] != "refused"  # the way there is open
            by_another_user = intruder(
                {
                    "uid": NOBODY,
                    "targets": [["127.0.0.1", port] for port in ports],
                    "files": [str(path) for path in paths if path.is_file()],
                    "folders": [str(path) for path in paths if path.is_dir()],
                    "sockets": [one.address for one in found if not one.port],
                }
            )
            (folder / "pause").unlink()
            steps = metrics.read_text().count("\n")
            until(lambda: run.poll() is not None or metrics.read_text().count("\n") > steps + 1, 60, said)
            assert run.poll() is None, "the run did not survive the strangers"
            yield Attacked(found, from_afar, by_another_user, temporary, paths)
        finally:
            for program in programs:
                program.send_signal(signal.SIGINT)
            for program in programs:
                program.wait(60)
        assert [path.name for path in temporary.iterdir()] == []  # nothing stays


def test_the_run_had_everything_open_that_this_is_about(attacked):
    commands = " ".join(attacked.ports.values())
    for part in (
        "gcs_server",
        "raylet",
        "ray::RunController",
        "launch.trainer",
        "watch",
    ):
        assert part in commands
    assert "ray.util.client" not in commands  # `cluster/ray_head.py` starts none
    assert "ray::GenerationActor" in commands or "VLLM::EngineCore" in commands
    assert len(attacked.ports) > 10 and any(
        one.address.endswith("plasma_store") for one in attacked.listening
    )


def test_from_another_address_every_port_is_shut(attacked):
    assert len(attacked.from_afar["ports"]) >= len(attacked.ports)
    answers = {
        (port, name): reply
        for _, port, replies in attacked.from_afar["ports"]
        for name, reply in replies.items()
    }
    assert {attacked.ports[port] for (port, _), reply in answers.items() if reply != "refused"} == set()


def test_all_sockets_are_bound_to_the_loopback_interface_or_lie_in_a_folder_of_ours(attacked):
    for one in attacked.listening:
        if one.port:
            assert one.address == "127.0.0.1", one
        else:
            assert one.address.startswith(str(attacked.temporary)), one


def test_another_user_s_calls_are_refused_by_every_server_of_ray(attacked):
    """A server says that it does not know the method, or that the token is missing. What it knows, it does not do."""
    known = set()
    for _, port, replies in attacked.by_another_user["ports"]:
        for method in RAY_METHODS:
            code = replies.get(method, "UNIMPLEMENTED")
            assert code in ("UNAUTHENTICATED", "UNIMPLEMENTED"), (attacked.ports[port], method, code)
            if code == "UNAUTHENTICATED":
                known.add(method.split("/")[1])
    of_a_dashboard = {"ray.rpc.ReporterService"}
    of_ray_client = {"ray.rpc.RayletDriver", "ray.rpc.RayletDataStreamer", "ray.rpc.RayletLogStreamer"}
    # Neither is started
    assert known >= set(RAY_SERVICES) - of_a_dashboard - of_ray_client
    assert not known & of_ray_client


def test_no_server_tells_another_user_anything_over_http_but_metrics(attacked):
    for _, port, replies in attacked.by_another_user["ports"]:
        for name, reply in replies.items():
            if not name.startswith("GET ") or not reply.startswith("HTTP/"):
                continue
            status, is_metrics = reply.split()[1], "async_grpo_" in reply
            assert status in ("400", "401", "403", "404") or is_metrics, (attacked.ports[port], name, reply)
            if is_metrics:
                assert "launch.trainer" in attacked.ports[port]


def test_no_port_is_a_store_of_torch(attacked):
    for _, port, replies in attacked.by_another_user["ports"]:
        assert TCP_STORE[-4:].decode("latin-1") not in replies["TCPStore"], attacked.ports[port]


def test_another_user_reads_and_writes_no_file_and_no_socket_of_the_run(attacked):
    seen = attacked.by_another_user
    assert len([path for path in attacked.paths if path.is_relative_to(attacked.temporary)]) > 20
    for what in ("read", "written", "entered", "listed", "connected"):
        assert seen[what] == [], what
