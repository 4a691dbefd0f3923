"""`FakeEngine`, and what joins it with a trainer and a `RunController` in one process."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

import numpy as np

from async_grpo.errors import WorkerLost
from async_grpo.messages import Message, SharedRunSettings, WorkerInfo
from async_grpo.protocols import Engine, Manifest, Receipt, WeightPackage, answer_canary
from async_grpo.types import Completion, FinishReason, Sampling


class FakeEngine:
    """`Engine` that draws every token at random, with the log-probs of that drawing, and really holds its weights.

    So the proof of landing means something, and off-policy corrections see true numbers, while nothing is decoded.
    """

    STOP_CHANCE = 0.1  # of every token but the first
    kv_cache_tokens = 1 << 20

    def __init__(self, model: Any, settings: SharedRunSettings) -> None:
        self._model, self._settings = model, settings
        self._others = np.setdiff1d(np.arange(settings.vocab_size), settings.stop_token_ids).astype(np.int32)
        self._running = asyncio.Event()  # cleared while weights are loaded
        self._running.set()
        self.policy_version = -1
        self._progress: dict[str, Any] = {"token_timeline": [], "paused_s": 0.0, "busy": []}

    @classmethod
    def start(cls, config: Any, settings: SharedRunSettings) -> Self:
        """Load the weights of `config.model_path`, as a logprob worker would."""
        from async_grpo.inference.logprob_worker import LogprobWorker

        return cls(LogprobWorker.start(config, settings), settings)

    async def complete(
        self, prompt_token_ids: np.ndarray, seeds: Mapping[int, int], sampling: Sampling | None = None
    ) -> AsyncGenerator[Completion]:
        """See `Engine`; all completions are drawn alike."""
        begun = time.time()
        for member, seed in seeds.items():
            await asyncio.sleep(0)
            await self._running.wait()
            completion = self._draw(len(prompt_token_ids), member, np.random.default_rng(seed))
            self._progress["token_timeline"].append((time.time(), len(completion)))
            self._progress["busy"].append((begun, time.time()))
            yield completion

    def _draw(self, prompt_length: int, member: int, random: np.random.Generator) -> Completion:
        """A stop token comes by its chance, the others share the rest evenly."""
        settings = self._settings
        room = min(settings.max_completion_tokens, settings.max_total_tokens - prompt_length)
        length = min(room, 1 + int(random.geometric(self.STOP_CHANCE)))
        tokens = random.choice(self._others, length)
        logprobs = np.full(length, np.log((1 - self.STOP_CHANCE) / len(self._others)), np.float32)
        logprobs[0] = -np.log(len(self._others))
        if stopped := length < room:
            tokens[-1], logprobs[-1] = settings.stop_token_ids[0], np.log(self.STOP_CHANCE)
        text = (tokens[: length - stopped] % 26 + ord("a")).astype(np.uint8).tobytes().decode()
        return Completion(
            token_ids=tokens,
            logprobs=logprobs,
            versions=np.full(length, self.policy_version, np.int32),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            text=text,
            char_ends=np.minimum(np.arange(1, length + 1), len(text)).astype(np.int32),
            member=member,
        )

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """See `Engine`."""
        paused_at = time.monotonic()
        self._running.clear()
        try:
            manifest = await self._model.update(version, chunks)
            self.policy_version = version
        finally:
            self._running.set()
            self._progress["paused_s"] += time.monotonic() - paused_at
        return manifest

    async def begin_anew(self) -> bool:
        """See `Engine`."""
        return True

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """See `Engine`: of the weights that it holds."""
        return await self._model.canary(token_ids)

    def progress(self) -> dict[str, Any]:
        """See `Engine`."""
        progress, self._progress = self._progress, {"token_timeline": [], "paused_s": 0.0, "busy": []}
        return progress

    async def until_failure(self) -> str:
        """It never dies."""
        return await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """There is no process to stop."""


class InProcessWorker:
    """An `Engine` as a registered worker: the handle that it registers with, and the `WorkerLink` to it."""

    _lost: WorkerLost | None = None
    _on_lost: Callable[[WorkerLost], None]

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def connect(self, name: str, on_lost: Callable[[WorkerLost], None]) -> Self:
        """`Connect`: a worker is its own handle."""
        self._on_lost = on_lost
        return self

    def die(self, reason: str) -> None:
        """From now on every call, and every completion under way, is lost."""
        self._lost = WorkerLost(reason)
        self._on_lost(self._lost)

    async def call(self, method: str, *args: Any) -> Any:
        answer = self._handler(method)(*args)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        async for item in self._handler(method)(*args):
            self._handler(method)  # lost meanwhile?
            yield item

    def _handler(self, method: str) -> Callable[..., Any]:
        if self._lost:
            raise self._lost
        return getattr(self.engine, method)

    def close(self) -> None:
        """There is nothing to let go of."""

    async def load(self, package: WeightPackage) -> Receipt:
        """Load a package, and answer its canary."""
        manifest = await self._handler("update")(package.version, [memoryview(c) for c in package.chunks])
        return manifest, await answer_canary(self.engine, package.canary_texts)


class InProcessRun:
    """`Engines` for packages, and `ExperienceSource`, of a `RunController` in the event loop of a thread of its own."""

    def __init__(self, controller: Any) -> None:
        self.controller, self._loop = controller, asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.delivered: list[int] = []  # the versions, in order

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        """Run the coroutine over there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine returns, run over there."""
        return self.begin(coroutine).result(30.0)

    def put(self, chunk: np.ndarray) -> np.ndarray:
        return chunk

    def deliver(self, package: WeightPackage) -> Mapping[str, Receipt]:
        members: list[tuple[WorkerInfo, InProcessWorker]]
        members = self.run(self.controller.begin_sync(package.for_late))
        self._members = {info.worker_id: info for info, _ in members}
        self.delivered.append(package.version)
        receipts: dict[str, Receipt] = {}
        for info, handle in members:
            try:
                receipts[info.worker_id] = self.run(handle.load(package))
            except WorkerLost as lost:
                self.fence(info.worker_id, lost)
        return receipts

    def fence(self, worker_id: str, error: Exception) -> None:
        kind = self._members[worker_id].kind
        self.run(self.controller.deregister(kind, worker_id, str(error)))

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        self.run(self.controller.end_sync(package, landed))

    def abort(self, error: BaseException) -> None:
        self.run(self.controller.fail(error))

    def start(self) -> None:
        self.run(self.controller.start())

    def next_message(self, rank: int) -> Message:
        return self.run(self.controller.next_message(rank))
