"""Every wall of the library as a Protocol: what one side asks of the other, and nothing more.

`async_grpo.testing` ships a stand-in for each.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from async_grpo.errors import WorkerLost
from async_grpo.messages import Message, SharedRunSettings
from async_grpo.types import Completion, Prompt, Sampling, Session, Tokens, Verdict


class Generation(Protocol):
    """Completes prompts on whichever engine has room."""

    def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield `count` completions, each when it is finished; closing aborts the others. `session`: the one completion is
        the next turn of that trajectory, after the prompt's tokens."""

    async def take_stats(self) -> dict[str, Any]:
        """Of `Engine.progress`, for all engines since the last call, `wait_generation_weights_s`, and where they are known
        their `spans` (`metrics.spans`) and the `workers_lost`, in words."""


class Verification(Protocol):
    """Scores single samples."""

    async def start(self) -> None:
        """Make everything that the samples of the training need."""

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
        """The verdict; samples of an evaluation never wait behind those of the training."""

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict], *, evaluation: bool = False
    ) -> list[Verdict]:
        """The verdicts of one whole group, after the rewards have looked at all of it."""

    async def take_stats(self) -> dict[str, Any]:
        """Since the last call: `verifiers`, counts and latencies by adapter, and those of cache and budget."""

    async def close(self) -> None:
        """End everything that `start` made, within a few seconds."""


class Logprobs(Protocol):
    """Recomputes log-probs of completions under another policy."""

    async def logprobs(
        self, sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int]
    ) -> list[np.ndarray]:
        """(T,) float32 log-probs of each completion."""


class ExperienceSource(Protocol):
    """Hands out the micro-batches of each step; every rank gets equally many between two StepEnds."""

    def start(self) -> None:
        """Begin to generate. Called once on every rank, after the first weights are live."""

    def next_message(self, rank: int) -> Message:
        """The next message for `rank`; waits for it, and raises when its deadline passes."""


Proof = Callable[[], dict[str, float]]
"""Waits, within a deadline, until weights are proven and live; the metrics of their sync, or what it failed of."""


class WeightPublisher(Protocol):
    """Brings the policy's weights to the engines and proves that they landed."""

    def publish(self, model: Any, version: int, *, self_test: bool) -> Proof:
        """Publish `model` (a `PolicyModel`) as `version`, after a self-test if asked; a collective of all ranks.

        A self-test after the first one is for the workers that have joined since: they alone are sent anything.
        The weights travel on afterwards: `model` must not change before the proof is asked for, gradients may.
        """


@dataclass(frozen=True)
class TensorRecord:
    """One tensor as one side saw it."""

    dtype: str
    shape: tuple[int, ...]
    digest: int  # of its bits; see `weights.package.tensor_digest`
    in_use: bool = True  # False: it arrived, but the engine computes with something else
    # Whether `in_use` was read from what the engine computes with; otherwise only the canary can show a loss
    is_read_back: bool = field(default=False, compare=False)


Manifest = Mapping[str, TensorRecord]
Receipt = tuple[Manifest, np.ndarray]  # what arrived, and the engine's own log-probs of the canary


@dataclass(frozen=True)
class WeightPackage:
    """One version of the weights, with all that is needed to prove that it landed."""

    version: int
    manifest: Manifest  # every tensor as sent (a self-test changes a few at a time and leaves the others)
    chunks: list[
        Any
    ]  # references to safetensors images, uint8, or paths; empty where weights travel elsewhere
    canary_texts: Sequence[np.ndarray]  # each (L,) int32, fixed; N tokens in all
    canary_logprobs: np.ndarray  # (N,) float32, the trainer's, of these texts under these weights, end to end
    tolerance: float  # root mean square of canary differences that rounding explains, nats
    for_late: bool = False  # sent to the workers that joined late, and to no other


