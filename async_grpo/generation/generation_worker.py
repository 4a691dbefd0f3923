"""`GenerationWorker`: one vLLM engine that completes prompts and changes its weights while it does so.

Plain asyncio; the Ray actor around it is in `cluster/`. vLLM's types stay in this room.
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.generation.char_ends import char_ends
from async_grpo.generation.config import EngineConfig
from async_grpo.generation.engine_arguments import engine_arguments
from async_grpo.protocols import Manifest, Receipt, TensorRecord, answer_canary
from async_grpo.types import Completion, FinishReason, Sampling, SharedRunSettings
from async_grpo.weights.read_back import place_of
from async_grpo.weights.vllm_engine import WORKER_EXTENSION, shared_bytes

log = logging.getLogger(__name__)
UNSYNCED = -1  # policy version of an engine that still holds whatever its checkpoint held


class TokenTimeline(StatLoggerBase):
    """Notes (wall-clock seconds, generated tokens) of every step of the engine."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.steps: list[tuple[float, int]] = []

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        if iteration_stats is not None and iteration_stats.num_generation_tokens:
            self.steps.append((time.time(), iteration_stats.num_generation_tokens))

    def log_engine_initialized(self) -> None:
        pass


class GenerationWorker:
    """An `Engine` of vLLM. `complete` may be called as often as wanted at once; updates wait for nobody (pause, keep)."""

    worker_extension = WORKER_EXTENSION  # what vLLM's worker processes import

    def __init__(
        self, engine: AsyncLLM, tokenizer: Any, settings: SharedRunSettings, timeline: TokenTimeline
    ) -> None:
        self.engine, self.tokenizer, self.settings, self.timeline = engine, tokenizer, settings, timeline
        self.policy_version = UNSYNCED
        self.paused_s = 0.0
        self._request_ids = itertools.count()
        self._updating = asyncio.Lock()
        self._paused_at, self._update_finished = 0.0, True
        self._broken_reason: str | None = None
        self._unreadable: set[str] | None = (
            None  # places of the weights (`read_back`); None before the first update
        )
        self._begun: dict[int, float] = {}  # unfinished request -> since when
        self._busy: list[tuple[float, float]] = []  # the intervals of the others

    @classmethod
    def start(cls, options: EngineConfig, settings: SharedRunSettings) -> "GenerationWorker":
        """Load the model and start the engine (tens of seconds). Must run inside an event loop."""
        if current_platform.is_cpu() and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
            # Or the model gets a process and an import of vLLM of its own: only needed to bind its threads
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        timeline = TokenTimeline()
        arguments = engine_arguments(options, settings, cls.worker_extension)
        engine = AsyncLLM.from_engine_args(
            arguments,
            usage_context=UsageContext.LLM_CLASS,  # prefills as large as for a batch, not a chat
            stat_loggers=[lambda *_: timeline],
        )
        return cls(engine, AutoTokenizer.from_pretrained(options.model_path), settings, timeline)

    @property
    def kv_cache_tokens(self) -> int:
        cache = self.engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    async def complete(
        self, prompt_token_ids: np.ndarray, seeds: Mapping[int, int], sampling: Sampling | None = None
    ) -> AsyncGenerator[Completion]:
        """See `Engine`. Raises ConfigurationError for a prompt that leaves no room to answer."""
        token_ids, sampling = prompt_token_ids.tolist(), sampling or Sampling()
        of_each = {m: self._sampling_params(len(token_ids), sampling, seed) for m, seed in seeds.items()}
        requests = [asyncio.ensure_future(self._complete(token_ids, *one)) for one in of_each.items()]
        try:
            for request in asyncio.as_completed(requests):
                yield await request
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def _complete(self, token_ids: list[int], member: int, params: SamplingParams) -> Completion:
        self._check_fit()
        # No request may hit a prefix computed by other weights: their version is the salt; while it changes, wait. vLLM
        # takes other forms of prompts through a thread, and a pause could come between.
        async with self._updating:
            prompt = tokens_input(token_ids, cache_salt=str(self.policy_version))
        request = next(self._request_ids)
        self._begun[request] = time.time()
        try:
            final = await self._last_output(prompt, params)
        finally:
            self._busy.append((self._begun.pop(request), time.time()))
        self._check_fit()
        return self._completion(final.outputs[0], member)

    def _check_fit(self) -> None:
        if self._broken_reason:
            raise WorkerLost(f"this engine takes no more requests: {self._broken_reason}")

    def _sampling_params(self, prompt_length: int, sampling: Sampling, seed: int) -> SamplingParams:
        room = self.settings.max_total_tokens - prompt_length
        if room < 1:
            raise ConfigurationError(
                f"a prompt of {prompt_length} tokens leaves no room in {self.settings.max_total_tokens} tokens: "
                "shorten it or raise --max-generation-tokens"
            )
        temperature, longest = sampling.temperature, sampling.max_tokens
        return SamplingParams(
            temperature=self.settings.temperature if temperature is None else temperature,
            seed=seed,
            max_tokens=min(longest or self.settings.max_completion_tokens, room),
            stop_token_ids=list(self.settings.stop_token_ids),
            logprobs=0,  # the sampled token's own
            flat_logprobs=True,  # lists instead of a dictionary per token
            skip_clone=True,  # nobody changes it
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _last_output(self, prompt: TokensInput, params: SamplingParams) -> Any:
        name = str(next(self._request_ids))
        try:
            outputs = [output async for output in self.engine.generate(prompt, params, name)]
        except Exception as error:
            if self.engine.errored:
                raise WorkerLost(f"the vLLM engine died: {error or type(error).__name__}") from error
            raise
        return outputs[-1]

    def _completion(self, output: CompletionOutput, member: int) -> Completion:
        token_ids, flat = np.asarray(output.token_ids, np.int32), output.logprobs
        if output.finish_reason not in ("stop", "length"):
            raise WorkerLost(f"the engine ended a request with {output.finish_reason!r}")
        assert isinstance(flat, FlatLogprobs) and len(flat) == len(token_ids), type(flat)
        stopped = output.finish_reason == "stop"
        text = self.tokenizer.decode(token_ids[:-1] if stopped else token_ids, skip_special_tokens=False)
        return Completion(
            token_ids=token_ids,
            logprobs=np.asarray(flat.logprobs, np.float32)[flat.start_indices],  # the first of each position
            versions=_versions(output),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            text=text,
            char_ends=char_ends(self.tokenizer, output.token_ids, text) if self.settings.char_ends else None,
            member=member,
        )

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Replace the weights by `chunks` (safetensors images) while requests are paused; returns the receipt.

        After a failure the engine holds a mixture of two policies: it refuses every further request.
        """
        await self.pause(version)
        try:
            await self.start_weight_update()
            for number, chunk in enumerate(chunks):
                with shared_bytes(chunk, f"weights-{version}-{number}") as path:
                    await self.receive_weights({"path": path})
            await self.finish_weight_update()
        finally:
            await self.resume(version)
        return await self._manifest()

    # The steps of an update, which the trainer's own transfer engine (NCCL) asks for one by one: `Engines`.

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    async def pause(self, version: int) -> None:
        """Hold all requests. Those that come from now on wait, and carry the salt of `version`, which will serve them."""
        await self._updating.acquire()
        try:
            self._paused_at = time.monotonic()
            await self.engine.pause_generation(mode="keep", clear_cache=False)
        except BaseException:
            self._updating.release()
            raise
        self.policy_version, self._update_finished = version, False

    async def start_weight_update(self) -> None:
        await self.engine.start_weight_update()

    async def receive_weights(self, update_info: dict[str, Any]) -> None:
        await self.engine.update_weights(WeightTransferUpdateRequest(update_info))

    async def finish_weight_update(self) -> None:
        await self.engine.finish_weight_update(weight_version=str(self.policy_version))
        self._update_finished = True

    async def resume(self, version: int) -> None:
        """Go on with the requests that `pause` held; if the update did not finish, only to refuse them."""
        if not self._update_finished:
            self._broken_reason = f"its update to policy version {version} did not finish"
        try:
            await self.engine.resume_generation()
        finally:
            self.paused_s += time.monotonic() - self._paused_at
            self._updating.release()

    async def receipt(self, texts: Sequence[np.ndarray]) -> Receipt:
        return await self._manifest(), await answer_canary(self, texts)

    async def _manifest(self) -> Manifest:
        receipts = await self.engine.collective_rpc("weight_receipt")
        if any(receipt != receipts[0] for receipt in receipts):
            self._broken_reason = "its processes received different weights"
            raise WorkerLost("the processes of one engine received different weights")
        unused = await self._places_not_in_use()
        return {
            name: TensorRecord(dtype, tuple(shape), digest, unused.isdisjoint((name, place_of(name))))
            for name, (dtype, shape, digest, _) in receipts[0].items()
        }

    async def _places_not_in_use(self) -> set[str]:
        """Where the engine computes with other weights than arrived. Some places cannot be read (quantised layers,
        experts): those that differ after the first update, which brings what a new engine holds already."""
        processes = await self.engine.collective_rpc("fingerprints")
        arrived = processes[0][1]
        used = {place: sum(own[place] for own, _ in processes) % 2**64 for place in arrived}
        differing = {place for place in arrived if used[place] != arrived[place]}
        if self._unreadable is None:
            self._unreadable = differing
            log.info(
                "%d of %d places of the weights can be read back", len(arrived) - len(differing), len(arrived)
            )
        return differing - self._unreadable

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """See `Engine`."""
        params = SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, skip_reading_prefix_cache=True
        )
        final = await self._last_output(tokens_input(token_ids.tolist()), params)
        steps = zip(final.prompt_logprobs[1:], token_ids[1:].tolist(), strict=True)
        return np.asarray([0.0, *(step[token].logprob for step, token in steps)], np.float32)

    async def until_failure(self, every_s: float = 1.0) -> str:
        """See `Engine`; it finds a death that no request would meet."""
        while not self.engine.errored:
            await asyncio.sleep(every_s)
        return "the vLLM engine's processes died"

    def progress(self) -> dict[str, Any]:
        """See `Engine`."""
        paused_s, self.paused_s = self.paused_s, 0.0
        now = time.time()
        busy = self._busy + [(begun, now) for begun in self._begun.values()]
        self._busy, self._begun = [], dict.fromkeys(self._begun, now)
        timeline, self.timeline.steps = self.timeline.steps, []
        return {"token_timeline": timeline, "paused_s": paused_s, "busy": busy}

    def close(self) -> None:
        self.engine.shutdown()


def _versions(output: CompletionOutput) -> np.ndarray:
    """(T,) int32: the policy version of every token, from the engine's own spans."""
    versions = np.full(len(output.token_ids), UNSYNCED, np.int32)
    for span in output.weight_versions or ():
        if span.version.lstrip("-").isdigit():
            versions[span.start : span.end] = int(span.version)
    return versions
