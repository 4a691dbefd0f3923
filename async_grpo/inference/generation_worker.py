"""`GenerationWorker`: one vLLM engine that completes prompts, and receives new weights at the same time.

This module uses plain asyncio. The Ray actor that runs the worker is in `cluster/`. No vLLM types reach the callers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import TokensInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from async_grpo.errors import WorkerLost
from async_grpo.inference.completions import finished_completion
from async_grpo.inference.config import EngineConfig
from async_grpo.inference.engine_arguments import describe_engine, engine_arguments
from async_grpo.inference.grammar_replay import GrammarReplay, refuse_grammar
from async_grpo.inference.image_requests import (
    ImageRequest,
    canary_prompt,
    check_expanded,
    check_image_processor,
    without_tokens,
)
from async_grpo.inference.memory_cures import lack_in_step
from async_grpo.inference.received_weights import ReceivedWeights
from async_grpo.inference.requests import (
    NO_TOKENS,
    PROMPT_LOGPROBS,
    UNSYNCED,
    EngineRequest,
    RequestTimes,
    TokenTimeline,
    new_name,
    new_tokens_by_member,
    prompt_logprobs,
)
from async_grpo.inference.served_lora import POLICY_LORA, served_lora
from async_grpo.inference.sleep_mode import SleepMode
from async_grpo.inference.stall_watch import StallWatch
from async_grpo.inference.vllm_edges.model_inspection import inspect_models_here
from async_grpo.inference.vllm_edges.one_process import run_model_in_engine_process
from async_grpo.inference.vllm_edges.receive_weights import shared_bytes
from async_grpo.inference.vllm_edges.stop_texts import use_tokenizer
from async_grpo.inference.vllm_edges.transfer_group import leave_transfer_group
from async_grpo.inference.vllm_edges.weight_versions import note_versions
from async_grpo.inference.vllm_edges.worker_extension import WORKER_EXTENSION
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import load_tokenizer
from async_grpo.protocols import Manifest, Receipt, answer_canary
from async_grpo.types import Completion, ImageReference, Sampling, Tokens

log = logging.getLogger(__name__)
# Seconds between reports of the new tokens of unfinished completions. If an engine is lost, only the tokens since the
# last report are lost
PARTIAL_RESULTS_EVERY_S = 5.0
DID_NOT_WAKE = "it did not wake up"


class GenerationWorker:
    """An `Engine` that runs vLLM.

    Any number of calls of `complete` may run at the same time. A weight update does not wait for them to end: vLLM
    pauses the requests during the update, and they continue with the new weights.
    """

    worker_extension = WORKER_EXTENSION  # module and class whose methods vLLM adds to its worker processes

    def __init__(
        self,
        engine: AsyncLLM,
        tokenizer: Any,
        settings: SharedRunSettings,
        timeline: TokenTimeline,
        stall_s: float,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.timeline = timeline
        self.stall_s = stall_s
        self.policy_version = UNSYNCED
        self.paused_s = 0.0  # seconds of pauses by weight updates since the last call of `progress`
        self.peak_gpu_bytes = 0  # peak memory of the engine's GPUs until the last update; 0 on the CPU
        self._num_starts = 0  # number of times that a restarted trainer has taken over this engine
        self._broken_reason: str | None = None  # why the engine refuses all requests; None if it accepts them
        self._requests = RequestTimes()
        self._watch = StallWatch(timeline, self._requests)
        self._adapter = served_lora(settings)
        self._received = ReceivedWeights(engine, self._adapter)
        self._grammar_replay = GrammarReplay(engine, tokenizer)
        # Locked while weights change: from `pause` (or `sleep`) to `resume`
        self._update_lock = asyncio.Lock()
        self._paused_at = 0.0
        self._is_update_finished = True
        self._sleep_mode = SleepMode(engine)

    @classmethod
    def start(cls, options: EngineConfig, settings: SharedRunSettings) -> "GenerationWorker":
        """Load the model and start the engine, which takes tens of seconds. Must run inside an event loop."""
        run_model_in_engine_process()
        inspect_models_here()
        timeline = TokenTimeline()
        engine = AsyncLLM.from_engine_args(
            engine_arguments(options, settings, cls.worker_extension),
            # Use vLLM's defaults for offline batches. They allow larger prefills than the defaults for a chat server
            usage_context=UsageContext.LLM_CLASS,
            stat_loggers=[lambda *_: timeline],
        )
        tokenizer = load_tokenizer(options.model_path)
        # vLLM needs the tokenizer to find the texts of `Sampling.stop`
        use_tokenizer(engine, tokenizer)
        if settings.unsampled_token_ids:
            check_image_processor(engine, settings)
        note_versions(engine)  # without it, outputs of vLLM 0.31 lack the policy version of each token
        log.info("vLLM's engine is up: %s", describe_engine(engine.vllm_config))
        return cls(engine, tokenizer, settings, timeline, options.engine_stall_s)

    async def finish_start(self) -> None:
        """Prepare the engine for the policy's adapter, if it has one. Must be called once, before the first update.

        Raises:
            ConfigurationError: The engine cannot apply the adapter.
        """
        await self._received.begin()

    @property
    def kv_cache_tokens(self) -> int:
        """Return the number of tokens for which the KV cache has room."""
        cache = self.engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    async def complete(
        self,
        prompt_token_ids: np.ndarray,
        seeds: Mapping[int, int],
        sampling: Sampling | None = None,
        begun: Mapping[int, Tokens] | None = None,
        images: Sequence[ImageReference] = (),
    ) -> AsyncGenerator[Completion | Mapping[int, Tokens]]:
        """Yield finished completions, and every few seconds the new tokens of unfinished ones. See `protocols.Engine`.

        `seeds` has each member's seed, `begun` the tokens that a lost engine had sampled (`EngineRequest.first_tokens`).

        Raises:
            ConfigurationError: The prompt leaves no room for an answer, or its grammar is refused (RequestRefused).
            ImagesDiffer: The engine would read other images or image tokens than the trainer.
            WorkerLost: The engine died, or its last update failed.
        """
        begun = begun or {}
        image_request = None
        if images:
            image_token_id = self.settings.image_token_id
            image_request = await ImageRequest.of(self.engine, prompt_token_ids, images, image_token_id)
        requests = [
            EngineRequest.of(
                self.settings,
                prompt_token_ids,
                member,
                seed,
                sampling,
                begun.get(member, NO_TOKENS),
            )
            for member, seed in seeds.items()
        ]
        tasks = [asyncio.ensure_future(self._complete(request, image_request)) for request in requests]
        unfinished = set(tasks)
        next_report_at = time.monotonic() + PARTIAL_RESULTS_EVERY_S
        try:
            while unfinished:
                finished, unfinished = await asyncio.wait(
                    unfinished,
                    timeout=max(0.0, next_report_at - time.monotonic()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in finished:
                    yield await task
                if time.monotonic() >= next_report_at:
                    next_report_at += PARTIAL_RESULTS_EVERY_S
                    new_tokens = new_tokens_by_member(requests, self.engine)
                    if new_tokens:
                        yield new_tokens
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, request: EngineRequest, images: ImageRequest | None) -> Completion:
        self._refuse_if_not_ready()
        # The salt names the weights, so that vLLM does not reuse a cached prefix that other weights computed. The lock
        # waits for the end of an update. No other update can begin before vLLM has the request, because no other task runs
        # until then: vLLM sends a prompt in its internal form (`tokens_input`) at once. It converts other forms in a thread
        async with self._update_lock:
            salt = f"{self._num_starts}/{self.policy_version}"
            if images is None:
                prompt = tokens_input(request.token_ids, cache_salt=salt)
            else:
                prompt = images.input(request.first_tokens.token_ids.tolist(), salt)
        if self._requests.num_unfinished == 0:
            # The engine was idle until now, so count its silence from here
            self.timeline.last_progress = time.monotonic()
        with self._requests.measure(request.name):
            final = await self._last_output(prompt, request.params, request.name)
        self._refuse_if_not_ready()
        if images is not None:
            check_expanded(final.prompt_token_ids or (), request.token_ids)
        allowed = await self._grammar_replay.allowed_tokens(request, final.outputs[0])
        if self.settings.unsampled_token_ids:
            num_tokens = len(request.first_tokens) + len(final.outputs[0].token_ids)
            allowed = without_tokens(
                allowed, num_tokens, self.settings.unsampled_token_ids, self.settings.vocab_size
            )
        return finished_completion(
            output=final.outputs[0],
            member=request.member,
            tokenizer=self.tokenizer,
            settings=self.settings,
            first_tokens=request.first_tokens,
            allowed=allowed,
        )

    def _refuse_if_not_ready(self) -> None:
        if self._broken_reason:
            raise WorkerLost(f"this engine takes no more requests: {self._broken_reason}")
        if not self._received.is_ready:
            raise WorkerLost("this engine takes no requests yet: it has not received the policy's adapter")

    async def _last_output(
        self, prompt: TokensInput, params: SamplingParams, name: str, with_adapter: bool = True
    ) -> RequestOutput:
        adapter = POLICY_LORA if self._adapter is not None and with_adapter else None
        try:
            generator = self.engine.generate(prompt, params, name, lora_request=adapter)
            outputs = [output async for output in generator]
        except Exception as error:
            if self.engine.errored:
                cause = str(error) or type(error).__name__
                cause = lack_in_step(self._requests.num_unfinished, error) or cause
                raise WorkerLost(f"the vLLM engine died: {cause}") from error
            refuse_grammar(params, error)
            raise
        return outputs[-1]

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Pause requests, load the weights in `chunks` (bytes of safetensors files), and return a record of each tensor.

        If the update fails, the engine has a mixture of two policies, and refuses all further requests.
        """
        with self._watch.working_for_trainer():
            await self.pause(version)
            try:
                await self.start_weight_update()
                for number, chunk in enumerate(chunks):
                    with shared_bytes(chunk, f"weights-{version}-{number}") as path:
                        await self.receive_weights({"path": path})
                    self.timeline.last_progress = time.monotonic()
                await self.finish_weight_update()
            finally:
                await self.resume(version)
            return await self._manifest()

    async def begin_anew(self) -> bool:
        """Prepare to serve a restarted trainer, and return whether this engine can. See `protocols.Engine`."""
        if self._broken_reason or self.engine.errored or self._update_lock.locked():
            return False
        # The new trainer reuses version numbers for other weights. A new salt keeps old cached prefixes from being used
        self._num_starts += 1
        self._received.begin_anew()
        self.policy_version = UNSYNCED
        return True

    # The steps of an update. `update` calls them in order. With the NCCL transport, the trainer calls them one by one

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Join a transfer group. The engine first leaves its earlier group, which would otherwise stay open."""
        await leave_transfer_group(self.engine)
        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    async def sleep(self, level: int) -> None:
        """Release the memory of the GPU, once all requests have ended. Later requests wait for the next update."""
        await self._update_lock.acquire()
        try:
            await self._sleep_mode.begin(level)
        except BaseException:
            self._update_lock.release()
            raise

    async def pause(self, version: int) -> None:
        """Hold all requests until `resume`. Later requests wait, and then use the weights of `version`."""
        if not self._sleep_mode.is_asleep:
            await self._update_lock.acquire()
        try:
            self._paused_at = time.monotonic()
            await self._sleep_mode.wake_weights()
            await self.engine.pause_generation(mode="keep", clear_cache=False)
        except BaseException:
            if self._sleep_mode.is_asleep:
                self._broken_reason = DID_NOT_WAKE
            self._update_lock.release()
            raise
        self.policy_version = version
        self._is_update_finished = False

    async def start_weight_update(self) -> None:
        """Prepare the engine for new weights."""
        await self.engine.start_weight_update()

    async def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Receive some of the new weights."""
        await self.engine.update_weights(WeightTransferUpdateRequest(update_info))

    async def finish_weight_update(self) -> None:
        """Let the engine compute with the new weights."""
        await self.engine.finish_weight_update(weight_version=str(self.policy_version))
        await self._received.put_adapter_in_place()
        if self.settings.unsampled_token_ids:
            # vLLM caches the features of images, which the old weights computed
            await self.engine.reset_encoder_cache()
        self._is_update_finished = True

    async def resume(self, version: int) -> None:
        """Continue the requests that `pause` has stopped. If the update did not finish, these requests fail."""
        if not self._is_update_finished:
            self._broken_reason = f"its update to policy version {version} did not finish"
        try:
            # Allocate the KV cache only now, because the update may have needed that memory
            await self._sleep_mode.wake_cache()
            await self.engine.resume_generation()
        finally:
            if self._sleep_mode.is_asleep:
                self._broken_reason = DID_NOT_WAKE
            now = time.monotonic()
            self.timeline.last_progress = now
            self.paused_s += now - self._paused_at
            self._update_lock.release()

    async def receipt(self, texts: Sequence[np.ndarray]) -> Receipt:
        """Return a record of each tensor of the last update, and the log-probs of the canary texts."""
        manifest = await self._manifest()
        return manifest, await answer_canary(self, texts)

    async def _manifest(self) -> Manifest:
        """Return a record of every received tensor, including whether the engine computes with this tensor."""
        try:
            manifest = await self._received.manifest()
        except WorkerLost as error:
            self._broken_reason = str(error)
            raise
        if torch.cuda.is_available():
            self.peak_gpu_bytes = sum(await self.engine.collective_rpc("peak_gpu_bytes"))
        return manifest

    async def canary(self, token_ids: np.ndarray, with_adapter: bool = True) -> np.ndarray:
        """Return the log-probs (N,) float32 of a fixed text. The first is 0. See `protocols.Engine`.

        Args:
            token_ids: The text (N,).
            with_adapter: Whether to apply the policy's adapter. Without it, the base model answers: the reference policy.
        """
        prompt = await canary_prompt(self.engine, token_ids, self.settings)
        with self._watch.working_for_trainer():
            final = await self._last_output(prompt, PROMPT_LOGPROBS, new_name(), with_adapter)
        return prompt_logprobs(final, token_ids)

    async def until_failure(self, every_s: float = 1.0) -> str:
        """Wait until the engine dies or stalls, and return the reason. This also works while there are no requests."""
        while not self.engine.errored:
            await asyncio.sleep(every_s)
            silence_s = self._watch.silence_s(is_paused=self._update_lock.locked())
            if silence_s > self.stall_s:
                self._broken_reason = (
                    f"it made no token for {silence_s:.0f} s (--engine-stall-s {self.stall_s:g}), with "
                    f"{self._requests.num_unfinished} requests under way"
                )
                return self._broken_reason
        memory_error = lack_in_step(self._requests.num_unfinished)
        return f"the vLLM engine's processes died; {memory_error}".removesuffix("; ")

    def progress(self) -> dict[str, Any]:
        """Return statistics of the time since the last call. See `protocols.Engine`."""
        progress = {
            "token_timeline": self.timeline.steps,
            "paused_s": self.paused_s,
            "busy": self._requests.take(),
        }
        self.timeline.steps = []
        self.paused_s = 0.0
        return progress

    def close(self) -> None:
        """Stop the engine and its processes."""
        self.engine.shutdown()
