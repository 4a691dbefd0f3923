"""The parent's side of processes that run environments and tools, and can be killed. The child's side is `host`."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from async_grpo.errors import WorkerLost
from async_grpo.rewards.isolation.adapter_process import CLOSE_S, AdapterProcess


class EnvironmentFailed(RuntimeError):
    """An environment raised an error or did not answer in time, or its process died. Its trajectory fails."""


class EnvironmentProcess(AdapterProcess):
    """One process that runs environments or tools. It serves calls in order, or concurrently if they are async."""

    kind = "environment"
    host = "async_grpo.environments.host:hosted_environment"
    trajectories = 0  # number of trajectories that use this process
    stuck = 0  # number of ended trajectories whose last step still runs in this process

    async def ask(self, call: str, trajectory: int, *arguments: Any, timeout_s: float) -> dict[str, Any]:
        """Return the answer of a trajectory's environment.

        Args:
            call: Name of the call; see `host`.
            trajectory: Number of the trajectory.
            arguments: Arguments of the call.
            timeout_s: Time limit of the call.

        Raises:
            EnvironmentFailed: The environment gave no answer, or answered with an error.
        """
        try:
            request = {"call": call, "trajectory": trajectory, "arguments": arguments}
            answers = await self._exchange("sample", request, 1, timeout_s)
        except WorkerLost as error:
            # The process died, or was ended because a step of another trajectory took too long
            raise EnvironmentFailed(str(error)) from error
        answer = answers[0]
        if answer["status"] != "ok":
            raise EnvironmentFailed(answer["reason"])
        return answer


class EnvironmentProcesses:
    """The processes of one environment.

    A trajectory stays in one process. If a step hangs, the process is ended, and its other trajectories fail as well.

    Args:
        make: Function that makes a process, which starts when it is first needed.
        count: Number of processes.
        timeout_s: Time limit of each call.
    """

    def __init__(self, make: Callable[[], EnvironmentProcess], count: int, timeout_s: float) -> None:
        self._processes = [make() for _ in range(count)]
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the first process. The others start when they are needed.

        Raises:
            ConfigurationError: The environment cannot be made.
        """
        await self._processes[0].start()

    @asynccontextmanager
    async def place(self) -> AsyncIterator["Place"]:
        """Yield a place for one trajectory, in the process with the fewest stuck steps and trajectories."""
        process = min(self._processes, key=lambda process: (process.stuck, process.trajectories))
        place = Place(process, next(self._numbers), self._timeout_s)
        process.trajectories += 1
        try:
            yield place
        finally:
            process.trajectories -= 1
            if place.is_cut_off:
                process.stuck += 1
            # Leave the place in a task. The caller must not wait for this, because a step may still run for a long time
            task = asyncio.create_task(self._leave(process, place))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _leave(self, process: EnvironmentProcess, place: "Place") -> None:
        """Make the process close the trajectory's environment and forget it."""
        if place.is_used and process.is_alive:
            # A failure does not matter, because the environment is not used any more
            with suppress(EnvironmentFailed):
                await place.call("leave")
        if place.is_cut_off:
            process.stuck -= 1

    async def close(self) -> None:
        """End all processes. The environments of ended trajectories first have up to `CLOSE_S` seconds to close."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=CLOSE_S)
        await asyncio.gather(*(process.close() for process in self._processes))


class Place:
    """The place of one trajectory in a process, through which its environment is called.

    Attributes:
        is_used: Whether a call was made.
        is_cut_off: Whether a call was cancelled. The process does not know this, and may still work on the call.
        seconds: Total time of all calls so far.
    """

    def __init__(self, process: EnvironmentProcess, number: int, timeout_s: float) -> None:
        self.is_used = False
        self.is_cut_off = False
        self.seconds = 0.0
        self._process = process
        self._number = number
        self._timeout_s = timeout_s

    async def call(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Return the answer of the environment.

        Raises:
            EnvironmentFailed: The environment raised an error or took too long, or its process died.
        """
        started_at = time.monotonic()
        self.is_used = True
        try:
            return await self._process.ask(name, self._number, *arguments, timeout_s=self._timeout_s)
        except asyncio.CancelledError:
            self.is_cut_off = True
            raise
        finally:
            self.seconds += time.monotonic() - started_at
