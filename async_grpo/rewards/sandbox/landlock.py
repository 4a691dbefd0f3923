"""Landlock (Linux 5.13 and later): from here on this process may read some folders, and touch no other file.

It needs no privilege and no namespace. Beside files it keeps the process from looking into others through /proc
and ptrace, and, where the kernel is new enough, from TCP (6.7), signals and abstract sockets of others (6.12).
"""

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same number on every architecture
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_O_PATH = getattr(os, "O_PATH", 0o10000000)

_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # version -> how many rights over files it knows
_BIND_AND_CONNECT_TCP = 0b11
_FOREIGN_SOCKETS_AND_SIGNALS = 0b11


def ruleset(version: int) -> bytes:
    """The kernel's `struct landlock_ruleset_attr` that forbids all it can, as long as that version knows it."""
    rights = (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1
    fields = [rights]
    if version >= 4:
        fields.append(_BIND_AND_CONNECT_TCP)
    if version >= 6:
        fields.append(_FOREIGN_SOCKETS_AND_SIGNALS)
    return struct.pack(f"={len(fields)}Q", *fields)


def read_only(paths: Iterable[str | Path]) -> bool:
    """Forbid this process all files but to read what lies in (or is) one of `paths`. False where the kernel cannot.

    The process must have given up new privileges (PR_SET_NO_NEW_PRIVS). Paths that do not exist are passed over.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    if version < 1:
        return False
    attributes = ruleset(version)
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    try:
        return (
            all(_allow(libc, rules, path) for path in paths) and libc.syscall(_RESTRICT_SELF, rules, 0) == 0
        )
    finally:
        os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str | Path) -> bool:
    try:
        handle = os.open(path, _O_PATH | os.O_CLOEXEC)
    except OSError:  # not on this machine, or out of reach: then it stays so
        return True
    try:
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        return libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, handle), 0) == 0
    finally:
        os.close(handle)
