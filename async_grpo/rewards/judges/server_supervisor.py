"""Keeps a few programs running for an owner: `python -m async_grpo.rewards.judges.server_supervisor`.

The order comes as one line of JSON on stdin: {"folder", "restarts", "programs": [{"name", "command", "environment"}]}.
Each death is one line of JSON on stdout. When stdin closes or the owner is gone, everything is ended.

It is a process of its own for three reasons: a `Supervisor` ends whatever descends from its process, adapters and
Ray included if it stood in a program that has some; engines that outlive their server (a killed API server of vLLM
leaves them) become the keeper's children and can be ended; and the owner may be a thread that comes and goes.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from async_grpo.processes.supervisor import KILL_GRACE_S, Program, Supervisor, log_excerpt

POLL_S = 0.2
BACKOFF_S = 2.0  # before a program is started again


def main() -> None:
    """Read the order, keep the programs, end them all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    owner = os.getppid()
    order = json.loads(sys.stdin.readline())
    supervisor = Supervisor(Path(order["folder"]))
    try:
        _keep(supervisor, order, owner)
    finally:
        supervisor.stop()


def _keep(supervisor: Supervisor, order: dict[str, Any], owner: int) -> None:
    specs = {spec["name"]: spec for spec in order["programs"]}
    running = {name: _start(supervisor, spec, 0) for name, spec in specs.items()}
    restarts = dict.fromkeys(specs, 0)
    due: dict[str, float] = {}
    while os.getppid() == owner and not _closed(sys.stdin.fileno()):
        for name, program in list(running.items()):
            if program.process.poll() is None:
                continue
            del running[name]
            last = restarts[name] >= order["restarts"]
            _report(name, program, last)
            _end_group(program.process.pid)
            if not last:
                restarts[name] += 1
                due[name] = time.monotonic() + BACKOFF_S
        for name in [name for name, moment in due.items() if moment <= time.monotonic()]:
            del due[name]
            running[name] = _start(supervisor, specs[name], restarts[name])


def _start(supervisor: Supervisor, spec: dict[str, Any], restart: int) -> Program:
    name = f"{spec['name']} restart {restart}" if restart else spec["name"]  # the log of a death is kept
    return supervisor.start(name, spec["command"], spec["environment"])


def _report(name: str, program: Program, last: bool) -> None:
    news = {"name": name, "what": program.describe_exit(), "words": log_excerpt(program), "last": last}
    print(json.dumps(news), flush=True)


def _end_group(group: int) -> None:
    """Kill what a dead program left behind in its process group; a tracker of shared memory may clean up first."""
    left = [process for process in psutil.Process().children(recursive=True) if _is_in(process, group)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(process.cmdline()):
                process.kill()
    _, stuck = psutil.wait_procs(left, timeout=KILL_GRACE_S)
    for process in stuck:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group
    except ProcessLookupError:
        return False


def _closed(descriptor: int) -> bool:
    """Whether the owner closed the channel; waits a moment for it."""
    readable, _, _ = select.select([descriptor], [], [], POLL_S)
    return bool(readable) and not os.read(descriptor, 1)


if __name__ == "__main__":
    main()
