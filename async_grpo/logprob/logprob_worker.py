"""A queue of sequences in front of a packed forward. Plain asyncio; the actor around it is elsewhere.

A batch leaves when the next sequence does not fit its token budget, or when its oldest sequence has waited
`max_wait_s`. That is a deadline: waiting for `max_wait_s` of silence instead would never end under steady
traffic.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_grpo.errors import ConfigurationError, WeightsDidNotLand, WorkerLost
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel, named_weights


@dataclass
class _Request:
    """One sequence on its way through the queue; `answer` gets its completion's log-probs (T,)."""

    token_ids: np.ndarray
    prompt_length: int
    answer: asyncio.Future[np.ndarray]
    arrived: float = field(default_factory=time.monotonic)

    def __len__(self) -> int:
        return len(self.token_ids)


class LogprobWorker:
    """Answers `logprobs` from `policy`, packing what is asked concurrently into few forwards.

    max_tokens: of one forward. max_wait_s: the longest a sequence waits for company. temperature: divides the
    logits; it must be the one that the completions were sampled at.
    """

    def __init__(
        self, policy: PolicyModel, *, max_tokens: int, max_wait_s: float = 0.05, temperature: float = 1.0
    ) -> None:
        self._policy = policy.eval().requires_grad_(False)
        self._max_tokens, self._max_wait_s, self._temperature = max_tokens, max_wait_s, temperature
        self._queue: deque[_Request] = deque()
        self._batch: list[_Request] = []  # taken from the queue and not yet answered
        self._arrival = asyncio.Event()
        # One thread, so that a forward and an update of the weights never run at once
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="logprob")
        self._serving: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    def from_folder(cls, model_path: str | Path, *, dtype: str, **options: Any) -> "LogprobWorker":
        """A server of the model in `model_path`, on the GPU if there is one; `options`: the constructor's."""
        policy = PolicyModel(load_causal_lm(model_path, dtype))
        return cls(policy.to("cuda" if torch.cuda.is_available() else "cpu"), **options)

    async def logprobs(self, sequences: list[np.ndarray], prompt_lengths: list[int]) -> list[np.ndarray]:
        """Per sequence the log-probs (T,) float32 of its completion, the tokens after `prompt_length`.

        sequences: (L,) integers each, prompt and completion. ConfigurationError: a sequence longer than the
        budget, a prompt length outside 1..L. WorkerLost: the server is closed. What the forward raised, if it
        failed.
        """
        self._check(sequences, prompt_lengths)
        loop = asyncio.get_running_loop()
        requests = [
            _Request(token_ids, prompt_length, loop.create_future())
            for token_ids, prompt_length in zip(sequences, prompt_lengths, strict=True)
        ]
        self._queue.extend(requests)
        self._arrival.set()
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
            self._serving.add_done_callback(self._serving_ended)
        answers = asyncio.gather(*(request.answer for request in requests))
        return list(await answers)

    async def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the policy's weights, between two batches.

        WeightsDidNotLand: names or shapes are not the model's. What was loaded stays: load again, or close.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, _copy_weights, self._policy, named_tensors)

    async def prompt_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """(N,) float32 log-probs of a fixed text at temperature 1, the first 0: what a landing check asks."""
        loop = asyncio.get_running_loop()
        request = _Request(token_ids, 1, loop.create_future())
        (answer,) = await loop.run_in_executor(self._thread, self._forward, [request], 1.0)
        return np.concatenate([np.zeros(1, np.float32), answer])

    async def close(self) -> None:
        """Fail what still waits and take no more. A forward under way ends on its own, not waited for."""
        self._closed = True
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving], timeout=1.0)
        self._fail(WorkerLost("the logprob server was closed"), *self._batch, *self._queue)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, sequences: list[np.ndarray], prompt_lengths: list[int]) -> None:
        if self._closed:
            raise WorkerLost("the logprob server is closed")
        if len(sequences) != len(prompt_lengths):
            raise ConfigurationError(
                f"{len(sequences)} sequences came with {len(prompt_lengths)} prompt lengths"
            )
        for token_ids, prompt_length in zip(sequences, prompt_lengths, strict=True):
            if not 1 <= prompt_length <= len(token_ids):
                raise ConfigurationError(
                    f"prompt length {prompt_length} of a sequence of {len(token_ids)} tokens"
                )
            if len(token_ids) > self._max_tokens:
                raise ConfigurationError(
                    f"a sequence of {len(token_ids)} tokens exceeds the budget of {self._max_tokens} tokens "
                    "per forward; raise max_tokens_per_gpu or shorten the completions"
                )

    async def _serve(self) -> None:
        while True:
            self._batch = []
            await self._collect(self._batch)
            await self._answer(self._batch)

    async def _collect(self, batch: list[_Request]) -> None:
        """Fill `batch` with at least one request and at most the token budget."""
        while not batch or self._budget_left(batch) > 0:
            if self._queue:
                if len(self._queue[0]) > self._budget_left(batch):
                    return
                request = self._queue.popleft()
                if not request.answer.done():  # its caller may have gone
                    batch.append(request)
                continue
            self._arrival.clear()
            # Idle: wait for work however long it takes. With work in hand: no longer than the oldest may wait
            timeouts = batch[0].arrived + self._max_wait_s - time.monotonic() if batch else None
            try:
                await asyncio.wait_for(self._arrival.wait(), timeouts)
            except TimeoutError:
                return

    def _budget_left(self, batch: list[_Request]) -> int:
        return self._max_tokens - sum(map(len, batch))

    async def _answer(self, batch: list[_Request]) -> None:
        """One forward; its error is the answer of exactly the requests that were in it."""
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self._forward, batch, self._temperature)
        except Exception as error:
            self._fail(error, *batch)
            return
        for request, answer in zip(batch, answers, strict=True):
            if not request.answer.done():
                request.answer.set_result(answer)

    @torch.no_grad()
    def _forward(self, batch: list[_Request], temperature: float) -> list[np.ndarray]:
        """Completion log-probs of each request of one packed batch; runs in the worker thread."""
        bounds = np.cumsum([0, *map(len, batch)])
        input_ids = np.concatenate([request.token_ids for request in batch])
        is_completion = np.concatenate([np.arange(len(r)) >= r.prompt_length for r in batch])
        device = self._policy.device
        logprobs, _ = self._policy(
            torch.tensor(input_ids, dtype=torch.int64, device=device),
            torch.tensor(bounds),
            torch.tensor(is_completion, device=device),
            temperature,
        )
        rows = np.split(logprobs.float().cpu().numpy(), bounds[1:-1])
        return [row[request.prompt_length :].copy() for request, row in zip(batch, rows, strict=True)]

    def _serving_ended(self, task: asyncio.Task[None]) -> None:
        """The loop only ends by `close`; should it fail, no caller may be left waiting for it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._closed = True
            self._fail(WorkerLost(f"the logprob server's loop failed: {error!r}"), *self._batch, *self._queue)

    @staticmethod
    def _fail(error: Exception, *requests: _Request) -> None:
        for request in requests:
            if not request.answer.done():
                request.answer.set_exception(error)


@torch.no_grad()
def _copy_weights(policy: PolicyModel, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Tensors that do not come keep their values: whether all came that were sent, the receipt says."""
    known = dict(named_weights(policy))
    for name, tensor in named_tensors:
        if name not in known or known[name].shape != tensor.shape:
            expected = tuple(known[name].shape) if name in known else "no such tensor, or it came twice"
            raise WeightsDidNotLand(
                f"received {name} of shape {tuple(tensor.shape)}; the model expects {expected}"
            )
        known.pop(name).copy_(tensor)
