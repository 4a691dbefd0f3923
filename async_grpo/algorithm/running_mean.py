"""The estimator that compares a reward with the running mean of earlier rewards of its question or agent."""

from collections.abc import Sequence

import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from async_grpo.algorithm.statistics import Groups


def running_mean(
    rewards: Float64[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    keys: Int64[Tensor, " batch"],
    means: Float64[Tensor, " batch"],
    decay: float = 0.95,
) -> Float64[Tensor, "batch 1"]:
    """Return s_i - b, where b is the running mean of the scores of the sample's key. Batch-coupled.

    Liu et al. 2025, "SPIRAL" (arXiv 2506.24119), role-conditioned advantage estimation (RAE). The samples of a step are
    processed in order. Each sample is compared with the mean before its own score changes it, b <- decay b + (1 - decay) s.

    Args:
        rewards: See `outcome_advantages`.
        used: See `outcome_advantages`.
        groups: See `outcome_advantages`.
        keys: A number for each sample's question or agent. Samples with the same number share a mean.
        means: The mean of each sample's key before the first sample of the batch. A new key has 0.
        decay: Weight of the earlier scores in the mean.

    >>> ADVANTAGE_ESTIMATORS["running_mean"](  # the third score is compared with 0.5 * 2 + 0.5 * 1
    ...     torch.tensor([[1.], [1.], [0.]]), torch.ones(3, 1), torch.arange(3),
    ...     keys=torch.tensor([7, 8, 7]), means=torch.tensor([2., 0., 2.]).double(), decay=0.5).flatten()
    tensor([-1.0000,  1.0000, -1.5000])
    """
    scores = rewards.sum(dim=1)
    is_counted = groups.participates[:, 0]
    baselines, _ = running_baselines(
        scores.tolist(), is_counted.tolist(), keys.tolist(), means.tolist(), decay
    )
    return (scores - torch.tensor(baselines, dtype=torch.float64, device=scores.device))[:, None]


def running_baselines(
    scores: Sequence[float],
    is_counted: Sequence[bool],
    keys: Sequence[int],
    means: Sequence[float],
    decay: float,
) -> tuple[list[float], dict[int, float]]:
    """Return the running mean that each sample is compared with, and the last mean of each key.

    Args:
        scores: Score of each sample, in the order in which the samples change the means.
        is_counted: False for samples that change no mean, because they have no score.
        keys: Number of each sample's question or agent.
        means: The mean of each sample's key before the first sample.
        decay: Weight of the earlier scores in the mean.

    >>> running_baselines([1.0, 0.0], [True, True], [7, 7], [0.0, 0.0], decay=0.5)
    ([0.0, 0.5], {7: 0.25})
    """
    latest_means: dict[int, float] = {}
    baselines = []
    for score, counts, key, mean_before in zip(scores, is_counted, keys, means, strict=True):
        mean = latest_means.get(key, mean_before)
        baselines.append(mean)
        if counts:
            latest_means[key] = decay * mean + (1 - decay) * score
    return baselines, latest_means
