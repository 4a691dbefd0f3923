"""The parent's end of a forker: have processes forked, learn how they ended, kill them."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import async_grpo
from async_grpo.rewards.sandbox.fork_server import BOOTSTRAP, MAX_PACKET_BYTES

START_S = 60.0  # for an interpreter to start, on a busy machine
REAP_S = 10.0  # for a killed process to end


class SandboxError(RuntimeError):
    """No sandboxed process could be started here."""


class Nursery:
    """One forker and what it forked; used by one thread. It ends with this process, its children with it."""

    def __init__(self, python: str = sys.executable) -> None:
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
        self.python, self._owner = python, os.getpid()
        self._exit_codes: dict[int, int] = {}

    @property
    def usable(self) -> bool:
        """Whether it lives and belongs to this process: one inherited by fork() would share its socket."""
        return self._owner == os.getpid() and self._process.poll() is None

    def start(self, kind: str, folder: str, descriptors: Sequence[int]) -> int:
        """A new process; see `guest.main`. Returns its id. Raises SandboxError."""
        try:
            request = json.dumps({"kind": kind, "folder": folder}).encode()
            socket.send_fds(self._socket, [request], list(descriptors))
            while "code" in (message := self._message(time.monotonic() + START_S)):
                pass
        except OSError as error:
            self.close()
            raise SandboxError(f"no sandboxed process could be started: {error!r}") from error
        return message["pid"]

    def exit_code(self, pid: int, deadline: float) -> int:
        """As `subprocess` has it: minus the signal, if one ended it. Raises TimeoutError, SandboxError."""
        while pid not in self._exit_codes:
            self._message(deadline)
        return self._exit_codes[pid]

    def kill(self, pid: int) -> None:
        """End it and all that it started, and forget it."""
        try:
            if pid not in self._exit_codes:
                self._socket.send(json.dumps({"kill": pid}).encode())
                self.exit_code(pid, time.monotonic() + REAP_S)
            del self._exit_codes[pid]
        except (OSError, SandboxError):  # the forker is gone, and its children with it
            self.close()

    def close(self) -> None:
        """End the forker. Harmless when repeated."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _message(self, deadline: float) -> dict[str, int]:
        self._socket.settimeout(max(1e-6, deadline - time.monotonic()))
        packet = self._socket.recv(MAX_PACKET_BYTES)
        if not packet:
            raise SandboxError("the process that starts sandboxed processes has ended")
        message: dict[str, int] = json.loads(packet)
        if "code" in message:
            self._exit_codes[message["pid"]] = message["code"]
        return message


_nurseries = threading.local()


def nursery(python: str) -> Nursery:
    """This thread's, a new one if the last has died."""
    current: Nursery | None = getattr(_nurseries, "current", None)
    if current is None or not current.usable or current.python != python:
        current = _nurseries.current = Nursery(python)
    return current
