"""The nouns of the library: what one sample is on its way from a data row to a gradient.

Axes in names:  G members of one group (completions of one prompt),  T tokens of one completion,
S sequences and N tokens of one packed micro-batch (N = sum of the sequence lengths, no padding).

    Prompt -> Completion -> Verdict -> Sample -> Group -> MicroBatch (one per rank) ... StepEnd
"""

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

PROMPT_TOKEN = -1  # `versions` of a token that no policy generated
GENERATION = "generation"  # the kind of worker that every run needs


class FinishReason(str, Enum):
    """Why a completion ended. Only STOP is a finished answer; LENGTH is a truncated one."""

    STOP = "stop"
    LENGTH = "length"


class RewardStatus(str, Enum):
    """What became of scoring one sample. Only OK carries a reward; a failure is never a zero."""

    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    ABSTAINED = "abstained"

    @property
    def is_lost(self) -> bool:
        """Whether it should have been scored, and could not be; who abstains has answered."""
        return self in (RewardStatus.FAILED, RewardStatus.TIMED_OUT)


@dataclass(frozen=True)
class Prompt:
    """One question of the data set, tokenised once. `ordinal` counts prompts since the start of the run."""

    ordinal: int
    token_ids: np.ndarray  # (L,) int32
    row: dict[str, Any]  # the JSONL row: `input`, `answer` and any other column
    question: int = -1  # its place in the data set; -1: held out


@dataclass(frozen=True)
class Tokens:
    """Generated tokens as the engine sampled them (the end token included)."""

    token_ids: np.ndarray  # (T,) int32
    logprobs: np.ndarray  # (T,) float32, the engine's, at the sampling temperature
    versions: np.ndarray  # (T,) int32, policy version that produced each token

    def __post_init__(self) -> None:
        lengths = [len(self.token_ids), len(self.logprobs), len(self.versions)]
        if len(set(lengths)) > 1:
            raise ValueError(f"token_ids, logprobs and versions of a completion differ in length: {lengths}")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __add__(self, more: "Tokens") -> "Tokens":
        """These tokens, and after them `more`."""
        return Tokens(*map(np.concatenate, zip(self.arrays, more.arrays, strict=True)))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.token_ids, self.logprobs, self.versions

    @property
    def oldest_version(self) -> int:
        return int(self.versions.min()) if len(self.versions) else 0


@dataclass(frozen=True)
class Completion(Tokens):
    """One generated sequence, token by token."""

    finish_reason: FinishReason
    text: str
    char_ends: np.ndarray | None = None  # (T,) int32, characters of `text` after each token; if asked for
    member: int = 0  # its place in the group

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn that are not to be trained on. None: as the run's settings say."""

    temperature: float | None = None  # 0: the likeliest token each time
    max_tokens: int | None = None


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class AdapterResult:
    """What one reward adapter said of one sample."""

    adapter: str
    status: RewardStatus
    reward: float | None = None  # set exactly when status is OK
    extra: dict[str, float] = field(default_factory=dict)  # further numbers, logged per component
    steps: tuple[tuple[int, float], ...] = ()  # process rewards: (index of the step's last token, reward)
    reason: str = ""  # why it failed, timed out or abstained
    attempts: int = 1
    latency_s: float = 0.0  # from the request to the answer, queueing included
    queue_s: float = 0.0  # of which waiting for a free worker

    def __post_init__(self) -> None:
        is_reward = self.reward is not None and math.isfinite(self.reward)
        if (self.status is RewardStatus.OK) != is_reward or (self.reward is not None and not is_reward):
            raise ValueError(f"{self.adapter}: status {self.status.value} with the reward {self.reward}")

    def standing_in_for(self, failed: "AdapterResult") -> "AdapterResult":
        """This result under the name of the adapter whose failure it makes good; the reason says so."""
        reason = f"{self.adapter} in place of {failed.adapter}, which {failed.status.value}: {failed.reason}"
        return replace(
            self,
            adapter=failed.adapter,
            reason=f"{reason}; {self.reason}" if self.reason else reason,
            attempts=failed.attempts + self.attempts,
            latency_s=failed.latency_s + self.latency_s,
        )


@dataclass(frozen=True)
class Verdict:
    """The combined result of all adapters on one sample; `reward` is set exactly when `status` is OK."""

    status: RewardStatus
    reward: float | None
    results: tuple[AdapterResult, ...] = ()
    filled: bool = False  # the reward stands in for a failure, as the run's policy says

    def __post_init__(self) -> None:
        if (self.status is RewardStatus.OK) != (self.reward is not None):
            raise ValueError(f"a verdict of status {self.status.value} cannot carry the reward {self.reward}")


@dataclass(frozen=True)
class Sample:
    """A completion with its verdict and, once its group is complete, its advantages."""

    prompt: Prompt
    completion: Completion
    verdict: Verdict
    advantages: np.ndarray | None = None  # (T,) float32; None: not trained on
    loss_mask: np.ndarray | None = None  # (T,) bool, the tokens that are; set with `advantages`
    group_tokens: int = 0  # trained tokens of its whole group
    ref_logprobs: np.ndarray | None = None  # (T,) float32, of the reference; None: the loss has no use for it
    proximal_logprobs: np.ndarray | None = None  # (T,) float32, of the policy when the group was complete

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.completion)

    @property
    def token_ids(self) -> np.ndarray:
        """(L + T,) int32: prompt and completion."""
        return np.concatenate([self.prompt.token_ids, self.completion.token_ids])


