"""The parent's end of an adapter's process: spawn it, exchange frames with it, kill it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import async_grpo
from async_grpo.errors import WorkerLost
from async_grpo.rewards.framing import HEADER, check_length

REAP_S = 10.0  # for a killed process to end
LAST_WORDS_S = 0.5  # for a process that closed its channel to end by itself
FORWARDED_VARIABLES = "PATH PYTHONPATH LD_LIBRARY_PATH HOME TMPDIR LANG LC_ALL LC_CTYPE TZ".split()
FIXED_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",  # the same text gets the same reward in every process
    "CUDA_VISIBLE_DEVICES": "",  # the accelerators belong to the trainers and the engines
}


class ChildProcess:
    """A running `python -m async_grpo.rewards.child`; it dies with the thread that made it."""

    def __init__(self, adapter: str, max_message_bytes: int) -> None:
        self._adapter = adapter
        self._max_message_bytes = max_message_bytes
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        try:
            with theirs:
                self._process = _spawn(theirs.fileno())
        except BaseException:
            self._channel.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    async def exchange(self, frame: bytes, timeout_s: float) -> dict[str, Any]:
        """Send one frame and return the reply. Raises TimeoutError, and WorkerLost when the process died."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(self._channel, frame)
                (length,) = HEADER.unpack(await self._receive(HEADER.size))
                check_length(length, self._max_message_bytes)
                reply: dict[str, Any] = json.loads(await self._receive(length))
                return reply
        except (ConnectionError, EOFError) as error:
            await self._ends_within(LAST_WORDS_S)  # a kill while it ends would hide what it died of
            await self.stop()
            raise WorkerLost(f"the process of {self._adapter!r} died ({self._cause_of_death()})") from error
        except ValueError as error:  # too long, or no JSON: somebody else writes into the channel
            raise WorkerLost(f"the process of {self._adapter!r} answered nonsense: {error}") from error

    def kill(self) -> None:
        """SIGKILL to the process and all that it started."""
        if self._process.returncode is None:  # not collected yet, so the id still belongs to it
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Kill and collect the process, close the channel. Harmless when repeated."""
        self._channel.close()
        self.kill()
        if not await self._ends_within(REAP_S):
            raise WorkerLost(f"process {self.pid} of {self._adapter!r} survives SIGKILL for {REAP_S:g} s")
        self._process.wait()

    async def _ends_within(self, timeout_s: float) -> bool:
        """Whether the process ends in time; it is not collected yet. Polled: waiting would take a thread."""
        deadline = time.monotonic() + timeout_s
        while not self._has_ended():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.002)
        return True

    def _has_ended(self) -> bool:
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # SIGCHLD is ignored in this program: the kernel has collected it
            return True

    async def _receive(self, num_bytes: int) -> bytes:
        loop, received = asyncio.get_running_loop(), bytearray()
        while len(received) < num_bytes:
            part = await loop.sock_recv(self._channel, num_bytes - len(received))
            if not part:
                raise EOFError
            received += part
        return bytes(received)

    def _cause_of_death(self) -> str:
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _spawn(channel_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "async_grpo.rewards.child", str(channel_fd), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what an adapter prints must not land among the program's own output
        pass_fds=(channel_fd,),
        start_new_session=True,  # a group of its own: killed as a whole, and deaf to the terminal's Ctrl-C
        env=child_environment(),
    )


def child_environment() -> dict[str, str]:
    """The allow-listed variables, one thread per library, and this package on the path."""
    forwarded = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    package_root = str(Path(async_grpo.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_root, forwarded.get("PYTHONPATH")]))
    return forwarded | FIXED_VARIABLES | {"PYTHONPATH": path}
