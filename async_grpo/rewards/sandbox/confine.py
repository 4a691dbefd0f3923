"""`confine`: removes all rights from the calling process that code does not need to compute an answer."""

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
# Each of these levels blocks the network access of the code
NETWORK_LEVELS = frozenset({"namespaces", "seccomp"})
MAX_FILES = 64  # maximum number of open files
# Size of the main thread's stack. Deep recursion needs more than the usual 8 MiB, and judges of contests allow this much
STACK_BYTES = 256 * 2**20

# linux/sched.h
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_CLONE_NEWIPC = 0x08000000
# linux/prctl.h
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
# linux/capability.h
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_THIS_THREAD = 0
_CAPABILITY_WORDS = 6  # effective, permitted and inheritable, in two halves of 32 bits

_FIRST_PRIVATE_UID = 1_000_000_000  # user ids from here on belong to nobody
_NOBODY = 65534
_READABLE = """
/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /etc/ld.so.cache
/usr/share/zoneinfo /dev/null /dev/zero /dev/random /dev/urandom .
""".split()

# System calls of landlock; their numbers are the same on every architecture
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
# linux/landlock.h
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_BIND_AND_CONNECT_TCP = 0b11
_FOREIGN_SOCKETS_AND_SIGNALS = 0b11
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of rights over files, by version of landlock
_FIRST_TCP_VERSION = 4
_FIRST_SCOPE_VERSION = 6


def confine(parent_pid: int, cpu_s: float, memory_bytes: int, levels: Collection[str]) -> frozenset[str]:
    """Confine this process permanently, and let it end when its parent ends.

    Args:
        parent_pid: Process id of the parent.
        cpu_s: Processor time, from now on, after which the kernel kills the process.
        memory_bytes: Limit of the address space.
        levels: Levels to try.

    Returns:
        The levels that are in force.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    prctl(PR_SET_NO_NEW_PRIVS, 1)  # landlock and seccomp require this
    attempts: dict[str, Callable[[], bool]] = {
        "uid": _become_nobody,
        "namespaces": lambda: libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0,
        "landlock": lambda: _restrict_files(libc),
    }
    levels_in_force = set()
    for level, attempt in attempts.items():
        if level in levels and attempt():
            levels_in_force.add(level)
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, _THIS_THREAD)
    no_capabilities = (ctypes.c_uint32 * _CAPABILITY_WORDS)()
    libc.capset(header, no_capabilities)
    # The next two calls must come after the change of user, which would undo them, and before the seccomp filter, which
    # forbids them. PR_SET_DUMPABLE prevents other processes of the same user from reading this process's memory
    prctl(PR_SET_DUMPABLE, 0)
    die_with(parent_pid)
    if "seccomp" in levels and seccomp.install():
        levels_in_force.add("seccomp")
    _limit_resources(cpu_s, memory_bytes, forbid_processes="seccomp" not in levels_in_force)
    return frozenset(levels_in_force)


def _become_nobody() -> bool:
    """Change to a user id that no other process has. If a container does not map such an id, change to `nobody`.

    Return False if this process is not root, or if the new user could not read Python's library.
    """
    if os.geteuid() != 0:
        return False
    for uid in (_FIRST_PRIVATE_UID + os.getpid(), _NOBODY):
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
    """Return a `struct landlock_ruleset_attr` that forbids everything that this version of landlock can forbid."""
    num_file_rights = _NUM_FILE_RIGHTS[min(version, max(_NUM_FILE_RIGHTS))]
    all_file_rights = (1 << num_file_rights) - 1
    # Older versions know only the first fields
    fields = [all_file_rights]
    if version >= _FIRST_TCP_VERSION:
        fields.append(_BIND_AND_CONNECT_TCP)
    if version >= _FIRST_SCOPE_VERSION:
        fields.append(_FOREIGN_SOCKETS_AND_SIGNALS)
    return struct.pack(f"={len(fields)}Q", *fields)


def _restrict_files(libc: ctypes.CDLL) -> bool:
    """Forbid access to files, and return whether that worked.

    The process can still read the libraries of the system and of Python, a few devices, and its own empty folder.
    """
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    if version < 1:
        return False
    attributes = ruleset(version)
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    paths_of_python = (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        str(Path(sys.base_prefix, "lib")),
    )
    is_complete = True
    for path in (*paths_of_python, *_READABLE):
        if os.path.exists(path) and not _allow_reading(libc, rules, path):
            is_complete = False
    is_restricted = is_complete and libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return is_restricted


def _allow_reading(libc: ctypes.CDLL, rules: int, path: str) -> bool:
    """Allow reading a file, or all files below a folder. Return whether that worked."""
    rights = _READ_FILE
    if os.path.isdir(path):
        rights |= _READ_DIR
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    path_beneath = struct.pack("=Qi", rights, handle)
    error = libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, path_beneath, 0)
    os.close(handle)
    return bool(error == 0)


def _limit_resources(cpu_s: float, memory_bytes: int, forbid_processes: bool) -> None:
    """Set the kernel's resource limits, except where a lower limit is already in force."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        # In whole seconds, rounded up
        resource.RLIMIT_CPU: max(1, round(used.ru_utime + used.ru_stime + cpu_s + 0.5)),
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if forbid_processes:
        # This also forbids threads, because the kernel counts them as processes. It does not limit root
        limits[resource.RLIMIT_NPROC] = 0
    stack_bytes, stack_ceiling = resource.getrlimit(resource.RLIMIT_STACK)
    if stack_bytes != resource.RLIM_INFINITY:
        allowed_bytes = STACK_BYTES if stack_ceiling == resource.RLIM_INFINITY else stack_ceiling
        new_stack_bytes = max(stack_bytes, min(STACK_BYTES, allowed_bytes))
        resource.setrlimit(resource.RLIMIT_STACK, (new_stack_bytes, stack_ceiling))
    for name, limit in limits.items():
        ceiling = resource.getrlimit(name)[1]
        if ceiling == resource.RLIM_INFINITY or limit < ceiling:
            resource.setrlimit(name, (limit, limit))