class Engines(Protocol):
    """The way from the trainer's rank 0 to all engines.

    `begin`, `each`, `together`, `members` and `address` are for transports whose own engine drives each step instead of
    delivering packages.
    """

    address: str  # of this node, as the engines reach it

    @property
    def members(self) -> Mapping[str, int]:
        """Of the sync that has begun: worker id -> processes that hold its weights. Who is fenced leaves."""

    def put(self, chunk: np.ndarray) -> Any:
        """Store one chunk where every engine can read it; returns its reference."""

    def deliver(self, package: WeightPackage) -> Mapping[str, Receipt]:
        """Load the package into every engine that it is for; returns what each one received and computes, by worker."""

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        """`landed` may work (not with a self-test's weights); chunks are needed no more."""

    def fence(self, worker_id: str, error: Exception) -> None:
        """A worker did not prove its weights: it is left out, and the run goes on."""

    def abort(self, error: BaseException) -> None:
        """The sync failed: every rank that waits for experience must hear of it, as the run is over."""

    def begin(self, for_late: bool) -> None:
        """Nobody joins until `commit`; the sync is for `members`."""

    def each(self, method: str, *args: Any) -> Mapping[str, Any]:
        """One step of every member (`pause`, `resume` or `receipt`); returns the answers by worker. Who does not answer
        is fenced."""

    def together(self, method: str, *args: Any) -> None:
        """One step that the members can only take together; WorkerLost: one was lost over it, and is fenced."""


class Engine(Protocol):
    """One inference engine: completes prompts, and changes its weights while it does so. Lives in one event loop.

    `--engine` chooses it: a name of `inference.config.ENGINES`, or FILE.py:NAME of a class of one's own.
    """

    kv_cache_tokens: int  # that it can hold at once: the registry balances by them

    @classmethod
    def start(cls, config: Any, settings: SharedRunSettings) -> Self:
        """Load the model; it may take minutes and block the event loop. `config`: the worker's, an `EngineConfig`."""

    def complete(
        self,
        prompt_token_ids: np.ndarray,
        seeds: Mapping[int, int],
        sampling: Sampling | None = None,
        begun: Mapping[int, Tokens] | None = None,
    ) -> AsyncGenerator[Completion | Mapping[int, Tokens]]:
        """Yield a completion of one prompt (L,) int32 for each member of its group, as soon as it is finished; closing
        aborts the rest. `seeds`: of its sampling, by member: under the same weights, the same completion.

        Now and then it may yield what unfinished members got since the last time. Should the engine be lost, another is
        given these tokens as `begun` (never called with it, if nothing of the kind was ever yielded), and goes on after
        them as the first would have: its completions hold them, too, and its draws are those that come next of the seed.

        Every token carries the version that produced it. WorkerLost: the engine died, or its last update failed.
        """

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Replace the weights by `chunks` (safetensors images), requests paused, not aborted; returns what arrived."""

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """(N,) float32 log-probs of a fixed text under the current weights, at temperature 1; the first is 0."""

    def progress(self) -> dict[str, Any]:
        """Since the last call: `token_timeline` [(wall-clock seconds, tokens)], `paused_s` for weights, and `busy`,
        the intervals in which it held unfinished requests."""

    async def until_failure(self) -> str:
        """Wait until the engine dies, or makes no progress though it should; returns how that was noticed."""

    async def begin_anew(self) -> bool:
        """The trainer died and was started again; the next weights come from version 0, or from a checkpoint. Returns
        whether the engine can serve it; one without this method, or that cannot, is loaded again."""

    def close(self) -> None:
        """Stop the engine and its processes."""


async def answer_canary(engine: Any, texts: Sequence[np.ndarray]) -> np.ndarray:
    """(N,) float32: the log-probs of an `Engine` of all texts, end to end."""
    return np.concatenate(await asyncio.gather(*map(engine.canary, texts)))


class WorkerLink(Protocol):
    """The way to one worker in another process. Every call of a worker that is gone raises WorkerLost."""

    async def call(self, method: str, *args: Any) -> Any:
        """The answer of one of its handlers."""

    def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        """What one of its handlers yields, item by item."""

    def close(self) -> None:
        """Let go of it; calls in flight fail."""


Connect = Callable[[Any, str, Callable[[WorkerLost], None]], WorkerLink]
"""Makes the link to a worker: its handle, its name for messages, and what to call once it is lost."""
