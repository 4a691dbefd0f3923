"""A queue of sequences in front of a packed forward. Plain asyncio; the actor around it is elsewhere.

A batch leaves when the next sequence does not fit its token budget, or when its oldest sequence has waited `max_wait_s`:
waiting for that long a silence instead would never end under steady traffic.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_grpo.errors import ConfigurationError, WeightsDidNotLand, WorkerLost
from async_grpo.inference.logprob_config import LogprobConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.forward_check import check_forward
from async_grpo.modeling.load import load_causal_lm, torch_dtype
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.protocols import Manifest
from async_grpo.weights.package import unpack


class _Request:
    """One sequence on its way through the queue; `answer` gets its completion's log-probs (T,)."""

    def __init__(self, token_ids: np.ndarray, prompt_length: int) -> None:
        self.token_ids, self.prompt_length, self.arrived = token_ids, prompt_length, time.monotonic()
        self.answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()


class LogprobWorker:
    """Answers `logprobs` from `policy`, packing what is asked concurrently into few forwards; otherwise as an `Engine`.

    temperature: divides the logits; it must be the one that the completions were sampled at.
    """

    def __init__(self, policy: PolicyModel, config: LogprobConfig, temperature: float = 1.0) -> None:
        self._policy = policy.eval().requires_grad_(False)
        self.kv_cache_tokens = self._max_tokens = config.max_tokens_per_gpu
        self._max_wait_s, self._temperature = config.max_wait_s, temperature
        self._queue: list[_Request] = []
        self._batch: list[_Request] = []  # taken from the queue and not yet answered
        self._arrival = asyncio.Event()
        # One thread, so that a forward and an update of the weights never run at once
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="logprob")
        self._serving: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    def start(cls, config: Any, settings: SharedRunSettings) -> "LogprobWorker":
        """A server for a run, on the GPU if there is one. `config`: the `WorkerConfig`."""
        policy = PolicyModel(load_causal_lm(config.model_path, settings.dtype))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy = policy.to(device).eval()
        check_forward(policy, torch_dtype(settings.dtype))
        return cls(policy, config, settings.temperature)

    async def logprobs(self, sequences: list[np.ndarray], prompt_lengths: list[int]) -> list[np.ndarray]:
        """Per sequence (L,) of prompt and completion the log-probs (T,) float32 of its tokens after `prompt_length`.

        ConfigurationError: a sequence longer than the budget. WorkerLost: the server is closed. What the forward raised.
        """
        if self._closed:
            raise WorkerLost("the logprob server is closed")
        if (longest := max(map(len, sequences))) > self._max_tokens:
            raise ConfigurationError(
                f"a sequence of {longest} tokens exceeds the budget of {self._max_tokens} tokens per forward; "
                "raise max_tokens_per_gpu or shorten the completions"
            )
        requests = [_Request(*pair) for pair in zip(sequences, prompt_lengths, strict=True)]
        self._queue += requests
        self._arrival.set()
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return list(await asyncio.gather(*(request.answer for request in requests)))

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """See `Engine`. The weights change between two batches; forwards go on while they are unpacked and digested.

        WeightsDidNotLand: names or shapes are not the model's. What was loaded stays: load again, or close.
        """
        tensors, manifest = await asyncio.to_thread(unpack, chunks)
        lost = await asyncio.wrap_future(self._thread.submit(_copy_weights, self._policy, tensors))
        return {
            name: replace(arrived, in_use=name not in lost, is_read_back=True)
            for name, arrived in manifest.items()
        }

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """See `Engine`."""
        request = _Request(token_ids, 1)
        (answer,) = await asyncio.wrap_future(self._thread.submit(self._forward, [request], 1.0))
        return np.concatenate([np.zeros(1, np.float32), answer])

    async def begin_anew(self) -> bool:
        """See `Engine`."""
        return True

    async def until_failure(self) -> str:
        """Never: its failures are answers to requests."""
        return await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Fail what still waits and take no more. A forward under way ends on its own, not waited for."""
        self._closed = True
        if self._serving is not None:
            self._serving.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        """Until it is cancelled. However it ends, no caller may be left waiting for it."""
        try:
            while True:
                await self._fill_batch()
                try:
                    forward = self._thread.submit(self._forward, self._batch, self._temperature)
                    answers = await asyncio.wrap_future(forward)
                except Exception as error:  # the answer of exactly the requests that were in it
                    _fail(error, self._batch)
                    continue
                for request, answer in zip(self._batch, answers, strict=True):
                    if not request.answer.done():
                        request.answer.set_result(answer)
        finally:
            self._closed = True
            _fail(WorkerLost("the logprob server was closed"), self._batch + self._queue)

    async def _fill_batch(self) -> None:
        """Wait until the queue fills a forward, or its oldest may wait no longer; then take what fits."""
        while True:
            self._queue = [one for one in self._queue if not one.answer.done()]  # a caller may have gone
            lengths = np.cumsum([len(one.token_ids) for one in self._queue])
            # Idle: wait for work however long it takes. With work in hand: no longer than the oldest may wait
            wait_s = self._queue[0].arrived + self._max_wait_s - time.monotonic() if self._queue else None
            if wait_s is not None and (wait_s <= 0 or lengths[-1] >= self._max_tokens):
                break
            self._arrival.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), wait_s)
        count = int(np.searchsorted(lengths, self._max_tokens, side="right"))
        self._batch, self._queue = self._queue[:count], self._queue[count:]

    @torch.no_grad()
    def _forward(self, batch: list[_Request], temperature: float) -> list[np.ndarray]:
        """Completion log-probs of each request of one packed batch; runs in the worker thread."""
        bounds = np.cumsum([0, *(len(request.token_ids) for request in batch)])
        input_ids = np.concatenate([request.token_ids for request in batch])
        is_completion = np.concatenate([np.arange(len(r.token_ids)) >= r.prompt_length for r in batch])
        ids = torch.tensor(input_ids, dtype=torch.int64, device=self._policy.device)
        mask = torch.tensor(is_completion, device=self._policy.device)
        logprobs, *_ = self._policy(ids, torch.tensor(bounds), mask, temperature)
        rows = np.split(logprobs.float().cpu().numpy(), bounds[1:-1])
        return [row[request.prompt_length :].copy() for request, row in zip(batch, rows, strict=True)]


def _fail(error: Exception, requests: list[_Request]) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_exception(error)


@torch.no_grad()
def _copy_weights(policy: PolicyModel, tensors: Mapping[str, Tensor]) -> set[str]:
    """Copy the tensors into the policy; return the names of those that it does not compute with to the bit.

    Tensors that do not come keep their values: whether all came that were sent, the receipt says.
    """
    known = dict(named_weights(policy))
    for name, tensor in tensors.items():
        if name not in known or known[name].shape != tensor.shape:
            expected = tuple(known[name].shape) if name in known else "no such tensor"
            raise WeightsDidNotLand(f"received {name} of shape {tuple(tensor.shape)}; expected: {expected}")
        known[name].copy_(tensor)
    now = dict(named_weights(policy))
    return {name for name, tensor in tensors.items() if not torch.equal(now[name], tensor.to(now[name]))}
