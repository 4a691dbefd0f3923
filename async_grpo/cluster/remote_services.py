"""The batcher's three protocols over Ray: leases from a registry, channels to the workers, retries when one is lost."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from async_grpo.cluster.channel import Channel
from async_grpo.errors import WorkerLost
from async_grpo.experience.worker_registry import Lease
from async_grpo.types import Completion, Prompt, Verdict

POOL_RESTART_S, POOL_RETRY_INTERVAL_S = (
    120.0,
    0.5,
)  # how long the pool's actor may be away, and between two attempts
MAX_LOSSES = 3  # workers that one group may outlive; a fourth loss looks like the group's own fault


class RegisteredWorkers:
    """The workers of one registry as the batcher sees them."""

    def __init__(self, registry: Any, kind: str) -> None:
        self.kind = kind
        self._registry = Channel(registry, f"{kind} registry")
        self._channels: dict[str, Channel] = {}

    async def lease(self, sequences: int, tokens_each: int) -> "LeasedWorker":
        """Wait for a worker that takes `sequences` at once."""
        lease, handle = await self._registry.call("acquire", sequences, tokens_each)
        if lease.worker_id not in self._channels:
            self._channels[lease.worker_id] = Channel(handle, f"{self.kind} worker {lease.worker_id}")
        return LeasedWorker(lease, self._channels[lease.worker_id], self._registry)

    async def fence(self, worker_id: str, lost: WorkerLost) -> None:
        """Tell the registry that a worker is gone: nobody gets it any more."""
        if channel := self._channels.pop(worker_id, None):
            channel.close()
        await self._registry.call("deregister", worker_id, str(lost))

    async def ask_all(self, method: str) -> list[Any]:
        """The answers of all workers used so far; one that is lost meanwhile is left out (its work will tell)."""
        answers = await asyncio.gather(
            *(c.call(method) for c in self._channels.values()), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerLost):
                raise answer
        return [answer for answer in answers if not isinstance(answer, WorkerLost)]


class LeasedWorker:
    """One worker, for as many sequences as were leased."""

    def __init__(self, lease: Lease, channel: Channel, registry: Channel) -> None:
        self.lease, self._channel, self._registry = lease, channel, registry
        self._releases: set[asyncio.Task] = set()

    @property
    def worker_id(self) -> str:
        return self.lease.worker_id

    async def call(self, method: str, *args: Any) -> Any:
        return await self._channel.call(method, *args)

    def release(self, sequences: int = 1) -> None:
        """Give sequences back, without waiting for the registry's word on it."""
        task = asyncio.ensure_future(self._registry.call("release", self.lease.lease_id, sequences))
        self._releases.add(task)
        task.add_done_callback(self._released)

    def _released(self, task: asyncio.Task) -> None:
        self._releases.discard(task)
        if not task.cancelled():
            task.exception()  # a lost registry is noticed by whoever acquires next


class RemoteGeneration:
    """`Generation` over the registered generation workers."""

    def __init__(self, workers: RegisteredWorkers) -> None:
        self._workers = workers
        self._mean_length = 64.0  # of completions so far: the registry balances by expected tokens

    async def generate(
        self, prompt: Prompt, count: int, *, greedy: bool = False
    ) -> AsyncIterator[Completion]:
        """Yield `count` completions as they finish; what a lost worker still owed is generated elsewhere."""
        owed, losses = count, 0
        while owed:
            worker = await self._workers.lease(owed, len(prompt.token_ids) + int(self._mean_length))
            try:
                async for completion in self._complete(worker, prompt, owed, greedy):
                    owed -= 1
                    self._mean_length += 0.01 * (len(completion) - self._mean_length)
                    yield completion
            except WorkerLost as lost:
                losses += 1
                await self._workers.fence(worker.worker_id, lost)
                if losses > MAX_LOSSES:
                    raise WorkerLost(
                        f"prompt {prompt.ordinal} was lost with {losses} workers; the last: {lost}"
                    ) from lost

    async def _complete(
        self, worker: "LeasedWorker", prompt: Prompt, count: int, greedy: bool
    ) -> AsyncIterator[Completion]:
        calls = [
            asyncio.ensure_future(worker.call("complete", prompt.token_ids, greedy)) for _ in range(count)
        ]
        finished = 0
        try:
            for call in asyncio.as_completed(calls):
                completion = await call
                finished += 1
                worker.release()  # its slot is free while its siblings still generate and it is being scored
                yield completion
        finally:
            if finished < count:
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                worker.release(count - finished)

    async def take_stats(self) -> dict[str, Any]:
        answers = await self._workers.ask_all("take_stats")
        timeline = sorted(entry for answer in answers for entry in answer["token_timeline"])
        return {
            "token_timeline": timeline,
            "wait_generation_weights_s": sum(answer["paused_s"] for answer in answers),
            "busy": [interval for answer in answers for interval in answer["busy"]],
        }


class RemoteVerification:
    """`Verification` over the pool's actor. Ray starts it anew when it dies; what it owed is asked again."""

    def __init__(self, pool: Any) -> None:
        self._actor = pool
        self._channel = Channel(pool, "verifier pool")

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
        return await self._call("verify", sample, evaluation)

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict], *, evaluation: bool = False
    ) -> list[Verdict]:
        return await self._call("post_process", samples, verdicts, evaluation)

    async def take_stats(self) -> dict[str, Any]:
        return await self._call("take_stats")

    async def _call(self, method: str, *args: Any) -> Any:
        give_up = math.inf
        while True:
            channel = self._channel
            try:
                return await channel.call(method, *args)
            except WorkerLost:
                give_up = min(give_up, time.monotonic() + POOL_RESTART_S)
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(POOL_RETRY_INTERVAL_S)
                if self._channel is channel:  # else a call that was lost with ours was quicker
                    channel.close()
                    self._channel = Channel(self._actor, "verifier pool")


class RemoteLogprobs:
    """`Logprobs` over the registered logprob workers."""

    def __init__(self, workers: RegisteredWorkers) -> None:
        self._workers = workers

    async def logprobs(
        self, sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int]
    ) -> list[np.ndarray]:
        """Ask the worker with the fewest tokens outstanding; another one if it is lost."""
        tokens_each = max(1, sum(map(len, sequences)) // len(sequences))
        for _ in range(MAX_LOSSES):
            worker = await self._workers.lease(len(sequences), tokens_each)
            try:
                return await worker.call("logprobs", list(sequences), list(prompt_lengths))
            except WorkerLost as lost:
                await self._workers.fence(worker.worker_id, lost)
            finally:
                worker.release(len(sequences))
        raise WorkerLost(f"{MAX_LOSSES} {self._workers.kind} workers were lost over one group")
