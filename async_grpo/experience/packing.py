"""Packing of samples into micro-batches of whole sequences, without padding and within the token budget of a rank."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from async_grpo.allowed_tokens import ALL_TOKENS, AllowedTokens
from async_grpo.experience.reward_tensors import repeated
from async_grpo.experience.run_images import images_of
from async_grpo.messages import NO_TIME, MicroBatch, dummy_micro_batch
from async_grpo.options.fields import refuse
from async_grpo.types import PROMPT_TOKEN, ImageReference, Sample


class WaitingSample(NamedTuple):
    """A sample that waits to be packed. Samples are sorted by these fields, and packed in that order.

    Longer samples come first. Lengths and length classes are negated because `bisect` needs ascending order.
    """

    negated_length_class: int  # the length divided by the width of a length class, rounded up and negated
    prompt_ordinal: int  # keeps samples of one group together within a length class
    negated_length: int
    arrival: int  # unique, so that samples themselves are never compared
    sample: Sample

    @property
    def length(self) -> int:
        """Return the number of tokens of the sample, including its prompt."""
        return -self.negated_length


@dataclass
class RankLoad:
    """The samples that one rank has received in the current round."""

    samples: list[Sample] = field(default_factory=list)
    num_tokens: int = 0
    cost: float = 0.0  # compute cost, in units of the cost of one token in a short sequence


class Packer:
    """Collects samples and packs them in rounds of one micro-batch per rank.

    A rank that gets no samples in a round gets a dummy micro-batch. A round takes the longest samples first. Each
    sample goes to the rank with the lowest cost so far that still has room, and short samples fill the gaps. So the
    token budget is used and the ranks finish together. Packing improves with the number of samples that wait.

    A sequence of n tokens costs n (1 + n / (12 h)): a layer of hidden size h takes 24 h^2 operations per token for its
    matrices and 2 h n for its causal attention (Kaplan et al. 2020, section 2.1).

    Libraries for bin packing do not fit, because they bound a single weight per bin. Here, tokens are bounded while
    costs are balanced.

    Args:
        num_ranks: Number of trainer ranks.
        max_tokens: Token budget of one micro-batch.
        hidden_size: Hidden size of the model, from which costs are computed.
        longest_first: Whether `flush` returns the round with the largest micro-batch first.
    """

    def __init__(
        self, num_ranks: int, max_tokens: int, hidden_size: int = 1536, *, longest_first: bool = True
    ) -> None:
        self.num_ranks = num_ranks
        self.max_tokens = max_tokens
        self.longest_first = longest_first
        # Sequence length at which the attention costs as much as the matrices
        self._balance_tokens = 12 * hidden_size
        # Width of a length class, in tokens. Within a class, samples are sorted by group, so that samples of a group
        # tend to share a micro-batch, which computes their common prompt only once
        self._length_class_tokens = max(1, max_tokens // 64)
        # A group's next sample goes to the same rank unless that rank's cost exceeds the lowest cost by more than this
        self._group_bonus_tokens = max_tokens / 16
        self._waiting: list[WaitingSample] = []  # in ascending order
        self._num_waiting_tokens = 0
        self._arrivals = itertools.count()

    def add(self, sample: Sample) -> None:
        """Add a sample, which consists of a single sequence, to the waiting samples.

        Raises:
            ConfigurationError: The sample exceeds the token budget of a micro-batch.
        """
        length = sample.num_tokens
        refuse(
            length > self.max_tokens,
            f"a sample of {length} tokens cannot fit --max-tokens-per-gpu {self.max_tokens}",
        )
        waiting_sample = WaitingSample(
            negated_length_class=-length // self._length_class_tokens,
            prompt_ordinal=sample.prompt.ordinal,
            negated_length=-length,
            arrival=next(self._arrivals),
            sample=sample,
        )
        bisect.insort(self._waiting, waiting_sample)
        self._num_waiting_tokens += length

    def full_round(self) -> list[MicroBatch] | None:
        """Return one micro-batch per rank if the waiting samples have enough tokens to fill them all, else None."""
        if self._num_waiting_tokens < self.num_ranks * self.max_tokens:
            return None
        return self._round()

    def flush(self) -> list[list[MicroBatch]]:
        """Return all waiting samples, in as many rounds of micro-batches as necessary.

        With `longest_first`, the round with the largest micro-batch comes first. A later round may be packed more tightly
        than the first one: of samples with 60, 55 and 45 tokens, the last two fill a micro-batch of 100.
        """
        rounds = []
        while self._waiting:
            rounds.append(self._round())
        if self.longest_first:
            rounds.sort(key=_largest_tokens, reverse=True)
        return rounds

    def _round(self) -> list[MicroBatch]:
        """Pack one micro-batch per rank, longest samples first. Samples that do not fit continue to wait."""
        loads = [RankLoad() for _ in range(self.num_ranks)]
        left_over: list[WaitingSample] = []
        previous_load: RankLoad | None = None
        previous_ordinal = -1
        position = 0

        while position < len(self._waiting):
            candidate = self._waiting[position]
            # Highest number of tokens that a rank may already have if the sample is to fit
            max_load_tokens = self.max_tokens - candidate.length
            fitting_loads = [load for load in loads if load.num_tokens <= max_load_tokens]
            if not fitting_loads:
                next_position = self._next_that_fits(position, loads)
                left_over += self._waiting[position:next_position]
                position = next_position
                continue

            is_same_group = candidate.prompt_ordinal == previous_ordinal
            bonus_load = previous_load if is_same_group else None
            load = min(fitting_loads, key=partial(self._cost_after_bonus, bonus_load=bonus_load))
            load.samples.append(candidate.sample)
            load.num_tokens += candidate.length
            load.cost += candidate.length * (1 + candidate.length / self._balance_tokens)
            previous_load = load
            previous_ordinal = candidate.prompt_ordinal
            position += 1

        self._waiting = left_over
        self._num_waiting_tokens -= sum(load.num_tokens for load in loads)
        return [pack(load.samples) if load.samples else dummy_micro_batch(0) for load in loads]

    def _cost_after_bonus(self, load: RankLoad, *, bonus_load: RankLoad | None) -> float:
        """Return the cost of a rank, reduced for the rank that got the previous sample of the candidate's group."""
        if load is bonus_load:
            return load.cost - self._group_bonus_tokens
        return load.cost

    def _next_that_fits(self, position: int, loads: Sequence[RankLoad]) -> int:
        """Return the position of the next waiting sample that fits on some rank, or the end of the list."""
        largest_room = self.max_tokens - min(load.num_tokens for load in loads)
        # Tens of thousands of samples may wait, so a bisection skips the length classes that are too long
        negated_class = -largest_room // self._length_class_tokens
        first_of_class = bisect.bisect_left(self._waiting, (negated_class,))
        for next_position in range(max(position + 1, first_of_class), len(self._waiting)):
            if self._waiting[next_position].length <= largest_room:
                return next_position
        return len(self._waiting)


