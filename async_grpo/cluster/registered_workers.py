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
    is_late: bool  # it joined a run under way, and has not proven the current weights yet: no other sync may cross it
    progress: asyncio.Future[dict[str, Any]] | None = None  # asked for, and not yet taken


class RegisteredWorkers:
    """One per kind of worker: "generation", "reference" or "proximal". See `RunController` for the arguments."""

    def __init__(self, kind: str, grace_s: float, connect: Connect, policy: SchedulingPolicy) -> None:
        self.kind, self._connect = kind, connect
        self.is_frozen = kind == "reference"  # its workers keep the weights that they started with
        self.registry = WorkerRegistry(kind, grace_s, policy)
        self.by_id: dict[str, _Worker] = {}
        self._is_live = False  # weights have landed: who joins now is late
        self._last_lost: WorkerLost | None = None
        self._settled = asyncio.Event()  # cleared while weights are being sent
        self._settled.set()

    async def register(self, info: WorkerInfo, handle: Any) -> bool:
        """Let a worker in; it takes part in the next sync. True: it is late, and needs one of its own before."""
        await self._settled.wait()
        self.registry.register(info)
        worker_id, is_late = info.worker_id, self._is_live
        name = f"{self.kind} worker {worker_id}"
        link = self._connect(handle, name, lambda lost: self.deregister(worker_id, str(lost)))
        self.by_id[worker_id] = _Worker(info, handle, link, is_late)
        if self.is_frozen:
            self.registry.activate(worker_id)
        return is_late

    def deregister(self, worker_id: str, reason: str) -> None:
        """A worker is gone, or fenced: it gets no more work. Unknown ids are ignored (it may be told twice)."""
        self.registry.deregister(worker_id, reason)
        if worker := self.by_id.pop(worker_id, None):
            worker.link.close()

    def begin_sync(self, for_late: bool = False) -> list[tuple[WorkerInfo, Any]]:
        """Weights are about to be sent: no worker joins meanwhile. Returns those that get them, with their handles: the
        workers that joined late, or else all others."""
        if self.is_frozen:
            return []
        self._settled.clear()
        return [(worker.info, worker.handle) for worker in self.by_id.values() if worker.is_late == for_late]

    def end_sync(self, package: WeightPackage, landed: Sequence[str]) -> None:
        """`landed` hold the weights of `package`: they may work, and no other worker may. A self-test goes on."""
        if package.version == SELF_TEST or self.is_frozen:
            return
        self._is_live = True
        for worker_id in set(landed) & set(self.by_id):
            self.by_id[worker_id].is_late = False
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
