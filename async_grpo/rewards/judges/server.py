"""`JudgeServer` starts and stops vLLM's OpenAI-compatible servers for judges. They serve only this machine.

    with JudgeServer("Qwen2.5-7B-Instruct", log_folder="runs/x/logs", replicas=2, devices=("6", "7")) as server:
        judge = LLMJudge(url=server.urls, model=server.served_name)

    owner -> keeper (`keep`, one for each replica) -> vLLM's server -> its engines

A keeper restarts its server if the server dies. When the JudgeServer is closed or its process has ended, the keeper
ends the server and its engines, which would keep running if only the server was killed. Each keeper is a separate
process, because the `Supervisor` in it ends all descendants of its own process.
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
from async_grpo.processes.device_variables import is_device_variable
from async_grpo.processes.private_folder import compile_cache, private_folder
from async_grpo.processes.process_tree import end_descendants
from async_grpo.processes.supervisor import KILL_GRACE_S, Program, Supervisor, log_excerpt
from async_grpo.rewards.http.endpoint import require_all
from async_grpo.rewards.judges.idle_sleep import UNABLE, server_reply, set_sleeping

HOST = "127.0.0.1"  # servers require no API key, so they must not be reachable from the network
GUARD = "async_grpo.rewards.judges.own_user.OwnUserOnly"  # ASGI middleware that refuses other users of this machine
POLL_S = 0.2
CLOSE_S = 45.0  # time limit for a keeper to end, in seconds
BACKOFF_S = 2.0  # pause before a server is restarted, in seconds
# Environment variables that a server inherits from this process, in addition to those of `is_device_variable`
FORWARDED = "PATH HOME LANG LC_ALL TZ TMPDIR USER LD_LIBRARY_PATH VIRTUAL_ENV PYTHONPATH".split()
FORWARDED_PREFIXES = ("OMP_", "MKL_", "XDG_")
END_OF_DEATH = "\0\n"  # ends each report about the death of a server
FIXED = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
ON_THE_CPU = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
# Arguments of vLLM that `options` must not contain, because other settings determine them
RESERVED = "model host port served-model-name runner enable-sleep-mode api-key middleware".split()
ROOT = str(Path(__file__).resolve().parents[3])  # folder from which the package was imported
KEEP = "import sys; sys.path.insert(0, sys.argv[1]); from async_grpo.rewards.judges.server import keep; keep(*sys.argv[2:])"


@dataclass(eq=False)
class JudgeServer:
    """Replicas of one model, each a vLLM server on its own port.

    Args:
        model: Local folder with the model.
        log_folder: Folder for the servers' output.
        served_name: Name of the model in the field `model` of requests.
        replicas: Number of servers. Each server needs the memory of a complete vLLM engine.
        devices: CUDA_VISIBLE_DEVICES for each server, such as ("4,5", "6,7"). None uses the value of this process.
        runner: vLLM's runner: "auto", "generate", or "pooling" for reward models (/classify, /pooling).
        options: Further arguments of vLLM, such as {"max-model-len": 4096, "enforce-eager": True}.
        sleep_mode: Allow the servers to be put to sleep. This needs a GPU.
        restarts: Maximum number of restarts of a replica that died.

    Attributes:
        urls: The addresses of the servers, to be passed as a judge's `url`.

    Raises:
        ConfigurationError: The settings are invalid.
    """

    model: str | Path
    _: KW_ONLY
    log_folder: str | Path
    served_name: str = "judge"
    replicas: int = 1
    devices: Sequence[str] | None = None
    runner: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    sleep_mode: bool = False
    restarts: int = 3

    def __post_init__(self) -> None:
        model = str(self.model)
        devices = self.devices
        replicas = self.replicas
        has_devices_for_each = devices is None or (not isinstance(devices, str) and len(devices) == replicas)
        require_all(
            ((Path(model) / "config.json").is_file(), f"{model!r} is no folder of a model: no config.json"),
            (replicas >= 1 and self.restarts >= 0, f"{replicas=}, restarts={self.restarts}: too low"),
            (
                has_devices_for_each,
                f"{devices=} must be a list with the GPUs of each of the {replicas} replicas",
            ),
            (
                not (self.sleep_mode and on_the_cpu()),
                "sleep_mode=True needs a GPU: vLLM on the CPU says that it sleeps but gives no memory back",
            ),
        )
        ports = _free_ports(replicas)
        self.urls = tuple(f"http://{HOST}:{port}" for port in ports)
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
        """Start the replicas, and wait until each of them serves the model. The call blocks.

        Raises:
            WorkerLost: A replica ended. The message contains its last output.
            DeadlineExceeded: A replica was not ready in time. The message contains its last output.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout_s
        try:
            for number in range(self.replicas):
                self._start_keeper(number)
            for name, url, keeper in zip(self._names, self.urls, self._keepers, strict=True):
                while not self._serves(url):
                    self.check(0)
                    if time.monotonic() > deadline:
                        log = self._folder / f"{name.replace(' ', '-')}.log"
                        output = log_excerpt(Program(name, keeper, log)) if log.exists() else ""
                        raise DeadlineExceeded(
                            f"{name} did not serve on {url} within {timeout_s:g} s{output}"
                        )
                    time.sleep(POLL_S)
            self.check(0)
        except BaseException:
            self.close()
            raise

    def check(self, forgiven: int | None = None) -> None:
        """Raise an error if a replica died too often or its keeper has ended.

        Args:
            forgiven: Number of deaths of each replica that are not an error. None uses `restarts`.

        Raises:
            WorkerLost: A replica died more often than `forgiven`, or a keeper has ended.
        """
        max_deaths = self.restarts if forgiven is None else forgiven
        for deaths in self._deaths[: len(self._keepers)]:
            reports = deaths.read_text().split(END_OF_DEATH)[:-1]
            if len(reports) > max_deaths:
                raise WorkerLost(reports[-1])
        if not self._keepers or any(keeper.poll() is not None for keeper in self._keepers):
            raise WorkerLost(f"the judge server does not run; see {self._folder / 'judge-supervisor.log'}")

    def sleep(self) -> None:
        """Put the servers to sleep, which frees their GPU memory until `IdleSleep` wakes them.

        This ends running requests.

        Raises:
            ConfigurationError: The server was created without sleep_mode.
            WorkerLost: A replica does not fall asleep.
        """
        require_all((self.sleep_mode, "the judge server was made without sleep_mode=True"))
        for name, url in zip(self._names, self.urls, strict=True):
            try:
                set_sleeping(url, True)
            except UNABLE as error:
                raise WorkerLost(f"{name} does not sleep: {error}; see {self._folder}") from error

    def close(self) -> None:
        """End all replicas within `CLOSE_S` seconds. Further calls have no effect."""
        keepers = self._keepers
        self._keepers = []
        for keeper in keepers:
            keeper.terminate()
        for keeper in keepers:
            keeper.wait(CLOSE_S)

    def _start_keeper(self, number: int) -> None:
        keep_arguments = [os.getpid(), self._names[number], self._folder, self.restarts]
        errors_path = self._folder / "judge-supervisor.log"
        with errors_path.open("ab") as errors, self._deaths[number].open("wb") as deaths:
            keeper = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    KEEP,
                    ROOT,
                    *(str(argument) for argument in keep_arguments),
                    *self._commands[number],
                ],
                stdin=subprocess.DEVNULL,
                stdout=deaths,
                stderr=errors,
                # Ctrl-C must reach only the owner process, which then closes the keepers
                start_new_session=True,
                env=self._environment(number),
            )
        self._keepers.append(keeper)

    def _command(self, port: int) -> list[str]:
        """Return the command that starts vLLM's server on a port."""
        options = {name.replace("_", "-"): value for name, value in self.options.items()}
        conflicts = ", ".join(sorted(set(RESERVED) & set(options)))
        require_all(
            (not conflicts, f"options must not hold {conflicts}: the server's other settings set them")
        )
        arguments: dict[str, Any] = {
            "model": self.model,
            "host": HOST,
            "port": port,
            "served-model-name": self.served_name,
            "middleware": GUARD,
            "runner": self.runner,
        }
        if self.sleep_mode:
            arguments["enable-sleep-mode"] = True
        # The command `vllm` does not work in vLLM's build for the CPU
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in (arguments | options).items():
            if isinstance(value, bool):
                command.append(f"--{name}" if value else f"--no-{name}")
            elif isinstance(value, dict | list):
                command.append(f"--{name}={json.dumps(value)}")
            else:
                command.append(f"--{name}={value}")
        return command

    def _environment(self, number: int) -> dict[str, str]:
        """Return a server's environment: allow-listed variables of this process, and the server's own variables."""
        variables = dict(ON_THE_CPU) if on_the_cpu() else {}
        for name, value in os.environ.items():
            if name in FORWARDED or name.startswith(FORWARDED_PREFIXES) or is_device_variable(name):
                variables[name] = value
        variables |= FIXED
        if on_the_cpu() and variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind":
            # If threads are not bound to cores, vLLM needs no separate process for the model. Such a process would
            # import vLLM a second time.
            variables.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if self.sleep_mode:
            variables["VLLM_SERVER_DEV_MODE"] = "1"
        # vLLM must be able to import GUARD
        paths = [ROOT, variables.get("PYTHONPATH")]
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if self.devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.devices[number]
        return variables

    def _serves(self, url: str) -> bool:
        try:
            models = server_reply(f"{url}/v1/models")["data"]
            return any(model["id"] == self.served_name for model in models)
        except UNABLE:
            # The server has not started yet, or another program uses the port
            return False


