"""Estimators with one score per sample: s_i, the sum of the sample's unmasked rewards.

They are called through `ADVANTAGE_ESTIMATORS` of `advantages`, which applies the rules that all estimators share. Each
function gets

- `rewards`: finite numbers, zero where masked.
- `used`: True at the unmasked tokens of participants, or the number of tokens that each entry stands for (see
  `Estimator.flat_between_rewards`). Participants are defined in `advantages`.
- `groups`: the groups of rows that are compared with each other.

It returns one advantage per token or one per sample. In the formulas, s_i is the score of sample i, n the number of
participants of its group, and T_i the number of its unmasked tokens. "Batch-coupled" estimators use statistics of the
whole batch.
"""

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from async_grpo.algorithm.statistics import Groups, divide_or_zero, power_of_two_near, whitened

# `max_rl` treats a mean as 0 if it is below this share of the group's largest score
SMALLEST_MEAN = 1e-6


def sample_scores(rewards: Float64[Tensor, "batch tokens"]) -> Float64[Tensor, "batch 1"]:
    """Return the score s_i of each sample: the sum of its rewards."""
    return rewards.sum(dim=1, keepdim=True)


def grpo(
    rewards: Float64[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    eps: float = 1e-6,
) -> Float64[Tensor, "batch 1"]:
    """Return (s_i - mean) / (std + eps), with the mean and the std (ddof 1) of the group.

    Shao et al. 2024, "DeepSeekMath", 4.1.2.

    >>> scores = torch.tensor([[1.], [0.], [0.], [1.]])  # mean 1/2, std sqrt(4 * 1/4 / 3) = 0.57735
    >>> ADVANTAGE_ESTIMATORS["grpo"](scores, torch.ones(4, 1), torch.zeros(4, dtype=int)).flatten()
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660])
    """
    return groups.standardised(sample_scores(rewards), groups.participates, eps)


def dr_grpo(
    rewards: Float64[Tensor, "batch tokens"], used: Shaped[Tensor, "batch tokens"], groups: Groups
) -> Float64[Tensor, "batch 1"]:
    """Return s_i minus the group's mean (Liu et al. 2025, "Understanding R1-Zero-Like Training").

    The expected gradient is (n - 1)/n times the true gradient, because a sample is part of its own baseline.

    >>> scores = torch.tensor([[1.], [0.], [0.], [1.]])
    >>> ADVANTAGE_ESTIMATORS["dr_grpo"](scores, torch.ones(4, 1), torch.zeros(4, dtype=int)).flatten()
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    """
    return groups.centred(sample_scores(rewards), groups.participates)


def no_advantage(
    rewards: Float64[Tensor, "batch tokens"], used: Shaped[Tensor, "batch tokens"], groups: Groups
) -> Float64[Tensor, "batch 1"]:
    """Return 0 for each sample, so that only a teacher trains the policy (see `teacher_advantages`).

    Lu and Thinking Machines Lab 2025, "On-Policy Distillation".

    >>> ADVANTAGE_ESTIMATORS["teacher"](torch.tensor([[1.], [0.]]), torch.ones(2, 1), torch.zeros(2, dtype=int)).flatten()
    tensor([0., 0.])
    """
    return sample_scores(rewards).new_zeros(len(rewards), 1)


def rloo(
    rewards: Float64[Tensor, "batch tokens"], used: Shaped[Tensor, "batch tokens"], groups: Groups
) -> Float64[Tensor, "batch 1"]:
    """Return n/(n-1) * (s_i - mean): s_i minus the mean of the other samples (Ahmadian et al. 2024, "Back to Basics").

    The estimator is unbiased: its expected gradient is the true gradient.

    >>> scores = torch.tensor([[1.], [0.], [0.], [1.]])  # 1 - (0 + 0 + 1)/3
    >>> ADVANTAGE_ESTIMATORS["rloo"](scores, torch.ones(4, 1), torch.zeros(4, dtype=int)).flatten()
    tensor([ 0.6667, -0.6667, -0.6667,  0.6667])
    """
    size = groups.total(groups.participates)
    return dr_grpo(rewards, used, groups) * size / (size - 1).clamp(min=1)


def opo(
    rewards: Float64[Tensor, "batch tokens"], used: Shaped[Tensor, "batch tokens"], groups: Groups
) -> Float64[Tensor, "batch 1"]:
    """Return s_i - b with b = sum_j T_j s_j / sum_j T_j (Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline").

    This baseline minimises the variance of the gradient if the squared norm of a sample's gradient is proportional to
    its length.

    >>> rewards = torch.tensor([[0., 0., 1.], [0., 0., 0.]])
    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])  # b = 3/4
    >>> ADVANTAGE_ESTIMATORS["opo"](rewards, mask, torch.zeros(2, dtype=int)).tolist()
    [[0.25, 0.25, 0.25], [-0.75, 0.0, 0.0]]
    """
    lengths = used.double().sum(dim=1, keepdim=True)
    return groups.centred(sample_scores(rewards), groups.participates, lengths)


def gpg(
    rewards: Float64[Tensor, "batch tokens"], used: Shaped[Tensor, "batch tokens"], groups: Groups
) -> Float64[Tensor, "batch 1"]:
    """Return alpha * (s_i - mean), with the group's mean and alpha = B / max(1, number of s != 0).

    Chu et al. 2025, "GPG". B is the number of participants in the whole batch, and the scores s != 0 are also counted
    over the whole batch. So the estimator is batch-coupled.

    >>> scores = torch.tensor([[1.], [0.], [0.], [0.]])  # alpha = 4
    >>> ADVANTAGE_ESTIMATORS["gpg"](scores, torch.ones(4, 1), torch.zeros(4, dtype=int)).flatten()
    tensor([ 3., -1., -1., -1.])
    """
    is_scored = (sample_scores(rewards) != 0) & groups.participates
    num_scored = is_scored.sum().clamp(min=1)
    return dr_grpo(rewards, used, groups) * groups.participates.sum() / num_scored


def grpo_passk(
    rewards: Float64[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    eps: float = 1e-6,
    normalize: bool = True,
) -> Float64[Tensor, "batch 1"]:
    """Return the lead of the group's best sample over the second best, and 0 for all other samples.

    With `normalize`, the lead is divided by the group's std + eps. Training with these advantages raises the expected
    best score of k samples (Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives using
    Reinforcement Learning"): the lead is the amount by which the best score would fall without the best sample. If any
    other sample were missing instead, the best score would stay the same, so all other advantages are 0. If several
    samples share the best score, no sample has a lead.

    >>> scores = torch.tensor([[1.], [5.], [3.]])
    >>> ADVANTAGE_ESTIMATORS["grpo_passk"](scores, torch.ones(3, 1), torch.zeros(3, dtype=int), normalize=False).flatten()
    tensor([0., 2., 0.])
    """
    scores = sample_scores(rewards)
    participates = groups.participates
    highest = -groups.lowest(-scores, participates)
    is_highest = participates & (scores == highest)
    second_highest = -groups.lowest(-scores, participates & ~is_highest)
    is_sole_best = is_highest & (groups.total(is_highest) == 1)
    leads = torch.where(is_sole_best, scores - second_highest, 0)
    if not normalize:
        return leads
    deviation = groups.deviation(groups.centred(scores, participates), participates)
    return divide_or_zero(leads, deviation + eps)


def grpo_batch_std(
    rewards: Float64[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    eps: float = 1e-6,
    centred: bool = True,
) -> Float64[Tensor, "batch 1"]:
    """Return (s_i - mean of the group) / (std of the batch + eps). Batch-coupled.

    By default, the std (ddof 1) is that of the numerators s_i - mean (ScaleRL: Khatri et al. 2025, "The Art of Scaling
    Reinforcement Learning Compute for LLMs"). With centred=False it is that of the scores s_i (Lite PPO: Liu et al.
    2025, "Tricks or Traps?"). Each sample counts once, whatever its length.

    >>> # Numerators: 1/2, -1/2, 0, 0, with the std sqrt(1/6). Scores: 1, 0, 1, 1, with the std 1/2
    >>> scores = torch.tensor([[1.], [0.], [1.], [1.]])
    >>> estimator = ADVANTAGE_ESTIMATORS["grpo_batch_std"]
    >>> estimator(scores, torch.ones(4, 1), torch.tensor([0, 0, 1, 1])).flatten()
    tensor([ 1.2247, -1.2247,  0.0000,  0.0000])
    >>> estimator(scores, torch.ones(4, 1), torch.tensor([0, 0, 1, 1]), centred=False).flatten()
    tensor([ 1.0000, -1.0000,  0.0000,  0.0000])
    """
    scores = sample_scores(rewards)
    centred_scores = groups.centred(scores, groups.participates)
    pool = centred_scores if centred else scores
    pool = pool[groups.participates]
    deviation = torch.zeros_like(pool[0])
    if not (pool == pool[0]).all():
        # Scale first: otherwise the squares of small scores underflow to 0
        scale = power_of_two_near(pool.abs().max())
        deviation = scale * (pool / scale).std()
    return divide_or_zero(centred_scores, (deviation + eps).expand_as(centred_scores))


def max_rl(
    rewards: Float64[Tensor, "batch tokens"], used: Shaped[Tensor, "batch tokens"], groups: Groups
) -> Float64[Tensor, "batch 1"]:
    """Return (s_i - mean) / mean with the group's mean, or 0 if the mean is not positive (Tajwar et al. 2026, "MaxRL").

    The scores should not be negative. If they are 0 or 1, and p is the probability of a 1, the expected gradient is that
    of -(sum over k from 1 to n-1 of (1 - p)^k / k), the series of log p up to the order n - 1. So questions that the policy
    rarely solves count more than with `dr_grpo`, which follows the gradient of p.

    >>> scores = torch.tensor([[1.], [0.], [0.], [0.]])  # mean 1/4
    >>> ADVANTAGE_ESTIMATORS["max_rl"](scores, torch.ones(4, 1), torch.zeros(4, dtype=int)).flatten()
    tensor([ 3., -1., -1., -1.])
    """
    scores = sample_scores(rewards)
    participates = groups.participates
    sizes = groups.total(participates).clamp(min=1)
    means = groups.total(torch.where(participates, scores, 0)) / sizes
    largest = -groups.lowest(-scores.abs(), participates)
    # Scores of both signs may add up to a rounding error instead of 0. Dividing by it would give huge advantages
    is_positive = participates & (means > SMALLEST_MEAN * largest)
    return torch.where(is_positive, dr_grpo(rewards, used, groups) / torch.where(is_positive, means, 1), 0)


def reinforce_plus_plus_baseline(
    rewards: Float64[Tensor, "batch tokens"], used: Shaped[Tensor, "batch tokens"], groups: Groups
) -> Float64[Tensor, "batch tokens"]:
    """Return s_i minus the group's mean at each token, whitened over all tokens of the batch. Batch-coupled.

    Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization".

    >>> rewards = torch.tensor([[0., 0., 1.], [0., 0., 0.]])
    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])  # pool .5 .5 .5 -.5: mean 1/4, variance 1/4
    >>> ADVANTAGE_ESTIMATORS["reinforce_plus_plus_baseline"](rewards, mask, torch.zeros(2, dtype=int))
    tensor([[ 0.5000,  0.5000,  0.5000],
            [-1.5000,  0.0000,  0.0000]])
    """
    return whitened(dr_grpo(rewards, used, groups).expand_as(used), used)


def flash_reinforce(
    rewards: Float64[Tensor, "batch tokens"], used: Shaped[Tensor, "batch tokens"], groups: Groups
) -> Float64[Tensor, "batch 1"]:
    """Return s_i minus the mean score of the batch, without any whitening. Batch-coupled.

    This is the baseline of FlashREINFORCE (OpenRLHF, TRL and slime call it `flash_reinforce`), which samples one
    completion for each prompt. Each sample counts once, whatever its length. Because a sample is part of its own baseline,
    the expected gradient is (B - 1)/B times the true gradient, for B samples.

    >>> scores = torch.tensor([[1.], [0.], [0.], [1.]])  # one sample of each of four prompts
    >>> ADVANTAGE_ESTIMATORS["flash_reinforce"](scores, torch.ones(4, 1), torch.arange(4)).flatten()
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    """
    return groups.joined().centred(sample_scores(rewards), groups.participates)


def gdpo(
    rewards: dict[str, Float64[Tensor, "batch tokens"]],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    eps: float = 1e-6,
    weights: dict[str, float] | None = None,
) -> Float64[Tensor, "batch tokens"]:
    """Return whitened(sum over components k of w_k * grpo(component k)) (Liu et al. 2026, "GDPO", arXiv 2601.05242).

    The sum is whitened over the tokens of the batch, so the estimator is batch-coupled.

    Args:
        rewards: The rewards of each component, by name.
        used: See the docstring of the module.
        groups: See the docstring of the module.
        eps: Added to the standard deviation of each component.
        weights: Weight of each component, by name. A component without an entry has the weight 1.

    >>> # right: (2, -1, -1) / sqrt(3). short: (-1, -1, 2) / sqrt(3), with the weight -1/2
    >>> # Their sum: (5/2, -1/2, -2) / sqrt(3), with the std sqrt(21/4) / sqrt(3) and the mean 0
    >>> rewards = {"right": torch.tensor([[1.], [0.], [0.]]), "short": torch.tensor([[0.], [0.], [100.]])}
    >>> gdpo = ADVANTAGE_ESTIMATORS["gdpo"]
    >>> gdpo(rewards, torch.ones(3, 1), torch.zeros(3, dtype=int), weights={"short": -0.5}).flatten()
    tensor([ 1.0911, -0.2182, -0.8729])
    """
    weights = weights or {}
    total = torch.zeros_like(used, dtype=torch.float64)
    for name, component_rewards in rewards.items():
        total = total + weights.get(name, 1.0) * grpo(component_rewards, used, groups, eps=eps)
    return whitened(total, used)
