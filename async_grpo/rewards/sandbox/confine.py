"""Gives up, in the process that calls it, what computing an answer does not need: see the package's table."""

import ctypes
import os
import resource
import struct
import sys
import sysconfig
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from async_grpo.processes.process_tree import die_with, prctl
from async_grpo.rewards.sandbox import seccomp

LEVELS = ("uid", "namespaces", "landlock", "seccomp")
NETWORK_LEVELS = frozenset({"namespaces", "seccomp"})  # either of them keeps the code off the network
MAX_FILES = 64

_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38  # linux/prctl.h
_FIRST_OWN_UID, _NOBODY = 1_000_000_000, 65534
_READABLE = """
/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /etc/ld.so.cache
/usr/share/zoneinfo /dev/null /dev/zero /dev/random /dev/urandom .
""".split()

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same number on every architecture
_VERSION_FLAG = _PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # version -> how many rights over files it knows
_BIND_AND_CONNECT_TCP = _FOREIGN_SOCKETS_AND_SIGNALS = 0b11


def confine(parent_pid: int, cpu_s: float, memory_bytes: int, levels: Collection[str]) -> frozenset[str]:
    """Confine this process for good, which dies with its parent. Returns those of the levels that stand.

    SIGKILL ends it after `cpu_s` of processor time from now; `memory_bytes` are of address space.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    prctl(PR_SET_NO_NEW_PRIVS, 1)  # without it neither landlock nor seccomp may be had
    attempts: dict[str, Callable[[], bool]] = {
        "uid": _become_nobody,
        "namespaces": lambda: libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0,
        "landlock": lambda: _restrict_files(libc),
    }
    standing = {level for level, attempt in attempts.items() if level in levels and attempt()}
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    libc.capset(header, (ctypes.c_uint32 * 6)())
    # After the change of user, which would undo the two; before the filter, which forbids them.
    prctl(PR_SET_DUMPABLE, 0)  # a neighbour of the same user must not read this memory
    die_with(parent_pid)
    if "seccomp" in levels and seccomp.install():
        standing.add("seccomp")
    _limit_resources(cpu_s, memory_bytes, forbid_processes="seccomp" not in standing)
    return frozenset(standing)


def _become_nobody() -> bool:
    """Change to a user id that nobody else has, if root can and that user can read Python's library."""
    if os.geteuid() != 0:
        return False
    for uid in (_FIRST_OWN_UID + os.getpid(), _NOBODY):  # a container may not map the first
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.seteuid(uid)
            if os.access(os.__file__, os.R_OK, effective_ids=True):
                os.setresuid(uid, uid, uid)
                return True
            os.seteuid(0)
    return False


def ruleset(version: int) -> bytes:
    """The kernel's `struct landlock_ruleset_attr`, as long as that version knows it: forbids all it can."""
    rights = (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1
    num_fields = 1 + (version >= 4) + (version >= 6)
    fields = (rights, _BIND_AND_CONNECT_TCP, _FOREIGN_SOCKETS_AND_SIGNALS)[:num_fields]
    return struct.pack(f"={num_fields}Q", *fields)


def _restrict_files(libc: ctypes.CDLL) -> bool:
    """Forbid all files but to read the system's libraries, Python's, a few devices, and the (empty) folder."""
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    if version < 1:
        return False
    attributes = ruleset(version)
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    own = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(sys.base_prefix, "lib")))
    held = True
    for path in filter(os.path.exists, (*own, *_READABLE)):
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        held &= libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, handle), 0) == 0
        os.close(handle)
    restricted = held and libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return bool(restricted)


def _limit_resources(cpu_s: float, memory_bytes: int, forbid_processes: bool) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        resource.RLIMIT_CPU: max(1, round(used.ru_utime + used.ru_stime + cpu_s + 0.5)),
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_NOFILE: MAX_FILES,
    }
    limits |= dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_MEMLOCK), 0)
    if forbid_processes:  # and threads, which the kernel counts with them; no limit for root
        limits[resource.RLIMIT_NPROC] = 0
    for name, limit in limits.items():
        ceiling = resource.getrlimit(name)[1]
        if ceiling == resource.RLIM_INFINITY or limit < ceiling:
            resource.setrlimit(name, (limit, limit))
