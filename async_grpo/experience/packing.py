"""Packing: samples become padding-free micro-batches, one per rank, whole sequences only, within the token budget."""

import bisect
import itertools
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from async_grpo.experience.reward_tensors import repeated
from async_grpo.messages import NO_TIME, MicroBatch, dummy_micro_batch
from async_grpo.options.fields import refuse
from async_grpo.types import PROMPT_TOKEN, Sample


class Packer:
    """Keeps what is to be trained until rounds are made of it: one micro-batch per rank, dummies where one stays empty.

    A round takes the longest samples first, each to the rank with least to do of those in which it fits; short ones fill
    the gaps. So the budget is used, the ranks end together, and what waits longer is packed better. A sequence of n
    tokens costs n (1 + n / (12 h)): a layer of hidden size h takes 24 h^2 operations per token for its matrices, 2 h n
    for its causal attention (Kaplan et al. 2020). Ours, and no library for bin packing: those bound one weight of a bin,
    here tokens are bounded and costs evened.
    """

    def __init__(self, num_ranks: int, max_tokens: int, hidden_size: int = 1536) -> None:
        self.num_ranks, self.max_tokens = num_ranks, max_tokens
        self._even_at = 12 * hidden_size  # tokens of a sequence whose attention costs as much as its matrices
        # Samples of about one length keep together by groups: in one micro-batch their prompt is computed once
        self._same_length = max(1, max_tokens // 64)
        # In order: negated class of length, ordinal of the prompt, negated length, number, and the sample
        self._waiting: list[tuple[int, int, int, int, Sample]] = []
        self._numbers = itertools.count()
        self._tokens = 0  # that wait

    def add(self, sample: Sample) -> None:
        """Keep a sample of one sequence for a round; ConfigurationError: it alone exceeds the token budget of a rank."""
        limit, length = f"--max-tokens-per-gpu {self.max_tokens}", sample.num_tokens
        refuse(length > self.max_tokens, f"a sample of {length} tokens cannot fit {limit}")
        order = -length // self._same_length, sample.prompt.ordinal, -length, next(self._numbers)
        bisect.insort(self._waiting, (*order, sample))
        self._tokens += length

    def full_round(self) -> list[MicroBatch] | None:
        """A round, if what waits would fill the budget of every rank."""
        return self._round() if self._tokens >= self.num_ranks * self.max_tokens else None

    def flush(self) -> list[list[MicroBatch]]:
        """All that waits, in as many rounds as it takes."""
        rounds = []
        while self._waiting:
            rounds.append(self._round())
        return rounds

    def _round(self) -> list[MicroBatch]:
        """First-fit decreasing, to the rank of least cost; a group stays on its rank up to a sixteenth of the budget."""
        ranks: list[list[Sample]] = [[] for _ in range(self.num_ranks)]
        tokens, costs, waiting = [0] * self.num_ranks, [0.0] * self.num_ranks, self._waiting
        left, last, place = waiting[:0], (0, -1), 0
        while place < len(waiting):
            _, ordinal, negated, _, sample = waiting[place]
            room = self.max_tokens - (length := -negated)
            if not (fitting := [rank for rank, taken in enumerate(tokens) if taken <= room]):
                # On to the next that is short enough, quickly: tens of thousands may wait
                most = min(tokens) - self.max_tokens  # the largest room, negated as lengths are
                start = max(place + 1, bisect.bisect_left(waiting, (most // self._same_length,)))
                those = range(start, len(waiting))
                beyond = next((other for other in those if waiting[other][2] >= most), len(waiting))
                left += waiting[place:beyond]
                place = beyond
                continue
            ahead = [self.max_tokens / 16 * (last == (rank, ordinal)) for rank in fitting]
            rank = min(zip(fitting, ahead, strict=True), key=lambda one: costs[one[0]] - one[1])[0]
            last, place = (rank, ordinal), place + 1
            ranks[rank].append(sample)
            tokens[rank] += length
            costs[rank] += length * (1 + length / self._even_at)
        self._waiting, self._tokens = left, self._tokens - sum(tokens)
        return [pack(samples) if samples else dummy_micro_batch(0) for samples in ranks]


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """Lay samples of one sequence each end to end. Tokens that were not sampled carry no loss."""
    members, times = _trajectories(samples)
    return MicroBatch(
        input_ids=np.concatenate([sample.token_ids for sample in samples]),
        cu_seqlens=np.cumsum([0, *(sample.num_tokens for sample in samples)]).astype(np.int32),
        loss_mask=_laid_out(samples, "loss_mask", False),
        behaviour_logprobs=_laid_out(samples, "completion.logprobs", np.float32(0)),
        advantages=_laid_out(samples, "advantages", np.float32(0)),
        versions=_laid_out(samples, "completion.versions", np.int32(PROMPT_TOKEN)),
        group_ids=np.array([s.prompt.ordinal for s in samples], np.int64),
        group_tokens=np.array([s.group_tokens for s in samples], np.int64),
        ref_logprobs=_optional(samples, "ref_logprobs"),
        proximal_logprobs=_optional(samples, "proximal_logprobs"),
        members=members,
        times=times,
    )


def _trajectories(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Return members (S,) and times (N,) of the micro-batch; None if none is part of a trajectory's several sequences."""
    if all(sample.times is None for sample in samples):
        return None, None
    parts = []
    for sample in samples:
        no_times = repeated(np.array(NO_TIME), len(sample.completion))
        parts.append(sample.laid_out(no_times if sample.times is None else sample.times, NO_TIME))
    members = np.array([sample.completion.member for sample in samples], np.int64)
    return members, np.concatenate(parts).astype(np.int32)


def _laid_out(samples: Sequence[Sample], attribute: str, fill: np.generic | bool) -> np.ndarray:
    """(N,): a (T,) attribute of the samples on their sampled tokens, `fill` on the others."""
    values = map(attrgetter(attribute), samples)
    return np.concatenate([sample.laid_out(own, fill) for sample, own in zip(samples, values, strict=True)])


def _optional(samples: Sequence[Sample], attribute: str) -> np.ndarray | None:
    """The same in float32, if every sample has it."""
    if any(getattr(sample, attribute) is None for sample in samples):
        return None
    return _laid_out(samples, attribute, np.float32(0))
