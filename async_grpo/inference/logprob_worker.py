"""`LogprobWorker`: collects sequences in a queue, and computes their log-probs in packed forward passes.

This module uses plain asyncio. The Ray actor that runs it is in `cluster/`.

A batch starts when the sequences in the queue fill the token budget, or when the oldest of them has waited for
`max_wait_s`. Waiting until no sequence has arrived for `max_wait_s` would never end under steady traffic.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.inference.copied_weights import copy_weights
from async_grpo.inference.logprob_config import FROZEN_ROLES, LogprobConfig
from async_grpo.inference.memory_cures import forward_cure
from async_grpo.messages import ImageCanary, SharedRunSettings, Truncation
from async_grpo.modeling.forward_check import check_forward
from async_grpo.modeling.image_models import ImageReader
from async_grpo.modeling.load import load_causal_lm, torch_dtype
from async_grpo.modeling.lora import add_lora, fill_lora
from async_grpo.modeling.policy import PolicyModel
from async_grpo.processes.out_of_memory import naming_out_of_memory
from async_grpo.protocols import Manifest
from async_grpo.types import GENERATION, ImageReference
from async_grpo.weights.package import unpack


class _Request:
    """A sequence (L,) in the queue. `answer` will contain the log-probs of its completion.

    The answer has shape (T,). With `num_top`, it contains ids and log-probs, in shape (T, 2, 1 + num_top).
    """

    def __init__(
        self,
        token_ids: np.ndarray,
        prompt_length: int,
        allowed: AllowedTokens | None = None,
        images: Sequence[ImageReference] = (),
        call_number: int = 0,
        num_top: int = 0,
    ) -> None:
        self.num_top = num_top  # number of most probable tokens whose ids and log-probs are also needed
        self.call_number = call_number  # number of the call of `logprobs` that asked for the sequence
        self.token_ids = token_ids
        self.allowed = allowed  # the tokens that a grammar allowed at each of the L tokens
        self.images = images  # the images of the prompt
        self.prompt_length = prompt_length
        self.arrived_at = time.monotonic()
        self.answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()


class LogprobWorker:
    """Computes log-probs under a policy, and packs concurrent requests into few forward passes.

    It receives weights through the same methods as an `Engine`.

    Args:
        policy: The model that computes the log-probs.
        config: The worker's options.
        temperature: Divisor of the logits. It must be the temperature at which the completions were sampled.
        truncation: The rule by which the engines keep only probable tokens; None if they keep all of them. The worker
            applies it to its own policy, so that the log-probs are those of the truncated policy.
        image_canary: Text of the canary that has an image; None if there is none.
        joins_calls: Whether sequences of different calls may share a forward pass. This is faster, but the last bits of
            the log-probs then depend on which calls arrive at the same time.
    """

    def __init__(
        self,
        policy: PolicyModel,
        config: LogprobConfig,
        temperature: float = 1.0,
        truncation: Truncation | None = None,
        image_canary: ImageCanary | None = None,
        *,
        joins_calls: bool = True,
    ) -> None:
        self._image_canary = image_canary
        self._policy = policy.eval().requires_grad_(False)
        self._max_tokens = config.max_tokens_per_gpu
        self.kv_cache_tokens = self._max_tokens
        self._max_wait_s = config.max_wait_s
        self._temperature = temperature
        self._truncation = truncation
        self._joins_calls = joins_calls
        self._num_calls = 0
        self._queue: list[_Request] = []
        self._batch: list[_Request] = []  # requests of the current forward pass, no longer in the queue
        self._arrival = asyncio.Event()
        # A single thread, so that a forward pass and an update of the weights never run at the same time
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="logprob")
        self._serving: asyncio.Task[None] | None = None
        self._is_closed = False

    @classmethod
    def start(cls, config: Any, settings: SharedRunSettings) -> "LogprobWorker":
        """Make a worker for a run, on the GPU if there is one.

        Args:
            config: The `WorkerConfig`.
            settings: Settings that all workers of the run share.
        """
        policy = _load_policy(config, settings)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy = policy.to(device).eval()
        if policy.reads_images:
            policy.image_reader = ImageReader.load(config.model_path, policy.model.config)
        check_forward(policy, torch_dtype(settings.dtype))
        return cls(
            policy,
            config,
            settings.temperature,
            settings.truncation,
            settings.image_canary,
            joins_calls=not settings.deterministic,
        )

    async def logprobs(
        self,
        sequences: list[np.ndarray],
        prompt_lengths: list[int],
        allowed: list[AllowedTokens | None] | None = None,
        images: list[tuple[ImageReference, ...]] | None = None,
    ) -> list[np.ndarray]:
        """Compute the log-probs of completions. If a forward pass fails, all callers of its batch get the error.

        Args:
            sequences: Token ids (L,) of prompt and completion.
            prompt_lengths: Number of prompt tokens of each sequence.
            allowed: For each sequence, the tokens that a grammar allowed at each of its L tokens, or None.
            images: The images of each sequence; None if no sequence has one.

        Returns:
            (T,) float32 log-probs of each sequence's tokens after the prompt.

        Raises:
            ConfigurationError: A sequence is longer than the token budget of a forward pass.
            WorkerLost: The worker is closed.
        """
        requests = []
        masks_of_sequences = allowed or [None] * len(sequences)
        images_of_sequences = images or [()] * len(sequences)
        rows = zip(sequences, prompt_lengths, masks_of_sequences, images_of_sequences, strict=True)
        self._num_calls += 1
        for token_ids, prompt_length, masks, sequence_images in rows:
            request = _Request(token_ids, prompt_length, masks, sequence_images, self._num_calls)
            requests.append(request)
        return await self._answers(requests)

    async def logprobs_with_top(
        self, sequences: list[np.ndarray], prompt_lengths: list[int], k: int
    ) -> list[np.ndarray]:
        """Compute the log-probs of completions, and of the k most probable tokens at each of their positions.

        Returns:
            For each sequence an array (T, 2, 1 + k) float32 over its T tokens after the prompt. Index 0 of the second
            axis has token ids, and index 1 their log-probs. The first of the 1 + k entries is the completion's own
            token, the others are the k most probable ones. Ids are exact in float32 below 2^24.

        Raises:
            ConfigurationError: A sequence is longer than the token budget of a forward pass.
            WorkerLost: The worker is closed.
        """
        self._num_calls += 1
        requests = []
        for token_ids, prompt_length in zip(sequences, prompt_lengths, strict=True):
            requests.append(_Request(token_ids, prompt_length, call_number=self._num_calls, num_top=k))
        return await self._answers(requests)

    async def _answers(self, requests: list[_Request]) -> list[np.ndarray]:
        """Queue the requests, and wait for their answers."""
        if self._is_closed:
            raise WorkerLost("the logprob server is closed")
        longest = max(len(request.token_ids) for request in requests)
        if longest > self._max_tokens:
            raise ConfigurationError(
                f"a sequence of {longest} tokens exceeds the budget of {self._max_tokens} tokens per forward; "
                "raise max_tokens_per_gpu or shorten the completions"
            )
        self._queue += requests
        self._arrival.set()
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return list(await asyncio.gather(*(request.answer for request in requests)))

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Replace the weights between two batches. See `Engine`.

        Forward passes continue while the chunks are unpacked.

        Raises:
            WeightsDidNotLand: A name or shape is not the model's. Some weights may already have been replaced, so the
                worker needs another update.
        """
        tensors, manifest = await asyncio.to_thread(unpack, chunks)
        not_in_use = await asyncio.wrap_future(self._thread.submit(copy_weights, self._policy, tensors))
        checked_manifest = {}
        for name, record in manifest.items():
            checked_manifest[name] = replace(record, in_use=name not in not_in_use, is_read_back=True)
        return checked_manifest

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-probs (N,) of a fixed text. The first is 0. See `Engine`."""
        image = self._image_canary
        images = () if image is None else image.images_of(token_ids)
        request = _Request(token_ids, prompt_length=1, images=images)
        (answer,) = await asyncio.wrap_future(self._thread.submit(self._forward, [request], 1.0))
        return np.concatenate([np.zeros(1, np.float32), answer])

    async def begin_anew(self) -> bool:
        """Return True, because the worker can always serve a restarted trainer. See `Engine`."""
        return True

    async def until_failure(self) -> str:
        """Wait forever: this worker does not fail as a whole, because callers get the errors of their requests.

        See `Engine`.
        """
        return await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Fail all requests and accept no more.

        If a forward pass is running in the thread, it ends, and its result is dropped.
        """
        self._is_closed = True
        if self._serving is not None:
            self._serving.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        """Serve requests until this task is cancelled. Then all requests that are still waiting fail."""
        try:
            while True:
                await self._fill_batch()
                try:
                    forward = self._thread.submit(
                        self._forward, self._batch, self._temperature, self._truncation
                    )
                    answers = await asyncio.wrap_future(forward)
                except Exception as error:
                    # Only the requests of this batch fail; the worker continues with the next batch
                    _fail(error, self._batch)
                    continue
                for request, answer in zip(self._batch, answers, strict=True):
                    if not request.answer.done():
                        request.answer.set_result(answer)
        finally:
            self._is_closed = True
            _fail(WorkerLost("the logprob server was closed"), self._batch + self._queue)

    async def _fill_batch(self) -> None:
        """Wait until a batch can start, and move the requests that fit into it from the queue to `_batch`."""
        while True:
            # Drop requests whose callers have cancelled them
            self._queue = [request for request in self._queue if not request.answer.done()]
            queued_tokens = np.cumsum([len(request.token_ids) for request in self._queue])
            wait_s = None  # while the queue is empty, wait for a request without a time limit
            if self._queue:
                wait_s = self._queue[0].arrived_at + self._max_wait_s - time.monotonic()
                if wait_s <= 0 or queued_tokens[-1] >= self._max_tokens:
                    break
            self._arrival.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), wait_s)
        count = int(np.searchsorted(queued_tokens, self._max_tokens, side="right"))
        if not self._joins_calls:
            calls = [request.call_number for request in self._queue]
            count = min(count, calls.count(calls[0]))
        self._batch = self._queue[:count]
        self._queue = self._queue[count:]

    def _forward(
        self, batch: list[_Request], temperature: float, truncation: Truncation | None = None
    ) -> list[np.ndarray]:
        """Compute the log-probs (T,) of each request's completion in one packed forward pass. Runs in a thread.

        Raises:
            OutOfMemory: The sequences do not fit into the memory together.
        """
        num_tokens = sum(len(request.token_ids) for request in batch)
        activity = f"in a logprob worker's forward pass of {num_tokens:,} tokens in {len(batch):,} sequences"
        with naming_out_of_memory(activity, forward_cure(self._max_tokens)):
            return self._packed_logprobs(batch, temperature, truncation)

    @torch.no_grad()
    def _packed_logprobs(
        self, batch: list[_Request], temperature: float, truncation: Truncation | None
    ) -> list[np.ndarray]:
        lengths = [len(request.token_ids) for request in batch]
        bounds = np.cumsum([0, *lengths])
        input_ids = np.concatenate([request.token_ids for request in batch])
        is_completion = np.ones(len(input_ids), bool)
        for begin, request in zip(bounds[:-1], batch, strict=True):
            is_completion[begin : begin + request.prompt_length] = False
        allowed = AllowedTokens.joined([request.allowed for request in batch], lengths)
        masks = None if allowed is None else self._policy.token_masks(allowed)
        images = [request.images for request in batch]
        masks_and_images: tuple[Any, ...] = () if masks is None else (masks,)
        if any(images):
            masks_and_images = (masks, self._policy.image_inputs(images, input_ids, bounds))
        num_top = max(request.num_top for request in batch)
        further_options: dict[str, Any] = {} if truncation is None else {"truncation": truncation}
        if num_top:
            further_options["num_top"] = num_top
        logprobs, *further_results = self._policy(
            torch.tensor(input_ids, dtype=torch.int64, device=self._policy.device),
            torch.tensor(bounds),
            torch.tensor(is_completion, device=self._policy.device),
            temperature,
            *masks_and_images,
            **further_options,
        )
        values = logprobs.float().cpu().numpy()
        if num_top:
            sampled = np.stack([input_ids.astype(np.float32), values], axis=1)[:, :, None]
            values = np.concatenate([sampled, further_results[-1].float().cpu().numpy()], axis=2)
        answers = []
        for request, row in zip(batch, np.split(values, bounds[1:-1]), strict=True):
            completion_row = row[request.prompt_length :]
            if request.num_top:
                completion_row = completion_row[:, :, : 1 + request.num_top]
            elif num_top:
                completion_row = completion_row[:, 1, 0]
            answers.append(completion_row.copy())
        return answers


def _load_policy(config: Any, settings: SharedRunSettings) -> PolicyModel:
    """Load the model. If the trainer sends the run's LoRA adapter separately from the weights, add the adapter.

    Reference workers and frozen teachers get no adapter. The reference of a policy with an adapter is the model without
    it.
    """
    model = load_causal_lm(config.model_path, settings.dtype)
    lora = settings.lora
    if lora is None or lora.sync == "merged":
        return PolicyModel(model)
    if config.mode != GENERATION and config.role in FROZEN_ROLES:
        return PolicyModel(model)
    # The first sync brings the adapter's values. The folder of an initial adapter may not exist on this node
    lora = dataclasses.replace(lora, initial_folder="")
    add_lora(model, lora)
    policy = PolicyModel(model)
    fill_lora(policy.model, lora, settings.seed, torch.device("cpu"))
    return policy


def _fail(error: Exception, requests: list[_Request]) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_exception(error)
