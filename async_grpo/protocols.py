"""The interfaces between the parts of the library, as Protocols.

`async_grpo.testing` contains a simple implementation of each for tests.
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
    """Generates completions on whichever engine has room."""

    def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield completions, each as soon as it is finished. To close the generator aborts the remaining ones.

        Args:
            prompt: The tokens to continue.
            count: Number of completions.
            sampling: Overrides of the run's sampling settings.
            session: The trajectory of which the completion is the next turn; `count` is then 1.
        """

    async def take_stats(self) -> dict[str, Any]:
        """Return statistics since the last call.

        They are those of `Engine.progress` for all engines, `wait_generation_weights_s`, and if they are known the engines'
        `spans` (`metrics.spans`) and `workers_lost`, one text for each lost worker.
        """


class Verification(Protocol):
    """Scores single samples."""

    async def start(self) -> None:
        """Start everything that is needed to score training samples."""

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
        """Return the verdict on a sample; samples of an evaluation never wait behind training samples."""

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict], *, evaluation: bool = False
    ) -> list[Verdict]:
        """Return the final verdicts on a whole group, after the rewards have processed all of its samples together."""

    async def take_stats(self) -> dict[str, Any]:
        """Return statistics since the last call: `verifiers`, counts and latencies by adapter, of cache and budget too."""

    async def close(self) -> None:
        """Stop everything that `start` started, within a few seconds."""


class Logprobs(Protocol):
    """Recomputes log-probs of completions under another policy."""

    async def logprobs(
        self, sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int]
    ) -> list[np.ndarray]:
        """Return the log-probs (T,) float32 of each completion.

        Args:
            sequences: (N,) token ids each, prompt and completion.
            prompt_lengths: Number of prompt tokens of each sequence.
        """


class ExperienceSource(Protocol):
    """Supplies the micro-batches of each step; every rank gets equally many of them between two StepEnds."""

    def start(self) -> None:
        """Start to generate; called once on every rank, after the first weights are live."""

    def next_message(self, rank: int) -> Message:
        """Wait for the next message for a rank, and return it; raise an error when the deadline passes."""


Proof = Callable[[], dict[str, float]]
"""Waits, within a deadline, until weights are proven and live, and returns the metrics of their sync.

It raises the error of a sync that failed.
"""


class WeightPublisher(Protocol):
    """Sends the policy's weights to the engines, and proves that they landed."""

    def publish(self, model: Any, version: int, *, self_test: bool) -> Proof:
        """Publish a model as a policy version. A collective of all ranks.

        The weights may still be travelling when this returns: until the proof has returned, the model must not change;
        its gradients may.

        Args:
            model: A `PolicyModel`.
            version: Its policy version.
            self_test: Send a self-test first. After the first self-test, such a sync is only for workers that have joined
                since.
        """


@dataclass(frozen=True)
class TensorRecord:
    """Description of one tensor, as the trainer sent it or as an engine received it."""

    dtype: str
    shape: tuple[int, ...]
    digest: int  # digest of its bits, see `weights.package.tensor_digest`
    in_use: bool = True  # False: the engine received it, but computes with other values
    # Whether `in_use` was read from the values that the engine computes with; if not, only the canary shows a lost tensor
    is_read_back: bool = field(default=False, compare=False)


Manifest = Mapping[str, TensorRecord]
Receipt = tuple[
    Manifest, np.ndarray
]  # the tensors that an engine received, and its log-probs (N,) of the canary


@dataclass(frozen=True)
class WeightPackage:
    """One version of the weights, with everything that is needed to prove that it landed."""

    version: int
    manifest: Manifest  # the tensors that are sent; a round of the self-test may send only some
    # References to safetensors images, uint8, or their paths; empty if the weights travel by another way
    chunks: list[Any]
    canary_texts: Sequence[np.ndarray]  # each (L,) int32, fixed; N tokens in all
    canary_logprobs: (
        np.ndarray
    )  # (N,) float32, the trainer's log-probs of the texts under these weights, end to end
    tolerance: (
        float  # accepted difference of the canary's log-probs, in nats (see `weights.package.canary_miss`)
    )
    for_late: bool = False  # sent only to workers that joined late


