"""One finished group: what its verifiers see, and how its rewards become advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.types import Completion, Prompt, RewardStatus, Sample


def reward_sample(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """What a reward adapter receives: every column of the row, and the completion."""
    return {
        **{key: value for key, value in prompt.row.items() if key != "input_token_ids"},
        "completion": completion.text,
        "sample_text": prompt.row["input"] + completion.text,
        "completion_token_ids": completion.token_ids.tolist(),
        "truncated": completion.truncated,
        "group_id": prompt.ordinal,
    }


def with_advantages(
    samples: Sequence[Sample], estimator: str, options: Mapping[str, Any], *, mask_truncated: bool
) -> tuple[Sample, ...]:
    """Give every trainable sample of one group its (T,) advantages; the others keep None and are not trained on.

    A sample whose reward is not OK takes no part in the group's statistics. A truncated one does, but is left out of
    the loss under `mask_truncated`.
    """
    lengths = [len(sample.completion) for sample in samples]
    valid = torch.tensor([sample.verdict.status is RewardStatus.OK for sample in samples])
    rewards = torch.zeros(len(samples), max(lengths), dtype=torch.float64)
    mask = torch.zeros(len(samples), max(lengths), dtype=torch.bool)
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        mask[row, :length] = True
        rewards[row, length - 1] = sample.verdict.reward or 0.0
    group_ids = torch.zeros(len(samples), dtype=torch.int64)
    advantages = ADVANTAGE_ESTIMATORS[estimator](rewards, mask, group_ids, valid=valid, **options)
    return tuple(
        replace(sample, advantages=row[: len(sample.completion)].numpy().astype(np.float32))
        if ok and not (mask_truncated and sample.completion.truncated)
        else sample
        for sample, row, ok in zip(samples, advantages, valid.tolist(), strict=True)
    )
