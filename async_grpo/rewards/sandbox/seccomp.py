"""A system-call filter (seccomp, Linux on x86-64 and aarch64): what confined code may ask of the kernel.

Allowed is what it takes to compute, to read files, to use own pipes and to start threads. All else fails with EPERM,
calls newer than this list with ENOSYS, so that libraries fall back.
"""

import ctypes
import os
import struct

# name x86-64 aarch64; "-" where the architecture does not have it
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
_CHECKED = """
open 2 -, openat 257 56, clone 56 220, kill 62 129, tgkill 234 131, ioctl 16 29, fcntl 72 25, prlimit64 302 261,
sendto 44 206, socketpair 53 199
"""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH_*
_FIRST_COMMON_NUMBER = 424  # from here on all architectures count alike

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _EPERM, _ENOSYS = 0x80000000, 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # in struct seccomp_data; both machines are little-endian
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x00010000
# TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_HARMLESS_FCNTLS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD F_GETFD F_SETFD F_GETFL F_SETFL F_DUPFD_CLOEXEC
_AF_UNIX = 1

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def numbers(table: str, machine: str) -> dict[str, int]:
    """Name -> number of the calls that this machine has.

    >>> numbers("open 2 -, openat 257 56", "aarch64")
    {'openat': 56}
    """
    column, _ = _ARCHITECTURES[machine]
    rows = (row.split() for row in table.replace("\n", " ").split(",") if row.strip())
    return {name: int(both[column]) for name, *both in rows if both[column] != "-"}


def _check(argument: int, *values: int, test: int = _EQUAL, found: int = _ALLOW) -> list[Instruction]:
    """Look for the values in one argument: in 32 bits, all that the kernel takes of these."""
    tests = [part for value in values for part in ((test, 0, 1, value), (_RETURN, 0, 0, found))]
    else_ = _EPERM if found == _ALLOW else _ALLOW
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *tests, (_RETURN, 0, 0, else_)]


def program(machine: str, pid: int) -> list[Instruction]:
    """The filter of the process `pid`. KeyError for an unknown machine."""
    own = (_EQUAL, 1, 0, _ARCHITECTURES[machine][1])
    code = [(_LOAD, 0, 0, _ARCHITECTURE), own, (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for number in numbers(_PLAIN, machine).values():
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    checks = {
        "open": _check(1, _WRITING, test=_ANY_BIT, found=_EPERM),
        "openat": _check(2, _WRITING, test=_ANY_BIT, found=_EPERM),
        "clone": _check(0, _CLONE_THREAD, test=_ANY_BIT),  # a thread, no process
        "kill": _check(0, pid),
        "tgkill": _check(0, pid),
        "ioctl": _check(1, *_HARMLESS_IOCTLS),
        "fcntl": _check(1, *_HARMLESS_FCNTLS),  # F_SETOWN would send signals to others
        "prlimit64": _check(0, 0, pid),
        "sendto": _check(5, 0),  # an address, of any length, would take a datagram to other programs
        "socketpair": _check(0, _AF_UNIX),
    }
    for name, number in numbers(_CHECKED, machine).items():
        code += [(_EQUAL, 0, len(checks[name]), number), *checks[name]]
    # The second set of numbers that x86-64 has (x32) begins at 2**30, so that it ends here, too
    return [*code, (_AT_LEAST, 0, 1, _FIRST_COMMON_NUMBER), (_RETURN, 0, 0, _ENOSYS), (_RETURN, 0, 0, _EPERM)]


def install() -> bool:
    """Filter the calls of this thread and all that it starts, for good. False where the kernel cannot."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False
    code = program(machine, os.getpid())
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
    head = struct.pack("HP", len(code), ctypes.addressof(packed))  # a struct sock_fprog
    return ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, _MODE_FILTER, head, 0, 0) == 0
