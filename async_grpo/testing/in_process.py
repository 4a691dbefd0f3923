"""A trainer and its `RunController` in one process: what Ray carries in a run are calls into the loop of a thread here."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from async_grpo.errors import WorkerLost
from async_grpo.protocols import Engine, Receipt, WeightPackage
from async_grpo.types import MicroBatch, StepEnd, WorkerInfo


class LoopThread:
    """An event loop in a thread of its own: what another process is to a trainer."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
        """What the coroutine returns, waited for from outside the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        """Stop the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)


class InProcessWorker:
    """An `Engine` as a registered worker: the handle that it registers with, and the `WorkerLink` to it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lost: WorkerLost | None = None
        self._on_lost: Callable[[WorkerLost], None] = lambda lost: None

    @staticmethod
    def connect(
        handle: "InProcessWorker", name: str, on_lost: Callable[[WorkerLost], None]
    ) -> "InProcessWorker":
        """`Connect`."""
        handle._on_lost = on_lost
        return handle

    def die(self, reason: str) -> None:
        """From now on every call, and every completion under way, is lost."""
        self._lost = WorkerLost(reason)
        self._on_lost(self._lost)

    async def call(self, method: str, *args: Any) -> Any:
        self._check()
        answer = getattr(self.engine, method)(*args)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        self._check()
        async for item in getattr(self.engine, method)(*args):
            self._check()
            yield item

    def close(self) -> None:
        """There is nothing to let go of."""

    async def load(self, package: WeightPackage) -> Receipt:
        """Load a package, and answer its canary."""
        manifest = await self.engine.update(package.version, [memoryview(chunk) for chunk in package.chunks])
        return manifest, await self.engine.canary(package.canary_ids)

    def _check(self) -> None:
        if self._lost:
            raise self._lost


class InProcessLink:
    """`EngineLink` to the workers of a `RunController` that lives in `loop`."""

    def __init__(self, loop: LoopThread, controller: Any) -> None:
        self._loop, self._controller = loop, controller
        self.delivered: list[int] = []  # the versions, in order

    def put(self, chunk: np.ndarray) -> np.ndarray:
        return chunk

    def deliver(self, package: WeightPackage) -> Mapping[str, Receipt]:
        members: list[tuple[WorkerInfo, InProcessWorker]] = self._loop.run(self._controller.begin_sync())
        self.delivered.append(package.version)
        return {info.worker_id: self._loop.run(handle.load(package)) for info, handle in members}

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        is_policy = package.version >= 0
        controller = self._controller
        self._loop.run(
            controller.end_sync(package, landed) if is_policy else controller.keep_self_test(package)
        )


class InProcessExperience:
    """`ExperienceSource` of a `RunController` that lives in `loop`."""

    def __init__(self, loop: LoopThread, controller: Any) -> None:
        self._loop, self._controller = loop, controller

    def start(self) -> None:
        self._loop.run(self._controller.start())

    def next_message(self, rank: int) -> MicroBatch | StepEnd:
        return self._loop.run(self._controller.next_message(rank))
