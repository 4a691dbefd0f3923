"""`FakeEngine`, and `InProcessRun`, which connects engines, a trainer and a `RunController` in one process."""

import asyncio
import concurrent.futures
import copy
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

import numpy as np

from async_grpo.errors import RequestRefused, WorkerLost
from async_grpo.messages import Message, SharedRunSettings, WorkerInfo
from async_grpo.protocols import Engine, Manifest, Receipt, WeightPackage, answer_canary
from async_grpo.types import Completion, FinishReason, ImageReference, Sampling, Tokens
from async_grpo.weights.received_chunks import ReceivedChunks


class FakeEngine:
    """An `Engine` that draws every token at random and reports the log-probs of that distribution.

    It uses no model for generation, but keeps the weights that it receives, so that the trainer can verify that they
    arrived. It reports the log-probs with which it has drawn the tokens, so off-policy corrections work as with a real
    engine.
    """

    STOP_CHANCE = 0.1  # probability that a token is a stop token; the first token never is
    kv_cache_tokens = 1 << 20

    def __init__(self, model: Any, settings: SharedRunSettings) -> None:
        self.policy_version = -1
        self._model = model
        self._settings = settings
        token_ids = np.arange(settings.vocab_size)
        undrawn_token_ids = [*settings.stop_token_ids, *settings.unsampled_token_ids]
        self._text_token_ids = np.setdiff1d(token_ids, undrawn_token_ids).astype(np.int32)
        # Set while requests may run; cleared while weights are loaded and while the engine sleeps
        self._running = asyncio.Event()
        self.is_asleep = False
        self._running.set()
        self._progress = _no_progress()

    @classmethod
    def start(cls, config: Any, settings: SharedRunSettings) -> Self:
        """Load the weights from `config.model_path`, as a logprob worker does."""
        from async_grpo.inference.logprob_worker import LogprobWorker

        return cls(LogprobWorker.start(config, settings), settings)

    async def complete(
        self,
        prompt_token_ids: np.ndarray,
        seeds: Mapping[int, int],
        sampling: Sampling | None = None,
        first_tokens: Mapping[int, Tokens] | None = None,
        images: Sequence[ImageReference] = (),
    ) -> AsyncGenerator[Completion]:
        """Yield completions, all drawn from the same distribution; see `Engine`. The images are not read."""
        if sampling is not None and sampling.grammar:
            raise RequestRefused("the engine draws tokens at random: start the run with --typed-output hint")
        started_at = time.time()
        for member, seed in seeds.items():
            await asyncio.sleep(0)
            await self._running.wait()
            completion = self._draw(len(prompt_token_ids), member, np.random.default_rng(seed))
            self._progress["token_timeline"].append((time.time(), len(completion)))
            self._progress["busy"].append((started_at, time.time()))
            yield completion

    def _draw(self, prompt_length: int, member: int, random: np.random.Generator) -> Completion:
        """Draw one completion. A stop token has the probability STOP_CHANCE; all other tokens are equally likely."""
        settings = self._settings
        room_tokens = min(settings.max_completion_tokens, settings.max_total_tokens - prompt_length)
        length = min(room_tokens, 1 + int(random.geometric(self.STOP_CHANCE)))
        is_stopped = length < room_tokens

        num_text_tokens = len(self._text_token_ids)
        tokens = random.choice(self._text_token_ids, length)
        logprobs = np.full(length, np.log((1 - self.STOP_CHANCE) / num_text_tokens), np.float32)
        # The first token is never a stop token, because a stopped completion has at least two tokens
        logprobs[0] = -np.log(num_text_tokens)
        text_tokens = tokens
        if is_stopped:
            tokens[-1] = settings.stop_token_ids[0]
            logprobs[-1] = np.log(self.STOP_CHANCE)
            text_tokens = tokens[:-1]
        # Each token is one letter of the text
        text = (text_tokens % 26 + ord("a")).astype(np.uint8).tobytes().decode()
        return Completion(
            token_ids=tokens,
            logprobs=logprobs,
            versions=np.full(length, self.policy_version, np.int32),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            text=text,
            char_ends=np.minimum(np.arange(1, length + 1), len(text)).astype(np.int32),
            member=member,
        )

    async def sleep(self, level: int) -> None:
        """Let all later requests wait until the next update."""
        self._running.clear()
        self.is_asleep = True

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Replace the weights; see `Engine`. An engine that sleeps wakes up."""
        paused_at = time.monotonic()
        self._running.clear()
        try:
            manifest = await self._model.update(version, chunks)
            self.policy_version = version
            self.is_asleep = False
        finally:
            self._running.set()
            self._progress["paused_s"] += time.monotonic() - paused_at
        return manifest

    async def begin_anew(self) -> bool:
        """Return True, because the engine can serve a restarted trainer; see `Engine`."""
        return True

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-probs of a text under the engine's current weights; see `Engine`."""
        return await self._model.canary(token_ids)

    def progress(self) -> dict[str, Any]:
        """Return the engine's statistics since the last call; see `Engine`."""
        progress = self._progress
        self._progress = _no_progress()
        return progress

    async def until_failure(self) -> str:
        """Wait forever, because this engine does not fail."""
        return await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Do nothing: there is no process to stop."""


def _no_progress() -> dict[str, Any]:
    return {"token_timeline": [], "paused_s": 0.0, "busy": []}


class InProcessWorker:
    """A worker with an `Engine` in this process. It is its own handle and its own `WorkerLink`."""

    _lost: WorkerLost | None = None  # the error that all calls raise after the worker has died
    _on_lost: Callable[[WorkerLost], None]

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._received = ReceivedChunks()

    def connect(self, name: str, on_lost: Callable[[WorkerLost], None]) -> Self:
        """Return the link to the worker, which is the worker itself; see `Connect`."""
        self._on_lost = on_lost
        return self

    def die(self, reason: str) -> None:
        """Make all later calls and all unfinished completions fail."""
        self._lost = WorkerLost(reason)
        self._on_lost(self._lost)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine, and return its result; see `WorkerLink`."""
        answer = self._handler(method)(*args)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        """Yield the items of a method of the engine; see `WorkerLink`."""
        async for item in self._handler(method)(*args):
            # The worker may have died while this item was generated
            self._refuse_if_lost()
            yield item

    def _handler(self, method: str) -> Callable[..., Any]:
        self._refuse_if_lost()
        return getattr(self.engine, method)

    def _refuse_if_lost(self) -> None:
        if self._lost:
            raise self._lost

    def close(self) -> None:
        """Do nothing: there is no connection to close."""

    async def load(self, package: WeightPackage) -> Receipt:
        """Load a package of weights, and return the receipt with the log-probs of its canary."""
        if not package.chunks:
            # The trainer only asks whether this worker already has the trainer's weights
            self._refuse_if_lost()
            return {}, await answer_canary(self.engine, package.canary_texts)
        chunks = [memoryview(chunk) for chunk in package.chunks]
        whole_chunks = self._received.restore(chunks, package.chunk_digests)
        manifest = await self._handler("update")(package.version, whole_chunks)
        return manifest, await answer_canary(self.engine, package.canary_texts)


