"""The worker's actor with an engine, and `Engines` that reach it, for tests that start Ray and a real engine."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil
import ray

from async_grpo.cluster.worker_actors import GenerationActor
from async_grpo.protocols import Receipt, WeightPackage
from async_grpo.types import Completion


class ObservedActor(GenerationActor):
    """A `GenerationActor` whose engine can be asked for completions without a run."""

    async def begin(self, prompt: np.ndarray, count: int) -> None:
        """Begin completions, and return once the engine has made two tokens of each on average."""

        async def collect() -> list[Completion]:
            outputs = self._engine.complete(prompt, {member: member for member in range(count)})
            return [output async for output in outputs if isinstance(output, Completion)]

        steps_before = len(self._engine.timeline.steps)  # such as those of the self-test
        self._completions = asyncio.ensure_future(collect())
        while sum(tokens for _, tokens in self._engine.timeline.steps[steps_before:]) < 2 * count:
            assert not self._completions.done(), "the completions ended before anybody could look"
            await asyncio.sleep(0.01)

    async def finish(self) -> list[Completion]:
        """Return the completions."""
        return await self._completions

    async def num_engine_processes(self) -> tuple[int, int]:
        """Return the number of processes that this one spawned, and of those that they spawned.

        Their titles do not tell: in some runs `setproctitle` has no effect in any of them.
        """
        children = _spawned_by(psutil.Process())
        return len(children), sum(len(_spawned_by(child)) for child in children)


def _spawned_by(process: psutil.Process) -> list[psutil.Process]:
    """Return the child processes without the resource tracker of `multiprocessing`."""
    return [child for child in process.children() if "resource_tracker" not in " ".join(child.cmdline())]


class ActorLink:
    """`Engines` of one actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.committed: list[int] = []

    def put(self, chunk: np.ndarray) -> Any:
        return ray.put(chunk)

    def deliver(self, package: WeightPackage) -> Mapping[str, Receipt]:
        return {"g0": ray.get(self.actor.update_weights.remote(package), timeout=60)}

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        self.committed += [package.version] * len(landed)

    def abort(self, error: BaseException) -> None:
        pass
