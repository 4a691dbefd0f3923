"""Runs code of a model in sandboxed processes: as a program, or as a module that tests are run against."""

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

START_S = 60.0  # for an interpreter to start, on a busy machine
END_S = 10.0  # for a killed process to end
MAX_PART_BYTES = 2**16  # of output or of a report
_MAIN = "import sys; from async_grpo.rewards.sandbox.fork_server import main; main(int(sys.argv[1]))"


class SandboxError(RuntimeError):
    """No sandboxed process could be started here, or its guardian has ended."""


@dataclass(frozen=True)
class SandboxRun:
    """What came of it: `ended_well` is exit status 0 of a program, or that all tests held."""

    ended_well: bool
    timed_out: bool
    levels: frozenset[str]
    output: bytes = b""


@dataclass(frozen=True)
class Sandbox:
    """The limits of one run.

    Args:
        cpu_s: processor time of each process; the kernel counts in whole seconds.
        wall_s: time on the clock, from when the processes are confined.
        memory_bytes: address space of each process.
        output_bytes: of standard output; a program that writes more is killed.
        allow_unsandboxed: run code even where nothing keeps it off the network.
        levels: those that are tried, see `confine`.
    """

    cpu_s: float = 4.0
    wall_s: float = 8.0
    memory_bytes: int = 2**30
    output_bytes: int = 2**20
    allow_unsandboxed: bool = False
    levels: Sequence[str] = LEVELS

    def run_program(self, code: str, stdin: str) -> SandboxRun:
        """Run the code as `__main__` with that standard input.

        ConfigurationError: nothing here keeps it off the network, and that was not allowed.
        SandboxError: no process could be started.
        """
        with ExitStack() as stack:
            source = stack.enter_context(_unnamed_file(stdin))  # a file: programs ask for its size
            ours, theirs = map(stack.enter_context, socket.socketpair())
            process = _Process(stack, self, PROGRAM, code, source.fileno(), theirs.fileno())
            theirs.close()
            output, deadline = bytearray(), time.monotonic() + self.wall_s
            try:
                while part := _receive(ours, deadline):
                    output += part
                    if len(output) > self.output_bytes:
                        return SandboxRun(False, False, process.levels)
                exit_code = process.report("exit_code", deadline)
            except TimeoutError:
                return SandboxRun(False, True, process.levels)
        return SandboxRun(exit_code == 0, exit_code == -signal.SIGKILL, process.levels, bytes(output))

    def run_tests(self, code: str, tests: str) -> SandboxRun:
        """Run the code as a module, and the tests (assertions, or any statements) in a second process.

        ValueError: the tests cannot be run, whatever the code.
        ConfigurationError, SandboxError: as `run_program`.
        """
        with ExitStack() as stack:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            solution = _Process(stack, self, SOLUTION, code, ours.fileno())
            runner = _Process(stack, self, TESTS, tests, theirs.fileno())
            ours.close()  # so that each side learns of the other's end
            theirs.close()
            deadline = time.monotonic() + self.wall_s
            try:
                verdict = runner.report("verdict", deadline)
                if isinstance(verdict, str):
                    raise ValueError(f"tests that cannot be run: {verdict}: {tests!r:.300}")
                if verdict:
                    return SandboxRun(True, False, solution.levels)
                ends = [process.report("exit_code", deadline) for process in (runner, solution)]
            except TimeoutError:
                return SandboxRun(False, True, solution.levels)
        return SandboxRun(False, -signal.SIGKILL in ends, solution.levels)


class _Process:
    """A sandboxed process in a folder of its own. It ends with the stack, and so does all that it started."""

    def __init__(self, stack: ExitStack, sandbox: Sandbox, kind: str, text: str, *descriptors: int) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-"))
        os.chmod(folder, 0o755)  # it stays empty, but a user of its own must be able to look
        order = asdict(sandbox) | {"kind": kind, "text": text, "folder": folder}
        self._reports: dict[str, Any] = {}
        self._channel, theirs = map(stack.enter_context, socket.socketpair(type=socket.SOCK_SEQPACKET))
        with theirs, _unnamed_file(json.dumps(order)) as file:
            _start([theirs.fileno(), file.fileno(), *descriptors])
        stack.callback(self._end)
        levels = self.report("levels", time.monotonic() + START_S)
        if levels is None:
            raise SandboxError(f"a sandboxed process ({kind}) ended before it was confined")
        self.levels: frozenset[str] = frozenset(levels)
        if not (self.levels & NETWORK_LEVELS or sandbox.allow_unsandboxed):
            raise ConfigurationError(
                "nothing on this machine keeps tested code off the network: neither user namespaces nor a seccomp "
                "filter (Linux on x86-64 or aarch64) can be had; allow_unsandboxed=True runs it all the same"
            )

    def report(self, name: str, deadline: float) -> Any:
        """What the process reports under that name; None if it ended without. TimeoutError: not by then."""
        while name not in self._reports and "exit_code" not in self._reports:
            packet = _receive(self._channel, deadline)
            if not packet:
                raise SandboxError("the process that starts sandboxed processes has ended")
            self._reports |= json.loads(packet)
        return self._reports.get(name)

    def _end(self) -> None:
        self._channel.shutdown(socket.SHUT_WR)  # its guardian takes that for the order to end it
        deadline = time.monotonic() + END_S
        while _receive(self._channel, deadline):
            pass


_of_thread = threading.local()


def _start(descriptors: list[int]) -> None:
    """Start a process with these descriptors, by this thread's fork server or, if that has died, a new one."""
    last: tuple[Any, Any] = getattr(_of_thread, "server", (None, None))
    server, requests = last
    if server is None or server.poll() is not None:  # also after a fork(): no child of this process
        requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        package_root = str(PACKAGE_ROOT)
        with theirs:
            server = subprocess.Popen(
                [sys.executable, *"-s -P -S -B -X utf8 -c".split(), _MAIN, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={"PYTHONHASHSEED": "0", "PYTHONPATH": package_root},  # the same text gets the same reward
                start_new_session=True,
            )
        _of_thread.server = server, requests
    try:
        socket.send_fds(requests, [b"+"], descriptors)
    except OSError as error:
        raise SandboxError(f"no sandboxed process could be started: {error!r}") from error


def _unnamed_file(text: str) -> BinaryIO:
    """A file in memory that holds the text, read from its beginning."""
    file = os.fdopen(os.memfd_create("sandbox"), "w+b")
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    return file


def _receive(source: socket.socket, deadline: float) -> bytes:
    """What has come; nothing at the end. Raises TimeoutError if nothing comes by then (`time.monotonic`)."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("a sandboxed process did not answer in time")
    source.settimeout(remaining_s)
    return source.recv(MAX_PART_BYTES)