class InProcessRun:
    """Connects a trainer with a `RunController`, as the trainer's `Engines` and `ExperienceSource`.

    The controller runs in the event loop of another thread.

    Attributes:
        controller: The run's controller.
        delivered: Policy versions whose weights were delivered, in order.
    """

    TIMEOUT_S = 30.0  # timeout of each call
    of_reference = False  # whether the workers are the reference workers
    reference_connection: "InProcessRun"  # the connection that `reference_workers` has returned

    def __init__(self, controller: Any) -> None:
        self.controller = controller
        self.delivered: list[int] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        """Start a coroutine in the controller's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the controller's event loop, and return its result."""
        return self.begin(coroutine).result(self.TIMEOUT_S)

    def reference_workers(self) -> "InProcessRun":
        """Return a connection to the reference workers, with a list `delivered` of its own; see `Engines`."""
        connection = copy.copy(self)
        connection.delivered = []
        connection.of_reference = True
        self.reference_connection = connection
        return connection

    def put(self, chunk: np.ndarray) -> np.ndarray:
        """Return the chunk itself, because all workers are in this process; see `Engines`."""
        return chunk

    def deliver(self, package: WeightPackage) -> Mapping[str, Receipt]:
        """Load the weights into all workers, and return the receipts by worker id; see `Engines`."""
        members: list[tuple[WorkerInfo, InProcessWorker]] = self.run(
            self.controller.begin_sync(package.for_late, self.of_reference)
        )
        self._members = {info.worker_id: info for info, _ in members}
        self.delivered.append(package.version)
        receipts: dict[str, Receipt] = {}
        for info, handle in members:
            try:
                receipts[info.worker_id] = self.run(handle.load(package))
            except WorkerLost as error:
                self.fence(info.worker_id, error)
        return receipts

    def fence(self, worker_id: str, error: Exception) -> None:
        """Remove a worker from the run; see `Engines`."""
        kind = self._members[worker_id].kind
        self.run(self.controller.deregister(kind, worker_id, str(error)))

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        """End a weight sync; see `Engines`."""
        self.run(self.controller.end_sync(package, landed, self.of_reference))

    def abort(self, error: BaseException) -> None:
        """End the run because a weight sync failed; see `Engines`."""
        self.run(self.controller.fail(error))

    def start(self) -> None:
        """Start generating; see `ExperienceSource`."""
        self.run(self.controller.start())

    def next_message(self, rank: int) -> Message:
        """Wait for the next message of a rank; see `ExperienceSource`."""
        return self.run(self.controller.next_message(rank))
