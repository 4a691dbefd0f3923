"""Start processes from one that has already imported the libraries: a warm server.

A run on one machine has about ten Python processes. Importing vLLM takes 9 s of CPU time, and torch with transformers 5.
On two cores, most of the time until the first step would go into imports. Instead, a server imports them once, and forks.

    server of torch and transformers  --fork-->  server that also imports vLLM
          |  fork per request                          |  fork per request
    trainer ranks, controller, workers           engines and their actors

Programs are started through an executable file that stands in for `python` (`write_executable`). It runs `warm_client.py`,
which sends the server its arguments, environment and open files. The process that the server forks for it does what
`python` would do with them. The client stays, passes signals on, and ends with the process, so that whoever started
`python` watches, signals and kills it as usual. The process dies if the client or the server dies.

The fork server of `multiprocessing` does not do: it serves only processes that the same program starts by `multiprocessing`,
and neither Ray's actors nor torchrun's ranks are among them.

Only processes of this user can connect: the socket is in a private folder.
"""

import fcntl
import gc
import importlib
import json
import logging
import multiprocessing.spawn
import os
import resource
import runpy
import selectors
import shlex
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.processes import process_tree
from async_grpo.processes.process_tree import die_with
from async_grpo.processes.warm_client import ACCEPTED, LENGTH, REFUSED, STATUS

try:
    import setproctitle
except ImportError:
    setproctitle = None  # type: ignore[assignment]  # processes then have the server's name

CLIENT = Path(__file__).with_name("warm_client.py")
MAX_DESCRIPTORS = 253  # of one message on Linux (SCM_MAX_FD)
REQUEST_TIMEOUT_S = 10.0
# Libraries read variables with these prefixes when they are imported. A request in which they differ from the server's
# is refused, and the client starts Python as usual
READ_AT_IMPORT = (
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "LD_LIBRARY_PATH",
    "HOME",
    "XDG_",
    "LANG",
    "LC_",
    "HF_",
    "TRANSFORMERS_",
    "TORCHINDUCTOR_",
    "TORCHDYNAMO_",
    "TORCH_LOGS",
    "PYTORCH_",
    "VLLM_LOGGING_",
    "VLLM_TARGET_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
)
# Options of the interpreter that change nothing in a process that runs already
IGNORED_OPTIONS = ("-B", "-u")

log = logging.getLogger(__name__)


def write_executable(folder: Path, socket_path: Path) -> Path:
    """Write the file that is called instead of `python`, and return its path."""
    folder.mkdir(mode=0o700, exist_ok=True)
    executable = folder / "python"
    client = [sys.executable, "-I", "-S", "-B", str(CLIENT), str(socket_path), sys.executable]
    executable.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
    executable.chmod(0o700)
    return executable


def listen(path: Path) -> socket.socket:
    """Return a socket to which clients can connect at once. They wait until their server has imported its modules."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


@dataclass(frozen=True)
class Stage:
    """One server.

    Attributes:
        listener: Descriptor of the socket to which clients connect (`listen`). It is inherited.
        executable: The file that is called instead of `python`; see `write_executable`.
        modules: The modules that the server imports.
        ignored: Beginnings of the names of variables that may differ in a request, because its processes do not use them.
    """

    listener: int
    executable: Path
    modules: Sequence[str]
    ignored: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the values for the command line of `main`."""
        return {
            "listener": self.listener,
            "executable": str(self.executable),
            "modules": list(self.modules),
            "ignored": list(self.ignored),
        }


