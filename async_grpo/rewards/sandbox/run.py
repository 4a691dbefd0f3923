"""Runs code of a model in sandboxed processes: once as a program, or as a module that tests are run against.

Each run is a new process, in an empty temporary folder, that confines itself (see `confine`) before it looks at the
code. Expected outputs and tests never enter the process that runs the code.
"""

import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Self

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.sandbox.confine import LEVELS, NETWORK_LEVELS
from async_grpo.rewards.sandbox.fork_client import START_S, SandboxError, nursery
from async_grpo.rewards.sandbox.sandbox_child import EXAMINER, PROGRAM, WITNESS
from async_grpo.rewards.sandbox.unit_test_runner import LOST, PASSED, UNUSABLE

EXIT_WAIT_S = 1.0  # for a process that closed its channel to end by itself
MAX_REPORT_BYTES = 4096
_OUT_OF_TIME = (-signal.SIGXCPU, -signal.SIGKILL)  # the kernel's soft and hard limit of processor time


@dataclass(frozen=True)
class Run:
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
        python: the interpreter. Only its standard library can be imported.
    """

    cpu_s: float = 4.0
    wall_s: float = 8.0
    memory_bytes: int = 2**30
    output_bytes: int = 2**20
    allow_unsandboxed: bool = False
    levels: Sequence[str] = LEVELS
    python: str = sys.executable

    def run_program(self, code: str, stdin: str) -> Run:
        """Run the code as `__main__` with that standard input.

        Raises:
            ConfigurationError: nothing here keeps it off the network, and that was not allowed.
            SandboxError: no process could be started.
        """
        with ExitStack() as stack:
            source = stack.enter_context(_unnamed_file(stdin))  # a file: programs ask for its size
            output = stack.enter_context(_Pipe())
            with output.writer:
                ends = [source.fileno(), output.writer.fileno()]
                guest = stack.enter_context(_Guest(self, PROGRAM, code, ends))
            deadline = time.monotonic() + self.wall_s
            try:
                written = _read(output.reader, deadline, self.output_bytes + 1)
                if len(written) > self.output_bytes:
                    return Run(False, False, guest.levels)
                exit_code = guest.exit_code(deadline)
            except TimeoutError:
                return Run(False, True, guest.levels)
        return Run(exit_code == 0, exit_code in _OUT_OF_TIME, guest.levels, written)

    def run_tests(self, code: str, tests: str) -> Run:
        """Run the code as a module, and the tests (assertions, or any statements) against it in a second process.

        Raises:
            ValueError: the tests cannot be run, whatever the code.
            ConfigurationError, SandboxError: as `run_program`.
        """
        with ExitStack() as stack:
            ends = socket.socketpair()
            with ends[0], ends[1]:
                witness = stack.enter_context(_Guest(self, WITNESS, code, [ends[0].fileno()]))
                examiner = stack.enter_context(_Guest(self, EXAMINER, tests, [ends[1].fileno()]))
            deadline = time.monotonic() + self.wall_s
            try:
                verdict = _read(examiner.report, deadline, MAX_REPORT_BYTES).decode(errors="replace")
                if verdict.startswith(UNUSABLE):
                    raise ValueError(
                        f"tests that cannot be run: {verdict.partition(': ')[2]}: {tests!r:.300}"
                    )
                late = verdict == LOST and witness.exit_code(time.monotonic() + EXIT_WAIT_S) in _OUT_OF_TIME
                late |= not verdict and examiner.exit_code(deadline) in _OUT_OF_TIME
            except TimeoutError:
                return Run(False, True, witness.levels)
        return Run(verdict == PASSED, late, witness.levels)


class _Guest:
    """One sandboxed process: confined when entered, dead when left."""

    levels: frozenset[str]
    report: BinaryIO

    def __init__(self, sandbox: Sandbox, kind: str, text: str, descriptors: Sequence[int]) -> None:
        self._sandbox, self._kind, self._descriptors = sandbox, kind, descriptors
        self._order = json.dumps({
            "text": text, "cpu_s": sandbox.cpu_s, "memory_bytes": sandbox.memory_bytes,
            "levels": list(sandbox.levels), "allow_unsandboxed": sandbox.allow_unsandboxed,
        })  # fmt: skip

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-"))
            os.chmod(folder, 0o755)  # it stays empty, but a user of its own must be able to look
            pipe = stack.enter_context(_Pipe())
            self.report = pipe.reader
            self._nursery = nursery(self._sandbox.python)
            with pipe.writer, _unnamed_file(self._order) as order:
                passed = [order.fileno(), pipe.writer.fileno(), *self._descriptors]
                self._pid = self._nursery.start(self._kind, folder, passed)
            stack.callback(self._nursery.kill, self._pid)
            self.levels = self._confined()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stack.close()

    def exit_code(self, deadline: float) -> int:
        """As `subprocess` has it. Raises TimeoutError."""
        return self._nursery.exit_code(self._pid, deadline)

    def _confined(self) -> frozenset[str]:
        try:
            line = _read(self.report, time.monotonic() + START_S, MAX_REPORT_BYTES, end=b"\n")
            levels: frozenset[str] = frozenset(json.loads(line))
        except (TimeoutError, ValueError) as error:
            raise SandboxError(f"a sandboxed {self._kind} ended before it was confined") from error
        if not (levels & NETWORK_LEVELS or self._sandbox.allow_unsandboxed):
            raise ConfigurationError(
                "nothing on this machine keeps tested code off the network: neither user namespaces nor a seccomp "
                "filter (Linux on x86-64 or aarch64) can be had; allow_unsandboxed=True runs it all the same"
            )
        return levels


class _Pipe:
    """Both ends of a pipe as files, closed when left."""

    def __enter__(self) -> Self:
        reader, writer = os.pipe()
        self.reader, self.writer = open(reader, "rb", buffering=0), open(writer, "wb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.writer.close()


def _unnamed_file(text: str) -> BinaryIO:
    file = os.fdopen(os.memfd_create("sandbox"), "w+b")
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    return file


def _read(file: Any, deadline: float, max_bytes: int, end: bytes = b"") -> bytes:
    """What comes until the end (or the byte `end`, or `max_bytes`). Raises TimeoutError."""
    received = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        while len(received) < max_bytes and not (end and received.endswith(end)):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not selector.select(remaining_s):
                raise TimeoutError
            part = os.read(file.fileno(), 1 if end else min(2**16, max_bytes - len(received)))
            if not part:
                break
            received += part
    return bytes(received)
