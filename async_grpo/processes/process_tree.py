"""Process trees that die with their owner and leave nothing behind.

It relies on two requests to Linux that need no right. Only the standard library is imported: the guardian of every
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
from collections.abc import Collection

from async_grpo.errors import ConfigurationError

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
    """Make each orphan below this process its child from now on. ConfigurationError: the kernel lists none."""
    if not os.path.exists("/proc/thread-self/children"):
        raise ConfigurationError("processes cannot be ended here: the kernel lacks CONFIG_PROC_CHILDREN")
    prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


def die_with(owner_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal when the parent dies.

    It watches the parent's thread that started this process: it must live as long as the owner.
    SystemExit: `owner_pid` is not the parent any more.
    """
    prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != owner_pid:  # it died before it could be watched
        sys.exit(f"the parent process {owner_pid} is gone")


def children(pid: int) -> list[int]:
    """The ids of a process's children, zombies included; [] if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # a process that has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants(root: int, spared: Collection[int] = ()) -> list[int]:
    """The ids of all processes below one, zombies included; without the `spared` ones and what is below them."""
    family = [root]
    for pid in family:  # it grows meanwhile
        family += [child for child in children(pid) if child not in spared]
    return family[1:]


def end_descendants(
    grace_s: float = 0.0, deadline_s: float = math.inf, spared: Collection[int] = ()
) -> dict[int, int]:
    """End every process below this one with SIGKILL, and with SIGTERM `grace_s` before, unless that is 0.

    Args:
        grace_s: seconds from SIGTERM to SIGKILL.
        deadline_s: longest wait for the end of a process after SIGKILL.
        spared: processes that are left alone, and so is all that descends from them.

    Returns:
        The exit codes of its children by their ids, negative for signals.

    Raises:
        TimeoutError: names what survives SIGKILL for `deadline_s`.
    """
    codes: dict[int, int] = {}
    if grace_s > 0:
        _signal_all(signal.SIGTERM, spared)
    kill_at = time.monotonic() + grace_s
    with contextlib.suppress(ChildProcessError):  # nothing is left: each descends from a child or is one
        while _collect_ended(codes, spared):
            late_s = time.monotonic() - kill_at
            if late_s >= 0:
                _signal_all(signal.SIGKILL, spared)  # again and again: they may have started others
            if late_s > deadline_s:
                raise TimeoutError(f"processes {sorted(descendants(os.getpid(), spared))} survive SIGKILL")
            time.sleep(0.001)
    return codes


def _collect_ended(codes: dict[int, int], spared: Collection[int]) -> bool:
    """Put the exit codes of children that have ended into `codes`. Returns whether there are others to end.

    ChildProcessError: this process has no children any more.
    """
    if not spared:
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        return True
    # Only ours by their ids: the exit code of a spared child belongs to whoever started it
    are_left = False
    for pid in children(os.getpid()):
        if pid in spared:
            continue
        with contextlib.suppress(ChildProcessError):  # the code that started it has collected it meanwhile
            ended = os.waitpid(pid, os.WNOHANG)
            if ended == (0, 0):
                are_left = True
            else:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
    return are_left


def split_off_guardian(owner_pid: int, close_fd: int, max_processes: int) -> None:
    """Return in a new process. This one becomes its guardian, and ends as it ends.

        owner -> guardian -> the new process -> whatever that starts

    The guardian ends everything below it when the new process ends, when the owner asks (SIGTERM) or dies, and when there
    are more than `max_processes`: RLIMIT_NPROC would count all of the user, and none of root. Only the new process keeps
    `close_fd`, a channel to the owner, which must see that it is closed.
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
    with contextlib.suppress(OSError):  # if it may: else a fork bomb in many sessions may win the race
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    too_many = _watch(guarded_pid, max_processes)
    with contextlib.suppress(ProcessLookupError):  # it may not lead its group yet
        os.killpg(guarded_pid, signal.SIGKILL)  # first: a group cannot outgrow that, however fast it forks
    exit_code = end_descendants()[guarded_pid]
    if exit_code < 0 and not too_many:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -exit_code)
    os._exit(TOO_MANY if too_many else exit_code % 256)


def _watch(guarded_pid: int, max_processes: int) -> bool:
    """Wait until it has ended or must be ended. Returns whether there are too many processes."""
    while True:
        received = signal.sigtimedwait(_GUARDED_SIGNALS, WATCH_S)
        if received is not None and received.si_signo == signal.SIGTERM:
            return False
        # Not collected yet: its id must remain its own until its group has been killed.
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == guarded_pid:
                return False
            os.waitpid(ended.si_pid, 0)  # an orphan
        if len(descendants(os.getpid())) > max_processes:
            return True


def _signal_all(number: int, spared: Collection[int]) -> None:
    for pid in descendants(os.getpid(), spared):
        with contextlib.suppress(OSError):  # it has ended, or became another user's
            os.kill(pid, number)
