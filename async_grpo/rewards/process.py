"""One adapter in a killable process: deadlines are kept by SIGKILL, a crash costs one sample at most two attempts."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import async_grpo
from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.contract import failure
from async_grpo.rewards.framing import HEADER, check_length, encode
from async_grpo.rewards.source import RewardSource
from async_grpo.types import AdapterResult, RewardStatus

ATTEMPTS = 2
REAP_S = 10.0
FORWARDED_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
FIXED_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",  # the same text gets the same reward in every process
}


class AdapterProcess:
    """A verifier worker (see `lane.VerifierWorker`) that runs one adapter of a page of rewards in a child process.

        worker = AdapterProcess(RewardSource.from_file("reward_registry.py"), "countdown")
        result = await worker.score({"completion": "...", "nums": [3, 4, 5], "target": 27}, timeout_s=30)

    The process is started by `start`, or by the first `score`, and anew after a time-out, a crash or a cancelled call:
    what an abandoned call may still answer is never read. It sees only an allow-list of environment variables.

    Args:
        options: keyword options; the adapter receives those that it names.
        memory_limit_bytes: address space of the process (RLIMIT_AS); None for no limit.
        start_timeout_s: for starting, importing the page and warming up; not part of any sample's time-out.
        max_message_bytes: of one sample or one answer.
    """

    def __init__(
        self,
        source: RewardSource,
        adapter: str,
        options: Mapping[str, Any] | None = None,
        *,
        memory_limit_bytes: int | None = 8 * 2**30,
        start_timeout_s: float = 60.0,
        max_message_bytes: int = 16 * 2**20,
    ) -> None:
        self.adapter = adapter
        self._start_timeout_s = start_timeout_s
        self._max_message_bytes = max_message_bytes
        self._greeting = {
            "source": asdict(source),
            "adapter": adapter,
            "options": dict(options or {}),
            "memory_limit_bytes": memory_limit_bytes,
            "max_message_bytes": max_message_bytes,
        }
        self._child: _Child | None = None
        self._closed = False
        self._one_at_a_time = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process, None while there is none."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Start the process now, so that no sample waits for it.

        Raises:
            ConfigurationError: the page or the adapter in it cannot be used.
            WorkerLost: the process died or was not ready in time.
        """
        async with self._one_at_a_time:
            if self._child is None:
                self._child = await self._started_child()

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """Score one sample. A crash is tried once more, with what is left of the time-out.

        Never raises for what the adapter or its process does; WorkerLost once the worker is closed.
        """
        async with self._one_at_a_time:
            started = time.monotonic()
            answer, attempts = await self._answer(sample, timeout_s)
        return AdapterResult(
            self.adapter,
            RewardStatus(answer["status"]),
            answer["reward"],
            answer["extra"],
            answer["reason"],
            attempts,
            latency_s=time.monotonic() - started,
        )

    async def close(self) -> None:
        """Kill the process, for good; a call in flight raises WorkerLost."""
        self._closed = True
        if self._child is not None:
            self._child.kill()  # a call in flight sees the end of the channel and lets go of the lock
        async with self._one_at_a_time:
            child, self._child = self._child, None
            if child is not None:
                await child.stop()

    async def _answer(self, sample: dict[str, Any], timeout_s: float) -> tuple[dict[str, Any], int]:
        try:
            frame = encode({"sample": sample}, self._max_message_bytes)
        except (TypeError, ValueError) as error:
            return failure(f"the sample cannot be sent: {error}"), 1
        remaining_s, reason = timeout_s, ""
        for attempt in range(1, ATTEMPTS + 1):
            started = time.monotonic()
            try:
                self._child = self._child or await self._started_child()
                started = time.monotonic()
                return await self._exchange(self._child, frame, remaining_s), attempt
            except TimeoutError:
                return failure(f"no answer within {timeout_s:g} s", RewardStatus.TIMED_OUT.value), attempt
            except WorkerLost as error:
                if self._closed:
                    raise
                reason = str(error)
            except ConfigurationError as error:
                return failure(str(error)), attempt
            remaining_s -= time.monotonic() - started
        return failure(reason), ATTEMPTS

    async def _exchange(self, child: "_Child", frame: bytes, timeout_s: float) -> dict[str, Any]:
        try:
            return await child.exchange(frame, timeout_s)
        except BaseException:  # timed out, dead or cancelled: an answer that still comes would be taken for the next
            self._child = None
            await child.stop()
            raise

    async def _started_child(self) -> "_Child":
        if self._closed:
            raise WorkerLost(f"the worker of {self.adapter!r} is closed")
        child = _Child(self.adapter, self._max_message_bytes)
        try:
            reply = await child.exchange(encode(self._greeting, sys.maxsize), self._start_timeout_s)
            if "error" in reply:
                raise ConfigurationError(f"reward function {self.adapter!r} cannot start: {reply['error']}")
        except TimeoutError as error:
            await child.stop()
            message = f"the process of {self.adapter!r} was not ready within {self._start_timeout_s:g} s"
            raise WorkerLost(message) from error
        except BaseException:
            await child.stop()
            raise
        return child


class _Child:
    """One process and our end of its channel. Start it in the event loop's thread: it dies with that thread."""

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
                return json.loads(await self._receive(length))
        except (ConnectionError, EOFError) as error:
            await self.stop()
            raise WorkerLost(f"the process of {self._adapter!r} died ({self._cause_of_death()})") from error
        except ValueError as error:  # too long, or no JSON: somebody else writes into the channel
            raise WorkerLost(f"the process of {self._adapter!r} answered nonsense: {error}") from error

    def kill(self) -> None:
        """SIGKILL to the process and all that it started."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # not yet collected, so the id is still its own

    async def stop(self) -> None:
        """Kill and collect the process, close the channel. Harmless when repeated."""
        self._channel.close()
        self.kill()
        deadline = time.monotonic() + REAP_S
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                raise WorkerLost(f"process {self._process.pid} of {self._adapter!r} survives SIGKILL for {REAP_S:g} s")
            await asyncio.sleep(0.002)

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
        start_new_session=True,  # a process group of its own: killed as a whole, and deaf to the terminal's Ctrl-C
        env=child_environment(),
    )


def child_environment() -> dict[str, str]:
    """The allow-listed variables, one thread per library, and this package on the path."""
    forwarded = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    package_root = str(Path(async_grpo.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_root, forwarded.get("PYTHONPATH")]))
    return forwarded | FIXED_VARIABLES | {"PYTHONPATH": path}


def process_maker(
    source: RewardSource, options: Mapping[str, Any] | None = None, **limits: Any
) -> Callable[[str], Awaitable[AdapterProcess]]:
    """`make_worker` of a VerifierPool whose adapters run in child processes; `limits` are those of AdapterProcess."""

    async def make_worker(adapter: str) -> AdapterProcess:
        worker = AdapterProcess(source, adapter, options, **limits)
        await worker.start()
        return worker

    return make_worker
