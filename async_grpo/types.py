"""The data types of the library. A data row passes through them, in this order, until it becomes a gradient.

    Prompt -> Completion -> Verdict -> Sample -> Group -> MicroBatch (many per step) -> StepEnd (one per step)

`MicroBatch` and `StepEnd` are in `messages`. Each rank of the training gets its own micro-batches, and every StepEnd.

A *group* contains all completions of one prompt. A completion is usually one answer. With an environment it is a
*trajectory*: the policy generates several *turns*, and the environment (a game, tools, an agent's program) answers
between them. The tokens of a trajectory form one *sequence* as long as each turn continues the text before it. A turn
whose history was rewritten, for example summarised by an agent, begins a new sequence.

Axes in the comments: G members of one group; T sampled tokens of one completion; L tokens of its prompt; E tokens of an
environment between two turns; N tokens of one sequence, or of several sequences end to end.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np

from async_grpo.allowed_tokens import AllowedTokens

PROMPT_TOKEN = -1  # entry of `versions` for a token that no policy generated
GENERATION = "generation"  # the kind of worker that every run needs
REFERENCE = "reference"  # the kind of logprob worker with the reference policy of the KL penalty
ENVIRONMENT = "environment"  # name of the reward that comes from an environment


class FinishReason(str, Enum):
    """Why a completion ended. STOP means that the answer is finished, LENGTH that it was truncated."""

    STOP = "stop"
    LENGTH = "length"


class RewardStatus(str, Enum):
    """Outcome of scoring one sample. Only OK comes with a reward. A failure does not count as a reward of 0."""

    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    ABSTAINED = "abstained"

    @property
    def is_lost(self) -> bool:
        """Return whether a reward is missing because of a failure. An adapter that abstains has not failed."""
        return self in (RewardStatus.FAILED, RewardStatus.TIMED_OUT)


@dataclass(frozen=True)
class ImageReference:
    """An image of a prompt. Its file is in the folder of the run, which every node must see."""

    path: str  # absolute path of the encoded image
    digest: str  # sha256 (hex) of the file's content, which every reader compares
    num_tokens: int  # number of placeholder tokens in the prompt


@dataclass(frozen=True)
class Prompt:
    """One question of the data set, tokenised once."""

    ordinal: int  # consecutive number of the prompt in the run; a repeated question gets a new one
    token_ids: np.ndarray  # (L,) int32
    row: dict[str, Any]  # row of the JSONL file: `input`, `answer` and any other column
    question: int = -1  # index of the question in the data set; negative for held-out questions
    images: tuple[ImageReference, ...] = ()  # images of the prompt, in the order of their tokens
    teacher_token_ids: np.ndarray | None = None  # (L',) int32, the teacher's prompt; None if it is the same


@dataclass(frozen=True)
class Tokens:
    """Generated tokens as the engine sampled them, including the end token."""

    token_ids: np.ndarray  # (T,) int32
    logprobs: np.ndarray  # (T,) float32, computed by the engine at the sampling temperature
    versions: np.ndarray  # (T,) int32, policy version that sampled each token

    def __post_init__(self) -> None:
        lengths = [len(self.token_ids), len(self.logprobs), len(self.versions)]
        if len(set(lengths)) > 1:
            raise ValueError(f"token_ids, logprobs and versions of a completion differ in length: {lengths}")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __add__(self, other: "Tokens") -> "Tokens":
        """Return these tokens followed by the others."""
        pairs = zip(self.arrays, other.arrays, strict=True)
        return Tokens(*(np.concatenate(pair) for pair in pairs))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return token_ids, logprobs and versions."""
        return self.token_ids, self.logprobs, self.versions

    @property
    def oldest_version(self) -> int:
        """Return the oldest policy version that sampled one of the tokens, or 0 if there are no tokens."""
        return int(self.versions.min()) if len(self.versions) else 0


