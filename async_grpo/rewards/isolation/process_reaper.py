"""The keeper of an adapter's process: it watches, outlives it, and leaves no descendant of it behind.

    verifier -> keeper -> the adapter's process -> whatever the adapter starts

Orphans below the keeper become its children (Linux, PR_SET_CHILD_SUBREAPER), whatever sessions or groups they moved
to: so it knows of all of them, and needs no right that only some machines grant. It ends them when the adapter's
process ends, when the verifier asks (SIGTERM) or dies, and when there are more than `max_processes`: RLIMIT_NPROC
would count all processes of the user, and none of root.

A fork bomb dies at once, as a group. One whose every process opens a session of its own is a race, which the keeper
wins where it may raise its priority (CAP_SYS_NICE). Nothing here keeps a reward from `kill(-1)`.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

WATCH_S = 0.1  # between two looks at the number of processes
TOO_MANY = 113  # exit status of a keeper that ended more than `max_processes`

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def keep(parent_pid: int, channel_fd: int, max_processes: int) -> None:
    """Return in a new process, the adapter's. This one becomes its keeper, and ends as it ends."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _die_with(parent_pid, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keeper_pid = os.getpid()
    adapter_pid = os.fork()
    if adapter_pid == 0:
        os.setsid()
        _die_with(keeper_pid, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    os.close(channel_fd)  # else the verifier would not see that the adapter's process is gone
    with contextlib.suppress(OSError):  # if it may: a fork bomb must not keep its keeper from the processor
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    too_many = _watch(adapter_pid, max_processes)
    status = _end_descendants(adapter_pid)
    _end_as(TOO_MANY if too_many else status)


def _watch(adapter_pid: int, max_processes: int) -> bool:
    """Until it has ended or must be ended. Returns whether that is for its too many descendants."""
    while True:
        received = signal.sigtimedwait(_SIGNALS, WATCH_S)
        if received is not None and received.si_signo == signal.SIGTERM:
            return False
        # Not collected yet: its id must remain its own until its group has been killed.
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == adapter_pid:
                return False
            os.waitpid(ended.si_pid, 0)  # an orphan
        if sum(1 for _ in _descendants(os.getpid())) > max_processes:
            return True


def _end_descendants(adapter_pid: int) -> int:
    """Kill until none is left; returns the exit code of the adapter's process (negative: a signal)."""
    with contextlib.suppress(ProcessLookupError):  # it may not lead its group yet
        os.killpg(adapter_pid, signal.SIGKILL)  # at once: a group cannot outgrow that, however fast it forks
    exit_code = -signal.SIGKILL.value
    while True:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == adapter_pid:
                    exit_code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:  # no child is left, and each descendant is one or descends from one
            return exit_code
        time.sleep(0.001)


def _end_as(exit_code: int) -> None:
    if exit_code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL: it cannot be handled in the first place
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code % 256)


def _descendants(root: int) -> Iterator[int]:
    children_of = _children_of if os.path.exists(_children_file(root, threading.get_native_id())) else _scan()
    waiting = [root]
    while waiting:
        children = children_of(waiting.pop())
        yield from children
        waiting += children


def _children_of(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(_children_file(pid, thread)) as file:
                children += map(int, file.read().split())
    return children


def _children_file(pid: int, thread: int | str) -> str:
    return f"/proc/{pid}/task/{thread}/children"


def _scan() -> Callable[[int], list[int]]:
    """For kernels without that file: the same by reading the parent of every process there is."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    return lambda pid: children.get(pid, [])


def _die_with(parent_pid: int, signal_number: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent dies: an endless loop never looks at its channel."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:  # it died before it could be watched
        sys.exit(f"the parent process {parent_pid} is gone")


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
