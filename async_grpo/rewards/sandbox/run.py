"""`Sandbox`: runs code from a model in sandboxed processes, either as a program or as a module with tests."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from async_grpo.errors import ConfigurationError
from async_grpo.options.source_file import PACKAGE_ROOT
from async_grpo.rewards.sandbox.confine import LEVELS, NETWORK_LEVELS
from async_grpo.rewards.sandbox.fork_server import PROGRAM, SOLUTION, TESTS

START_S = 60.0  # maximum time for an interpreter to start, even on a busy machine
END_S = 10.0  # maximum time for a killed process to end
MAX_PART_BYTES = 2**16  # maximum size of a report, or of the output that is read at once
_FOLDER_MODE = 0o755  # mode of a sandboxed process's folder, because another user id must be able to enter it
_MAIN = "import sys; from async_grpo.rewards.sandbox.fork_server import main; main(int(sys.argv[1]))"


class SandboxError(RuntimeError):
    """No sandboxed process could be started here, or its guardian has ended."""


@dataclass(frozen=True)
class SandboxRun:
    """The outcome of a run."""

    ended_well: bool  # the program ended with exit status 0, or all tests passed
    timed_out: bool  # the limit of clock time or processor time was reached
    levels: frozenset[str]  # levels of confinement that were in force
    output: bytes = b""  # standard output of a program that ended in time


@dataclass(frozen=True)
class Sandbox:
    """Runs code within these limits.

    Args:
        cpu_s: Processor time of each process; the kernel counts in whole seconds.
        wall_s: Wall-clock time, which starts when the processes are confined.
        memory_bytes: Address space of each process.
        output_bytes: Size of the standard output. A program that writes more is killed.
        allow_unsandboxed: Whether to run code even if its network access cannot be blocked.
        levels: Levels of confinement to try (see `confine`).
    """

    cpu_s: float = 4.0
    wall_s: float = 8.0
    memory_bytes: int = 2**30
    output_bytes: int = 2**20
    allow_unsandboxed: bool = False
    levels: Sequence[str] = LEVELS

    def run_program(self, code: str, stdin: str) -> SandboxRun:
        """Run the code as `__main__` with this standard input.

        Raises:
            ConfigurationError: This machine cannot block the network access of the code, and `allow_unsandboxed` is
                false.
            SandboxError: No process could be started.
        """
        with ExitStack() as stack:
            # A file and not a pipe, because programs may ask for the size of their input
            source = stack.enter_context(_unnamed_file(stdin))
            output_end, program_end = _entered_socket_pair(stack)
            process = _Process(stack, self, PROGRAM, code, source.fileno(), program_end.fileno())
            program_end.close()
            output = bytearray()
            deadline = time.monotonic() + self.wall_s
            try:
                while True:
                    part = _receive(output_end, deadline)
                    if not part:
                        break
                    output += part
                    if len(output) > self.output_bytes:
                        return SandboxRun(ended_well=False, timed_out=False, levels=process.levels)
                exit_code = process.report("exit_code", deadline)
            except TimeoutError:
                return SandboxRun(ended_well=False, timed_out=True, levels=process.levels)
        return SandboxRun(
            ended_well=exit_code == 0,
            timed_out=exit_code == -signal.SIGKILL,
            levels=process.levels,
            output=bytes(output),
        )

    def run_tests(self, code: str, tests: str) -> SandboxRun:
        """Run the code as a module, and the tests (assertions, or any statements) in a second process.

        Raises:
            ValueError: The tests are invalid and cannot be run with any code.
            ConfigurationError: See `run_program`.
            SandboxError: See `run_program`.
        """
        with ExitStack() as stack:
            solution_end, runner_end = _entered_socket_pair(stack)
            solution = _Process(stack, self, SOLUTION, code, solution_end.fileno())
            runner = _Process(stack, self, TESTS, tests, runner_end.fileno())
            # Close our copies. While they are open, neither process notices that the other process has ended
            solution_end.close()
            runner_end.close()
            deadline = time.monotonic() + self.wall_s
            try:
                verdict = runner.report("verdict", deadline)
                if isinstance(verdict, str):
                    raise ValueError(f"tests that cannot be run: {verdict}: {tests!r:.300}")
                if verdict:
                    return SandboxRun(ended_well=True, timed_out=False, levels=solution.levels)
                exit_codes = [process.report("exit_code", deadline) for process in (runner, solution)]
            except TimeoutError:
                return SandboxRun(ended_well=False, timed_out=True, levels=solution.levels)
        is_killed = -signal.SIGKILL in exit_codes
        return SandboxRun(ended_well=False, timed_out=is_killed, levels=solution.levels)


class _Process:
    """A sandboxed process in an empty folder. The process and all that it started end when the stack is closed.

    Args:
        stack: Ends the process when it is closed.
        sandbox: Limits of the process.
        kind: PROGRAM, SOLUTION or TESTS.
        text: The code to run.
        descriptors: Descriptors that the process gets (see `fork_server`).
    """

    def __init__(self, stack: ExitStack, sandbox: Sandbox, kind: str, text: str, *descriptors: int) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-"))
        os.chmod(folder, _FOLDER_MODE)
        order = asdict(sandbox) | {"kind": kind, "text": text, "folder": folder}
        self._reports: dict[str, Any] = {}
        self._channel, guardian_end = _entered_socket_pair(stack, socket.SOCK_SEQPACKET)
        with guardian_end, _unnamed_file(json.dumps(order)) as file:
            _start([guardian_end.fileno(), file.fileno(), *descriptors])
        stack.callback(self._end)
        levels = self.report("levels", time.monotonic() + START_S)
        if levels is None:
            raise SandboxError(f"a sandboxed process ({kind}) ended before it was confined")
        self.levels: frozenset[str] = frozenset(levels)
        is_off_network = bool(self.levels & NETWORK_LEVELS)
        if not is_off_network and not sandbox.allow_unsandboxed:
            raise ConfigurationError(
                "nothing on this machine keeps tested code off the network: neither user namespaces nor a seccomp "
                "filter (Linux on x86-64 or aarch64) is available; allow_unsandboxed=True runs it anyway"
            )

    def report(self, name: str, deadline: float) -> Any:
        """Wait for the report with this name, and return its value, or None if the process ended without it.

        Raises:
            TimeoutError: The process has neither reported nor ended at the deadline (`time.monotonic`).
            SandboxError: The fork server has ended.
        """
        while name not in self._reports and "exit_code" not in self._reports:
            packet = _receive(self._channel, deadline)
            if not packet:
                raise SandboxError("the process that starts sandboxed processes has ended")
            self._reports |= json.loads(packet)
        return self._reports.get(name)

    def _end(self) -> None:
        # The guardian ends the process when this side of the channel is closed
        self._channel.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + END_S
        while _receive(self._channel, deadline):
            pass


@dataclass(frozen=True)
class _ForkServer:
    """A process that starts sandboxed processes, and the socket that sends requests to it."""

    process: subprocess.Popen[bytes]
    requests: socket.socket


_thread_state = threading.local()  # contains the `fork_server` of each thread


def _start(descriptors: list[int]) -> None:
    """Start a sandboxed process with these descriptors, from this thread's fork server.

    Start the fork server first if it does not run.
    """
    server: _ForkServer | None = getattr(_thread_state, "fork_server", None)
    # `poll` also reports an end if this process is a fork of the one that started the server. A fork needs its own server
    if server is None or server.process.poll() is not None:
        server = _start_fork_server()
        _thread_state.fork_server = server
    try:
        socket.send_fds(server.requests, [b"+"], descriptors)
    except OSError as error:
        raise SandboxError(f"no sandboxed process could be started: {error!r}") from error


def _start_fork_server() -> _ForkServer:
    requests, server_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with server_end:
        process = subprocess.Popen(
            [sys.executable, *"-s -P -S -B -X utf8 -c".split(), _MAIN, str(server_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[server_end.fileno()],
            cwd="/",
            env={
                "PYTHONHASHSEED": "0",  # makes the reward of the same code always the same
                "PYTHONPATH": str(PACKAGE_ROOT),
            },
            start_new_session=True,
        )
    return _ForkServer(process, requests)


def _entered_socket_pair(
    stack: ExitStack, kind: socket.SocketKind = socket.SOCK_STREAM
) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, which are closed when the stack is closed."""
    first, second = socket.socketpair(type=kind)
    stack.enter_context(first)
    stack.enter_context(second)
    return first, second


def _unnamed_file(text: str) -> BinaryIO:
    """Return a file in memory that contains the text, positioned at its beginning."""
    file = os.fdopen(os.memfd_create("sandbox"), "w+b")
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    return file


def _receive(source: socket.socket, deadline: float) -> bytes:
    """Wait for data and return it, or b"" if the other end is closed.

    Raises:
        TimeoutError: Nothing has arrived by the deadline (`time.monotonic`).
    """
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("a sandboxed process did not answer in time")
    source.settimeout(remaining_s)
    return source.recv(MAX_PART_BYTES)
