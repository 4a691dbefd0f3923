"""The process from which sandboxed ones are forked: an interpreter takes 50 ms of processor time to start, a fork 2.

    python -s -P -S -B -X utf8 -c BOOTSTRAP PACKAGE_ROOT SOCKET

    owner -> fork server -> a guardian of each sandboxed process -> that process

Each packet on the socket is a request: the descriptors of the channel for reports, of the order, and of whatever else the
new process is to have. The server is started before any sample exists, with an empty environment (the fork server of
multiprocessing takes over that of its parent), and never reads an order itself, so that what it leaves in the memory of
its children gives nothing away. It ends when its owner closes the socket.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from importlib import import_module

from async_grpo.processes.process_tree import adopt_orphans, die_with, end_descendants, prctl
from async_grpo.rewards.sandbox import sandbox_child
from async_grpo.rewards.sandbox.confine import PR_SET_DUMPABLE

BOOTSTRAP = """
import sys
sys.path.insert(0, sys.argv[1])
from async_grpo.rewards.sandbox.fork_server import main
del sys.path[0]
main(int(sys.argv[2]))
"""
MAX_DESCRIPTORS = 8
MAX_THREADS = (
    64  # of a sandboxed process; RLIMIT_NPROC would count all that the user runs, and nothing of root
)
WATCH_S = 0.05  # between two looks at them
_PRELOADED = "bisect collections copy datetime fractions functools heapq itertools math random re string typing".split()


def main(socket_fd: int) -> None:
    """Serve until the other end of the socket is closed. Returns in each new process, too, when that has ended."""
    for name in _PRELOADED:
        import_module(name)
    os.environ.clear()
    sys.argv[:] = ["solution.py"]
    prctl(PR_SET_DUMPABLE, 0)  # inherited: sandboxed processes of one user must not read each other's memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the guardians
    own_pid = os.getpid()
    with socket.socket(fileno=socket_fd) as requests:
        while True:
            packet, descriptors, _, _ = socket.recv_fds(requests, 1, MAX_DESCRIPTORS)
            if not packet:
                return
            if not os.fork():
                break
            for descriptor in descriptors:
                os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with(own_pid)
    _guard(*descriptors)


def _guard(channel: int, *descriptors: int) -> None:
    """Fork the sandboxed process, end it if its owner asks or dies or it has too many threads, report how it ended."""
    adopt_orphans()  # without the filter of system calls it may start processes
    own_pid = os.getpid()
    pid = os.fork()
    if not pid:
        sandbox_child.main(own_pid, channel, *descriptors)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    process = os.pidfd_open(pid)
    while not select.select([process, channel], [], [], WATCH_S)[
        0
    ]:  # the owner writes nothing, but may close it
        if num_threads(pid) > MAX_THREADS:
            break
    exit_code = end_descendants()[pid]
    with contextlib.suppress(OSError):  # the owner is gone
        os.write(channel, json.dumps({"exit_code": exit_code}).encode() + b"\n")
    os._exit(0)  # taking an interpreter down in good order takes 10 ms


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
