"""The parent's end of an adapter's process: spawn it, ask it several things at a time, end it."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import async_grpo
from async_grpo.errors import WorkerLost
from async_grpo.processes.process_tree import TOO_MANY
from async_grpo.rewards.isolation.framing import Frames, encode, frame

REAP_S = 10.0  # for a killed process to end
EXIT_WAIT_S = 0.5  # for a process that closed its channel to end by itself
GREETING = 0  # id of the first exchange
FORWARDED_VARIABLES = "PATH PYTHONPATH LD_LIBRARY_PATH HOME TMPDIR LANG LC_ALL LC_CTYPE TZ".split()
FIXED_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",  # the same text gets the same reward in every process
    "CUDA_VISIBLE_DEVICES": "",  # the accelerators belong to the trainers and the engines
}

Reply = asyncio.Future[dict[str, Any]]


class ProcessDied(WorkerLost):
    """A process ended or spoiled its channel by itself. Which of the samples in flight made it do so is unknown."""


class ChildProcess(asyncio.Protocol):
    """A running `python -m async_grpo.rewards.isolation.child`; it dies with the thread that made it."""

    def __init__(self, adapter: str, max_message_bytes: int, max_processes: int) -> None:
        self.lost = False  # it will answer nothing any more
        self._adapter, self._max_processes = adapter, max_processes
        self._frames = Frames(max_message_bytes)
        self._ids = itertools.count(GREETING + 1)
        self._replies: dict[int, Reply] = {}
        self._nonsense = ""
        self._transport: asyncio.Transport | None = None
        self._burial: asyncio.Task[None] | None = None
        self._channel, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _spawn(theirs.fileno(), max_processes)
        except BaseException:
            self._channel.close()
            raise

    @property
    def pid(self) -> int:
        """Of the guardian (see `process_tree`): all others end with it."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Whether nothing is asked of it."""
        return not self._replies

    async def greet(self, greeting: dict[str, Any]) -> Reply:
        """Open the channel with a first message."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._channel)
        return self._send(GREETING, encode(greeting, sys.maxsize))

    def ask(self, what: str, bodies: Sequence[bytes]) -> tuple[int, Reply]:
        """Send `samples` or a `group`, each of them as JSON. Returns the request's id, and the reply to come.

        The reply raises ProcessDied, or WorkerLost if somebody called `end`.
        """
        request_id = next(self._ids)
        body = b'{"id":%d,"%b":[%b]}' % (request_id, what.encode(), b",".join(bodies))
        return request_id, self._send(request_id, frame(body))

    def is_asked(self, request_id: int) -> bool:
        """Whether the request has not been replied to."""
        return request_id in self._replies

    def cancel(self, request_id: int) -> Reply:
        """Ask an async reward to let go of a request; returns its reply, which comes when it has."""
        return self._send(request_id, encode({"cancel": request_id}, sys.maxsize))

    async def dismiss(self, timeout_s: float) -> None:
        """Let the process end in order, if it does so in time; then `end` it."""
        if self._transport is not None and not self.lost:
            self._transport.write_eof()
            await self._ends_within(timeout_s)

    async def end(self, reason: str) -> None:
        """Kill the process; the replies to come raise WorkerLost."""
        self._fail(WorkerLost(reason))
        await self._stop()
        if self._burial is not None:
            await asyncio.wait((self._burial,))

    def kill(self) -> None:
        """Have the process killed, and all that it started."""
        if self._process.returncode is None:  # not collected yet, so the id still belongs to it
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)  # the adapter may have stopped its guardian

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                reply = self._replies.pop(message.get("id", GREETING))
                if not reply.done():  # else its caller has just given up
                    reply.set_result(message)
        except (ValueError, TypeError, LookupError) as error:
            self._nonsense = f"{type(error).__name__}: {error}"  # somebody else writes into the channel
            self._transport.abort()  # type: ignore[union-attr]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost:
            self.lost = True
            self._burial = asyncio.get_running_loop().create_task(self._bury())

    def _send(self, request_id: int, message: bytes) -> Reply:
        reply: Reply = asyncio.get_running_loop().create_future()
        self._replies[request_id] = reply
        if self._transport is not None and not self.lost:
            self._transport.write(message)
        return reply

    async def _bury(self) -> None:
        error: WorkerLost
        try:
            if not self._nonsense:
                await self._ends_within(EXIT_WAIT_S)  # a kill while it ends would hide what it died of
            await self._stop()
            error = ProcessDied(f"the process of {self._adapter!r} {self._fate()}")
        except WorkerLost as survived:
            error = survived
        self._fail(error)

    def _fail(self, error: WorkerLost) -> None:
        self.lost = True
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(error)
                reply.exception()  # who still waits gets it all the same; nobody need wait

    async def _stop(self) -> None:
        """Kill and collect the process, close the channel. Harmless when repeated."""
        if self._transport is None:
            self._channel.close()
        else:
            self._transport.abort()
        self.kill()
        if not await self._ends_within(REAP_S):
            os.kill(
                self.pid, signal.SIGKILL
            )  # whatever ails the guardian, the adapter's process dies with it
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

    def _fate(self) -> str:
        if self._nonsense:
            return f"answered nonsense: {self._nonsense}"
        code = self._process.returncode
        if code == TOO_MANY:
            return f"was ended, for it had started more than {self._max_processes} processes"
        return f"died ({f'signal {signal.Signals(-code).name}' if code < 0 else f'exit status {code}'})"


def _spawn(channel_fd: int, max_processes: int) -> subprocess.Popen[bytes]:
    arguments = [channel_fd, os.getpid(), max_processes]
    return subprocess.Popen(
        [sys.executable, "-m", "async_grpo.rewards.isolation.child", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what an adapter prints must not land among the program's own output
        pass_fds=(channel_fd,),
        start_new_session=True,  # deaf to the terminal's Ctrl-C
        env=child_environment(),
    )


def child_environment() -> dict[str, str]:
    """The allow-listed variables, one thread per library, and this package on the path."""
    forwarded = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    package_root = str(Path(async_grpo.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_root, forwarded.get("PYTHONPATH")]))
    return forwarded | FIXED_VARIABLES | {"PYTHONPATH": path}