class Engines(Protocol):
    """The connection from the trainer's rank 0 to all engines.

    `begin`, `each`, `together`, `members` and `address` are for transports that drive every step themselves instead of
    delivering packages.
    """

    address: str  # address of this node from the engines' point of view

    @property
    def members(self) -> Mapping[str, int]:
        """Return the workers of the current sync, worker id -> number of processes that hold its weights.

        A worker that is fenced is removed.
        """

    def put(self, chunk: np.ndarray) -> Any:
        """Store one chunk where every engine can read it, and return its reference."""

    def deliver(self, package: WeightPackage) -> Mapping[str, Receipt]:
        """Load the package into every engine that it is for, and return the receipts by worker."""

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        """Release the chunks, and let the workers in `landed` generate, unless the package is a self-test."""

    def fence(self, worker_id: str, error: Exception) -> None:
        """Exclude a worker that did not prove its weights; the run continues without it."""

    def abort(self, error: BaseException) -> None:
        """End the run, because the sync failed: every rank that waits for experience gets the error."""

    def begin(self, for_late: bool) -> None:
        """Begin a sync with the current `members`; no worker joins until `commit`."""

    def each(self, method: str, *args: Any) -> Mapping[str, Any]:
        """Call `pause`, `resume` or `receipt` of every member, and return the answers by worker.

        A member that does not answer is fenced.
        """

    def together(self, method: str, *args: Any) -> None:
        """Call a method that all members must execute at the same time.

        Raises:
            WorkerLost: A member was lost during the call; it is fenced.
        """


class Engine(Protocol):
    """One inference engine, which can change its weights while it completes prompts. It lives in one event loop.

    `--engine` selects it: a name of `inference.config.ENGINES`, or FILE.py:NAME of a class of the user.
    """

    kv_cache_tokens: int  # tokens that it can hold at once, by which the registry balances the load

    @classmethod
    def start(cls, config: Any, settings: SharedRunSettings) -> Self:
        """Load the model; this may take minutes and block the event loop.

        Args:
            config: The worker's `EngineConfig`.
            settings: The settings that all workers share.
        """

    def complete(
        self,
        prompt_token_ids: np.ndarray,
        seeds: Mapping[int, int],
        sampling: Sampling | None = None,
        begun: Mapping[int, Tokens] | None = None,
    ) -> AsyncGenerator[Completion | Mapping[int, Tokens]]:
        """Yield one completion for each member of a group, as soon as it is finished.

        To close the generator aborts the remaining ones. Every token carries the policy version that produced it. Now and
        then an engine may also yield the tokens that unfinished members got since the last time. If the engine is lost,
        another engine gets these tokens as `begun`.

        Args:
            prompt_token_ids: (L,) int32.
            seeds: Seed of the sampling, by member. Under the same weights, a seed always gives the same completion.
            sampling: Overrides of the run's sampling settings.
            begun: Tokens that another engine has already sampled, by member. The completion contains them, and continues
                after them with the draws that come next of the same seed. An engine that never yields unfinished tokens is
                never called with it.

        Raises:
            WorkerLost: The engine died, or its last update failed.
        """

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Load new weights from chunks (safetensors images), while requests pause, and return the tensors received."""

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-probs (N,) float32 of a text under the current weights, at temperature 1; the first is 0."""

    def progress(self) -> dict[str, Any]:
        """Return statistics since the last call.

        They are `token_timeline` [(wall-clock seconds, tokens)], the seconds `paused_s` for weight updates, and `busy`, the
        intervals in which the engine had unfinished requests.
        """

    async def until_failure(self) -> str:
        """Wait until the engine dies or stops making progress, and return a description of the symptom."""

    async def begin_anew(self) -> bool:
        """Prepare for a trainer that was restarted, whose next weights are version 0 or come from a checkpoint.

        Returns:
            Whether the engine can serve the new trainer. If not, or if it does not have this method, it is loaded again.
        """

    def close(self) -> None:
        """Stop the engine and its processes."""


async def answer_canary(engine: Any, texts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the log-probs (N,) float32 that an `Engine` computes for all texts, end to end."""
    return np.concatenate(await asyncio.gather(*map(engine.canary, texts)))


class WorkerLink(Protocol):
    """The connection to one worker in another process. Every call to a lost worker raises WorkerLost."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call one of the worker's handlers, and return its answer."""

    def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        """Call one of the worker's handlers, and yield its items."""

    def close(self) -> None:
        """Close the connection; calls in progress fail."""


Connect = Callable[[Any, str, Callable[[WorkerLost], None]], WorkerLink]
"""Makes the link to a worker from (its handle, its name for messages, a function to call once it is lost)."""