@dataclass(frozen=True)
class Turn:
    """One turn of a trajectory: the tokens that the policy read since its last turn, and how many it then sampled."""

    # (E,) int32, the environment's tokens since the last turn; for a fresh turn, all tokens that the engine read
    before: np.ndarray
    num_tokens: int  # number of sampled tokens
    fresh: bool = False  # whether the turn begins a sequence: the first, or one whose history was rewritten
    before_text: str = ""  # `before` as text
    text: str = ""  # the sampled tokens as text
    number: int = 0  # number in the order of time; `Completion.turns` is ordered sequence by sequence
    images: tuple[ImageReference, ...] = ()  # images of `before`, in the order of their tokens


@dataclass(frozen=True)
class Outcome:
    """How a trajectory ended, as its environment reports."""

    reward: float | None = None  # the environment's own reward of the trajectory; None if there is none
    failure: str = ""  # why the trajectory cannot be scored; "" if it can. A failure is not a reward of 0
    turn_rewards: tuple[float, ...] = ()  # the environment's own reward of each turn; () if there are none
    # Name of the state in which each turn began, for the estimator `gigpo`; () if the environment names no states
    states: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)  # metrics by name, such as `tool_calls`


@dataclass(frozen=True)
class Completion(Tokens):
    """What the policy generated for one prompt: one answer, or the turns of a trajectory end to end.

    The arrays contain sampled tokens only, so that tokens of the prompt or of an environment cannot be trained on or
    counted.
    """

    finish_reason: FinishReason
    text: str  # the answer as text; for a trajectory, the text of its last turn
    char_ends: np.ndarray | None = None  # (T,) int32, characters of `text` up to each token's end
    member: int = 0  # index in the group
    turns: tuple[Turn, ...] = ()  # turns of a trajectory; () for an answer that directly follows the prompt
    outcome: Outcome | None = None  # outcome of a trajectory; None for an answer
    # Turns that the agent threw away and that are not trained on, with their texts. Their tokens are not in the arrays
    abandoned: tuple[Turn, ...] = ()
    allowed: AllowedTokens | None = None  # set if a grammar restricted the tokens
    latents: np.ndarray | None = None  # (T, 2 or 1, *picture) float32; see `MicroBatch.latents`
    condition: tuple[np.ndarray, ...] = ()  # embeddings of the prompt, if the policy draws from texts
    picture_png: bytes = b""  # the finished picture as a PNG file; b"" for a text

    @property
    def failure(self) -> str:
        """Return why the trajectory cannot be scored; "" if it can."""
        return self.outcome.failure if self.outcome else ""

    @property
    def truncated(self) -> bool:
        """Return whether the completion was cut off at its token limit."""
        return self.finish_reason is FinishReason.LENGTH

    @property
    def turn_order(self) -> list[int]:
        """Return the indices of `turns` in the order of time."""
        numbers = [turn.number for turn in self.turns]
        return np.argsort(numbers, kind="stable").tolist()

    @property
    def turn_ranks(self) -> np.ndarray:
        """Return the position of each turn in the order of time, (turns,), 0 for the first.

        Without turns, the result is [0], as if all tokens belonged to one turn.
        """
        # The argsort of a permutation is its inverse
        return np.argsort(self.turn_order or [0])

    @property
    def times(self) -> np.ndarray | None:
        """Return the position of each token in the order of time, (T,) int32; None if they are already in this order."""
        ranks = self.turn_ranks
        if np.all(ranks[1:] > ranks[:-1]):
            return None
        token_ranks = np.repeat(ranks, [turn.num_tokens for turn in self.turns])
        times = np.empty(len(self), np.int32)
        times[np.argsort(token_ranks, kind="stable")] = np.arange(len(self), dtype=np.int32)
        return times


@dataclass(frozen=True)
class Sampling:
    """Overrides of the run's sampling settings for one request. None keeps the run's value.

    Samples that are trained on must use the run's temperature.
    """

    temperature: float | None = None  # 0 always takes the most probable token
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()  # texts that end a completion; the completion includes the text
    # Grammar that the engine enforces, as the JSON text of a structural tag of xgrammar; "" if all tokens are allowed
    grammar: str = ""


