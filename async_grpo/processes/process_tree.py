"""Process trees that end with their owner, so that no process is left behind.

They use two options of Linux's prctl that need no privileges. This module imports little besides the standard library,
because the guardian of every reward process imports it at its start (see `split_off_guardian`).
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

PR_SET_PDEATHSIG = 1  # this and the next constant are from linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
WATCH_S = 0.1  # seconds between two counts of a guardian's descendants
TOO_MANY = 113  # exit code of a guardian that had more than `max_processes` descendants

# Id of the process that asked a warm server for this one (see `warm_server`); None if this process was started as usual
starter_pid: int | None = None

_GUARDED_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def prctl(option: int, value: int) -> None:
    """Call `prctl` on Linux; do nothing elsewhere.

    Raises:
        OSError: The kernel refused the call.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of its orphaned descendants from now on.

    Args:
        adopt: False turns this off again.

    Raises:
        ConfigurationError: The kernel does not list the children of processes.
    """
    if not os.path.exists("/proc/thread-self/children"):
        raise ConfigurationError(
            "child processes could not be found and ended here: the kernel lacks CONFIG_PROC_CHILDREN"
        )
    prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


def die_with(owner_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies.

    The kernel watches the thread that started this process, so that thread must live as long as the parent.

    Raises:
        SystemExit: `owner_pid` is not the parent any more.
    """
    prctl(PR_SET_PDEATHSIG, signal_number)
    # The parent may have died before this call, and then the kernel sends nothing
    if os.getppid() != owner_pid:
        sys.exit(f"the parent process {owner_pid} is gone")


def pid_of_starter() -> int:
    """Return the id of the process that started this one. That is not its parent if a warm server forked it."""
    return os.getppid() if starter_pid is None else starter_pid


def children(pid: int) -> list[int]:
    """Return the ids of a process's children, zombies included; [] if the process has ended."""
    pids: list[int] = []
    # The process may have ended
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                pids += map(int, file.read().split())
    return pids


def descendants(root: int, spared: Collection[int] = ()) -> list[int]:
    """Return the ids of all descendants of a process, including zombies, but without `spared` and their descendants."""
    pids = [root]
    # Children of children are visited, too, because the list grows during the iteration
    for pid in pids:
        pids += [child for child in children(pid) if child not in spared]
    return pids[1:]


def end_descendants(
    grace_s: float = 0.0, deadline_s: float = math.inf, spared: Collection[int] = ()
) -> dict[int, int]:
    """End all descendants of this process.

    Args:
        grace_s: Seconds between SIGTERM and SIGKILL; 0 sends only SIGKILL.
        deadline_s: Seconds to wait for the processes to end after SIGKILL.
        spared: Ids of processes that are not ended. Their descendants are not ended either.

    Returns:
        The exit codes of this process's children, by process id. An exit code is negative for a signal.

    Raises:
        TimeoutError: Processes still run `deadline_s` seconds after SIGKILL.
    """
    codes: dict[int, int] = {}
    if grace_s > 0:
        _signal_all(signal.SIGTERM, spared)
    kill_at = time.monotonic() + grace_s
    # This process has no children any more, and therefore no descendants
    with contextlib.suppress(ChildProcessError):
        while _collect_ended(codes, spared):
            late_s = time.monotonic() - kill_at
            if late_s >= 0:
                # Send SIGKILL again in each round, because a process may have started others in the meantime
                _signal_all(signal.SIGKILL, spared)
            if late_s > deadline_s:
                raise TimeoutError(f"processes {sorted(descendants(os.getpid(), spared))} survive SIGKILL")
            time.sleep(0.001)
    return codes


def _collect_ended(codes: dict[int, int], spared: Collection[int]) -> bool:
    """Add the exit codes of ended children to `codes`, and return whether the caller must call this again.

    The caller must call it again if there were any children to end, even if all of them have ended now: in the
    meantime, this process may have adopted their children.

    Raises:
        ChildProcessError: This process has no children any more.
    """
    if not spared:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            codes[pid] = os.waitstatus_to_exitcode(status)
    # Collect only these children. The exit code of a spared child must be left to the code that started it
    to_end = [child for child in children(os.getpid()) if child not in spared]
    for child in to_end:
        # The code that started the child may have collected its exit code already
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid != 0:
                codes[pid] = os.waitstatus_to_exitcode(status)
    return bool(to_end)


def split_off_guardian(owner_pid: int, close_fd: int, max_processes: int) -> None:
    """Fork, and return in the child. This process becomes the child's guardian, and ends with the child's exit code.

        owner -> guardian (this process) -> child -> all processes that the child starts

    The guardian ends all of its descendants when the child ends, when the owner sends SIGTERM or dies, or when there
    are too many descendants.

    Args:
        owner_pid: Process id of the owner, which is the parent of this process.
        close_fd: Descriptor of a channel to the owner. The guardian closes it, so that the owner notices when the child
            closes its own copy.
        max_processes: Maximum number of descendants. RLIMIT_NPROC cannot be used, because it counts all processes of
            the user, and does not limit root.
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
    # Use real-time priority if that is allowed. Otherwise a fork bomb in many sessions may be faster than the guardian
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    has_too_many = _watch(guarded_pid, max_processes)
    # First kill the whole process group of the child at once: processes that are killed one by one could fork faster.
    # If the child has not called `setsid` yet, there is no such group
    with contextlib.suppress(ProcessLookupError):
        os.killpg(guarded_pid, signal.SIGKILL)
    exit_code = end_descendants()[guarded_pid]
    if exit_code < 0 and not has_too_many:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -exit_code)
    os._exit(TOO_MANY if has_too_many else exit_code % 256)


def _watch(guarded_pid: int, max_processes: int) -> bool:
    """Wait until the guarded process ends or must be ended. Return True if it has too many descendants."""
    while True:
        received = signal.sigtimedwait(_GUARDED_SIGNALS, WATCH_S)
        if received is not None and received.si_signo == signal.SIGTERM:
            return False
        # Do not collect the guarded process yet (WNOWAIT), so that no other process gets its id before its group is
        # killed
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == guarded_pid:
                return False
            # This is an orphan that the guardian has adopted, so collect it
            os.waitpid(ended.si_pid, 0)
        if len(descendants(os.getpid())) > max_processes:
            return True


def _signal_all(number: int, spared: Collection[int]) -> None:
    for pid in descendants(os.getpid(), spared):
        # The process may have ended, or may belong to another user now
        with contextlib.suppress(OSError):
            os.kill(pid, number)
