"""The interfaces between the parts of the library, as Protocols.

`async_grpo.testing` contains simple implementations for tests.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.errors import WorkerLost
from async_grpo.messages import Message, SharedRunSettings
from async_grpo.types import Completion, ImageReference, Prompt, Sampling, Session, Tokens, Verdict


class Generation(Protocol):
    """Generates completions, and chooses an engine that has capacity for each request."""

    def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield completions, each as soon as it is finished. Closing the generator aborts the unfinished ones.

        Args:
            prompt: The tokens to continue.
            count: Number of completions.
            sampling: Overrides of the run's sampling settings.
            session: The trajectory whose next turn is generated; `count` must then be 1.
        """

    async def take_stats(self) -> dict[str, Any]:
        """Return statistics since the last call.

        They contain the statistics of `Engine.progress` of all engines. `wait_generation_weights_s` is the sum of their
        `paused_s`. If known, they also contain the engines' `spans` (see `metrics.spans`), and `workers_lost`, a
        description of each lost worker.
        """


class Verification(Protocol):
    """Scores single samples."""

    async def start(self) -> None:
        """Start all processes and connections that are needed to score training samples."""

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
        """Return the verdict on a sample. Samples of an evaluation never wait for training samples."""

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict], *, evaluation: bool = False
    ) -> list[Verdict]:
        """Return the final verdicts on a group. Rewards that compare samples of the group may change the verdicts."""

    async def take_stats(self) -> dict[str, Any]:
        """Return statistics since the last call.

        They contain `verifiers`, with the counts and latencies of each reward adapter. If the run has a verdict cache
        or a budget for judges, they also contain the numbers of the cache or the budget.
        """

    async def close(self) -> None:
        """Stop everything that `start` started, within a few seconds."""


class Logprobs(Protocol):
    """Computes the log-probs of completions under a policy other than the one that sampled them."""

    async def logprobs(
        self,
        sequences: Sequence[np.ndarray],
        prompt_lengths: Sequence[int],
        allowed: Sequence[AllowedTokens | None] | None = None,
        images: Sequence[tuple[ImageReference, ...]] | None = None,
    ) -> list[np.ndarray]:
        """Return the log-probs (T,) float32 of each completion.

        Args:
            sequences: Token ids (N,) of each prompt and its completion.
            prompt_lengths: Number of prompt tokens of each sequence.
            allowed: For each sequence, the tokens that a grammar allowed at each of its N tokens, or None. The log-probs
                are those of a softmax over the allowed tokens. The argument is only passed if a sequence has a grammar
                or an image.
            images: The images of each sequence. The argument is only passed if a sequence has an image.
        """


class ExperienceSource(Protocol):
    """Supplies the micro-batches of each step. All ranks get the same number of micro-batches between two StepEnds."""

    def start(self) -> None:
        """Start the generation. Called once on every rank, after the engines have the first weights."""

    def next_message(self, rank: int) -> Message:
        """Wait for the next message for a rank, and return it. Raise an error if there is none before a deadline."""


# Weights are "proven" once the engines have shown that they received them, and "live" once engines generate with them
Proof = Callable[[], dict[str, float]]
"""Waits, within a deadline, until weights are proven and live, and returns the metrics of their sync.

It raises the error of a sync that failed.
"""


class WeightPublisher(Protocol):
    """Sends the policy's weights to the engines, and proves that they arrived unchanged."""

    def publish(self, model: Any, version: int, *, self_test: bool) -> Proof:
        """Publish a model as a policy version. A collective: every rank must call it.

        The weights may still be in transfer when this method returns. The weights of the model must not change until
        the proof has returned, but its gradients may.

        Args:
            model: A `PolicyModel`.
            version: Its policy version.
            self_test: Before the weights, send a self-test: weights in which every tensor is visibly changed, to check
                that the engines use each of them. The first call with a self-test serves all workers. Each later call
                with a self-test serves only the workers that have joined since the previous one.
        """


