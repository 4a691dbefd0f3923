"""A run over three nodes of one machine: one is cut off, heals; another loses its power. What was seen, and when.

    python -m tests.long.nodes                              fake engines
    python -m tests.long.nodes --short                      without the loss of power, as tests/real/test_nodes_real.py
    python -m tests.long.nodes --short --blow SIGSTOP       its raylet is stopped, or killed (SIGKILL), not its cable pulled
    python -m tests.long.nodes --engine vllm --reference    real engines, and a reference worker beside each

Each node is a network, process and mount namespace (`unshare`, without privileges) with an address, a /dev/shm and a folder
of its own, joined by a bridge. The trainer and its rewards' file are on node 1, which has no engine; nodes 2 and 3 have one
each. Prints a JSON line for each thing seen, and exits with 1 and the ends of all logs where something is not seen in time.
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "sample-data"
NAMESPACES = ["unshare", "--net", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
PORT = 6379
SHM_MB = 300  # of each node, for Ray's object store
GROUPS, MEMBERS = 8, 4
QUICK_HEALTH_CHECKS = {"period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "3"}
PAGE = """
import os, socket

def _where(sample):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.9.0.254", 1))
        node = int(probe.getsockname()[0].rpartition(".")[2])
    return {"reward": float(len(sample["completion"]) % 7), "node": node}