@dataclass
class Session:
    """Routing state of a trajectory. All its turns go to the same worker, whose prefix cache contains their history."""

    member: int  # index of the trajectory in its group
    turn: int = 0  # number of the next turn
    worker_id: str = ""  # worker that served the last turn


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class AdapterResult:
    """Result of one reward adapter on one sample."""

    adapter: str
    status: RewardStatus
    reward: float | None = None  # set if and only if the status is OK
    extra: dict[str, float] = field(default_factory=dict)  # further numbers for the metrics, by name
    steps: tuple[tuple[int, float], ...] = ()  # process rewards: (index of the step's last token, reward)
    reason: str = ""  # why the adapter failed, timed out or abstained
    attempts: int = 1  # number of calls of the adapter, including retries
    latency_s: float = 0.0  # seconds from the request to the answer, including the time in queues
    queue_s: float = 0.0  # part of `latency_s` that was spent waiting for a free worker

    def __post_init__(self) -> None:
        if self.status is RewardStatus.OK:
            is_consistent = self.reward is not None and math.isfinite(self.reward)
        else:
            is_consistent = self.reward is None
        if not is_consistent:
            raise ValueError(f"{self.adapter}: status {self.status.value} with the reward {self.reward}")

    def standing_in_for(self, failed: "AdapterResult") -> "AdapterResult":
        """Return this result of a fallback adapter under the name of the failed adapter, with a reason that says so."""
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
    """The combined result of all adapters on one sample. `reward` is set if and only if `status` is OK."""

    status: RewardStatus
    reward: float | None
    results: tuple[AdapterResult, ...] = ()  # the result of each adapter
    filled: bool = False  # whether `--on-reward-failure` put this reward in place of a failed one

    def __post_init__(self) -> None:
        if (self.status is RewardStatus.OK) != (self.reward is not None):
            raise ValueError(f"a verdict of status {self.status.value} cannot carry the reward {self.reward}")