@dataclass(frozen=True)
class Group:
    """All completions of one prompt. `admitted_version` is the policy that was live when it was let in."""

    prompt: Prompt
    samples: tuple[Sample, ...]  # (G,)
    admitted_version: int
    sequence_number: int  # of its admission; says which step trains it at the latest
    baseline: Verdict | None = None  # of the greedy completion, where the estimator compares with it
    resampled: int = 0  # prompts without signal that this one replaced

    @property
    def oldest_version(self) -> int:
        return min(sample.completion.oldest_version for sample in self.samples)

    @property
    def rewards(self) -> list[float]:
        """Of the samples that have one."""
        return [sample.verdict.reward for sample in self.samples if sample.verdict.reward is not None]


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences packed end to end for one rank: no padding, at most `max_tokens_per_gpu` tokens.

    Everything of axis N is aligned with the *token it speaks of*: `behaviour_logprobs[i]` is the log-prob of
    `input_ids[i]` given the tokens before it in its own sequence. Where `loss_mask` is False the values mean nothing.
    """

    input_ids: np.ndarray  # (N,) int32
    cu_seqlens: np.ndarray  # (S + 1,) int32, boundaries of the sequences: 0 ... N
    loss_mask: np.ndarray  # (N,) bool, tokens that are trained on
    behaviour_logprobs: np.ndarray  # (N,) float32, the engine's
    advantages: np.ndarray  # (N,) float32
    versions: np.ndarray  # (N,) int32, PROMPT_TOKEN where not generated
    group_ids: np.ndarray  # (S,) int64, the prompt's ordinal
    group_tokens: np.ndarray  # (S,) int64, trained tokens of the sequence's group in the whole minibatch
    ref_logprobs: np.ndarray | None = None  # (N,) float32
    proximal_logprobs: np.ndarray | None = None  # (N,) float32
    is_dummy: bool = False  # nothing to learn: keeps the collectives of an idle rank aligned

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def sequence_ids(self) -> np.ndarray:
        """(N,) int64: the index of the sequence each token belongs to."""
        return np.repeat(np.arange(self.num_sequences), np.diff(self.cu_seqlens))


def dummy_micro_batch(token_id: int) -> MicroBatch:
    """The smallest micro-batch with an empty loss mask, for a rank that has nothing while others do."""
    zeros = np.zeros(2, np.float32)
    return MicroBatch(
        input_ids=np.full(2, token_id, np.int32),
        cu_seqlens=np.array([0, 2], np.int32),
        loss_mask=np.zeros(2, bool),
        behaviour_logprobs=zeros,
        advantages=zeros,
        versions=np.full(2, PROMPT_TOKEN, np.int32),
        group_ids=np.array([-1], np.int64),
        group_tokens=np.array([0], np.int64),
        is_dummy=True,
    )


@dataclass(frozen=True)
class StepEnd:
    """Closes one optimizer step on every rank, after its last micro-batch; `stats` go into the metrics line."""

    step: int
    num_groups: int
    num_samples: int
    stats: dict[str, Any]


@dataclass(frozen=True)
class WorkersJoined:
    """Workers wait for the current weights: all ranks publish them once more, with the self-test."""


@dataclass(frozen=True)
class SaveRequested:
    """Every rank saves its part of a checkpoint, of the policy that it holds now; with a reason, the run ends there."""

    end_reason: str = ""


# What a rank is told; every rank, as many of each, in one order
Message = MicroBatch | StepEnd | WorkersJoined | SaveRequested


@dataclass(frozen=True)
class SharedRunSettings:
    """The settings that every worker must share, published by the trainer: typed once, never twice."""

    run_name: str
    model_fingerprint: str  # sha256 over the architecture part of config.json and the vocabulary
    vocab_size: int
    dtype: str
    temperature: float
    stop_token_ids: tuple[int, ...]
    max_total_tokens: int  # prompt and completion together
    max_completion_tokens: int
    transport: str  # how weights travel: see `weights.config`
    logprob_roles: tuple[str, ...]  # kinds of logprob worker that the loss needs: "reference", "proximal"
    seed: int
    char_ends: bool = False  # completions carry `char_ends`: for process rewards
    float32_head: bool = False  # engines compute logits in float32
    guaranteed_completion_tokens: int = 0  # for which even the longest prompt leaves room; 0: not known
    group_size: int = 1  # samples that one engine must take at once
    samples_in_flight: int = 0  # admitted and not yet part of the live weights, at most; 0: not known
    checkpoint: str = ""  # that the ranks resume from
    trains: bool = True  # else engines work with the weights that they start with
    library: str = ""  # version of the trainer's


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says of itself when it registers."""

    worker_id: str
    kind: str  # "generation", "reference" or "proximal"
    max_sequences: int  # admitted at once: max_num_seqs + overhead_seqs
    max_tokens: int  # tokens it can hold at once (its KV cache, or its packing budget)
    world_size: int = 1  # GPUs or processes that hold a share of the weights
    rewards: str = ""  # that it was started with
