"""Start processes from one that has already imported the libraries: a warm server.

A run on one machine has about ten Python processes. Importing vLLM takes 9 s of CPU time, and importing torch and
transformers takes 5 s. On two cores, most of the time until the first step would go into imports. Instead, a server
imports them once, and forks.

    server of torch and transformers  --fork-->  server that also imports vLLM
          |  fork per request                          |  fork per request
    trainer ranks, controller, workers           engines and their actors

While the second server imports vLLM, the first one imports what only its own processes need.

Programs are started with an executable file that is called in place of `python` (`write_executable`). It runs
`warm_client.py`, which sends the server its arguments, environment and open files. The server forks a process, which
does what `python` would do with them. The client keeps running, passes signals on to this process, and ends when it
ends. So whoever started `python` can watch, signal and kill it as usual. The process dies if the client or the server
dies.

The fork server of `multiprocessing` cannot be used: it only starts processes that the same program starts with
`multiprocessing`. Ray and torchrun start their actors and ranks in another way.

Only processes of this user can connect: the socket is in a private folder.
"""

import gc
import importlib
import json
import logging
import os
import selectors
import shlex
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.processes.process_tree import die_with
from async_grpo.processes.warm_client import ACCEPTED, REFUSED, STATUS, open_descriptors
from async_grpo.processes.warm_process import (
    Request,
    close_all,
    find_place_of_name,
    is_understood,
    reason_against_taking_over,
    run_and_exit,
    take_over,
)

CLIENT = Path(__file__).with_name("warm_client.py")
# Prefixes of variables that libraries read when they are imported. If the values of the server and of a client differ,
# the server refuses the client's request, and the client starts Python as usual
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
# Exceptions to these prefixes: the variable is read when it is needed, so each process may have its own value
READ_WHEN_NEEDED = {"TORCHINDUCTOR_CACHE_DIR"}

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
    """Return a socket to which clients can connect at once.

    They wait until the server behind it has imported its modules.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


@dataclass(frozen=True)
class Stage:
    """One server: its socket, and the modules that it imports.

    Attributes:
        listener: Descriptor of the socket to which clients connect (`listen`). The server process inherits it.
        executable: The file that is called instead of `python`; see `write_executable`.
        modules: The modules that the server imports before it forks the next server.
        own_modules: The modules that the server imports after it has forked the next server, which does not need them.
        ignored: Prefixes in `READ_AT_IMPORT` that are not compared, because the server's processes do not use them.
    """

    listener: int
    executable: Path
    modules: Sequence[str]
    own_modules: Sequence[str] = ()
    ignored: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the values for the command line of `main`."""
        return {
            "listener": self.listener,
            "executable": str(self.executable),
            "modules": list(self.modules),
            "own_modules": list(self.own_modules),
            "ignored": list(self.ignored),
        }


def serve(stages: Sequence[Stage]) -> None:
    """Import the modules of the first stage, fork a process that continues with the next one, and serve requests.

    Returns only if this process cannot be forked safely.
    """
    environment = dict(os.environ)
    find_place_of_name()
    # Imports create many objects that stay. The garbage collector would visit all of them again and again, which takes
    # a quarter of the time (docs/log.md, 2026-11-27). The few that are garbage stay in memory (see `WarmServer.run`)
    gc.disable()
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
        _import_all(stage.own_modules)
        WarmServer(stage, listener, environment).run()
        return


def _import_all(modules: Iterable[str]) -> None:
    """Import modules, but let them believe that Ray is not installed.

    If a process is forked after Ray was imported, Ray cannot connect to its cluster (tried with 2.60). vLLM imports Ray
    if it can, for an executor that this library does not use.
    """
    sys.modules["ray"] = None  # type: ignore[assignment]  # makes `import ray` raise ModuleNotFoundError
    for module in modules:
        importlib.import_module(module)
    del sys.modules["ray"]