@dataclass(frozen=True)
class TensorRecord:
    """Description of one tensor, as the trainer sent it or as an engine received it."""

    dtype: str
    shape: tuple[int, ...]
    digest: int  # digest of the tensor's bits, see `weights.package.tensor_digest`
    in_use: bool = True  # False if the engine received the tensor, but computes with other values
    # Whether `in_use` was checked by reading the values that the engine computes with. If False, a tensor that is not
    # in use is only detected by wrong log-probs of the canary
    is_read_back: bool = field(default=False, compare=False)


Manifest = Mapping[str, TensorRecord]
# The tensors that an engine received, and its log-probs (N,) of the canary. The canary consists of fixed texts. The
# trainer computes their log-probs as well, and compares them with the engine's
Receipt = tuple[Manifest, np.ndarray]


@dataclass(frozen=True)
class ChunkDigest:
    """Digest of a chunk of weights, with which workers and trainer name the chunk.

    With `--weight-sync-deltas`, the trainer may send only the changes to a chunk of the previous version.
    """

    digest: str  # digest of the whole chunk, see `weights.sent_chunks.chunk_digest`
    base_digest: str = ""  # digest of the chunk to which the changes apply; "" if the whole chunk is sent


@dataclass(frozen=True)
class WeightPackage:
    """One version of the weights, with all data that is needed to prove that it arrived."""

    version: int  # policy version
    manifest: Manifest  # the tensors that are sent; a round of the self-test may send only some of them
    # References to the weights, as uint8 arrays in safetensors format, or file paths; [] if a transport needs none. A
    # chunk may also be only the changes to a chunk of the previous version (see `ChunkDigest`)
    chunks: list[Any]
    # Token ids, (L,) int32 each, of fixed texts for the check; N tokens in all
    canary_texts: Sequence[np.ndarray]
    # (N,) float32, the trainer's log-probs of the texts under these weights, end to end
    canary_logprobs: np.ndarray
    # Accepted difference between trainer and engine in the canary's log-probs, in nats (see
    # `weights.package.canary_miss`)
    tolerance: float
    for_late: bool = False  # True if the package is only for workers that joined late and have no weights yet
    # Digest of each chunk. Workers keep these chunks, because the next version may be sent as changes to them. Workers do
    # not keep a chunk whose entry is None, such as those of a self-test, or of the base of an adapter that is sent alone
    # afterwards; () if none of the chunks is kept
    chunk_digests: Sequence[ChunkDigest | None] = ()


class Engines(Protocol):
    """The connection from the trainer's rank 0 to all engines.

    Most transports `put` chunks and `deliver` packages. Transports that control each step of a transfer use `begin`,
    `each`, `together`, `members` and `address`.
    """

    address: str  # address at which engines reach this node

    def reference_workers(self) -> "Engines":
        """Return a connection to the reference workers, whose weights are those of a moving reference."""

    @property
    def members(self) -> Mapping[str, int]:
        """Return the workers of the current sync: worker id -> number of processes that have its weights.

        Workers that `fence` has excluded are not included.
        """

    def put(self, chunk: np.ndarray) -> Any:
        """Store one chunk where every engine can read it, and return its reference."""

    def deliver(self, package: WeightPackage) -> Mapping[str, Receipt]:
        """Load the package into each engine that should get it, and return the receipts by worker id."""

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        """Release the chunks. Unless the package is a self-test, let the workers in `landed` generate with it."""

    def fence(self, worker_id: str, error: Exception) -> None:
        """Exclude a worker that did not prove its weights. The run continues without it."""

    def abort(self, error: BaseException) -> None:
        """End the run because the sync failed: raise the error in all ranks that wait for experience."""

    def begin(self, for_late: bool) -> None:
        """Begin a sync with the current workers, which become `members`. No worker joins until `commit`.

        Args:
            for_late: Sync only the workers that joined late and still have no weights. False syncs all others.
        """

    def each(self, method: str, *args: Any) -> Mapping[str, Any]:
        """Call `pause`, `resume` or `receipt` of every member, and return the answers by worker id.

        A member that does not answer is fenced.
        """

    def together(self, method: str, *args: Any) -> None:
        """Call a method of all members at the same time. The method finishes only when all members execute it.

        Raises:
            WorkerLost: A member was lost during the call. It is fenced.
        """


