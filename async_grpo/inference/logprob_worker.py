"""`LogprobWorker`: a queue of sequences in front of packed forwards. Plain asyncio; the Ray actor is in `cluster/`.

A batch starts when the next sequence does not fit its token budget, or when its oldest sequence has waited `max_wait_s`.
Waiting until no sequence has arrived for that long instead would never end under steady traffic.
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
    """One sequence (L,) on its way through the queue; `answer` gets its completion's log-probs (T,)."""

    def __init__(self, token_ids: np.ndarray, prompt_length: int) -> None:
        self.token_ids = token_ids
        self.prompt_length = prompt_length
        self.arrived_at = time.monotonic()
        self.answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()


class LogprobWorker:
    """Computes log-probs under a policy, packing concurrent requests into few forwards.

    It receives weights as an `Engine` does.

    Args:
        policy: The policy.
        config: The worker's options.
        temperature: Divides the logits; it must be the temperature that the completions were sampled at.
    """

    def __init__(self, policy: PolicyModel, config: LogprobConfig, temperature: float = 1.0) -> None:
        self._policy = policy.eval().requires_grad_(False)
        self._max_tokens = config.max_tokens_per_gpu
        self.kv_cache_tokens = self._max_tokens
        self._max_wait_s = config.max_wait_s
        self._temperature = temperature
        self._queue: list[_Request] = []
        self._batch: list[_Request] = []  # taken from the queue and not yet answered
        self._arrival = asyncio.Event()
        # One thread, so that a forward and an update of the weights never run at once
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="logprob")
        self._serving: asyncio.Task[None] | None = None
        self._is_closed = False

    @classmethod
    def start(cls, config: Any, settings: SharedRunSettings) -> "LogprobWorker":
        """Make a worker for a run, on the GPU if there is one.

        Args:
            config: The `WorkerConfig`.
            settings: What every worker of the run must share.
        """
        policy = PolicyModel(load_causal_lm(config.model_path, settings.dtype))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy = policy.to(device).eval()
        check_forward(policy, torch_dtype(settings.dtype))
        return cls(policy, config, settings.temperature)

    async def logprobs(self, sequences: list[np.ndarray], prompt_lengths: list[int]) -> list[np.ndarray]:
        """Compute the log-probs of completions; an error of the forward is raised to its callers.

        Args:
            sequences: Token ids (L,) of prompt and completion.
            prompt_lengths: Number of prompt tokens of each sequence.

        Returns:
            (T,) float32 log-probs of each sequence's tokens after the prompt.

        Raises:
            ConfigurationError: A sequence is longer than the token budget.
            WorkerLost: The worker is closed.
        """
        if self._is_closed:
            raise WorkerLost("the logprob server is closed")
        longest = max(len(sequence) for sequence in sequences)
        if longest > self._max_tokens:
            raise ConfigurationError(
                f"a sequence of {longest} tokens exceeds the budget of {self._max_tokens} tokens per forward; "
                "raise max_tokens_per_gpu or shorten the completions"
            )
        requests = []
        for token_ids, prompt_length in zip(sequences, prompt_lengths, strict=True):
            requests.append(_Request(token_ids, prompt_length))
        self._queue += requests
        self._arrival.set()
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return list(await asyncio.gather(*(request.answer for request in requests)))

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Replace the weights between two batches; see `Engine`. Forwards continue while the chunks are unpacked.

        Raises:
            WeightsDidNotLand: Names or shapes are not those of the model. Some weights may have been replaced, so the
                worker needs another update.
        """
        tensors, manifest = await asyncio.to_thread(unpack, chunks)
        not_in_use = await asyncio.wrap_future(self._thread.submit(_copy_weights, self._policy, tensors))
        checked_manifest = {}
        for name, record in manifest.items():
            checked_manifest[name] = replace(record, in_use=name not in not_in_use, is_read_back=True)
        return checked_manifest

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-probs (N,) of a fixed text; see `Engine`."""
        request = _Request(token_ids, prompt_length=1)
        (answer,) = await asyncio.wrap_future(self._thread.submit(self._forward, [request], 1.0))
        return np.concatenate([np.zeros(1, np.float32), answer])

    async def begin_anew(self) -> bool:
        """Return that the worker can serve the next start of a run; see `Engine`."""
        return True

    async def until_failure(self) -> str:
        """Wait for ever, because every failure is the answer to a request; see `Engine`."""
        return await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Fail all requests and take no more. A forward under way ends in its thread; nobody waits for it."""
        self._is_closed = True
        if self._serving is not None:
            self._serving.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        """Serve requests until cancelled. However it ends, every caller gets an answer."""
        try:
            while True:
                await self._fill_batch()
                try:
                    forward = self._thread.submit(self._forward, self._batch, self._temperature)
                    answers = await asyncio.wrap_future(forward)
                except Exception as error:
                    # Only the requests of this batch fail
                    _fail(error, self._batch)
                    continue
                for request, answer in zip(self._batch, answers, strict=True):
                    if not request.answer.done():
                        request.answer.set_result(answer)
        finally:
            self._is_closed = True
            _fail(WorkerLost("the logprob server was closed"), self._batch + self._queue)

    async def _fill_batch(self) -> None:
        """Wait until the queue fills a forward, or its oldest request has waited long enough; then take what fits."""
        while True:
            # The callers of cancelled requests have gone
            self._queue = [request for request in self._queue if not request.answer.done()]
            queued_tokens = np.cumsum([len(request.token_ids) for request in self._queue])
            wait_s = None  # an empty queue waits for a request without a limit
            if self._queue:
                wait_s = self._queue[0].arrived_at + self._max_wait_s - time.monotonic()
                if wait_s <= 0 or queued_tokens[-1] >= self._max_tokens:
                    break
            self._arrival.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), wait_s)
        count = int(np.searchsorted(queued_tokens, self._max_tokens, side="right"))
        self._batch = self._queue[:count]
        self._queue = self._queue[count:]

    @torch.no_grad()
    def _forward(self, batch: list[_Request], temperature: float) -> list[np.ndarray]:
        """Return the log-probs (T,) of each request's completion, in one packed forward. Runs in the worker thread."""
        lengths = [len(request.token_ids) for request in batch]
        bounds = np.cumsum([0, *lengths])
        input_ids = np.concatenate([request.token_ids for request in batch])
        is_completion = np.ones(len(input_ids), bool)
        for begin, request in zip(bounds[:-1], batch, strict=True):
            is_completion[begin : begin + request.prompt_length] = False
        logprobs, *_ = self._policy(
            torch.tensor(input_ids, dtype=torch.int64, device=self._policy.device),
            torch.tensor(bounds),
            torch.tensor(is_completion, device=self._policy.device),
            temperature,
        )
        rows = np.split(logprobs.float().cpu().numpy(), bounds[1:-1])
        return [row[request.prompt_length :].copy() for request, row in zip(batch, rows, strict=True)]


def _fail(error: Exception, requests: list[_Request]) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_exception(error)


@torch.no_grad()
def _copy_weights(policy: PolicyModel, tensors: Mapping[str, Tensor]) -> set[str]:
    """Copy the tensors into the policy.

    Weights that no tensor is named after keep their values; the receipt shows that they did not arrive.

    Returns:
        The names of tensors that differ from the weights that the policy computes with in at least one bit.

    Raises:
        WeightsDidNotLand: A name or a shape is not one of the policy's.
    """
    weights = dict(named_weights(policy))
    for name, tensor in tensors.items():
        if name not in weights or weights[name].shape != tensor.shape:
            expected = tuple(weights[name].shape) if name in weights else "no such tensor"
            raise WeightsDidNotLand(f"received {name} of shape {tuple(tensor.shape)}; expected: {expected}")
        weights[name].copy_(tensor)
    # Read again, because a weight may be a copy that the forward does not use
    used_weights = dict(named_weights(policy))
    differing = set()
    for name, tensor in tensors.items():
        if not torch.equal(used_weights[name], tensor.to(used_weights[name])):
            differing.add(name)
    return differing
