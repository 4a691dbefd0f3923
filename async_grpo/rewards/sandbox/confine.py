"""Gives up, in the process that calls it, everything that computing an answer does not need.

    uid          root becomes a user of its own that owns nothing (where that user can still read the interpreter)
    namespaces   a user, network and IPC namespace of its own: no network device, no capability, no view of others
    landlock     read-only, and only the interpreter's library; see `landlock`
    seccomp      no network, process, signal or change of a file; see `seccomp`
    rlimits      processor time, memory, open files, no file content; they hold everywhere

Each level is tried and none is needed by the next: they overlap on purpose.
"""

import ctypes
import os
import resource
import sys
import sysconfig
from collections.abc import Callable, Collection
from pathlib import Path

from async_grpo.processes.process_tree import die_with, prctl
from async_grpo.rewards.sandbox import landlock, seccomp

LEVELS = ("uid", "namespaces", "landlock", "seccomp")
NETWORK_LEVELS = frozenset({"namespaces", "seccomp"})  # either of them keeps the code off the network
MAX_FILES = 64

_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38  # linux/prctl.h
_FIRST_OWN_UID, _NOBODY = 1_000_000_000, 65534
_SYSTEM_LIBRARIES = "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /etc/ld.so.cache".split()
_FILES = "/usr/share/zoneinfo /dev/null /dev/zero /dev/random /dev/urandom".split()


def confine(
    parent_pid: int, cpu_s: float, memory_bytes: int, levels: Collection[str] = LEVELS
) -> frozenset[str]:
    """Confine this process for good. Returns the levels that stand, of those asked for.

    Args:
        parent_pid: dies with it; exits at once if it is gone already.
        cpu_s: of processor time from now; SIGXCPU ends the process then.
        memory_bytes: of address space.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    prctl(PR_SET_NO_NEW_PRIVS, 1)  # without it neither landlock nor seccomp may be had
    attempts: dict[str, Callable[[], bool]] = {
        "uid": _become_nobody,
        "namespaces": lambda: libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0,
        "landlock": lambda: landlock.read_only(readable_paths()),
    }
    standing = {level for level, attempt in attempts.items() if level in levels and attempt()}
    _drop_capabilities(libc)
    # After the change of user, which would undo the two; before the filter, which forbids them.
    prctl(PR_SET_DUMPABLE, 0)  # a neighbour of the same user must not read this memory
    die_with(parent_pid)
    if "seccomp" in levels and seccomp.install():
        standing.add("seccomp")
    _limit_resources(cpu_s, memory_bytes, forbid_processes="seccomp" not in standing)
    return frozenset(standing)


def readable_paths() -> list[str]:
    """The interpreter's library, the system's libraries, a few devices, and the (empty) working folder.

    >>> sysconfig.get_path("stdlib") in readable_paths()
    True
    """
    own = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(sys.base_prefix, "lib"))]
    return [*own, *_SYSTEM_LIBRARIES, *_FILES, "."]


def _become_nobody() -> bool:
    """Change to a user id that nobody else has, if this is root and that user can read the interpreter's library."""
    if os.geteuid() != 0:
        return False
    for uid in (_FIRST_OWN_UID + os.getpid(), _NOBODY):  # a container may not map the first
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.seteuid(uid)
        except OSError:
            continue
        if os.access(os.__file__, os.R_OK, effective_ids=True):
            os.setresuid(uid, uid, uid)
            return True
        os.seteuid(0)
        return False
    return False


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    libc.capset(header, (ctypes.c_uint32 * 6)())


def _limit_resources(cpu_s: float, memory_bytes: int, forbid_processes: bool) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_limit_s = max(1, round(used.ru_utime + used.ru_stime + cpu_s + 0.5))
    limits = {
        resource.RLIMIT_CPU: (cpu_limit_s, cpu_limit_s + 1),  # SIGXCPU, then SIGKILL
        resource.RLIMIT_AS: (memory_bytes, memory_bytes),
        resource.RLIMIT_NOFILE: (MAX_FILES, MAX_FILES),
    }
    limits |= dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_MEMLOCK), (0, 0))
    if forbid_processes:  # and threads, which the kernel counts with them; no limit for root
        limits[resource.RLIMIT_NPROC] = (0, 0)
    for limit, (soft, hard) in limits.items():
        ceiling = resource.getrlimit(limit)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(limit, (soft, hard))
