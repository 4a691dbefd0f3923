"""A filter of system calls (seccomp, Linux on x86-64 and aarch64) for confined code.

It allows the calls that are needed to compute, read files, use open pipes and start threads. All other calls fail with
EPERM. Newer calls, which the list cannot know, fail with ENOSYS, so that libraries fall back to older calls.
"""

import ctypes
import os
import struct

# Name, number on x86-64, number on aarch64; "-" if the architecture does not have the call.
# These calls are allowed with any arguments:
_PLAIN = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, close 3 57, lseek 8 62, dup 32 23,
dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, fadvise64 221 223,
fstat 5 80, newfstatat 262 79, stat 4 -, lstat 6 -, statx 332 291, statfs 137 43, fstatfs 138 44, access 21 -,
faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, chdir 80 49,
fchdir 81 50, umask 95 166,
mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, brk 12 214, mincore 27 232,
membarrier 324 283,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
rt_sigtimedwait 128 137, sigaltstack 131 132, restart_syscall 219 128, pause 34 -, alarm 37 -, setitimer 38 103,
getitimer 36 102,
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
epoll_pwait 281 22, eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86, recvfrom 45 207, shutdown 48 210,
futex 202 98, set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, arch_prctl 158 -, sched_yield 24 124,
sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120, getpriority 140 141, getcpu 309 168,
nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169,
time 201 -, times 100 153, getrandom 318 278, sysinfo 99 179, uname 63 160, getrusage 98 165, getrlimit 97 163,
getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgid 121 155, getpgrp 111 -, getsid 124 156,
wait4 61 260, waitid 247 95, exit 60 93, exit_group 231 94
"""
# These calls are allowed with some arguments (see `program`):
_CHECKED = """
open 2 -, openat 257 56, clone 56 220, kill 62 129, tgkill 234 131, ioctl 16 29, fcntl 72 25, prlimit64 302 261,
sendto 44 206, socketpair 53 199
"""
# Machine -> (column of its numbers in the tables above, its AUDIT_ARCH constant)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_FIRST_COMMON_NUMBER = 424  # calls from this number on have the same number on all architectures

# Instructions of the filter's machine (classic BPF)
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
# What a filter returns
_KILL = 0x80000000
_ALLOW = 0x7FFF0000
_EPERM = 0x00050000 | 1
_ENOSYS = 0x00050000 | 38
# Offsets in struct seccomp_data; both architectures are little-endian
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16
_ARGUMENT_BYTES = 8
# linux/prctl.h and linux/seccomp.h
_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x00010000
# TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_HARMLESS_FCNTLS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD F_GETFD F_SETFD F_GETFL F_SETFL F_DUPFD_CLOEXEC
_AF_UNIX = 1

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def numbers(table: str, machine: str) -> dict[str, int]:
    """Return the numbers of the system calls in a table on this machine, by name.

    >>> numbers("open 2 -, openat 257 56", "aarch64")
    {'openat': 56}
    """
    column, _ = _ARCHITECTURES[machine]
    numbers_by_name = {}
    for row in table.replace("\n", " ").split(","):
        name, *numbers_of_machines = row.split()
        number = numbers_of_machines[column]
        if number != "-":
            numbers_by_name[name] = int(number)
    return numbers_by_name


def _check(argument: int, *values: int, test: int = _EQUAL, if_found: int = _ALLOW) -> list[Instruction]:
    """Return instructions that compare an argument of the system call with values, and end the filter accordingly.

    Args:
        argument: Index of the argument. Its low 32 bits are compared; the kernel reads no more of these arguments.
        values: The values.
        test: Comparison of the argument with each value.
        if_found: What the filter returns if any comparison is true: _ALLOW or _EPERM. If none is true, it returns
            _EPERM or _ALLOW, respectively.
    """
    code: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + _ARGUMENT_BYTES * argument)]
    for value in values:
        code += [(test, 0, 1, value), (_RETURN, 0, 0, if_found)]
    not_found = _EPERM if if_found == _ALLOW else _ALLOW
    return [*code, (_RETURN, 0, 0, not_found)]


def program(machine: str, pid: int) -> list[Instruction]:
    """Return the filter program for the process `pid`.

    Raises:
        KeyError: The machine is unknown.
    """
    _, architecture = _ARCHITECTURES[machine]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in numbers(_PLAIN, machine).values():
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    checks = {
        "open": _check(1, _WRITING, test=_ANY_BIT, if_found=_EPERM),
        "openat": _check(2, _WRITING, test=_ANY_BIT, if_found=_EPERM),
        "clone": _check(0, _CLONE_THREAD, test=_ANY_BIT),  # allows threads but no processes
        "kill": _check(0, pid),
        "tgkill": _check(0, pid),
        "ioctl": _check(1, *_HARMLESS_IOCTLS),
        "fcntl": _check(1, *_HARMLESS_FCNTLS),  # F_SETOWN would send signals to other processes
        "prlimit64": _check(0, 0, pid),
        "sendto": _check(5, 0),  # with an address, a datagram would reach other programs
        "socketpair": _check(0, _AF_UNIX),
    }
    for name, number in numbers(_CHECKED, machine).items():
        code += [(_EQUAL, 0, len(checks[name]), number), *checks[name]]
    # The calls of the x32 ABI of x86-64 also end here, because their numbers begin at 2**30
    return [
        *code,
        (_AT_LEAST, 0, 1, _FIRST_COMMON_NUMBER),
        (_RETURN, 0, 0, _ENOSYS),
        (_RETURN, 0, 0, _EPERM),
    ]


def install() -> bool:
    """Filter the calls of this thread, and of all that it starts, permanently. Return whether that worked."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False
    code = program(machine, os.getpid())
    code_bytes = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(code_bytes)
    sock_fprog = struct.pack("HP", len(code), ctypes.addressof(buffer))
    return ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, _MODE_FILTER, sock_fprog, 0, 0) == 0