@dataclass(frozen=True)
class Sample:
    """A completion with its verdict and, once its group is complete, its advantages."""

    prompt: Prompt
    completion: Completion
    verdict: Verdict
    advantages: np.ndarray | None = None  # (T,) float32; None if the sample is not trained on
    loss_mask: np.ndarray | None = None  # (T,) bool, the tokens that are trained on; set with `advantages`
    group_tokens: int = 0  # number of trained tokens in the whole group
    ref_logprobs: np.ndarray | None = None  # (T,) float32, of the reference policy; None without one
    proximal_logprobs: np.ndarray | None = None  # (T,) float32, of the policy when the group was complete
    teacher_logprobs: np.ndarray | None = None  # (T,) float32, NaN for a missing one; None without a teacher
    teacher_top: np.ndarray | None = None  # (T, 2, k) float32, ids and log-probs of the teacher's top tokens
    times: np.ndarray | None = None  # (T,) int32, position in time of each token; only with a critic

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sequences of the sample, sampled or not."""
        num_not_sampled = sum(len(before) for before, _ in self.pieces)
        return num_not_sampled + len(self.completion)

    @property
    def pieces(self) -> list[tuple[np.ndarray, slice]]:
        """Return for each turn, in the order of `turns`, the tokens (E,) int32 before it and the slice of its own tokens.

        An answer counts as one turn after the prompt. With a `condition`, the first token stands for the whole prompt.
        """
        turns = self.completion.turns
        if not turns:
            return [(self.prompt.token_ids[: 1 if self.completion.condition else None], slice(None))]
        pieces = []
        begin = 0
        for turn in turns:
            end = begin + turn.num_tokens
            pieces.append((turn.before, slice(begin, end)))
            begin = end
        return pieces

    def laid_out(self, sampled: np.ndarray, fill: np.generic | bool | None = None) -> np.ndarray:
        """Place the values of the sampled tokens among all tokens of the sequence.

        Args:
            sampled: Values (T, ...) of the sampled tokens.
            fill: Value of all other tokens. None uses their token ids.

        Returns:
            The values (N, ...) of all tokens of the sequence.
        """
        parts: list[np.ndarray] = []
        for before, place in self.pieces:
            parts.append(before if fill is None else np.full((len(before), *sampled.shape[1:]), fill))
            parts.append(sampled[place])
        return np.concatenate(parts)

    def sampled(self, values: np.ndarray, begin: int = 0) -> np.ndarray:
        """Return the values (T,) of the sampled tokens, from values that begin at some token of the sequence.

        Args:
            values: One value for each token of the sequence from index `begin` to the end.
            begin: Index of the first token that has a value. For a sample without turns it must be the first token after
                the prompt. All tokens from there on are sampled, so the values are returned as they are.
        """
        if not self.completion.turns:
            return values
        is_sampled = self.laid_out(np.ones(len(self.completion), bool), False)
        return values[is_sampled[begin:]]

    @property
    def token_ids(self) -> np.ndarray:
        """Return the ids of all tokens that the engine read and sampled, (N,) int32, for a sample with one sequence."""
        return self.laid_out(self.completion.token_ids)

    @property
    def sequences(self) -> "list[Sample]":
        """Return one sample per sequence. Each has the verdict of the whole sample.

        If no history was rewritten, the sample has a single sequence, and the list contains the sample itself.
        """
        turns = self.completion.turns
        first_turns = [index for index, turn in enumerate(turns) if turn.fresh]
        if len(first_turns) < 2:
            return [self]
        places = [place for _, place in self.pieces]
        sequences = []
        for first, beyond in pairwise([*first_turns, len(turns)]):
            tokens = slice(places[first].start, places[beyond - 1].stop)
            completion = _with_tokens_cut(self.completion, (*COMPLETION_ARRAYS, "allowed"), tokens)
            completion = replace(completion, turns=turns[first:beyond])
            sample = _with_tokens_cut(self, SAMPLE_ARRAYS, tokens)
            sequences.append(replace(sample, completion=completion))
        return sequences


# Fields of a completion, and of a sample, that are arrays (T, ...). `Sample.sequences` divides them among the sequences
COMPLETION_ARRAYS = ("token_ids", "logprobs", "versions", "char_ends", "latents")
POLICY_ARRAYS = ("ref_logprobs", "proximal_logprobs", "teacher_logprobs", "teacher_top")
SAMPLE_ARRAYS = ("advantages", "loss_mask", *POLICY_ARRAYS, "times")


def _with_tokens_cut(item: Any, array_names: Sequence[str], tokens: slice) -> Any:
    """Return a copy of a completion or sample of which some fields contain only the given tokens."""
    arrays = {}
    for name in array_names:
        array = getattr(item, name)
        arrays[name] = None if array is None else array[tokens]
    return replace(item, **arrays)


@dataclass(frozen=True)
class Group:
    """All completions of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]  # (G,)
    # Policy version of the engines when the generation of the group began. It may be newer than the version at the
    # group's admission, if the group is generated again after a restart or replaces a discarded group
    start_version: int
    # Number of the group in the order of admission. It determines the step in which the group is due, see
    # `experience.staleness`
    sequence_number: int
    baseline: Verdict | None = None  # verdict on the greedy completion, if the estimator compares with it
    # Number of earlier groups that were discarded and that this one replaces, because their rewards did not differ
    # (`--zero-variance resample`) or a reward failed (`--on-reward-failure refill`)
    resampled: int = 0

    @property
    def oldest_version(self) -> int:
        """Return the oldest policy version that sampled a token of the group, or `start_version` without tokens."""
        versions = (s.completion.oldest_version for s in self.samples if len(s.completion))
        return min(versions, default=self.start_version)

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the samples that have one."""
        return [sample.verdict.reward for sample in self.samples if sample.verdict.reward is not None]
