"""Process trees that die with their owner and leave nothing behind.

It relies on two requests to Linux, PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER, which need no right that only some
machines grant; on other systems they do nothing. Only the standard library is imported, for the guardian of every
reward's process starts with it.
"""

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
WATCH_S = 0.1  # between two looks of a guardian at the number of processes
TOO_MANY = 113  # exit status of a guardian that ended more than `max_processes`

_GUARDED_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def prctl(option: int, value: int) -> None:
    """The system call. Raises OSError if it is refused; does nothing where there is none."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def adopt_orphans(adopt: bool = True) -> None:
    """From now on an orphan below this process becomes its child: it can be found, ended and collected."""
    prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


def die_with(owner_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal when the parent dies; an endless loop would never notice that by itself.

    The kernel watches the parent's thread that started this process: it must live as long as the owner.
    SystemExit: `owner_pid` is not the parent any more.
    """
    prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != owner_pid:  # it died before it could be watched
        sys.exit(f"the parent process {owner_pid} is gone")


def descendants(root: int) -> Iterator[int]:
    """The ids of all processes below one, zombies included."""
    waiting = [root]
    while waiting:
        children = _children_of(waiting.pop())
        yield from children
        waiting += children


def end_descendants(grace_s: float = 0.0, deadline_s: float = math.inf) -> dict[int, int]:
    """End every process below this one, and collect those that are its children.

    Args:
        grace_s: between SIGTERM and SIGKILL, in seconds; 0: SIGKILL at once.
        deadline_s: for the processes to end after SIGKILL, in seconds; TimeoutError names those that survive it.

    Returns:
        The exit codes of those collected, by process id; negative where a signal ended one.
    """
    codes: dict[int, int] = {}
    if grace_s > 0:
        _signal_all(signal.SIGTERM)
        _collect_all(codes, time.monotonic() + grace_s)
    give_up = time.monotonic() + deadline_s
    while not _collect_all(codes, time.monotonic() + 0.001):
        _signal_all(signal.SIGKILL)  # again and again: they may have started others meanwhile
        if time.monotonic() > give_up:
            raise TimeoutError(f"processes {sorted(descendants(os.getpid()))} survive SIGKILL")
    return codes


def split_off_guardian(owner_pid: int, close_fd: int, max_processes: int) -> None:
    """Return in a new process. This one becomes its guardian, and ends as it ends.

        owner -> guardian -> the new process -> whatever that starts

    The guardian ends everything below it when the new process ends, when the owner asks (SIGTERM) or dies, and when there
    are more than `max_processes`: RLIMIT_NPROC would count all processes of the user, and none of root. A fork bomb whose
    every process opens a session of its own is a race, which the guardian wins where it may raise its priority.

    Args:
        close_fd: a channel to the owner, open in the new process alone: the owner must see that it is closed.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _GUARDED_SIGNALS)
    adopt_orphans()
    die_with(owner_pid, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    guardian_pid = os.getpid()
    guarded_pid = os.fork()
    if guarded_pid == 0:
        os.setsid()
        die_with(guardian_pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    os.close(close_fd)
    with contextlib.suppress(OSError):  # if it may: a fork bomb must not keep the guardian from the processor
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    too_many = _watch(guarded_pid, max_processes)
    with contextlib.suppress(ProcessLookupError):  # it may not lead its group yet
        os.killpg(guarded_pid, signal.SIGKILL)  # first: a group cannot outgrow that, however fast it forks
    status = end_descendants().get(guarded_pid, -signal.SIGKILL)
    _end_as(TOO_MANY if too_many else status)


def _watch(guarded_pid: int, max_processes: int) -> bool:
    """Until it has ended or must be ended. Returns whether that is for its too many descendants."""
    while True:
        received = signal.sigtimedwait(_GUARDED_SIGNALS, WATCH_S)
        if received is not None and received.si_signo == signal.SIGTERM:
            return False
        # Not collected yet: its id must remain its own until its group has been killed.
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == guarded_pid:
                return False
            os.waitpid(ended.si_pid, 0)  # an orphan
        if sum(1 for _ in descendants(os.getpid())) > max_processes:
            return True


def _end_as(exit_code: int) -> None:
    if exit_code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL: it cannot be handled in the first place
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code % 256)


def _signal_all(number: int) -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended, or became another user's
            os.kill(pid, number)


def _collect_all(codes: dict[int, int], until: float) -> bool:
    """Collect ended children. Returns whether no child is left: each descendant is one, or descends from one."""
    while True:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.001)


def _children_of(pid: int) -> list[int]:
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # a kernel without CONFIG_PROC_CHILDREN
        return _children_by_psutil(pid)
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def _children_by_psutil(pid: int) -> list[int]:
    """The same by a look at every process of the machine: too slow where a guardian looks ten times a second."""
    import psutil

    return [process.pid for process in psutil.process_iter(["ppid"]) if process.info["ppid"] == pid]
