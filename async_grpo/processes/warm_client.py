"""The program that is called in place of `python`. It asks a warm server for a process with imported libraries.

    python -I -S warm_client.py SOCKET PYTHON ARGUMENTS...

It behaves like `PYTHON ARGUMENTS...`: it has the same output, passes signals on, and ends with the same exit code. If
no server answers, or the server cannot serve these arguments, it replaces itself by `PYTHON ARGUMENTS...`.

This file imports only few modules, all of the standard library, because each process of a run starts with it.
"""

import array
import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress

# Signals that the client passes on to its process. SIGSTOP and SIGKILL cannot be caught. If a client is killed, the
# server kills the client's process
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Format of the number of bytes in a request's JSON text, which precedes the text
LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!i")  # format of the server's answers: ACCEPTED or REFUSED, and later the exit code
ACCEPTED = 1000
REFUSED = 1001
# If this variable is set, the kernel kills the client as soon as the process that started the client ends. The server
# then kills the client's process
DIES_WITH_STARTER = "ASYNC_GRPO_DIES_WITH_STARTER"
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
SERVER_IS_GONE = 70  # exit code if the server ended first, which also ends the client's process


def main(socket_path: str, python: str, arguments: list[str]) -> None:
    """Let the server run Python with these arguments, and end like that process. If it cannot, run Python here."""
    if DIES_WITH_STARTER in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptors = open_descriptors()
    # Block these signals until they can be passed on, because other programs may already send some to the client
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        process = None
        # There may be no server, or it may end before it answers
        with suppress(OSError):
            connection.connect(socket_path)
            process = _request(connection, arguments, descriptors)
        if process is None:
            connection.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execv(python, [python, *arguments])
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: _pass_on(process, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Close the client's copies. Otherwise other processes would not notice when the new process closes these files
        for descriptor in descriptors:
            if descriptor > 2:
                os.close(descriptor)
        _end_like(_receive_status(connection))


def open_descriptors() -> list[int]:
    """Return the descriptors that this program inherited."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        # Skip the descriptor with which `listdir` has read this folder: it is in the list, but already closed
        if os.path.exists(f"/proc/self/fd/{name}") or os.path.islink(f"/proc/self/fd/{name}"):
            descriptors.append(int(name))
    return sorted(descriptors)


def _request(connection: socket.socket, arguments: list[str], descriptors: list[int]) -> int | None:
    """Send the request, and return a descriptor of the new process (pidfd), or None if the server refuses.

    Raises:
        OSError: The server ended.
    """
    umask = os.umask(0)
    os.umask(umask)
    with open("/proc/self/oom_score_adj") as file:
        oom_score_adj = file.read()
    request = {
        "arguments": arguments,
        "folder": os.getcwd(),
        "starter_pid": os.getppid(),
        "environment": dict(os.environ),
        "descriptors": descriptors,
        "umask": umask,
        "niceness": os.nice(0),
        "oom_score_adj": oom_score_adj.strip(),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limit_names()},
    }
    message = json.dumps(request).encode()
    passed = array.array("i", descriptors)
    first_bytes = LENGTH.pack(len(message))
    connection.sendmsg([first_bytes], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    connection.sendall(message)
    answer, pidfds, _, _ = socket.recv_fds(connection, STATUS.size, 1)
    if len(answer) < STATUS.size:
        raise ConnectionResetError("the warm server ended")
    return pidfds[0] if STATUS.unpack(answer)[0] == ACCEPTED else None


def limit_names() -> list[str]:
    """Return the names of the limits that a process inherits from its parent."""
    return sorted(name for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE")


def _pass_on(process: int, number: int) -> None:
    # The process may have ended. The server then sends its exit code
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


def _receive_status(connection: socket.socket) -> int:
    answer = connection.recv(STATUS.size, socket.MSG_WAITALL)
    if len(answer) < STATUS.size:
        print("the warm server ended, and its processes with it", file=sys.stderr)
        return SERVER_IS_GONE
    return int(STATUS.unpack(answer)[0])


def _end_like(status: int) -> None:
    """End this process with an exit code, or by a signal if the code is negative."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = -status
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
