"""The process from which sandboxed ones are forked: an interpreter takes 50 ms of processor time to start, a fork 2.

    owner -> fork server -> a guardian of each sandboxed process -> that process

Each packet on the socket is a request: the descriptors of the channel for reports, of the order, and of whatever else the
new process is to have. The server is started before any sample exists, with an empty environment, and never reads an order
itself: what it leaves in the memory of its children gives nothing away. It ends when its owner closes the socket.

An order is JSON in a file without a name, and holds the text to run. A report is a packet of JSON. A process sends its
first, the levels of its confinement, before it looks at the text; after it only one that runs tests can report.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from async_grpo.processes.process_tree import adopt_orphans, die_with, end_descendants, prctl
from async_grpo.rewards.sandbox import solution_process, unit_test_runner
from async_grpo.rewards.sandbox.confine import NETWORK_LEVELS, PR_SET_DUMPABLE, confine
from async_grpo.rewards.sandbox.rpc import Channel

PROGRAM, SOLUTION, TESTS = "program", "solution", "tests"

MAX_DESCRIPTORS = 8
MAX_THREADS = 64  # of a sandboxed process (RLIMIT_NPROC would count all of the user)
WATCH_S = 0.05  # between two looks at them
_PRELOADED = "bisect copy heapq math random re string typing".split()  # beside what `rpc` needs


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
        _be_sandboxed(own_pid, channel, *descriptors)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    ends = [os.pidfd_open(pid), channel]  # the owner writes nothing there, but may close it
    while not select.select(ends, [], [], WATCH_S)[0] and _num_threads(pid) <= MAX_THREADS:
        pass
    exit_code = end_descendants()[pid]
    with contextlib.suppress(OSError):  # the owner is gone
        _report(channel, exit_code=exit_code)
    os._exit(0)  # taking an interpreter down in good order takes 10 ms


def _be_sandboxed(parent_pid: int, channel: int, order_fd: int, *descriptors: int) -> None:
    """Do as ordered, with a program's input and output, or the channel between solution and tests; then it ends."""
    os.setsid()
    with open(order_fd, "rb") as file:
        order: dict[str, Any] = json.loads(file.read())
    os.chdir(order["folder"])
    levels = confine(parent_pid, order["cpu_s"], order["memory_bytes"], order["levels"])
    _report(channel, levels=sorted(levels))
    if not (levels & NETWORK_LEVELS or order["allow_unsandboxed"]):
        return
    if order["kind"] == TESTS:
        _report(channel, verdict=unit_test_runner.run(order["text"], Channel(*descriptors)))
        return
    os.close(channel)
    if order["kind"] == SOLUTION:
        solution_process.run(order["text"], Channel(*descriptors))
        return
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(order["text"], "solution.py", "exec"), module.__dict__)


def _report(channel: int, **report: Any) -> None:
    os.write(channel, json.dumps(report).encode())


def _num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # a host may hide the processes of others (hidepid)
        return 0
