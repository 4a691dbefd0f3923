"""Generation and log-probs by the registered workers: each piece of work is leased, and done again where one is lost."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from async_grpo.cluster.registered_workers import LeasedWorker, RegisteredWorkers
from async_grpo.errors import WorkerLost
from async_grpo.types import Completion, Prompt

MAX_LOSSES = 3  # workers that one group may outlive; a fourth loss looks like the group's own fault


class RemoteGeneration:
    """`Generation` over the registered generation workers."""

    def __init__(self, workers: RegisteredWorkers) -> None:
        self._workers = workers
        self._mean_length = 64.0  # of completions so far: the registry balances by expected tokens

    async def generate(
        self, prompt: Prompt, count: int, *, greedy: bool = False
    ) -> AsyncGenerator[Completion]:
        """Yield `count` completions as they finish; what a lost worker still owed is generated elsewhere."""
        owed, losses = count, 0
        while owed:
            worker = await self._workers.lease(owed, len(prompt.token_ids) + int(self._mean_length))
            try:
                async with aclosing(self._complete(worker, prompt, owed, greedy)) as completions:
                    async for completion in completions:
                        owed -= 1
                        self._mean_length += 0.01 * (len(completion) - self._mean_length)
                        yield completion
            except WorkerLost as lost:
                losses += 1
                worker.fence(lost)
                if losses > MAX_LOSSES:
                    raise WorkerLost(
                        f"prompt {prompt.ordinal} was lost with {losses} workers; the last: {lost}"
                    ) from lost

    async def _complete(
        self, worker: LeasedWorker, prompt: Prompt, count: int, greedy: bool
    ) -> AsyncGenerator[Completion]:
        finished = 0
        try:
            async with aclosing(worker.stream("complete", prompt.token_ids, count, greedy)) as completions:
                async for completion in completions:
                    finished += 1
                    worker.release()  # its slot is free while its siblings still generate and it is being scored
                    yield completion
        finally:
            worker.release(count - finished)

    async def take_stats(self) -> dict[str, Any]:
        """See `Generation`; an engine that does not answer at once is counted in a later step."""
        answers = await self._workers.progress()
        timeline = sorted(entry for answer in answers for entry in answer["token_timeline"])
        return {
            "token_timeline": timeline,
            "wait_generation_weights_s": sum(answer["paused_s"] for answer in answers),
            "busy": [interval for answer in answers for interval in answer["busy"]],
        }


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
                worker.fence(lost)
            finally:
                worker.release(len(sequences))
        raise WorkerLost(f"{MAX_LOSSES} {self._workers.kind} workers were lost over one group")
