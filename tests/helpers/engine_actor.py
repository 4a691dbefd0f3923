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
        """Begin completions, and return once the engine has made tokens."""

        async def collect() -> list[Completion]:
            outputs = self._engine.complete(prompt, {member: member for member in range(count)})
            return [output async for output in outputs if isinstance(output, Completion)]

        self._completions = asyncio.ensure_future(collect())
        while not self._engine.timeline.steps:
            await asyncio.sleep(0.01)

    async def finish(self) -> list[Completion]:
        """Return the completions."""
        return await self._completions

    async def process_titles(self) -> list[str]:
        """Return the titles of this process's descendants."""
        return [" ".join(psutil.Process(process_id).cmdline()) for process_id in await self.processes()]


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
