"""What the processes of this machine do: state, CPU, memory, and by py-spy the stacks of their Python threads."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from async_grpo.processes.process_tree import descendants

STACK_S = 10.0
PY_SPY = Path(sys.prefix) / "bin" / "py-spy"
THREAD = re.compile(r"^(Thread [^\n]*)\n((?:    .*\n?)*)", re.MULTILINE)
ROLES = {  # what a command line tells of a process
    "ray::GenerationActor": "the engine",
    "VLLM::": "the engine",
    "ray::RunController": "the controller",
    "rewards.isolation.child": "the process of a verifier",
}


@dataclass(frozen=True)
class ProcessState:
    """One process, as it was for a second."""

    pid: int
    role: str  # in the run; else the beginning of its command line
    status: str  # psutil's word: running, sleeping, stopped, ...
    cores: float = 0.0  # CPU seconds per second
    memory_mb: float = 0.0
    stack: str = ""  # as py-spy prints it, or why there is none

    def __str__(self) -> str:
        return f"{self.role} (process {self.pid}, {self.status}, {self.cores:.0%} of a core)"

    @property
    def frames(self) -> list[str]:
        """Of its main thread, the innermost first."""
        unnamed = f"Thread {self.pid} "  # as it is without `threading`
        for head, lines in THREAD.findall(self.stack):
            if '"MainThread"' in head or head.startswith(unnamed):
                return [line.strip() for line in lines.splitlines()]
        return ["no Python code"]


def look(roots: Iterable[int]) -> list[ProcessState]:
    """These processes and all below them."""
    family, states = [], []
    for pid in sorted({one for root in roots for one in (root, *descendants(root))}):
        with suppress(psutil.Error):
            family.append(psutil.Process(pid))
            family[-1].cpu_percent()  # counts from here on
    time.sleep(1.0)
    for one in family:
        with suppress(psutil.Error):  # it has ended
            used = one.cpu_percent() / 100, one.memory_info().rss / 2**20
            states.append(ProcessState(one.pid, _role(one), one.status(), *used, _stack(one)))
    return states


def _role(process: psutil.Process) -> str:
    command, parent = " ".join(process.cmdline()).replace("\n", " "), process.parent()
    rank = process.environ().get("RANK", "0" if process.pid == os.getpid() else "")
    if rank and parent is not None and "RANK" not in parent.environ():  # alone, or a child of torchrun
        return f"rank {rank}"
    return next((role for mark, role in ROLES.items() if mark in command), command[:60] or process.name())


def _stack(process: psutil.Process) -> str:
    """Read without stopping the process, which may be in the middle of a step."""
    if "python" not in Path(process.exe()).name:
        return ""
    command = [str(PY_SPY), "dump", "--nonblocking", "--pid", str(process.pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STACK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout or done.stderr


def request_look(pid: int) -> bool:
    """Send SIGUSR1 to the first of the process and those below it that awaits it; it would end any other. False: none."""
    for one in (pid, *descendants(pid)):
        with suppress(OSError):  # it has ended
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{one}/status").read_text())
            if caught and int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1:
                os.kill(one, signal.SIGUSR1)
                return True
    return False