class Engine(Protocol):
    """One inference engine, which can change its weights while it completes prompts. It runs in one event loop.

    `--engine` selects it: a name of `inference.config.ENGINES`, or FILE.py:NAME of a user's own class.
    """

    # Number of tokens that the engine can keep at once, from which the registry of workers computes the engine's load
    kv_cache_tokens: int

    @classmethod
    def start(cls, config: Any, settings: SharedRunSettings) -> Self:
        """Load the model and return the engine. This may take minutes and block the event loop.

        Args:
            config: The worker's `EngineConfig`.
            settings: The settings that all workers share.
        """

    @classmethod
    def check_model(cls, model_path: str, settings: SharedRunSettings) -> None:
        """Refuse a model that differs from the trainer's. An engine may lack this method.

        An engine without it serves a language model, whose folder the worker compares with the trainer's.

        Raises:
            ConfigurationError: The folder contains another model.
        """

    async def finish_start(self) -> None:
        """Finish the start with calls that need the running event loop. An engine may lack this method.

        Raises:
            ConfigurationError: The engine cannot do what the run needs, for example apply its adapter.
        """

    def complete(
        self,
        prompt_token_ids: np.ndarray,
        seeds: Mapping[int, int],
        sampling: Sampling | None = None,
        begun: Mapping[int, Tokens] | None = None,
        images: Sequence[ImageReference] = (),
    ) -> AsyncGenerator[Completion | Mapping[int, Tokens]]:
        """Yield one completion for each member of a group, as soon as it is finished.

        Closing the generator aborts the unfinished ones. Each token carries the policy version that produced it, and its
        log-prob at the temperature of the settings and over the tokens that `SharedRunSettings.truncation` keeps.

        Before the last completion is finished, an engine may also yield the new tokens of unfinished members, by
        member. If the engine is lost, another engine gets these tokens as `begun`.

        Args:
            prompt_token_ids: Token ids of the prompt, (L,) int32.
            seeds: Seed of the sampling, by member. Under the same weights, a seed always gives the same completion.
            sampling: Overrides of the run's sampling settings. An engine that cannot enforce its `grammar` raises
                RequestRefused, and one that does enforce it sets `Completion.allowed`.
            begun: Tokens that another engine has already sampled, by member. The completion starts with them, and
                continues with the next random draws of the same seed. If an engine never yields tokens of unfinished
                members, it is never called with `begun`.
            images: The images of the prompt, in the order of their tokens. Only passed if the prompt has images. For
                each image, `prompt_token_ids` has `ImageReference.num_tokens` placeholders. An engine never samples the
                tokens in `SharedRunSettings.unsampled_token_ids`, and takes its log-probs over all other tokens, which
                it reports as `Completion.allowed`.

        Raises:
            ImagesDiffer: The engine reads other images, or expands them to other tokens.
            WorkerLost: The engine died, or its last update failed.
            RequestRefused: The grammar cannot be enforced.
        """

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Load new weights from chunks in safetensors format, and return the tensors received.

        Requests in progress pause, and continue under the new weights.
        """

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-probs (N,) float32 of a text under the current weights, at temperature 1. The first is 0."""

    def progress(self) -> dict[str, Any]:
        """Return statistics since the last call.

        They are `token_timeline`, a list of (Unix time, number of tokens); `paused_s`, the seconds of pauses for weight
        updates; and `busy`, the intervals of time in which the engine had unfinished requests.
        """

    async def until_failure(self) -> str:
        """Wait until the engine dies or stops making progress, and return a description of the problem."""

    async def begin_anew(self) -> bool:
        """Prepare for a restarted trainer, whose next weights are version 0 or come from a checkpoint.

        Returns:
            Whether the engine can serve the restarted trainer. If it returns False, or lacks this method, the engine is
            loaded again.
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
        """Close the connection. Calls in progress fail."""


Connect = Callable[[Any, str, Callable[[WorkerLost], None]], WorkerLink]
"""Makes the link to a worker from (its handle, its name for messages, a function to call once it is lost)."""
