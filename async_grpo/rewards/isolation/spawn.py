"""Starts the program `child`, finds out how it ended, and ends it with everything that it started.

pebble 5.2's pool of processes was looked at for this and what stands above it. It kills a worker on a time-out and starts
another, but not what the worker has started; a worker in an endless loop outlives a killed owner; all workers answer
through one pipe with pickles, which one of them can spoil or abuse; and a process serves one call at a time.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import async_grpo
from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.processes.process_tree import TOO_MANY

REAP_S = 10.0  # for a killed process to end
FORWARDED_VARIABLES = "PATH PYTHONPATH LD_LIBRARY_PATH HOME TMPDIR LANG LC_ALL LC_CTYPE TZ".split()
FIXED_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",  # the same text gets the same reward in every process
    "CUDA_VISIBLE_DEVICES": "",  # the accelerators belong to the trainers and the engines
}
_MAIN = "import sys; from async_grpo.rewards.isolation.child import main; main(*map(int, sys.argv[1:]))"


class SpawnedChild:
    """A running program `child` and this end of its channel; it dies with the thread that made it.

    Args:
        adapter: the reward's name, for messages.
        max_processes: the process and all that it starts; beyond that they are ended.
        environment: variables for it beside the allow-list.
    """

    def __init__(self, adapter: str, max_processes: int, environment: Mapping[str, str]) -> None:
        self._adapter, self._max_processes = adapter, max_processes
        self.channel, theirs = socket.socketpair()
        arguments = [theirs.fileno(), os.getpid(), max_processes]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a reward prints must not land among the program's own output
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # deaf to the terminal's Ctrl-C
                    env=child_environment(environment),
                )
        except BaseException:
            self.channel.close()
            raise

    @property
    def pid(self) -> int:
        """Of the guardian (see `process_tree`): all others end with it."""
        return self._process.pid

    def kill(self) -> None:
        """Have the process killed, and all that it started."""
        if self._process.returncode is None:  # not collected yet, so the id still belongs to it
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)  # the reward may have stopped its guardian

    async def collect(self) -> None:
        """Kill and collect it. Harmless when repeated. Raises WorkerLost if it survives."""
        self.kill()
        if not await self.ends_within(REAP_S):
            os.kill(self.pid, signal.SIGKILL)  # whatever ails the guardian, the reward's process dies with it
            raise WorkerLost(f"process {self.pid} of {self._adapter!r} survives SIGKILL for {REAP_S:g} s")
        self._process.wait()

    async def ends_within(self, timeout_s: float) -> bool:
        """Whether the process ends in time; it is not collected yet. Polled: waiting would take a thread."""
        deadline = time.monotonic() + timeout_s
        while not self._has_ended():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.002)
        return True

    def describe_exit(self) -> str:
        """How it ended, once it has been collected."""
        code = self._process.returncode
        if code == TOO_MANY:
            return f"was ended, for it had started more than {self._max_processes} processes"
        return f"died ({f'signal {signal.Signals(-code).name}' if code < 0 else f'exit status {code}'})"

    def _has_ended(self) -> bool:
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # SIGCHLD is ignored in this program: the kernel has collected it
            return True


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allow-listed variables and the extra ones, one thread per library, and this package on the path."""
    forwarded = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    package_root = str(Path(async_grpo.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_root, forwarded.get("PYTHONPATH")]))
    return forwarded | FIXED_VARIABLES | dict(extra or {}) | {"PYTHONPATH": path}


def named_environment(names: Iterable[str]) -> dict[str, str]:
    """These variables of this process, for rewards that ask a service and need its key (`--reward-env`).

    The values are handed to the rewards' processes as arguments and kept nowhere else.

    Raises:
        ConfigurationError: one is not set.
    """
    names = list(names)
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigurationError(
            f"--reward-env {','.join(names)}: this process has no variable {', '.join(missing)}; set it, or leave it out"
        )
    return {name: os.environ[name] for name in names}
