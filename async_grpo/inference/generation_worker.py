"""`GenerationWorker`: one vLLM engine that completes prompts and changes its weights while it does so.

Plain asyncio; the Ray actor around it is in `cluster/`. vLLM's types stay in this room.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import TokensInput, tokens_input
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from async_grpo.errors import WorkerLost
from async_grpo.inference.char_ends import char_ends
from async_grpo.inference.config import EngineConfig
from async_grpo.inference.engine_arguments import engine_arguments
from async_grpo.inference.requests import NOTHING, UNSYNCED, EngineRequest, TokenTimeline, new_name, tokens_of
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import load_tokenizer
from async_grpo.protocols import Manifest, Receipt, TensorRecord, answer_canary
from async_grpo.types import Completion, FinishReason, Sampling, Tokens
from async_grpo.weights.read_back import place_of
from async_grpo.weights.vllm_engine import WORKER_EXTENSION, shared_bytes

log = logging.getLogger(__name__)
PARTS_EVERY_S = 5.0  # what an engine's loss costs of each of its completions


class GenerationWorker:
    """An `Engine` of vLLM. `complete` may be called as often as wanted at once; updates wait for nobody (pause, keep)."""

    worker_extension = WORKER_EXTENSION  # what vLLM's worker processes import

    def __init__(
        self,
        engine: AsyncLLM,
        tokenizer: Any,
        settings: SharedRunSettings,
        timeline: TokenTimeline,
        stall_s: float,
    ) -> None:
        self.engine, self.tokenizer, self.settings, self.timeline = engine, tokenizer, settings, timeline
        self.stall_s = stall_s
        self.policy_version, self._starts = UNSYNCED, 0
        self.paused_s = 0.0
        self._updating = asyncio.Lock()
        self._paused_at, self._update_finished = 0.0, True
        self._broken_reason: str | None = None
        self._places_are_known = False  # from the first update on:
        self._unreadable, self._readable = set[str](), set[str]()  # places (`read_back`)
        self._inner_work = 0  # updates by packages and canaries under way
        self._begun: dict[str, float] = {}  # unfinished request -> since when
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
        tokenizer = load_tokenizer(options.model_path)
        engine.output_processor.tokenizer = tokenizer  # for `Sampling.stop`: it looks at the text
        return cls(engine, tokenizer, settings, timeline, options.engine_stall_s)

    @property
    def kv_cache_tokens(self) -> int:
        cache = self.engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    async def complete(
        self,
        prompt_token_ids: np.ndarray,
        seeds: Mapping[int, int],
        sampling: Sampling | None = None,
        begun: Mapping[int, Tokens] | None = None,
    ) -> AsyncGenerator[Completion | Mapping[int, Tokens]]:
        """See `Engine`. Raises ConfigurationError for a prompt that leaves no room to answer."""
        has, common = begun or {}, (self.settings, prompt_token_ids)
        asked = [
            EngineRequest.of(*common, m, seed, sampling, has.get(m, NOTHING)) for m, seed in seeds.items()
        ]
        requests = [asyncio.ensure_future(self._complete(one)) for one in asked]
        waiting, due = set(requests), time.monotonic() + PARTS_EVERY_S
        try:
            while waiting:
                left_s = max(0.0, due - time.monotonic())
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when="FIRST_COMPLETED")
                for request in done:
                    yield await request
                if time.monotonic() >= due:
                    due += PARTS_EVERY_S
                    parts = {one.member: one.new_tokens(self.engine) for one in asked}
                    if told := {member: part for member, part in parts.items() if len(part)}:
                        yield told
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def _complete(self, asked: EngineRequest) -> Completion:
        self._check_fit()
        # No request may hit a prefix computed by other weights: their version is the salt; while it changes, wait. vLLM
        # takes other forms of prompts through a thread, and a pause could come between.
        async with self._updating:
            prompt = tokens_input(asked.token_ids, cache_salt=f"{self._starts}/{self.policy_version}")
        if not self._begun:  # it was idle
            self.timeline.last_progress = time.monotonic()
        self._begun[asked.name] = time.time()
        try:
            final = await self._last_output(prompt, asked.params, asked.name)
        finally:
            self._busy.append((self._begun.pop(asked.name), time.time()))
        self._check_fit()
        return self._completion(final.outputs[0], asked.member, asked.given)

    def _check_fit(self) -> None:
        if self._broken_reason:
            raise WorkerLost(f"this engine takes no more requests: {self._broken_reason}")

    async def _last_output(self, prompt: TokensInput, params: SamplingParams, name: str) -> Any:
        try:
            outputs = [output async for output in self.engine.generate(prompt, params, name)]
        except Exception as error:
            if self.engine.errored:
                raise WorkerLost(f"the vLLM engine died: {error or type(error).__name__}") from error
            raise
        return outputs[-1]

    def _completion(self, output: CompletionOutput, member: int, given: Tokens = NOTHING) -> Completion:
        if output.finish_reason not in ("stop", "length"):
            raise WorkerLost(f"the engine ended a request with {output.finish_reason!r}")
        tokens = given + tokens_of(output)
        token_ids, stopped = tokens.token_ids, output.finish_reason == "stop"
        by_text = isinstance(output.stop_reason, str) and token_ids[-1] not in self.settings.stop_token_ids
        by_token = stopped and not by_text
        text = self.tokenizer.decode(token_ids[:-1] if by_token else token_ids, skip_special_tokens=False)
        return Completion(
            *tokens.arrays,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            text=text,
            char_ends=char_ends(self.tokenizer, token_ids.tolist(), text)
            if self.settings.char_ends
            else None,
            member=member,
        )

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Replace the weights by `chunks` (safetensors images) while requests are paused; returns the receipt.

        After a failure the engine holds a mixture of two policies: it refuses every further request.
        """
        with self._at_work():
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

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """What the block awaits of the engine is work as requests are: `--engine-stall-s` counts."""
        self._inner_work += 1
        self.timeline.last_progress = time.monotonic()
        try:
            yield
        finally:
            self._inner_work -= 1

    async def begin_anew(self) -> bool:
        """See `Engine`. The versions of the next start are other weights: nothing that was computed may be found again."""
        if self._broken_reason or self.engine.errored or self._updating.locked():
            return False
        self.policy_version, self._starts = UNSYNCED, self._starts + 1
        return True

    # The steps of an update, which the trainer's own transfer engine (NCCL) asks for one by one: `Engines`.

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Join a group; the engine would leave an earlier one open."""
        await self.engine.shutdown_weight_transfer_engine()
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
            self.timeline.last_progress = time.monotonic()
            self.paused_s += self.timeline.last_progress - self._paused_at
            self._updating.release()

    async def receipt(self, texts: Sequence[np.ndarray]) -> Receipt:
        return await self._manifest(), await answer_canary(self, texts)

    async def _manifest(self) -> Manifest:
        receipts = await self.engine.collective_rpc("weight_receipt")
        if any(receipt != receipts[0] for receipt in receipts):
            self._broken_reason = "its processes received different weights"
            raise WorkerLost("the processes of one engine received different weights")
        unused = await self._places_not_in_use()
        manifest = {}
        for name, (dtype, shape, digest, *_) in receipts[0].items():
            places = {name, place_of(name)}
            is_used = places.isdisjoint(unused)
            is_read = places.isdisjoint(self._unreadable) and not places.isdisjoint(self._readable)
            manifest[name] = TensorRecord(dtype, tuple(shape), digest, is_used, is_read)
        return manifest

    async def _places_not_in_use(self) -> set[str]:
        """Where the engine computes with other weights than arrived. Some places cannot be read (quantised layers,
        experts): those that differ after the first update, which brings what a new engine holds already."""
        processes = await self.engine.collective_rpc("fingerprints")
        arrived = processes[0][1]
        used = {place: sum(own[place] for own, _ in processes) % 2**64 for place in arrived}
        differing = {place for place in arrived if used[place] != arrived[place]}
        if not self._places_are_known:
            self._places_are_known = True
            self._unreadable, self._readable = differing, arrived.keys() - differing
            log.info("%d of %d places of the weights can be read back", len(self._readable), len(arrived))
        return differing - self._unreadable

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """See `Engine`."""
        how: Any = {"detokenize": False, "skip_reading_prefix_cache": True}
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, **how)
        with self._at_work():
            final = await self._last_output(tokens_input(token_ids.tolist()), params, new_name())
        steps = zip(final.prompt_logprobs[1:], token_ids[1:].tolist(), strict=True)
        return np.asarray([0.0, *(step[token].logprob for step, token in steps)], np.float32)

    async def until_failure(self, every_s: float = 1.0) -> str:
        """See `Engine`; it finds a death that no request would meet."""
        while not self.engine.errored:
            await asyncio.sleep(every_s)
            still_s = time.monotonic() - self.timeline.last_progress
            waits_for_trainer = self._updating.locked() and not self._inner_work
            if (self._begun or self._inner_work) and not waits_for_trainer and still_s > self.stall_s:
                self._broken_reason = (
                    f"it made no token for {still_s:.0f} s (--engine-stall-s {self.stall_s:g}), with {len(self._begun)} "
                    "requests under way"
                )
                return self._broken_reason
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
