"""Inspects processes of this machine: state, CPU, memory, and the stacks of their Python threads (with py-spy)."""

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

STACK_S = 10.0  # seconds that py-spy may take to read one process
MAX_COMMAND_CHARACTERS = 60
RANK_IN_NAME = re.compile(r"RANK=(\d+) ")  # name that a rank has if a warm server forked it begins like this
# Part of the command line of a warm client, which only waits for the process that a warm server forked for it
WARM_CLIENT = "processes/warm_client.py"
PY_SPY = Path(sys.prefix) / "bin" / "py-spy"
THREAD = re.compile(r"^(Thread [^\n]*)\n((?:    .*\n?)*)", re.MULTILINE)
# Part of a process's command line -> role of the process in the run
ROLES = {
    "ray::GenerationActor": "the engine",
    "VLLM::": "the engine",
    "ray::RunController": "the controller",
    "rewards.isolation.child": "the process of a verifier",
}


@dataclass(frozen=True)
class ProcessState:
    """The state of one process, measured over one second."""

    pid: int
    role: str  # role in the run, or the beginning of the command line if the process has no role
    status: str  # psutil's name of the status: running, sleeping, stopped, ...
    cores: float = 0.0  # CPU seconds used per second
    memory_mb: float = 0.0
    stack: str = ""  # output of py-spy, or why it could not read the stack

    def __str__(self) -> str:
        return f"{self.role} (process {self.pid}, {self.status}, {self.cores:.0%} of a core)"

    @property
    def frames(self) -> list[str]:
        """Return the stack frames of the main thread, starting with the innermost."""
        # The main thread has no name if the process has not imported `threading`
        unnamed = f"Thread {self.pid} "
        for head, lines in THREAD.findall(self.stack):
            if '"MainThread"' in head or head.startswith(unnamed):
                return [line.strip() for line in lines.splitlines()]
        return ["no Python code"]


def look(roots: Iterable[int]) -> list[ProcessState]:
    """Return the states of these processes and of all their descendants.

    This takes at least a second, to measure CPU use.
    """
    pids = set()
    for root in roots:
        pids.update([root, *descendants(root)])
    processes = []
    for pid in sorted(pids):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            processes.append(process)
            # The first call only starts the measurement
            process.cpu_percent()
    time.sleep(1.0)
    states = []
    for process in processes:
        # The process may have ended
        with suppress(psutil.Error):
            state = ProcessState(
                process.pid,
                _role(process),
                process.status(),
                cores=process.cpu_percent() / 100,
                memory_mb=process.memory_info().rss / 2**20,
                stack=_stack(process),
            )
            states.append(state)
    return states


def _role(process: psutil.Process) -> str:
    """Return the role of a process in the run, or the beginning of its command line."""
    command = " ".join(process.cmdline()).replace("\n", " ")
    if match := RANK_IN_NAME.match(command):
        return f"rank {match[1]}"
    rank = process.environ().get("RANK", "0" if process.pid == os.getpid() else "")
    parent = process.parent()
    # A rank has the variable RANK, and its parent does not. The children of a rank inherit the variable, so they are no
    # ranks
    if rank and parent is not None and "RANK" not in parent.environ() and WARM_CLIENT not in command:
        return f"rank {rank}"
    for mark, role in ROLES.items():
        if mark in command:
            return role
    return command[:MAX_COMMAND_CHARACTERS] or process.name()


def _stack(process: psutil.Process) -> str:
    """Return the stacks of a process. Do not pause it, because it may be in the middle of a training step."""
    if "python" not in Path(process.exe()).name:
        return ""
    command = [str(PY_SPY), "dump", "--nonblocking", "--pid", str(process.pid)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=STACK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return result.stdout or result.stderr


def request_look(pid: int, program: str = "") -> bool:
    """Send SIGUSR1 to the first one of a process and its descendants that handles this signal.

    Processes that do not handle it are skipped, because the signal would end them. Clients of a warm server are
    skipped, too, because they only pass the signal on.

    Args:
        pid: The process.
        program: Text that the command line must contain.

    Returns:
        Whether any of the processes handles the signal.
    """
    for candidate in (pid, *descendants(pid)):
        # The process may have ended
        with suppress(OSError):
            handled = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{candidate}/status").read_text())
            command = Path(f"/proc/{candidate}/cmdline").read_text(errors="replace").replace("\0", " ")
            is_meant = program in command and WARM_CLIENT not in command
            if is_meant and handled and int(handled[1], 16) >> (signal.SIGUSR1 - 1) & 1:
                os.kill(candidate, signal.SIGUSR1)
                return True
    return False
