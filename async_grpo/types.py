"""The nouns of the library: what one sample is on its way from a data row to a gradient.

Axes in names:  G members of one group (completions of one prompt),  T sampled tokens of one completion,
L tokens of its prompt, N tokens of one sequence, or of several end to end.

    Prompt -> Completion -> Verdict -> Sample -> Group -> MicroBatch (`messages`, one per rank) ... StepEnd
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

PROMPT_TOKEN = -1  # `versions` of a token that no policy generated
GENERATION = "generation"  # the kind of worker that every run needs
ENVIRONMENT = "environment"  # the reward that an environment gives itself


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
    question: int = -1  # its place in the data set; below 0: held out


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
class Turn:
    """So many sampled tokens of a trajectory, and what stood before them."""

    before: np.ndarray  # (E,) int32, of an environment; of a fresh one, all that the engine saw
    tokens: int
    fresh: bool = False  # it begins a sequence of its own: the history was rewritten, or it is the first turn
    said: str = ""  # `before` as text, of a fresh one all of it
    text: str = ""  # what was sampled
    number: int = 0  # place in time among the trajectory's turns; equal numbers: as they stand


@dataclass(frozen=True)
class Outcome:
    """How a trajectory ended, as its program tells."""

    reward: float | None = None  # the environment's own; None: it has none to give
    failure: str = ""  # why there is nothing to be scored: it is no zero
    turn_rewards: tuple[float, ...] = ()  # of the environment's own, one per turn; () if it gives none
    states: tuple[str, ...] = ()  # names of what each turn found, for GiGPO; () if not named
    numbers: Mapping[str, float] = field(default_factory=dict)  # for the metrics: `tool_calls` ...


@dataclass(frozen=True)
class Completion(Tokens):
    """What the policy generated for one prompt, token by token: one sequence, or the `turns` of a trajectory end to end.
    Its arrays hold sampled tokens alone, so no other ones can be trained on or counted."""

    finish_reason: FinishReason
    text: str  # of a trajectory, that of its last turn
    char_ends: np.ndarray | None = None  # (T,) int32, characters of `text` after each token; if asked for
    member: int = 0  # its place in the group
    turns: tuple[Turn, ...] = ()  # (): one, after the prompt
    outcome: Outcome | None = None  # of a trajectory

    @property
    def failure(self) -> str:
        """Of a trajectory, why there is nothing to be scored."""
        return self.outcome.failure if self.outcome else ""

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH

    @property
    def turn_ranks(self) -> np.ndarray:
        """Return (turns,) the place in time of each turn, 0 for the first."""
        numbers = [turn.number for turn in self.turns] or [0]
        return np.argsort(np.argsort(numbers, kind="stable"))

    @property
    def times(self) -> np.ndarray | None:
        """Return (T,) int32 the place in time of each token; None: as they stand, which is by sequence."""
        ranks = self.turn_ranks
        if np.all(ranks[1:] > ranks[:-1]):
            return None
        token_ranks = np.repeat(ranks, [turn.tokens for turn in self.turns])
        times = np.empty(len(self), np.int32)
        times[np.argsort(token_ranks, kind="stable")] = np.arange(len(self), dtype=np.int32)
        return times


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn otherwise than the run's settings say (None); to be trained on, at their temperature."""

    temperature: float | None = None  # 0: the likeliest token each time
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()  # texts that end a completion, which holds them


@dataclass
class Session:
    """The turns of one trajectory, as those see it that serve them: whose they are, and which worker had the last."""

    member: int
    turn: int = 0
    worker_id: str = ""


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
    times: np.ndarray | None = None  # (T,) int32, places in time; for a critic, of several `sequences`

    @property
    def num_tokens(self) -> int:
        return sum(len(before) for before, _ in self.pieces) + len(self.completion)

    @property
    def pieces(self) -> list[tuple[np.ndarray, slice]]:
        """In order: tokens that were not sampled, (E,) int32, and where those that follow stand in the completion."""
        if not (turns := self.completion.turns):
            return [(self.prompt.token_ids, slice(None))]
        ends = np.cumsum([turn.tokens for turn in turns]).tolist()
        return [(turn.before, slice(end - turn.tokens, end)) for turn, end in zip(turns, ends, strict=True)]

    def laid_out(self, sampled: np.ndarray, fill: np.generic | bool | None = None) -> np.ndarray:
        """(N,) of one sequence: `sampled` (T,) in its places, between them `fill`, or the tokens that stand there."""
        parts: list[np.ndarray] = []
        for before, place in self.pieces:
            parts += [before if fill is None else np.full(len(before), fill), sampled[place]]
        return np.concatenate(parts)

    def sampled(self, values: np.ndarray, begin: int = 0) -> np.ndarray:
        """(T,): of what is said of each token of a sequence from `begin` on, that of the sampled ones."""
        if not self.completion.turns:
            return values
        return values[self.laid_out(np.ones(len(self.completion), bool), False)[begin:]]

    @property
    def token_ids(self) -> np.ndarray:
        """(N,) int32, of one sequence: what the engine saw and sampled."""
        return self.laid_out(self.completion.token_ids)

    @property
    def sequences(self) -> "list[Sample]":
        """Itself; or, if its history was rewritten, one for each sequence that the engine saw. They share all else."""
        turns = self.completion.turns
        begins = [number for number, turn in enumerate(turns) if turn.fresh]
        if len(begins) < 2:
            return [self]
        found, places = [], [place for _, place in self.pieces]
        for first, beyond in zip(begins, [*begins[1:], len(turns)], strict=True):
            own = slice(places[first].start, places[beyond - 1].stop)
            arrays = {name: _cut(getattr(self.completion, name), own) for name in OF_A_TOKEN}
            completion = replace(self.completion, **arrays, turns=turns[first:beyond])
            arrays = {name: _cut(getattr(self, name), own) for name in ADDED}
            found.append(replace(self, completion=completion, **arrays))
        return found


OF_A_TOKEN = ("token_ids", "logprobs", "versions", "char_ends")  # (T,) of a completion
ADDED = ("advantages", "loss_mask", "ref_logprobs", "proximal_logprobs", "times")  # (T,) of a sample


def _cut(array: np.ndarray | None, place: slice) -> Any:
    return None if array is None else array[place]


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
        """Of its tokens; a trajectory may have failed before it had any."""
        versions = (s.completion.oldest_version for s in self.samples if len(s.completion))
        return min(versions, default=self.admitted_version)

    @property
    def rewards(self) -> list[float]:
        """Of the samples that have one."""
        return [sample.verdict.reward for sample in self.samples if sample.verdict.reward is not None]