def first(sample): return _where(sample)
def second(sample): return _where(sample)
def third(sample): return _where(sample)
"""


class Node:
    """One machine: its processes see its own network, its own processes, its own /dev/shm, /mnt and /tmp/ray."""

    ray: subprocess.Popen[bytes]

    def __init__(self, number: int, folder: Path, environment: dict[str, str]) -> None:
        self.number, self.address, self.environment = number, f"10.9.0.{number}", environment
        self.ray_log = folder / f"ray-{number}-{time.monotonic_ns()}.log"
        self._init = subprocess.Popen([*NAMESPACES, "sleep", "infinity"], stderr=subprocess.DEVNULL)
        while not (children := _children(self._init.pid)):
            time.sleep(0.01)
        self.pid = children[0]  # unshare's child is the first process of the node
        time.sleep(0.2)
        port = f"node{number}"
        for command in (
            f"ip link add {port} type veth peer name eth0 netns {self.pid}",
            f"ip link set {port} master bridge up",
        ):
            subprocess.run(command.split(), check=True)
        for command in (
            "ip link set lo up",
            f"ip addr add {self.address}/24 dev eth0",
            "ip link set eth0 up",
            "ip route add default via 10.9.0.254",
            f"mount -t tmpfs -o size={SHM_MB}m tmpfs /dev/shm",
            "mount -t tmpfs tmpfs /mnt",
            "mount -t tmpfs tmpfs /tmp/ray",
        ):
            self.run(*command.split())

    def command(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount", f"--wd={ROOT}", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.command(*command), check=True, timeout=60, env=self.environment)

    def start(self, log: Path, *command: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(self.command(*command), stdout=out, stderr=out, env=self.environment)

    def link(self, state: str) -> None:
        """Pull its cable ("down"), or put it back ("up")."""
        subprocess.run(["ip", "link", "set", f"node{self.number}", state], check=True)

    def shared_memory_mb(self) -> float:
        """The most that was ever used: Ray gives no page of its store back."""
        use = os.statvfs(f"/proc/{self.pid}/root/dev/shm")
        return round((use.f_blocks - use.f_bfree) * use.f_frsize / 1e6, 1)

    def signal_raylet(self, blow: str) -> None:
        """SIGSTOP or SIGKILL to Ray's own process on this node; all others run on."""
        (raylet,) = [p for p in psutil.Process(self.ray.pid).children(recursive=True) if p.name() == "raylet"]
        raylet.send_signal(signal.Signals[blow])

    def power_off(self) -> None:
        """Every process of it is gone at once, and its address."""
        os.kill(self.pid, signal.SIGKILL)
        self._init.wait(20)
        subprocess.run(["ip", "link", "delete", f"node{self.number}"], check=False, stderr=subprocess.DEVNULL)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Cluster:
    """Three nodes with Ray, two engines, and a trainer."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.begun = folder, options, time.monotonic()
        Path("/tmp/ray").mkdir(exist_ok=True)
        subprocess.run("ip link add bridge type bridge".split(), check=True)
        subprocess.run("ip addr add 10.9.0.254/24 dev bridge".split(), check=True)
        subprocess.run("ip link set bridge up".split(), check=True)
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": f"10.9.0.1:{PORT}",
            "RAY_worker_niceness": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_worker_prestart": "0",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        if not options.ray_defaults:  # how soon a node that is silent counts as dead
            self.environment |= {
                f"RAY_health_check_{name}": value for name, value in QUICK_HEALTH_CHECKS.items()
            }
        self.nodes = {number: Node(number, folder, self.environment) for number in (1, 2, 3)}

    def note(self, what: str, **figures: Any) -> None:
        print(
            json.dumps({"at_s": round(time.monotonic() - self.begun, 1), "what": what, **figures}), flush=True
        )

    def start_ray(self, number: int) -> None:
        node = self.nodes[number]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"] if number == 1 else []
        head = head or [f"--address=10.9.0.1:{PORT}"]
        common = [f"--node-ip-address={node.address}", "--num-cpus=4", "--object-store-memory=100000000"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *head, *common]
        node.ray = node.start(node.ray_log, *command, "--disable-usage-stats", "--block")

    def join(self, *numbers: int) -> None:
        """Ray and a dispatcher (or two) on each of these nodes; node 1 has a trainer."""
        for number in numbers:
            self.start_ray(number)
        for number in numbers:
            log = self.nodes[number].ray_log
            self.until(lambda log=log: "runtime started" in log.read_text(), f"Ray on node {number}", 60)
            if number == 1:
                self.train()
                continue
            self.worker(number, "--mode=generation", f"--engine={self.options.engine}", "--enforce-eager")
            if self.options.reference:
                self.worker(number, "--mode=logprob", "--role=reference")

    def worker(self, number: int, *mode: str) -> None:
        told = [f"--model-path={DATA / 'tiny-model'}", "--run-name=nodes", *mode]
        log = self.folder / f"{mode[0].rpartition('=')[2]}-{number}.log"
        self.nodes[number].start(log, sys.executable, "-m", "async_grpo.launch.worker", *told)

    def train(self) -> None:
        page = "/mnt/page.py"  # on the trainer's node alone
        self.nodes[1].run("sh", "-c", f"cat > {page} <<'END'\n{PAGE}\nEND")
        settings = {
            "run-name": "nodes",
            "model-name-or-path": DATA / "tiny-model",
            "data-path": DATA / "countdown_train.jsonl",
            "output-dir": self.folder / "run",
            "reward-fns": ",".join(f"{page}:{name}" for name in ("first", "second", "third")),
            "verifiers": "first=1,second=1,third=1",
            "dump-samples-filename": "samples.jsonl",
            "batch-size": GROUPS,
            "samples-per-question": MEMBERS,
            "num-training-batches": 100_000,
            "max-tokens-per-gpu": 512,
            "max-generation-tokens": 24,
            "worker-grace-s": 60,
            "kl-coef": 0.001 if self.options.reference else 0,
        }
        told = [f"--{name}={value}" for name, value in settings.items()]
        trainer = [sys.executable, "-m", "async_grpo.launch.trainer", *told]
        self.trainer = self.nodes[1].start(self.folder / "trainer.log", *trainer)

    def lines(self, name: str = "training_metrics.jsonl") -> list[dict[str, Any]]:
        path = self.folder / "run" / name
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def step(self) -> int:
        return len(self.lines())

    def engines(self) -> set[str]:
        """The generation workers that worked for the last three steps, by the timeline."""
        last = self.step()
        spans = [span for span in self.lines("timeline.jsonl") if span["step"] > last - 3]
        return {span["lane"] for span in spans if span["lane"].startswith("engine")}

    def until(self, condition: Callable[[], Any], what: str, limit_s: float) -> float:
        """Seconds that it took; the run must live meanwhile."""
        begun = time.monotonic()
        while not condition():
            trainer = getattr(self, "trainer", None)
            ended = trainer is not None and trainer.poll() is not None
            if ended or time.monotonic() - begun > limit_s:
                tails = [f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.folder.glob("*.log")]
                why = "the run ended" if ended else f"not within {limit_s:.0f} s"
                raise SystemExit("\n".join([*tails, f"waiting for {what}: {why}"]))
            time.sleep(0.1)
        return round(time.monotonic() - begun, 1)

    def more_steps(self, count: int, what: str, limit_s: float = 90) -> float:
        goal = self.step() + count
        return self.until(lambda: self.step() >= goal, what, limit_s)

    def play(self) -> None:
        """The story; each thing seen is a note."""
        self.join(1)
        self.join(2, 3)
        self.note("three nodes have joined")
        self.until(lambda: self.step() >= 2, "the first steps", 150)
        self.until(lambda: len(self.engines()) == 2, "both engines to work", 60)
        self.note(
            "training", step=self.step(), engines=sorted(self.engines()), rewards_ran_on=self.reward_nodes()
        )

        if self.options.blow:
            self.nodes[3].signal_raylet(self.options.blow)
        else:
            self.nodes[3].link("down")
        self.note(f"node 3 is cut off ({self.options.blow or 'cable'})", step=self.step())
        took = self.more_steps(4, "steps without node 3")
        self.until(lambda: len(self.engines()) == 1, "node 3's engine to be fenced", 90)
        left = self.engines()
        self.note("the run went on", step=self.step(), four_steps_s=took, engines=sorted(left))

        self.nodes[3].power_off()
        self.nodes[3] = Node(3, self.folder, self.environment)
        self.join(3)
        self.until(lambda: len(self.engines() | left) > len(left), "the engine that joined to get work", 120)
        self.note("node 3 has healed", step=self.step(), engines=sorted(self.engines()))

        if not self.options.short:
            self.lose_power(left)
        os.kill(_children(self.trainer.pid)[0], signal.SIGTERM)  # nsenter's child
        code = self.trainer.wait(120)
        lines, samples = self.lines(), self.lines("samples.jsonl")
        drawn = sorted({sample["group"] for sample in samples})
        self.note(
            "the run was told to end",
            exit_code=code,
            steps=len(lines),
            samples=len(samples),
            each_prompt_once=drawn == list(range(len(lines) * GROUPS))
            and len(samples) == len(drawn) * MEMBERS,
            samples_failed=sum(sample["status"] != "ok" for sample in samples),
            canary_error=max(line["canary_error"] for line in lines),
            shared_memory_mb={node.number: node.shared_memory_mb() for node in self.nodes.values()},
            weights_mb=round((DATA / "tiny-model" / "model.safetensors").stat().st_size / 1e6, 1),
        )

    def lose_power(self, engine: set[str]) -> None:
        """Of node 2, whose engine it is."""
        self.nodes[2].power_off()
        self.note("node 2 lost its power", step=self.step())
        took = self.more_steps(4, "steps without node 2")
        self.until(lambda: not self.engines() & engine, "node 2's engine to be fenced", 90)
        self.note("the run went on", step=self.step(), four_steps_s=took, engines=sorted(self.engines()))

    def reward_nodes(self) -> list[int]:
        """Those on which a reward of the page was computed."""
        lines, names = self.lines(), ("first", "second", "third")
        return sorted({round(line[f"{name}/node"]) for line in lines for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="fake", choices=("fake", "vllm"))
    parser.add_argument("--reference", action="store_true", help="also a reference worker beside each engine")
    parser.add_argument("--short", action="store_true", help="no loss of power")
    parser.add_argument(
        "--blow", default="", choices=("SIGSTOP", "SIGKILL"), help="to node 3's raylet; its cable stays"
    )
    parser.add_argument(
        "--ray-defaults", action="store_true", help="silent nodes count as dead when Ray says"
    )
    parser.add_argument("--folder", type=Path, help="for the logs; a temporary one if it is not given")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:  # root over networks of its own, and nothing of it stays
        own = [
            "unshare",
            "--user",
            "--map-root-user",
            *NAMESPACES[1:],
            sys.executable,
            "-m",
            "tests.long.nodes",
        ]
        raise SystemExit(subprocess.run([*own, *sys.argv[1:], "--inside"], cwd=ROOT).returncode)
    with tempfile.TemporaryDirectory(prefix="nodes-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        Cluster(folder, options).play()


if __name__ == "__main__":
    main()
