"""Runs code of a model in sandboxed processes: once as a program, or as a module that tests are run against.

Each run is a new process, in an empty temporary folder, that confines itself (see `confine`) before it looks at the
code. Expected outputs and tests never enter the process that runs the code.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.sandbox.confine import LEVELS, NETWORK_LEVELS
from async_grpo.rewards.sandbox.fork_server import PROGRAM, SOLUTION, TESTS
from async_grpo.rewards.sandbox.sandboxed_process import SandboxedProcess, read_part, unnamed_file
from async_grpo.rewards.sandbox.unit_test_runner import LOST, PASSED, UNUSABLE

EXIT_WAIT_S = 1.0  # for a process that closed its channel to end by itself
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
            source = stack.enter_context(unnamed_file(stdin))  # a file: programs ask for its size
            reader, writer = map(stack.enter_context, _pipe())
            process = self._start(stack, PROGRAM, code, source.fileno(), writer.fileno())
            writer.close()
            output, deadline = bytearray(), time.monotonic() + self.wall_s
            try:
                while part := read_part(reader, deadline, 2**16):
                    output += part
                    if len(output) > self.output_bytes:
                        return Run(False, False, process.levels)
                exit_code = process.report("exit_code", deadline)
            except TimeoutError:
                return Run(False, True, process.levels)
        return Run(exit_code == 0, exit_code in _OUT_OF_TIME, process.levels, bytes(output))

    def run_tests(self, code: str, tests: str) -> Run:
        """Run the code as a module, and the tests (assertions, or any statements) against it in a second process.

        Raises:
            ValueError: the tests cannot be run, whatever the code.
            ConfigurationError, SandboxError: as `run_program`.
        """
        with ExitStack() as stack:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            solution = self._start(stack, SOLUTION, code, ours.fileno())
            runner = self._start(stack, TESTS, tests, theirs.fileno())
            ours.close()  # so that each side learns of the other's end
            theirs.close()
            deadline = time.monotonic() + self.wall_s
            try:
                verdict = runner.report("verdict", deadline) or ""
                if verdict.startswith(UNUSABLE):
                    raise ValueError(
                        f"tests that cannot be run: {verdict.partition(': ')[2]}: {tests!r:.300}"
                    )
                if verdict == LOST:
                    exit_code = solution.report("exit_code", time.monotonic() + EXIT_WAIT_S)
                else:
                    exit_code = None if verdict else runner.report("exit_code", deadline)
            except TimeoutError:
                return Run(False, True, solution.levels)
        return Run(verdict == PASSED, exit_code in _OUT_OF_TIME, solution.levels)

    def _start(self, stack: ExitStack, kind: str, text: str, *descriptors: int) -> SandboxedProcess:
        """A process that ends with the stack."""
        order = {
            "kind": kind, "text": text, "cpu_s": self.cpu_s, "memory_bytes": self.memory_bytes,
            "levels": list(self.levels), "allow_unsandboxed": self.allow_unsandboxed,
        }  # fmt: skip
        process = stack.enter_context(SandboxedProcess(order, descriptors, self.python))
        if not (process.levels & NETWORK_LEVELS or self.allow_unsandboxed):
            raise ConfigurationError(
                "nothing on this machine keeps tested code off the network: neither user namespaces nor a seccomp "
                "filter (Linux on x86-64 or aarch64) can be had; allow_unsandboxed=True runs it all the same"
            )
        return process


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    reader, writer = os.pipe()
    return open(reader, "rb", buffering=0), open(writer, "wb", buffering=0)