def _largest_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Return the number of tokens of the largest micro-batch of a round."""
    return max(len(micro_batch.input_ids) for micro_batch in micro_batches)


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """Concatenate single-sequence samples into a micro-batch. Tokens that were not sampled carry no loss."""
    members, times = _members_and_times(samples)
    return MicroBatch(
        input_ids=np.concatenate([sample.token_ids for sample in samples]),
        cu_seqlens=np.cumsum([0, *(sample.num_tokens for sample in samples)]).astype(np.int32),
        loss_mask=_laid_out(samples, "loss_mask", False),
        behaviour_logprobs=_laid_out(samples, "completion.logprobs", np.float32(0)),
        advantages=_laid_out(samples, "advantages", np.float32(0)),
        versions=_laid_out(samples, "completion.versions", np.int32(PROMPT_TOKEN)),
        group_ids=np.array([sample.prompt.ordinal for sample in samples], np.int64),
        group_tokens=np.array([sample.group_tokens for sample in samples], np.int64),
        ref_logprobs=_laid_out_if_present(samples, "ref_logprobs"),
        proximal_logprobs=_laid_out_if_present(samples, "proximal_logprobs"),
        teacher_top=_laid_out_if_present(samples, "teacher_top"),
        members=members,
        times=times,
        allowed=_joined_masks(samples),
        images=_images(samples),
        latents=_laid_out_if_present(samples, "completion.latents"),
        conditions=_conditions(samples),
    )


def _images(samples: Sequence[Sample]) -> tuple[tuple[ImageReference, ...], ...]:
    """Return the images of each sample, or () if none has an image."""
    images = tuple(images_of(sample) for sample in samples)
    return images if any(images) else ()


def _conditions(samples: Sequence[Sample]) -> tuple[tuple[np.ndarray, ...], ...]:
    """Return the embeddings of each sample's prompt, or () if the policy reads none.

    The engine sent equal arrays with each member of a group. Here, all members of a group get the same array object, so
    that a pickled micro-batch contains the embeddings of a prompt only once.
    """
    if not any(sample.completion.condition for sample in samples):
        return ()
    condition_by_group: dict[int, tuple[np.ndarray, ...]] = {}
    for sample in samples:
        condition_by_group.setdefault(sample.prompt.ordinal, sample.completion.condition)
    return tuple(condition_by_group[sample.prompt.ordinal] for sample in samples)


def allowed_tokens_of(sample: Sample) -> AllowedTokens | None:
    """Return the allowed tokens at all N tokens of a sample with one sequence; None if all were allowed everywhere."""
    allowed = sample.completion.allowed
    if allowed is None:
        return None
    return AllowedTokens(sample.laid_out(allowed.indices, np.int32(ALL_TOKENS)), allowed.masks)


def _joined_masks(samples: Sequence[Sample]) -> AllowedTokens | None:
    """Return the allowed tokens at all tokens of the samples, end to end."""
    if all(sample.completion.allowed is None for sample in samples):
        return None
    masks = [allowed_tokens_of(sample) for sample in samples]
    return AllowedTokens.joined(masks, [sample.num_tokens for sample in samples])


def _members_and_times(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Return the fields `members` (S,) and `times` (N,) of a micro-batch (see `MicroBatch`).

    Both are None unless a sample is one of several sequences of a trajectory, and there is a critic.
    """
    if all(sample.times is None for sample in samples):
        return None, None
    times_by_sample = []
    for sample in samples:
        sampled_times = sample.times
        if sampled_times is None:
            sampled_times = repeated(np.array(NO_TIME), len(sample.completion))
        times_by_sample.append(sample.laid_out(sampled_times, NO_TIME))
    members = np.array([sample.completion.member for sample in samples], np.int64)
    return members, np.concatenate(times_by_sample).astype(np.int32)


def _laid_out(samples: Sequence[Sample], attribute: str, fill: np.generic | bool) -> np.ndarray:
    """Return (N, ...) with the samples' attribute (T, ...) at their sampled tokens, and `fill` at all other tokens."""
    values_of = attrgetter(attribute)
    return np.concatenate([sample.laid_out(values_of(sample), fill) for sample in samples])


def _laid_out_if_present(samples: Sequence[Sample], attribute: str) -> np.ndarray | None:
    """Return the attribute (N, ...) as float32 with 0 at tokens that were not sampled, or None if a sample lacks it."""
    values_of = attrgetter(attribute)
    if any(values_of(sample) is None for sample in samples):
        return None
    return _laid_out(samples, attribute, np.float32(0))
