"""The owner's end of sandboxed processes: start one, learn what it reports and how it ended, end it."""

import json
import os
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self

import async_grpo
from async_grpo.rewards.sandbox.fork_server import BOOTSTRAP

START_S = 60.0  # for an interpreter to start, on a busy machine
END_S = 10.0  # for a killed process to end
MAX_REPORT_BYTES = 2**16


class SandboxError(RuntimeError):
    """No sandboxed process could be started here, or its guardian has ended."""


class SandboxedProcess:
    """One process, confined when entered; ended, with all that it started, when left.

    Args:
        order: see `fork_server`; it travels in a file without a name, past the fork server's memory.
        descriptors: that the process gets, beside the order and the channel for its reports.
        python: the interpreter.

    `levels` are those of `confine` that stand.
    """

    levels: frozenset[str]

    def __init__(self, order: Mapping[str, Any], descriptors: Sequence[int], python: str) -> None:
        self._order, self._descriptors, self._python = order, descriptors, python
        self._reports: dict[str, Any] = {}
        self._received = bytearray()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-"))
            os.chmod(folder, 0o755)  # it stays empty, but a user of its own must be able to look
            self._channel, theirs = map(stack.enter_context, socket.socketpair())
            with theirs, unnamed_file(json.dumps({**self._order, "folder": folder})) as order:
                _fork_server(self._python).start([theirs.fileno(), order.fileno(), *self._descriptors])
            stack.callback(self._end)
            self.levels = self._confined()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def report(self, name: str, deadline: float) -> Any:
        """What the process reports under that name; None if it has ended without.

        `verdict`: of tests. `exit_code`: as `subprocess` has it.

        Raises:
            TimeoutError: not before the deadline, a time of `time.monotonic`.
            SandboxError: its guardian has ended.
        """
        while name not in self._reports and "exit_code" not in self._reports:
            part = read_part(self._channel, deadline, MAX_REPORT_BYTES)
            if not part:
                raise SandboxError("the process that starts sandboxed processes has ended")
            *lines, self._received = (self._received + part).split(b"\n")
            for line in lines:
                self._reports |= json.loads(line)
        return self._reports.get(name)

    def _confined(self) -> frozenset[str]:
        try:
            levels = self.report("levels", time.monotonic() + START_S)
        except TimeoutError:
            levels = None
        if levels is None:
            raise SandboxError(f"a sandboxed process ({self._order['kind']}) ended before it was confined")
        return frozenset(levels)

    def _end(self) -> None:
        self._channel.shutdown(socket.SHUT_WR)  # its guardian takes that for the order to end it
        deadline = time.monotonic() + END_S
        try:
            while read_part(self._channel, deadline, MAX_REPORT_BYTES):
                pass
        except TimeoutError:
            raise SandboxError(f"a sandboxed process survives SIGKILL by more than {END_S:g} s") from None


class _ForkServer:
    """See `fork_server`. Used by one thread. It ends with this process, and what it forked with it."""

    def __init__(self, python: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package_root = str(Path(async_grpo.__file__).parents[1])
        with theirs:
            self._process = subprocess.Popen(
                [python, *"-s -P -S -B -X utf8 -c".split(), BOOTSTRAP, package_root, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={"PYTHONHASHSEED": "0"},  # the same text gets the same reward
                start_new_session=True,
            )
        self._python, self._owner = python, os.getpid()

    def serves(self, python: str) -> bool:
        """Whether it lives and belongs to this process: one inherited by fork() would share its socket."""
        return (self._python, self._owner) == (python, os.getpid()) and self._process.poll() is None

    def start(self, descriptors: Sequence[int]) -> None:
        """Start a process with these descriptors. Raises SandboxError."""
        try:
            socket.send_fds(self._socket, [b"+"], list(descriptors))
        except OSError as error:
            raise SandboxError(f"no sandboxed process could be started: {error!r}") from error


_of_thread = threading.local()


def _fork_server(python: str) -> _ForkServer:
    """This thread's, a new one if the last has died."""
    current: _ForkServer | None = getattr(_of_thread, "server", None)
    if current is None or not current.serves(python):
        current = _of_thread.server = _ForkServer(python)
    return current


def unnamed_file(text: str) -> BinaryIO:
    """A file in memory that holds the text, read from its beginning."""
    file = os.fdopen(os.memfd_create("sandbox"), "w+b")
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    return file


def read_part(file: Any, deadline: float, max_bytes: int) -> bytes:
    """What has come, at most so many bytes; nothing at the end. Raises TimeoutError if nothing comes in time."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0 or not select.select([file], [], [], remaining_s)[0]:
        raise TimeoutError
    return os.read(file.fileno(), max_bytes)