@dataclass(frozen=True)
class Request:
    """What a client asks for: a process that runs Python with these arguments in the client's surroundings."""

    arguments: list[str]
    folder: str
    starter_pid: int  # the process that started the client
    environment: dict[str, str]
    descriptors: list[int]  # the numbers that the open files have in the client
    umask: int
    niceness: int
    oom_score_adj: str
    cores: list[int]
    limits: dict[str, tuple[int, int]]

    @classmethod
    def receive(cls, connection: socket.socket) -> "tuple[Request, list[int]]":
        """Return the request, and the descriptors of this process for the client's open files.

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
            _close(received)
            raise
        connection.settimeout(None)
        return cls(**json.loads(message)), received


def serve(stages: Sequence[Stage]) -> None:
    """Import the modules of the first stage, fork a process that goes on with the next one, and serve requests.

    Returns only in a process that was forked for a request, after it has done its work.
    """
    environment = dict(os.environ)
    if setproctitle is not None:
        # The first call finds the place of the name in memory, which it cannot once variables have changed
        setproctitle.getproctitle()
    listeners = [socket.socket(fileno=stage.listener) for stage in stages]
    for stage in stages:
        listener = listeners.pop(0)
        _import_all(stage.modules)
        server_pid = os.getpid()
        if listeners and os.fork() == 0:
            die_with(server_pid)
            listener.close()
            continue
        for later_listener in listeners:
            later_listener.close()
        Server(stage, listener, environment).run()
        return


def _import_all(modules: Iterable[str]) -> None:
    """Import modules, as on a machine without Ray.

    In a process that is forked after Ray was imported, Ray cannot connect to its cluster (tried with 2.60). vLLM imports
    Ray if it can, for an executor that is not used here.
    """
    sys.modules["ray"] = None  # type: ignore[assignment]  # makes `import ray` raise ModuleNotFoundError
    for module in modules:
        importlib.import_module(module)
    del sys.modules["ray"]


class Server:
    """Forks a process for each request, and tells each client how its process ended.

    Args:
        stage: What the server has imported.
        listener: The socket to which clients connect.
        environment: The variables before the modules were imported.
    """

    def __init__(self, stage: Stage, listener: socket.socket, environment: Mapping[str, str]) -> None:
        self._stage = stage
        self._listener = listener
        self._environment = environment
        # Variables that libraries set when they are imported, in this process as in any other
        self._set_by_imports = {
            name: value for name, value in os.environ.items() if environment.get(name) != value
        }
        # Descriptors that belong to the imported libraries. A process must not lose them to a client's open files
        self._occupied = set(_open_descriptors()) - {0, 1, 2, listener.fileno()}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._clients: dict[
            int, socket.socket
        ] = {}  # descriptor of a process (pidfd) -> connection to its client
        self._pids: dict[int, int] = {}  # descriptor of a process (pidfd) -> its process id

    def run(self) -> None:
        """Serve until this process is ended. Returns only in a process that was forked for a request."""
        # A forked process shares the memory of objects that the garbage collector never visits
        gc.collect()
        gc.freeze()
        problem = _problem_with_forking()
        if problem:
            log.warning("processes start as usual, which takes seconds longer: %s", problem)
            return
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    is_in_new_process = self._accept()
                    if is_in_new_process:
                        return
                elif key.data is None:
                    self._report_end(key.fd)
                else:
                    # A client sends nothing after its request. It has ended, and so its process has to
                    self._kill(key.data)

    def _accept(self) -> bool:
        """Serve one request. Return True in the new process, after it has done its work."""
        connection, _ = self._listener.accept()
        try:
            request, received = Request.receive(connection)
        except OSError as error:
            log.warning("a request was not completed: %s", error)
            connection.close()
            return False
        reason = self._reason_to_refuse(request)
        if reason:
            log.warning("python %s starts as usual: %s", shlex.join(request.arguments)[:200], reason)
            connection.sendall(STATUS.pack(REFUSED))
            connection.close()
            _close(received)
            return False
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with(server_pid)
            connection.close()
            self._close_in_new_process()
            _take_over(request, received)
            os.environ.update(self._set_by_imports)
            _run(request.arguments, self._stage.executable)
            return True
        _close(received)
        process = os.pidfd_open(pid)
        self._pids[process] = pid
        self._clients[process] = connection
        self._selector.register(process, selectors.EVENT_READ)
        try:
            socket.send_fds(connection, [STATUS.pack(ACCEPTED)], [process])
            self._selector.register(connection, selectors.EVENT_READ, data=process)
        except OSError:
            # The client ended in the meantime
            self._kill(process)
        return False

    def _reason_to_refuse(self, request: Request) -> str:
        """Return the reason why the client must start Python itself, or "" if a fork does the same."""
        compared = tuple(prefix for prefix in READ_AT_IMPORT if prefix not in self._stage.ignored)
        for name in sorted(request.environment.keys() | self._environment.keys()):
            # A client that was forked here has the variables that the imports set
            known_values = (self._environment.get(name), os.environ.get(name))
            if name.startswith(compared) and request.environment.get(name) not in known_values:
                return f"{name} differs from that of the warm server"
        preloaded = os.environ.get("LD_PRELOAD", "").split(":")
        missing = set(request.environment.get("LD_PRELOAD", "").split(":")) - {*preloaded, ""}
        if missing:
            return f"{sorted(missing)} of LD_PRELOAD are not loaded in the warm server"
        taken = self._occupied & set(request.descriptors)
        if taken:
            return f"the libraries use its descriptors {sorted(taken)}"
        if not _is_understood(request.arguments):
            return "it has options of the interpreter"
        return ""

    def _report_end(self, process: int) -> None:
        """Collect a process that has ended, and tell its client the exit code."""
        _, status = os.waitpid(self._pids.pop(process), 0)
        connection = self._clients.pop(process)
        self._selector.unregister(process)
        os.close(process)
        if connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)
        # Fails if the client has ended, which ended the process
        try:
            connection.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
        except OSError:
            log.debug("a client ended before its process")
        connection.close()

    def _kill(self, process: int) -> None:
        """Kill the process of a client that has ended. `_report_end` does the rest."""
        connection = self._clients[process]
        if connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)
        signal.pidfd_send_signal(process, signal.SIGKILL)

    def _close_in_new_process(self) -> None:
        """Close the descriptors of the server."""
        self._selector.close()
        self._listener.close()
        _close(self._clients)
        for connection in self._clients.values():
            connection.close()


def _problem_with_forking() -> str:
    """Return the reason why this process cannot be forked safely, or ""."""
    num_threads = len(os.listdir("/proc/self/task"))
    # A fork has only the thread that forked. What the others held, such as a lock, would stay held
    return (
        f"the libraries started {num_threads - 1} threads when they were imported" if num_threads > 1 else ""
    )


def _is_understood(arguments: Sequence[str]) -> bool:
    rest = _without_ignored(arguments)
    return bool(rest) and (rest[0] in ("-c", "-m") or not rest[0].startswith("-"))


def _without_ignored(arguments: Sequence[str]) -> list[str]:
    rest = list(arguments)
    while rest and rest[0] in IGNORED_OPTIONS:
        rest.pop(0)
    return rest


def _take_over(request: Request, received: Sequence[int]) -> None:
    """Give this process the surroundings of the client: open files, folder, variables, limits."""
    os.setsid()
    # The received descriptors may have numbers that others of them must get, so all are first moved out of the way
    first_free = max([*request.descriptors, *received, 2]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, first_free) for descriptor in received]
    _close(received)
    for descriptor, number in zip(moved, request.descriptors, strict=True):
        os.dup2(descriptor, number, inheritable=True)
    _close(moved)
    for number in {0, 1, 2} - set(request.descriptors):
        os.close(number)
    process_tree.starter_pid = request.starter_pid
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # the server's, which a library may have asked for; TMPDIR may differ
    time.tzset()
    os.umask(request.umask)
    os.nice(request.niceness - os.nice(0))
    Path("/proc/self/oom_score_adj").write_text(request.oom_score_adj)
    os.sched_setaffinity(0, request.cores)
    for name, limits in request.limits.items():
        resource.setrlimit(getattr(resource, name), limits)


def _run(arguments: Sequence[str], executable: Path) -> None:
    """Do what `python ARGUMENTS` does. Exceptions, SystemExit among them, are left to the interpreter."""
    _name_process([sys.executable, *arguments])
    # Processes that multiprocessing starts are forked by the server, too
    multiprocessing.spawn.set_executable(str(executable))
    _seed_and_count_threads()
    first, *rest = _without_ignored(arguments)
    if first == "-m":
        module, *further = rest
        sys.argv = ["-m", *further]
        _set_first_path(os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif first == "-c":
        code, *further = rest
        sys.argv = ["-c", *further]
        _set_first_path("")
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), vars(main))
    else:
        sys.argv = [first, *rest]
        _set_first_path(os.path.dirname(os.path.realpath(first)))
        runpy.run_path(first, run_name="__main__")


def _set_first_path(folder: str) -> None:
    """Put the folder of the program first in the search path of modules, unless PYTHONSAFEPATH forbids it."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _name_process(command: Iterable[str]) -> None:
    """Show the command in the list of processes, where otherwise the server's would be.

    A rank's number precedes it, because the variables that other processes can see are the server's.
    """
    if setproctitle is not None:
        rank = f"RANK={os.environ['RANK']} " if "RANK" in os.environ else ""
        setproctitle.setproctitle(rank + shlex.join(command))


def _seed_and_count_threads() -> None:
    """Do what libraries do when they are imported, and what must not be the same in all processes."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        # The library of OpenMP read the variable when the server imported it
        num_threads = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(num_threads) if num_threads.isdigit() else len(os.sched_getaffinity(0)))


def _open_descriptors() -> list[int]:
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in numbers if os.path.lexists(f"/proc/self/fd/{number}")]


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in list(descriptors):
        os.close(descriptor)


def main(arguments: Sequence[str]) -> None:
    """Serve the stages of a JSON list (`Stage.as_json`)."""
    stages = []
    for stage in json.loads(arguments[0]):
        stages.append(Stage(**stage | {"executable": Path(stage["executable"])}))
    serve(stages)


if __name__ == "__main__":
    main(sys.argv[1:])
