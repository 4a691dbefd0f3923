"""Give a fork of a warm server its client's open files, variables and limits, and run what the client asks for."""

import atexit
import fcntl
import importlib
import json
import multiprocessing.spawn
import os
import resource
import runpy
import shlex
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from async_grpo.processes import process_tree
from async_grpo.processes.warm_client import LENGTH

MAX_DESCRIPTORS = 253  # maximum number of descriptors in one message on Linux (SCM_MAX_FD)
REQUEST_TIMEOUT_S = 10.0
OOM_SCORE_ADJ = "/proc/self/oom_score_adj"
RAY_WORKER = "ray/_private/workers/default_worker.py"
# Options of Python that have no meaning for a process that already runs, and can be ignored
IGNORED_OPTIONS = ("-B", "-u")


def find_place_of_name() -> None:
    """Make setproctitle find this process's name in memory. It cannot be found once environment variables change."""
    setproctitle.getproctitle()


@dataclass(frozen=True)
class Request:
    """A client's request for a process that runs Python with these arguments, and with the client's open files."""

    arguments: list[str]
    folder: str
    starter_pid: int  # the process that started the client
    environment: dict[str, str]
    descriptors: list[int]  # the numbers that these open files have in the client
    umask: int
    niceness: int
    oom_score_adj: str
    cores: list[int]
    limits: dict[str, tuple[int, int]]

    @classmethod
    def receive(cls, connection: socket.socket) -> "tuple[Request, list[int]]":
        """Return the request, and the descriptors that the client's open files have in this process.

        Raises:
            OSError: The client ended or sent nothing in time.
        """
        connection.settimeout(REQUEST_TIMEOUT_S)
        prefix, received, _, _ = socket.recv_fds(connection, LENGTH.size, MAX_DESCRIPTORS)
        try:
            if len(prefix) < LENGTH.size:
                raise ConnectionResetError("the client ended")
            (length,) = LENGTH.unpack(prefix)
            message = connection.recv(length, socket.MSG_WAITALL)
            if len(message) < length:
                raise ConnectionResetError("the client ended")
        except OSError:
            close_all(received)
            raise
        connection.settimeout(None)
        return cls(**json.loads(message)), received


def reason_against_taking_over(request: Request) -> str:
    """Return why a fork of this process cannot take over the client's limits; "" if it can."""
    if request.niceness < os.nice(0):
        return "its niceness is lower than that of the warm server"
    if int(request.oom_score_adj) < int(Path(OOM_SCORE_ADJ).read_text()):
        return "its oom_score_adj is lower than that of the warm server"
    for name, (_, hard_limit) in request.limits.items():
        _, own_hard_limit = resource.getrlimit(getattr(resource, name))
        is_higher = hard_limit == resource.RLIM_INFINITY or hard_limit > own_hard_limit
        if own_hard_limit != resource.RLIM_INFINITY and is_higher:
            return f"its {name} is higher than that of the warm server"
    return ""


def is_understood(arguments: Sequence[str]) -> bool:
    """Return whether `run_python` supports these arguments of Python."""
    understood_arguments = _without_ignored(arguments)
    return bool(understood_arguments) and (
        understood_arguments[0] in ("-c", "-m") or not understood_arguments[0].startswith("-")
    )


def _without_ignored(arguments: Sequence[str]) -> list[str]:
    remaining_arguments = list(arguments)
    while remaining_arguments and remaining_arguments[0] in IGNORED_OPTIONS:
        remaining_arguments.pop(0)
    return remaining_arguments


def take_over(request: Request, received: Sequence[int]) -> None:
    """Give this process the client's open files, working folder, environment variables and limits."""
    os.setsid()
    # First move all descriptors to free numbers. One of them may have the number that another must get
    first_free = max([*request.descriptors, *received, 2]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, first_free) for descriptor in received]
    close_all(received)
    for descriptor, number in zip(moved, request.descriptors, strict=True):
        os.dup2(descriptor, number, inheritable=True)
    close_all(moved)
    for number in {0, 1, 2} - set(request.descriptors):
        os.close(number)
    process_tree.starter_pid = request.starter_pid
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # forget the server's folder, because TMPDIR may differ in the client
    time.tzset()
    os.umask(request.umask)
    os.nice(request.niceness - os.nice(0))
    Path(OOM_SCORE_ADJ).write_text(request.oom_score_adj)
    os.sched_setaffinity(0, request.cores)
    for name, limits in request.limits.items():
        resource.setrlimit(getattr(resource, name), limits)


def run_and_exit(arguments: Sequence[str], executable: Path) -> NoReturn:
    """Do what `python ARGUMENTS` does, and end this process. Python itself handles an uncaught exception.

    The process ends without freeing its objects one by one, which would take half a second of CPU time after `import
    torch`.
    """
    exit_code = 0
    try:
        run_python(arguments, executable)
    except SystemExit as error:
        if isinstance(error.code, int):
            exit_code = error.code
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            exit_code = 1
    # Do what Python does at its end, because `os._exit` skips it
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # The reader of the stream may have ended, or a program may have set the stream to None
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code & 0xFF)


def run_python(arguments: Sequence[str], executable: Path) -> None:
    """Do what `python ARGUMENTS` does, except for the end of the process."""
    _name_process([sys.executable, *arguments])
    if any(argument.endswith(RAY_WORKER) for argument in arguments):
        # Ray names its processes with its own copy of setproctitle. That copy can no longer find the name in memory, so
        # replace it
        ray_internals: Any = importlib.import_module("ray._raylet")
        ray_internals.setproctitle = setproctitle.setproctitle
    # multiprocessing then starts its processes through the server, too
    multiprocessing.spawn.set_executable(str(executable))
    _seed_and_count_threads()
    first, *program_arguments = _without_ignored(arguments)
    if first == "-m":
        module, *module_arguments = program_arguments
        sys.argv = ["-m", *module_arguments]
        _set_first_path(os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif first == "-c":
        code, *module_arguments = program_arguments
        sys.argv = ["-c", *module_arguments]
        _set_first_path("")
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), vars(main))
    else:
        sys.argv = [first, *program_arguments]
        _set_first_path(os.path.dirname(os.path.realpath(first)))
        runpy.run_path(first, run_name="__main__")


def _set_first_path(folder: str) -> None:
    """Put the folder of the program first in the search path of modules, unless PYTHONSAFEPATH forbids it."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _name_process(command: Iterable[str]) -> None:
    """Show the command in the list of processes, which would otherwise show the server's command.

    The command of a trainer rank begins with RANK=N, because other processes cannot see the rank in the environment:
    they see the variables of the server.
    """
    rank = f"RANK={os.environ['RANK']} " if "RANK" in os.environ else ""
    setproctitle.setproctitle(rank + shlex.join(command))


def _seed_and_count_threads() -> None:
    """Seed numpy, and set torch's number of threads, as these libraries do when they are imported.

    The forked process did not import them, but got them from the server. With the server's seed, all forked processes
    would draw the same random numbers.
    """
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        # Set the number of threads here: OpenMP has read only the server's OMP_NUM_THREADS, when torch was imported
        # there
        num_threads = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(num_threads) if num_threads.isdigit() else len(os.sched_getaffinity(0)))


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors."""
    for descriptor in list(descriptors):
        os.close(descriptor)