class WarmServer:
    """Forks a process for each request, and tells each client how its process ended.

    Args:
        stage: The stage whose modules this process has imported.
        listener: The socket to which clients connect.
        environment: The environment variables as they were before the modules were imported.
    """

    def __init__(self, stage: Stage, listener: socket.socket, environment: Mapping[str, str]) -> None:
        self._stage = stage
        self._listener = listener
        self._environment = environment
        # Variables that libraries have set when they were imported
        self._set_by_imports = {
            name: value for name, value in os.environ.items() if environment.get(name) != value
        }
        # Descriptors of the imported libraries. In a new process, they must not be replaced by a client's open files
        self._occupied = set(open_descriptors()) - {0, 1, 2, listener.fileno()}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        # Two tables by the descriptor (pidfd) of the forked process
        self._clients: dict[int, socket.socket] = {}  # connection to the client of each process
        self._pids: dict[int, int] = {}  # process id of each process

    def run(self) -> None:
        """Serve until this process is ended. Returns only if it cannot be forked safely."""
        # Forked processes share the server's memory until one of them writes to it. The garbage collector writes to
        # each object that it visits, so exclude all present objects from it
        gc.freeze()
        gc.enable()
        problem = _problem_with_forking()
        if problem:
            log.warning("processes start as usual, which takes seconds longer: %s", problem)
            return
        while True:
            # Handle only one event at a time. A handler may close the descriptor of another event, whose number may
            # then be reused
            for key, _ in self._selector.select()[:1]:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is None:
                    self._report_end(key.fd)
                else:
                    # A client sends nothing after its request, so this event means that the client has ended. Kill its
                    # process
                    self._kill(key.data)

    def _accept(self) -> None:
        """Serve one request. The new process never returns from this call."""
        connection, _ = self._listener.accept()
        try:
            request, received = Request.receive(connection)
        except OSError as error:
            log.warning("a request was not completed: %s", error)
            connection.close()
            return
        reason = self._reason_to_refuse(request)
        if reason:
            log.warning("python %s starts as usual: %s", shlex.join(request.arguments)[:200], reason)
            # The client may have ended
            with suppress(OSError):
                connection.sendall(STATUS.pack(REFUSED))
            connection.close()
            close_all(received)
            return
        server_pid = os.getpid()
        # Let the new process wait at this pipe until its client knows that it exists. Otherwise, if the server died in
        # between, the client would start Python itself, and two processes would do the same work
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with(server_pid)
            os.close(writing)
            if not os.read(reading, 1):
                os._exit(1)
            os.close(reading)
            connection.close()
            self._close_in_new_process()
            take_over(request, received)
            self._set_variables_of_imports(request)
            run_and_exit(request.arguments, self._stage.executable)
        close_all([*received, reading])
        process = os.pidfd_open(pid)
        self._pids[process] = pid
        self._clients[process] = connection
        self._selector.register(process, selectors.EVENT_READ)
        try:
            socket.send_fds(connection, [STATUS.pack(ACCEPTED)], [process])
            self._selector.register(connection, selectors.EVENT_READ, data=process)
            os.write(writing, b"1")
        except OSError:
            # The client has ended in the meantime
            self._kill(process)
        os.close(writing)

    def _set_variables_of_imports(self, request: Request) -> None:
        """Set the variables that importing the libraries has set, except those that the client has set to other values."""
        for name, value in self._set_by_imports.items():
            if request.environment.get(name) == self._environment.get(name):
                os.environ[name] = value

    def _reason_to_refuse(self, request: Request) -> str:
        """Return the reason why the client must start Python itself, or "" if a fork can do the same work."""
        compared = tuple(prefix for prefix in READ_AT_IMPORT if prefix not in self._stage.ignored)
        for name in sorted(request.environment.keys() | self._environment.keys()):
            # Also accept the values that the imports have set: a client that was started by a fork of this server has
            # these
            known_values = (self._environment.get(name), os.environ.get(name))
            is_compared = name.startswith(compared) and name not in READ_WHEN_NEEDED
            if is_compared and request.environment.get(name) not in known_values:
                return f"{name} differs from that of the warm server"
        preloaded = os.environ.get("LD_PRELOAD", "").split(":")
        missing = set(request.environment.get("LD_PRELOAD", "").split(":")) - {*preloaded, ""}
        if missing:
            return f"{sorted(missing)} of LD_PRELOAD are not loaded in the warm server"
        collisions = self._occupied & set(request.descriptors)
        if collisions:
            return f"the libraries use its descriptors {sorted(collisions)}"
        if not is_understood(request.arguments):
            return "it has options of the interpreter"
        return reason_against_taking_over(request)

    def _report_end(self, process: int) -> None:
        """Collect a process that has ended, and tell its client the exit code."""
        _, status = os.waitpid(self._pids.pop(process), 0)
        connection = self._clients.pop(process)
        self._selector.unregister(process)
        os.close(process)
        if connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)
        # The client may have ended
        with suppress(OSError):
            connection.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
        connection.close()

    def _kill(self, process: int) -> None:
        """Kill the process of a client that has ended. `_report_end` then cleans up."""
        connection = self._clients[process]
        if connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)
        signal.pidfd_send_signal(process, signal.SIGKILL)

    def _close_in_new_process(self) -> None:
        """Close the server's descriptors in a process that was just forked. Only the server uses them."""
        self._selector.close()
        self._listener.close()
        close_all(self._clients)
        for connection in self._clients.values():
            connection.close()


def _problem_with_forking() -> str:
    """Return the reason why this process cannot be forked safely, or ""."""
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        # Only the thread that called fork exists in the forked process. A lock that another thread held would stay
        # locked forever
        return f"the libraries started {num_threads - 1} threads when they were imported"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"the kernel has no descriptors of processes (pidfd_open: {error.strerror})"
    return ""


def main(arguments: Sequence[str]) -> None:
    """Serve the stages of a JSON list (`Stage.as_json`)."""
    stages = []
    for stage in json.loads(arguments[0]):
        stages.append(Stage(**stage | {"executable": Path(stage["executable"])}))
    serve(stages)


if __name__ == "__main__":
    main(sys.argv[1:])
