"""Keeps a few programs running for an owner: `python -m async_grpo.rewards.judges.server_supervisor`.

The order comes as one line of JSON on stdin: {"folder", "deaths", "restarts", "programs": [{"name", "command",
"environment"}]}. Each death becomes one line of JSON in the file `deaths`. When stdin closes or the owner is gone,
everything is ended.

It is a process of its own for three reasons: a `Supervisor` ends whatever descends from its process, adapters and
Ray included if it stood in a program that has some; engines that outlive their server (a killed API server of vLLM
leaves them) become its children and can be ended; and the owner may be a thread that comes and goes.
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

from async_grpo.processes.supervisor import KILL_GRACE_S, Supervisor, log_excerpt

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
    restarts: dict[str, int] = {}
    running, due = {}, {spec["name"]: (0.0, spec) for spec in order["programs"]}
    while os.getppid() == owner and not _closed(sys.stdin.fileno()):
        for name, (moment, spec) in list(due.items()):
            if moment <= time.monotonic():
                del due[name]
                count = restarts.get(name, 0)
                shown = f"{name} restart {count}" if count else name  # the log of a death is kept
                running[name] = spec, supervisor.start(shown, spec["command"], spec["environment"])
        for name, (spec, program) in list(running.items()):
            if program.process.poll() is None:
                continue
            del running[name]
            last = restarts.get(name, 0) >= order["restarts"]
            death = {"name": name, "what": program.describe_exit(), "log": log_excerpt(program), "last": last}
            with open(order["deaths"], "a", encoding="utf-8") as file:
                file.write(json.dumps(death) + "\n")
            _end_group(program.process.pid)
            if not last:
                restarts[name] = restarts.get(name, 0) + 1
                due[name] = time.monotonic() + BACKOFF_S, spec


def _end_group(group: int) -> None:
    """End what a dead program left in its process group, gently first: its tracker of shared memory may clean up."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        give_up = time.monotonic() + KILL_GRACE_S
        while time.monotonic() < give_up:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-group, os.WNOHANG) != (0, 0):
                    pass
            os.killpg(group, 0)  # raises when the group is empty
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


def _closed(descriptor: int) -> bool:
    """Whether the owner closed the channel; waits a moment for it."""
    readable, _, _ = select.select([descriptor], [], [], POLL_S)
    return bool(readable) and not os.read(descriptor, 1)


if __name__ == "__main__":
    main()
