"""One adapter in a killable process: deadlines are kept by SIGKILL, and a crash is tried once more."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.channel import ChildProcess
from async_grpo.rewards.contract import failure
from async_grpo.rewards.framing import encode
from async_grpo.rewards.source import RewardSource
from async_grpo.types import AdapterResult, RewardStatus

ATTEMPTS = 2  # processes that a sample may crash before it has failed


class AdapterProcess:
    """A verifier worker (see `worker.VerifierWorker`) that runs one adapter of a page in a child process.

        worker = AdapterProcess(RewardSource.from_file("reward_registry.py"), "countdown")
        result = await worker.score({"completion": "...", "nums": [3, 4, 5], "target": 27}, timeout_s=30)

    The process is started by `start`, or by the first `score`, and anew after a time-out, a crash or a
    cancelled call: what an abandoned call may still answer is never read. It sees only an allow-list of
    environment variables.

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
        self._child: ChildProcess | None = None
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
            tuple((token, reward) for token, reward in answer["steps"]),
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

    async def _exchange(self, child: ChildProcess, frame: bytes, timeout_s: float) -> dict[str, Any]:
        try:
            return await child.exchange(frame, timeout_s)
        except BaseException:  # timed out, dead or cancelled: a late answer would be taken for the next one
            self._child = None
            await child.stop()
            raise

    async def _started_child(self) -> ChildProcess:
        if self._closed:
            raise WorkerLost(f"the worker of {self.adapter!r} is closed")
        child = ChildProcess(self.adapter, self._max_message_bytes)
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


def process_maker(
    source: RewardSource, options: Mapping[str, Any] | None = None, **limits: Any
) -> Callable[[str], Awaitable[AdapterProcess]]:
    """`make_worker` of a VerifierPool with child processes; `limits` are the keywords of AdapterProcess."""

    async def make_worker(adapter: str) -> AdapterProcess:
        worker = AdapterProcess(source, adapter, options, **limits)
        await worker.start()
        return worker

    return make_worker
