"""Packing: samples become padding-free micro-batches, one per rank, whole sequences only, within the token budget."""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from async_grpo.errors import ConfigurationError
from async_grpo.types import PROMPT_TOKEN, MicroBatch, Sample, dummy_micro_batch


class Packer:
    """Fills one open micro-batch per rank; hands out all at the same time, dummies where empty."""

    def __init__(self, num_ranks: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._open: list[list[Sample]] = [[] for _ in range(num_ranks)]
        self._tokens = [0] * num_ranks

    def add(self, sample: Sample) -> list[MicroBatch] | None:
        """Place a sample on the emptiest rank; returns a full round (one micro-batch per rank) if it had to make room.

        Raises:
            ConfigurationError: the sample alone exceeds the token budget of a rank.
        """
        if sample.num_tokens > self.max_tokens:
            limit = f"--max-tokens-per-gpu {self.max_tokens}"
            raise ConfigurationError(f"a sample of {sample.num_tokens} tokens cannot fit {limit}")
        rank, full = int(np.argmin(self._tokens)), None
        if self._tokens[rank] + sample.num_tokens > self.max_tokens:
            rank, full = 0, self.flush()
        self._open[rank].append(sample)
        self._tokens[rank] += sample.num_tokens
        return full

    def flush(self) -> list[MicroBatch] | None:
        """Close the open micro-batches of all ranks; None when all of them are empty."""
        if not any(self._open):
            return None
        ranks, self._open, self._tokens = self._open, [[] for _ in self._open], [0] * len(self._open)
        return [pack(samples) if samples else dummy_micro_batch(0) for samples in ranks]


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """Lay samples end to end: prompt, completion, prompt, completion ... Prompt tokens carry no loss."""
    return MicroBatch(
        input_ids=np.concatenate([sample.token_ids for sample in samples]),
        cu_seqlens=np.cumsum([0, *(sample.num_tokens for sample in samples)]).astype(np.int32),
        loss_mask=_over_completions(samples, "loss_mask", False),
        behaviour_logprobs=_over_completions(samples, "completion.logprobs", np.float32(0)),
        advantages=_over_completions(samples, "advantages", np.float32(0)),
        versions=_over_completions(samples, "completion.versions", np.int32(PROMPT_TOKEN)),
        group_ids=np.array([s.prompt.ordinal for s in samples], np.int64),
        group_tokens=np.array([s.group_tokens for s in samples], np.int64),
        ref_logprobs=_optional(samples, "ref_logprobs"),
        proximal_logprobs=_optional(samples, "proximal_logprobs"),
    )


def _over_completions(samples: Sequence[Sample], attribute: str, fill: np.generic | bool) -> np.ndarray:
    """(N,): a (T,) attribute of the samples on the completion tokens, `fill` on the prompt tokens."""
    values = map(attrgetter(attribute), samples)
    parts = [(np.full(len(s.prompt.token_ids), fill), v) for s, v in zip(samples, values, strict=True)]
    return np.concatenate([part for pair in parts for part in pair])


def _optional(samples: Sequence[Sample], attribute: str) -> np.ndarray | None:
    """The same in float32, if every sample has it."""
    if any(getattr(sample, attribute) is None for sample in samples):
        return None
    return _over_completions(samples, attribute, np.float32(0))
