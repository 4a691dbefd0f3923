"""The parent's end of environments and tools in killable processes (see `host`)."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from async_grpo.errors import WorkerLost
from async_grpo.rewards.isolation.adapter_process import CLOSE_S, AdapterProcess


class EnvironmentFailed(RuntimeError):
    """An environment raised, did not answer in time, or its process died: the trajectory has failed."""


class EnvironmentProcess(AdapterProcess):
    """One process. It serves calls in order, those of async environments all at once."""

    host = "async_grpo.environments.host:hosted_environment"
    trajectories = stuck = 0  # that play in it; that have ended in the middle of a step which goes on

    async def ask(self, call: str, of: int, *arguments: Any, timeout_s: float) -> dict[str, Any]:
        """What the environment of that number answers. EnvironmentFailed: it does not."""
        try:
            asked = {"call": call, "of": of, "arguments": arguments}
            (answer,) = await self._exchange("sample", asked, 1, timeout_s)
        except WorkerLost as error:  # its process died, or was ended for another trajectory
            raise EnvironmentFailed(str(error)) from error
        if answer["status"] != "ok":
            raise EnvironmentFailed(answer["reason"])
        return answer


class EnvironmentProcesses:
    """So many processes of one environment. A trajectory keeps to one of them; one that hangs costs those beside it."""

    def __init__(self, make: Callable[[], EnvironmentProcess], count: int, timeout_s: float) -> None:
        self._processes = [make() for _ in range(count)]
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the first one; the others when they are needed. ConfigurationError: the environment cannot be made."""
        await self._processes[0].start()

    @asynccontextmanager
    async def place(self) -> AsyncIterator["Place"]:
        """For one trajectory."""
        process = min(self._processes, key=lambda one: (one.stuck, one.trajectories))
        place = Place(process, next(self._numbers), self._timeout_s)
        process.trajectories += 1
        try:
            yield place
        finally:
            process.trajectories -= 1
            process.stuck += place.cut_off
            self._leaving.add(task := asyncio.create_task(self._leave(process, place)))
            task.add_done_callback(self._leaving.discard)

    async def _leave(self, process: EnvironmentProcess, place: "Place") -> None:
        """The environment forgets the trajectory. Nobody waits for that: a long step may come before."""
        if place.used and process.is_alive:
            with suppress(EnvironmentFailed):  # then it is gone anyway
                await place.call("leave")
        process.stuck -= place.cut_off

    async def close(self) -> None:
        """End all processes, once what was left is forgotten in them, or will not be."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=CLOSE_S)
        await asyncio.gather(*(process.close() for process in self._processes))


class Place:
    """One trajectory's environment."""

    def __init__(self, process: EnvironmentProcess, number: int, timeout_s: float) -> None:
        self._process, self._number, self._timeout_s = process, number, timeout_s
        self.used = self.cut_off = False
        self.seconds = 0.0  # that calls took

    async def call(self, name: str, *arguments: Any) -> dict[str, Any]:
        """EnvironmentFailed: it raised, was late, or its process died."""
        begun, self.used = time.monotonic(), True
        try:
            return await self._process.ask(name, self._number, *arguments, timeout_s=self._timeout_s)
        except asyncio.CancelledError:  # the process does not hear of it
            self.cut_off = True
            raise
        finally:
            self.seconds += time.monotonic() - begun
