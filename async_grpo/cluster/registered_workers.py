"""The workers of each kind: who has joined, the weights that they must hold to work, and the work that they are given.

Plain asyncio without Ray: what joins is a handle, and `connect` makes of it a link to call.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.errors import WorkerLost
from async_grpo.experience.worker_registry import Lease, SchedulingPolicy, WorkerRegistry
from async_grpo.protocols import Connect, WeightPackage, WorkerLink
from async_grpo.types import Completion, Prompt, WorkerInfo
from async_grpo.weights.package import SELF_TEST

PROGRESS_TIMEOUT_S = 1.0  # statistics are worth no longer wait: every rank waits for the end of its step
ATTEMPTS = 4  # of one group: when so many workers were lost over it, it looks like the group's own fault


@dataclass
class _Worker:
    """One that has joined."""

    info: WorkerInfo
    handle: Any
    link: WorkerLink
    is_joining: bool = False  # on its own way to the current weights: no sync may cross it
    progress: asyncio.Future[dict[str, Any]] | None = None  # asked for, and not yet taken


class RegisteredWorkers:
    """One per kind of worker: "generation", "reference" or "proximal". See `RunController` for the arguments."""

    def __init__(self, kind: str, grace_s: float, connect: Connect, policy: SchedulingPolicy) -> None:
        self.kind, self._connect = kind, connect
        self.is_frozen = kind == "reference"  # its workers keep the weights that they started with
        self.registry = WorkerRegistry(kind, grace_s, policy)
        self.by_id: dict[str, _Worker] = {}
        self._self_test: list[WeightPackage] = []
        self._package: WeightPackage | None = None
        self._last_lost: WorkerLost | None = None
        self._settled = asyncio.Event()  # cleared while weights are being sent
        self._settled.set()

    async def register(self, info: WorkerInfo, handle: Any) -> list[WeightPackage]:
        """Let a worker in; returns what it must load, and prove, before `activate`: nothing before the first sync, nor
        where weights travel outside the packages (NCCL). Then it takes part in the next sync."""
        await self._settled.wait()
        self.registry.register(info)
        worker_id, current = info.worker_id, self._current()
        name = f"{self.kind} worker {worker_id}"
        link = self._connect(handle, name, lambda lost: self.deregister(worker_id, str(lost)))
        self.by_id[worker_id] = _Worker(info, handle, link, is_joining=bool(current))
        if self.is_frozen:
            self.registry.activate(worker_id)
        return [*self._self_test, *current] if current else []

    async def activate(self, worker_id: str, version: int) -> list[WeightPackage]:
        """A late worker has loaded `version`; returns what it must load next: nothing, unless a sync came in between.

        Raises:
            WorkerLost: it was fenced meanwhile.
        """
        await self._settled.wait()
        if worker_id not in self.by_id:
            raise WorkerLost(f"worker {worker_id} was given up while it loaded the current weights")
        if self._package is None or self._package.version != version:
            return self._current()
        self.by_id[worker_id].is_joining = False
        self.registry.activate(worker_id)
        return []

    def _current(self) -> list[WeightPackage]:
        """The current weights, if they are in a package."""
        return [self._package] if self._package and self._package.chunks else []

    def deregister(self, worker_id: str, reason: str) -> None:
        """A worker is gone, or fenced: it gets no more work. Unknown ids are ignored (it may be told twice)."""
        self.registry.deregister(worker_id, reason)
        if worker := self.by_id.pop(worker_id, None):
            worker.link.close()

    def begin_sync(self) -> list[tuple[WorkerInfo, Any]]:
        """Weights are about to be sent: no worker joins meanwhile. Returns those that get them, with their handles; not
        one that is joining: it loads the current package by itself, and again if this comes first."""
        if self.is_frozen:
            return []
        self._settled.clear()
        return [(worker.info, worker.handle) for worker in self.by_id.values() if not worker.is_joining]

    def end_sync(self, package: WeightPackage, landed: Sequence[str]) -> None:
        """`landed` hold the weights of `package`: they may work, and no other worker may. Packages of the self-test are
        kept, for late workers to be tested as the first ones were."""
        if package.version == SELF_TEST:
            self._self_test.append(package)
        elif not self.is_frozen:
            self._package = package
            for worker_id in set(landed) & set(self.by_id):
                self.registry.activate(worker_id)
            self._settled.set()

    @asynccontextmanager
    async def lease(self, sequences: int, tokens_each: int) -> AsyncIterator[tuple[WorkerLink, Lease]]:
        """The next worker that takes `sequences` at once; `WorkerLost` in the block fences it, and goes no further."""
        lease = await self.registry.acquire(sequences, tokens_each)
        try:
            yield self.by_id[lease.worker_id].link, lease
        except WorkerLost as lost:
            self._last_lost = lost
            self.deregister(lease.worker_id, str(lost))
        finally:
            self.registry.release(lease, lease.sequences)


class GenerationWorkers(RegisteredWorkers):
    """`Generation` by the registered workers."""

    _mean_length = 64.0  # of completions so far: the registry balances by expected tokens

    async def generate(
        self, prompt: Prompt, count: int, *, greedy: bool = False
    ) -> AsyncGenerator[Completion]:
        """Yield `count` completions as they finish; what a lost worker still owed is generated elsewhere."""
        owed = count
        for _ in range(ATTEMPTS):
            tokens_each = len(prompt.token_ids) + int(self._mean_length)
            async with self.lease(owed, tokens_each) as (link, lease):
                completions = link.stream("complete", prompt.token_ids, owed, greedy)
                async with aclosing(completions):
                    async for completion in completions:
                        owed -= 1
                        self.registry.release(lease)  # its place, while its siblings generate
                        self._mean_length += 0.01 * (len(completion) - self._mean_length)
                        yield completion
            if not owed:
                return
        raise WorkerLost(f"{ATTEMPTS} workers were lost over prompt {prompt.ordinal}: {self._last_lost}")

    async def take_stats(self) -> dict[str, Any]:
        """See `Generation`; an engine that does not answer at once is counted in a later step."""
        for worker in self.by_id.values():
            worker.progress = worker.progress or asyncio.ensure_future(worker.link.call("progress"))
        asked = {worker.progress: worker for worker in self.by_id.values() if worker.progress}
        done = (await asyncio.wait(asked, timeout=PROGRESS_TIMEOUT_S))[0] if asked else set()
        for one in done:
            asked[one].progress = None
        answers = [one.result() for one in done if not isinstance(one.exception(), WorkerLost)]
        return {
            "token_timeline": sorted(entry for answer in answers for entry in answer["token_timeline"]),
            "wait_generation_weights_s": sum(answer["paused_s"] for answer in answers),
            "busy": [interval for answer in answers for interval in answer["busy"]],
        }


class LogprobWorkers(RegisteredWorkers):
    """`Logprobs` by the registered workers."""

    async def logprobs(
        self, sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int]
    ) -> list[np.ndarray]:
        """Ask the worker with the fewest tokens outstanding; another one if it is lost."""
        tokens_each = max(1, sum(map(len, sequences)) // len(sequences))
        for _ in range(ATTEMPTS):
            async with self.lease(len(sequences), tokens_each) as (link, _):
                return await link.call("logprobs", list(sequences), list(prompt_lengths))
        raise WorkerLost(f"{ATTEMPTS} {self.kind} workers were lost over one group: {self._last_lost}")
