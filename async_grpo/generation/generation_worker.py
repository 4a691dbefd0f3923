"""`GenerationWorker`: one vLLM engine that completes prompts and changes its weights while it does so.

Plain asyncio; the Ray actor around it is in `cluster/`. vLLM's types stay in this room.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.generation.char_ends import char_ends
from async_grpo.generation.config import EngineConfig
from async_grpo.generation.engine_arguments import engine_arguments
from async_grpo.generation.transfer_steps import TransferSteps
from async_grpo.protocols import Manifest, TensorRecord
from async_grpo.types import Completion, FinishReason, SharedRunSettings
from async_grpo.weights.vllm_engine import WORKER_EXTENSION, shared_bytes

# Of vLLM's arguments; another value would make engine and trainer two policies, or contradict an option of ours
UNSYNCED = -1  # policy version of an engine that still holds whatever its checkpoint held


class TokenTimeline(StatLoggerBase):
    """Counts generated tokens by the moment they were generated, in slots of 50 ms."""

    SLOT_S = 0.05

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.slots: dict[int, int] = {}

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        if iteration_stats is not None and iteration_stats.num_generation_tokens:
            slot = int(time.time() / self.SLOT_S)
            self.slots[slot] = self.slots.get(slot, 0) + iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        pass

    def take(self) -> list[tuple[float, int]]:
        """(wall-clock seconds, tokens) since the last call."""
        taken, self.slots = self.slots, {}
        return [((slot + 0.5) * self.SLOT_S, tokens) for slot, tokens in sorted(taken.items())]


class GenerationWorker:
    """One engine. `complete` may be called as often as wanted at once; updates wait for nobody (pause, keep)."""

    worker_extension = WORKER_EXTENSION  # what vLLM's worker processes import

    def __init__(
        self, engine: AsyncLLM, tokenizer: Any, settings: SharedRunSettings, timeline: TokenTimeline
    ) -> None:
        self.engine, self.tokenizer, self.settings, self.timeline = engine, tokenizer, settings, timeline
        self.policy_version = UNSYNCED
        self.paused_s = 0.0
        self._request_ids = itertools.count()
        self._updating = asyncio.Lock()
        self._paused_at = 0.0
        self.transfer = TransferSteps(self)
        self._broken_reason: str | None = None
        self._requests = 0  # unfinished, in the engine
        self._busy_since = 0.0
        self._busy: list[tuple[float, float]] = []  # wall-clock intervals with at least one request

    @classmethod
    def start(cls, options: EngineConfig, settings: SharedRunSettings) -> "GenerationWorker":
        """Load the model and start the engine (tens of seconds). Must run inside an event loop."""
        timeline = TokenTimeline()
        arguments = engine_arguments(options, settings, cls.worker_extension)
        engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: timeline])
        return cls(engine, AutoTokenizer.from_pretrained(options.model_path), settings, timeline)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the engine's KV cache can hold at once."""
        cache = self.engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    async def complete(
        self, prompt_token_ids: np.ndarray, count: int, greedy: bool = False
    ) -> AsyncGenerator[Completion]:
        """Yield `count` completions, sampled or of the likeliest token at every place, each as soon as it is finished.

        Closing the iterator aborts the other requests in the engine.

        Raises:
            WorkerLost: the engine died, or its last weight update failed.
        """
        requests = [asyncio.ensure_future(self._complete(prompt_token_ids, greedy)) for _ in range(count)]
        try:
            for request in asyncio.as_completed(requests):
                yield await request
        finally:
            unfinished = [request for request in requests if not request.done()]
            for request in unfinished:
                request.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def _complete(self, prompt_token_ids: np.ndarray, greedy: bool) -> Completion:
        self._check_fit()
        params = self._sampling_params(len(prompt_token_ids), greedy)
        # No request asked for under these weights may hit a prefix computed by others: the salt is the version.
        prompt = {"prompt_token_ids": prompt_token_ids.tolist(), "cache_salt": str(self.policy_version)}
        self._count(+1)
        try:
            final = await self._last_output(prompt, params)
        finally:
            self._count(-1)
        self._check_fit()
        return self._completion(final.outputs[0])

    def _sampling_params(self, prompt_length: int, greedy: bool = False) -> SamplingParams:
        room = self.settings.max_total_tokens - prompt_length
        if room < 1:
            raise ConfigurationError(
                f"a prompt of {prompt_length} tokens leaves no room in {self.settings.max_total_tokens} tokens: "
                "shorten it or raise --max-generation-tokens"
            )
        return SamplingParams(
            temperature=0.0 if greedy else self.settings.temperature,
            max_tokens=min(self.settings.max_completion_tokens, room),
            stop_token_ids=list(self.settings.stop_token_ids),
            logprobs=0,  # the sampled token's own
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _last_output(self, prompt: dict[str, Any], params: SamplingParams) -> Any:
        try:
            outputs = [
                output async for output in self.engine.generate(prompt, params, str(next(self._request_ids)))
            ]
        except Exception as error:
            if self.engine.errored:
                raise WorkerLost(f"the vLLM engine died: {error or type(error).__name__}") from error
            raise
        return outputs[-1]

    def _completion(self, output: CompletionOutput) -> Completion:
        token_ids = np.asarray(output.token_ids, np.int32)
        if output.finish_reason not in ("stop", "length"):
            raise WorkerLost(
                f"the engine ended a request with {output.finish_reason!r} after {len(token_ids)} tokens"
            )
        logprobs = [
            step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        stopped = output.finish_reason == "stop"
        text = self.tokenizer.decode(token_ids[:-1] if stopped else token_ids, skip_special_tokens=False)
        return Completion(
            token_ids=token_ids,
            logprobs=np.asarray(logprobs, np.float32),
            versions=_versions(output, len(token_ids)),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            text=text,
            char_ends=char_ends(self.tokenizer, token_ids.tolist(), text)
            if self.settings.char_ends
            else None,
        )

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Replace the weights by `chunks` (safetensors images) while requests are paused; returns the receipt.

        After a failure the engine holds a mixture of two policies: it refuses every further request.
        """
        await self.pause(version)
        try:
            await self.engine.start_weight_update()
            for number, chunk in enumerate(chunks):
                with shared_bytes(chunk, f"weights-{version}-{number}") as path:
                    await self.engine.update_weights(WeightTransferUpdateRequest({"path": path}))
            await self.engine.finish_weight_update(weight_version=str(version))
            return await self.receipt()
        except BaseException as error:
            self.break_down(f"its update to policy version {version} failed: {error or type(error).__name__}")
            raise
        finally:
            await self.resume()

    async def pause(self, version: int) -> None:
        """Hold all requests, for one update at a time. Those that come from now on wait, and are served by `version`:
        they carry its salt, so that they neither find nor leave a prefix of other weights."""
        await self._updating.acquire()
        try:
            self._paused_at = time.monotonic()
            await self.engine.pause_generation(mode="keep", clear_cache=False)
        except BaseException:
            self._updating.release()
            raise
        self.policy_version = version

    async def resume(self) -> None:
        """Go on with the requests that `pause` held."""
        try:
            await self.engine.resume_generation()
        finally:
            self.paused_s += time.monotonic() - self._paused_at
            self._updating.release()

    def break_down(self, reason: str) -> None:
        """Refuse every request from now on."""
        self._broken_reason = reason

    async def receipt(self) -> Manifest:
        """The receipts of all processes of the engine; they must be one and the same."""
        receipts = await self.engine.collective_rpc("weight_receipt")
        if any(receipt != receipts[0] for receipt in receipts):
            raise WorkerLost("the processes of one engine received different weights")
        return {
            name: TensorRecord(dtype, tuple(shape), digest)
            for name, (dtype, shape, digest) in receipts[0].items()
        }

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """(N,) float32 log-probs of a fixed text under the current weights, at temperature 1; the first one is 0."""
        params = SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, skip_reading_prefix_cache=True
        )
        final = await self._last_output({"prompt_token_ids": token_ids.tolist()}, params)
        steps = zip(final.prompt_logprobs[1:], token_ids[1:].tolist(), strict=True)
        return np.asarray([0.0] + [step[token].logprob for step, token in steps], np.float32)

    def _count(self, change: int) -> None:
        """Note when the engine begins and ceases to hold requests."""
        if self._requests == 0:
            self._busy_since = time.time()
        self._requests += change
        if self._requests == 0:
            self._busy.append((self._busy_since, time.time()))

    def _check_fit(self) -> None:
        if self._broken_reason:
            raise WorkerLost(f"this engine takes no more requests: {self._broken_reason}")

    async def until_failure(self, every_s: float = 1.0) -> str:
        """Wait for the engine to die; returns how it was noticed. Finds a death that no request would meet."""
        while not self.engine.errored:
            await asyncio.sleep(every_s)
        return "the vLLM engine's processes died"

    def progress(self) -> dict[str, Any]:
        """Since the last call: tokens by time, seconds paused for weights, and intervals with unfinished requests."""
        paused_s, self.paused_s = self.paused_s, 0.0
        busy, self._busy = self._busy, []
        if self._requests:  # the one that is still open, up to now
            busy.append((self._busy_since, time.time()))
            self._busy_since = time.time()
        return {"token_timeline": self.timeline.take(), "paused_s": paused_s, "busy": busy}

    def close(self) -> None:
        """Stop the engine and its processes."""
        self.engine.shutdown()


def _versions(output: CompletionOutput, num_tokens: int) -> np.ndarray:
    """(T,) int32: the policy version of every token, from the engine's own spans."""
    versions = np.full(num_tokens, UNSYNCED, np.int32)
    for span in output.weight_versions or ():
        if span.version.lstrip("-").isdigit():
            versions[span.start : span.end] = int(span.version)
    return versions
