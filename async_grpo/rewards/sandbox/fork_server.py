"""The process from which sandboxed processes are forked, so that an interpreter is started only once.

    python -s -P -S -B -X utf8 -c BOOTSTRAP PACKAGE_ROOT SOCKET

It is started before any sample exists and never reads an order itself, so that what it leaves in the memory of its
children gives nothing away. Requests, one packet each:

    {"kind": ..., "folder": ...} with descriptors  ->  {"pid": n}, and when that process has ended {"pid": n, "code": c}
    {"kill": n}                                    ->  SIGKILL, if it has not ended
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from async_grpo.rewards.sandbox import sandbox_child as guest

BOOTSTRAP = """
import sys
sys.path.insert(0, sys.argv[1])
from async_grpo.rewards.sandbox.fork_server import main
del sys.path[0]
main(int(sys.argv[2]))
"""
MAX_PACKET_BYTES = 2**16
MAX_DESCRIPTORS = 8
MAX_THREADS = 64  # of a child; RLIMIT_NPROC would count all that the user runs, and nothing of root
WATCH_S = 0.05  # between two looks at them
_PRELOADED = "bisect collections copy datetime fractions functools heapq itertools math random re string typing".split()


def main(socket_fd: int) -> None:
    """Serve until the other end of the socket is closed."""
    for name in _PRELOADED:
        import_module(name)
    os.environ.clear()
    sys.argv[:] = ["solution.py"]
    own_pid = os.getpid()
    with _Forker(socket_fd) as forker:
        birth = forker.serve()
    if birth is not None:  # this is a child
        request, descriptors = birth
        guest.main(request["kind"], request["folder"], descriptors, own_pid)


class _Forker:
    def __init__(self, socket_fd: int) -> None:
        self._socket = socket.socket(fileno=socket_fd)
        self._alarm, self._bell = os.pipe()  # rung by the kernel when a child has ended
        self._living: set[int] = set()

    def __enter__(self) -> Self:
        os.set_blocking(self._bell, False)
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._socket.close()
        os.close(self._alarm)
        os.close(self._bell)

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """None at the end; in each child what it is to do, with the descriptors for it."""
        while True:
            ready, _, _ = select.select(
                [self._socket, self._alarm], [], [], WATCH_S if self._living else None
            )
            for pid in self._living:
                if num_threads(pid) > MAX_THREADS:
                    os.kill(pid, signal.SIGKILL)
            if self._alarm in ready:
                os.read(self._alarm, MAX_PACKET_BYTES)
                self._reap()
            if self._socket in ready:
                packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
                if not packet:
                    return None
                request = json.loads(packet)
                if "kill" in request:
                    self._kill(request["kill"])
                elif not (pid := os.fork()):
                    return request, descriptors
                else:
                    self._born(pid, descriptors)

    def _born(self, pid: int, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        self._living.add(pid)
        self._say({"pid": pid})

    def _kill(self, pid: int) -> None:
        if pid in self._living:  # not collected, so the number still belongs to it
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid in tuple(self._living):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                with contextlib.suppress(ProcessLookupError):  # it did not come so far as to lead a group
                    os.killpg(pid, signal.SIGKILL)  # without the filter it may have started others
                _, status = os.waitpid(pid, 0)
                self._living.discard(pid)
                self._say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _say(self, message: dict[str, int]) -> None:
        self._socket.send(json.dumps(message).encode())


def num_threads(pid: int) -> int:
    """Of a process; 0 if it cannot be seen.

    >>> num_threads(os.getpid()) >= 1
    True
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[17])
    except OSError:
        return 0
