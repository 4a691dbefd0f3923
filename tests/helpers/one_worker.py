"""A queue with one process, as a pool uses it: what is lost is tried again."""

from dataclasses import replace
from typing import Any, Self

from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.adapter_queue import AdapterQueue
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.rewards.verifier_worker import Timeouts
from async_grpo.types import AdapterResult


class OneWorker:
    """Each call may have a time-out of its own; `process` is the worker."""

    def __init__(self, source: RewardRegistrySource, adapter: str, *options: Any, **limits: Any) -> None:
        arguments = {
            name: limits.pop(name) for name in ("environment", "memory_limit_bytes") if name in limits
        }
        self.process = AdapterProcess(source, adapter, *options, **arguments)
        vars(self.process).update(limits)
        self.queue = AdapterQueue(adapter, self._make, 1, Timeouts(backoff_s=(0.0,)))
        self.start, self.close = self.queue.start, self.queue.close

    async def _make(self, _: str) -> AdapterProcess:
        return await self.process.start()

    @property
    def pid(self) -> int | None:
        """Of the process that leads the others, None while there is none."""
        child = self.process._child
        return child.pid if child and not child.is_lost else None

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        return await self._within(timeout_s).score(sample)

    async def post_process(self, samples: list, results: list, timeout_s: float) -> list[AdapterResult]:
        return await self._within(timeout_s).post_process(samples, results)

    def _within(self, timeout_s: float) -> AdapterQueue:
        self.queue._timeouts = replace(self.queue._timeouts, timeout_s=timeout_s)
        return self.queue

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
