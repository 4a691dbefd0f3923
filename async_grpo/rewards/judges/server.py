"""`JudgeServer`: vLLM as an OpenAI-compatible server for judges, started and ended by us.

    with JudgeServer("Qwen2.5-7B-Instruct", log_folder="runs/x/logs", replicas=2, devices=("6", "7")) as server:
        judge = LLMJudge(url=server.urls, model=server.served_name)

The servers are children of a `server_supervisor`, which starts one again that died, and ends all of them, engines
included, when the JudgeServer is closed or its process is gone.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_grpo.errors import DeadlineExceeded, WorkerLost
from async_grpo.processes.process_tree import descendants
from async_grpo.processes.supervisor import Program, log_excerpt
from async_grpo.rewards.judges import vllm_program
from async_grpo.rewards.judges.remote_judge import require

POLL_S, ASK_S = 0.5, 5.0
SLEEP_S = 120.0  # to move the weights of a large model
CLOSE_S = 45.0  # the supervisor ends its programs one after the other, each with some grace
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class JudgeServer:
    """Replicas of one model, each a vLLM server on a port of its own.

    Args:
        model: a local folder.
        log_folder: for the servers' output.
        served_name: the `model` that requests name.
        replicas: how many; each needs the memory of a whole engine.
        devices: CUDA_VISIBLE_DEVICES of each replica, such as ("4,5", "6,7"); not given: as this process has it.
        port: of the first replica, the others follow; not given: free ones.
        host: to listen on. Beyond loopback only with a key.
        api_key_env: the name of this process's variable with the key that requests must bring.
        runner: "auto", "generate", or "pooling" for reward models (/classify, /pooling).
        options: of vLLM's server, {"max-model-len": 4096, "enforce-eager": True}.
        environment: further variables of the servers.
        sleep_mode: make `sleep` and `wake` possible; needs a GPU.
        restarts: how often a replica that died is started again, each.

    Raises:
        ConfigurationError: the settings cannot work.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        log_folder: str | Path,
        served_name: str = "judge",
        replicas: int = 1,
        devices: Sequence[str] | None = None,
        port: int | None = None,
        host: str = "127.0.0.1",
        api_key_env: str | None = None,
        runner: str = "auto",
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        sleep_mode: bool = False,
        restarts: int = 3,
    ) -> None:
        _check(model, host, port, replicas, devices, api_key_env, sleep_mode, restarts)
        self.served_name, self.sleep_mode = served_name, sleep_mode
        self._host, self._api_key = host, os.environ.get(api_key_env or "")
        self._ports = list(range(port, port + replicas)) if port else vllm_program.free_ports(host, replicas)
        self._names = [f"judge {served_name} {number}" for number in range(replicas)]
        further = dict(environment or {}) | ({"VLLM_SERVER_DEV_MODE": "1"} if sleep_mode else {})
        chosen = dict(options or {})
        self._programs = [
            {
                "name": name,
                "command": vllm_program.command(
                    str(model), host, port, served_name, runner, sleep_mode, chosen
                ),
                "environment": vllm_program.environment(device, self._api_key) | further,
            }
            for name, port, device in zip(
                self._names, self._ports, devices or replicas * (None,), strict=True
            )
        ]
        self._folder, self._restarts = Path(log_folder).absolute(), restarts
        self._deaths = self._folder / f"judge-deaths-{self._ports[0]}.jsonl"
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        """One base URL per replica, for a judge's `url`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return tuple(f"http://{host}:{port}" for port in self._ports)

    def __enter__(self) -> "JudgeServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, timeout_s: float = 600.0) -> None:
        """Start the replicas and wait until each of them serves the model; blocks.

        Raises:
            ConfigurationError: a port is taken.
            WorkerLost: one ended first; with its last words.
            DeadlineExceeded: one was not ready in time; with its last words.
        """
        require(self._supervisor is None, "the judge server is started already")
        vllm_program.require_free(self._host, self._ports)
        give_up = time.monotonic() + timeout_s
        try:
            self._start_supervisor()
            for name, url in zip(self._names, self.urls, strict=True):
                while not self._serves(url):
                    self._raise_for(self.deaths())
                    if time.monotonic() > give_up:
                        message = f"{name} did not serve on {url} within {timeout_s:g} s"
                        raise DeadlineExceeded(message + self._log_excerpt(name))
                    time.sleep(POLL_S)
            self._raise_for(self.deaths())
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise WorkerLost if a replica died for good, or the supervisor did. Cheap: for every step."""
        self._raise_for([death for death in self.deaths() if death["last"]])

    def deaths(self) -> list[dict[str, Any]]:
        """All deaths of replicas so far, those that were started again included: `name`, `what`, `log`, `last`."""
        lines = self._deaths.read_text().splitlines(keepends=True) if self._deaths.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def sleep(self, level: int = 1) -> None:
        """Give the GPUs' memory back: 1 keeps the weights in main memory, 2 drops them. Ends running requests.

        Raises:
            ConfigurationError: the server was not made with sleep_mode.
            WorkerLost: a replica did not obey.
        """
        require(level in (1, 2), f"level={level} is neither 1 nor 2")
        self._order(f"/sleep?level={level}", sleeping=True)

    def wake(self) -> None:
        """Take the memory again. Raises as `sleep` does."""
        self._order("/wake_up", sleeping=False)

    def close(self) -> None:
        """End all replicas; harmless when repeated. Nothing is left after `CLOSE_S`."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        assert supervisor.stdin is not None
        supervisor.stdin.close()
        try:
            supervisor.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            for pid in [*descendants(supervisor.pid), supervisor.pid]:
                os.kill(pid, signal.SIGKILL)
            supervisor.wait()

    def _start_supervisor(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._deaths.unlink(missing_ok=True)
        root = str(Path(__file__).resolve().parents[3])  # of this package, wherever it was imported from
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with (self._folder / "judge-supervisor.log").open("wb") as errors:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "async_grpo.rewards.judges.server_supervisor"],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                bufsize=0,
                start_new_session=True,  # a Ctrl-C is the owner's, which closes in order
                env=vllm_program.forwarded() | {"PYTHONPATH": path},
            )
        order = {"folder": str(self._folder), "deaths": str(self._deaths), "restarts": self._restarts}
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.write(json.dumps(order | {"programs": self._programs}).encode() + b"\n")

    def _serves(self, url: str) -> bool:
        try:
            models = self._request(url + "/v1/models", ASK_S)["data"]
            return any(model["id"] == self.served_name for model in models)
        except (OSError, ValueError, KeyError, TypeError):  # not there yet, or not ours
            return False

    def _order(self, path: str, *, sleeping: bool) -> None:
        require(self.sleep_mode, "the judge server was made without sleep_mode=True")
        for name, url in zip(self._names, self.urls, strict=True):
            try:
                self._request(url + path, SLEEP_S, method="POST")
                obeyed = self._request(url + "/is_sleeping", ASK_S)["is_sleeping"] is sleeping
            except (OSError, ValueError, KeyError) as error:
                raise WorkerLost(f"{name} did not answer {path}: {error}{self._log_excerpt(name)}") from error
            if not obeyed:
                raise WorkerLost(f"{name} did not obey {path}{self._log_excerpt(name)}")

    def _request(self, url: str, timeout_s: float, method: str = "GET") -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        request = urllib.request.Request(url, method=method, headers=headers)
        with _NO_PROXY.open(request, timeout=timeout_s) as reply:
            return json.loads(reply.read())

    def _raise_for(self, deaths: Sequence[Mapping[str, Any]]) -> None:
        if deaths:
            raise WorkerLost("; ".join(f"{death['what']}{death['log']}" for death in deaths))
        if self._supervisor is None or self._supervisor.poll() is not None:
            raise WorkerLost(f"the judge server does not run; see {self._folder / 'judge-supervisor.log'}")

    def _log_excerpt(self, name: str) -> str:
        output = self._folder / f"{name.replace(' ', '-')}.log"
        return (
            log_excerpt(Program(name, self._supervisor, output))
            if self._supervisor and output.exists()
            else ""
        )


def _check(
    model: str | Path,
    host: str,
    port: int | None,
    replicas: int,
    devices: Sequence[str] | None,
    api_key_env: str | None,
    sleep_mode: bool,
    restarts: int,
) -> None:
    require(
        (Path(model) / "config.json").is_file(), f"{str(model)!r} is no folder of a model: no config.json"
    )
    require(replicas >= 1, f"replicas={replicas}: there must be at least one")
    require(restarts >= 0, f"restarts={restarts} is negative")
    require(
        devices is None or (not isinstance(devices, str) and len(devices) == replicas),
        f"devices={devices!r} must be a list with the GPUs of each of the {replicas} replicas",
    )
    require(
        port is None or 0 < port <= 65536 - replicas, f"port={port} leaves no room for {replicas} replicas"
    )
    require(
        vllm_program.is_loopback(host) or api_key_env is not None,
        f"host={host!r} would let the whole network use the model: give an api_key_env, or 127.0.0.1",
    )
    require(
        api_key_env is None or bool(os.environ.get(api_key_env)),
        f"api_key_env={api_key_env!r}: this process has no such variable",
    )
    require(
        not (sleep_mode and vllm_program.on_the_cpu()),
        "sleep_mode=True needs a GPU: vLLM on the CPU says that it sleeps but gives no memory back",
    )