def keep(owner: str, name: str, folder: str, restarts: str, *command: str) -> None:
    """Keep a server running until SIGTERM arrives or the owner has ended. Then end all processes of the server.

    This is the main function of a keeper. It prints a report about each death of the server.

    Args:
        owner: Process id of the owner.
        name: Name of the replica.
        folder: Folder for the server's output.
        restarts: Maximum number of restarts.
        command: Command that starts the server.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    supervisor = Supervisor(Path(folder))
    # vLLM puts sockets and files of its processes into the temporary folder, which is shared with all users by default
    with private_folder() as temporary:
        variables = {**os.environ, **compile_cache(), "TMPDIR": str(temporary)}
        try:
            for count in range(int(restarts) + 1):
                # Each start has its own log file, so that a restart does not overwrite the log of a death
                program_name = f"{name} restart {count}" if count else name
                program = supervisor.start(program_name, command, variables)
                while program.process.poll() is None:
                    if os.getppid() != int(owner):
                        return
                    time.sleep(POLL_S)
                print(program.describe_exit() + log_excerpt(program), end=END_OF_DEATH, flush=True)
                # Wait before sending SIGKILL, so that Python's resource tracker can remove shared memory
                end_descendants(grace_s=KILL_GRACE_S)
                time.sleep(BACKOFF_S)
        finally:
            supervisor.stop()


def _free_ports(count: int) -> list[int]:
    """Return `count` ports on which no program listens."""
    with contextlib.ExitStack() as stack:
        # All sockets are open at the same time, so that no two of them get the same port
        listeners = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def on_the_cpu() -> bool:
    """Return whether the installed vLLM is its build for the CPU."""
    return any(metadata.distributions(name="vllm-cpu"))
