"""Estimators with one score per sample: s_i, the sum of the sample's unmasked rewards.

They are called through `ADVANTAGE_ESTIMATORS` of `advantages`, which keeps the rules that are the same for all. A
function gets the rewards (B, T) in float64, finite, zero where masked; `used` (B, T), how many unmasked tokens of the
participants each entry stands for (bool, or counts, see `Estimator.per_sample`); and the groups. It returns
(B, T) or (B, 1). In the formulas n counts the participants of the group, T_i the unmasked tokens of sample i.
"""

import torch
from torch import Tensor

from async_grpo.algorithm.statistics import Groups, over, power_of_two_near, whitened


def sample_scores(rewards: Tensor) -> Tensor:
    """s_i, (B, 1)."""
    return rewards.sum(dim=1, keepdim=True)


def grpo(rewards: Tensor, used: Tensor, groups: Groups, *, eps: float = 1e-6) -> Tensor:
    """(s_i - mean) / (std + eps) over the group, std with ddof 1 (Shao et al. 2024, "DeepSeekMath", 4.1.2).

    >>> scores = torch.tensor([[1.], [0.], [0.], [1.]])  # mean 1/2, std sqrt(4 * 1/4 / 3) = 0.57735
    >>> ADVANTAGE_ESTIMATORS["grpo"](scores, torch.ones(4, 1), torch.zeros(4, dtype=int)).flatten()
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660])
    """
    return groups.standardised(sample_scores(rewards), groups.participates, eps)


def dr_grpo(rewards: Tensor, used: Tensor, groups: Groups) -> Tensor:
    """s_i - mean over the group, not divided by its std (Liu et al. 2025, "Understanding R1-Zero-Like Training").

    Its expected gradient is (n - 1)/n of the true one: a sample stands in its own baseline.

    >>> scores = torch.tensor([[1.], [0.], [0.], [1.]])
    >>> ADVANTAGE_ESTIMATORS["dr_grpo"](scores, torch.ones(4, 1), torch.zeros(4, dtype=int)).flatten()
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    """
    return groups.centred(sample_scores(rewards), groups.participates)


def rloo(rewards: Tensor, used: Tensor, groups: Groups) -> Tensor:
    """n/(n-1) * (s_i - mean), which is s_i minus the mean of the others (Ahmadian et al. 2024, "Back to Basics").

    Unbiased: its expected gradient is the true one.

    >>> scores = torch.tensor([[1.], [0.], [0.], [1.]])  # 1 - (0 + 0 + 1)/3
    >>> ADVANTAGE_ESTIMATORS["rloo"](scores, torch.ones(4, 1), torch.zeros(4, dtype=int)).flatten()
    tensor([ 0.6667, -0.6667, -0.6667,  0.6667])
    """
    size = groups.total(groups.participates)
    return dr_grpo(rewards, used, groups) * size / (size - 1).clamp(min=1)


def opo(rewards: Tensor, used: Tensor, groups: Groups) -> Tensor:
    """s_i - b with b = sum_j T_j s_j / sum_j T_j (Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline").

    The baseline of least variance, if the norm of a sample's gradient grows with its length as its square root.

    >>> rewards = torch.tensor([[0., 0., 1.], [0., 0., 0.]])
    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])  # b = 3/4
    >>> ADVANTAGE_ESTIMATORS["opo"](rewards, mask, torch.zeros(2, dtype=int)).tolist()
    [[0.25, 0.25, 0.25], [-0.75, 0.0, 0.0]]
    """
    return groups.centred(sample_scores(rewards), groups.participates, used.double().sum(dim=1, keepdim=True))


def gpg(rewards: Tensor, used: Tensor, groups: Groups) -> Tensor:
    """alpha * (s_i - mean), alpha = B / max(1, number of s != 0) (Chu et al. 2025, "GPG").

    B and the number are counted over the participants of the whole batch, so it is batch-coupled.

    >>> scores = torch.tensor([[1.], [0.], [0.], [0.]])  # alpha = 4
    >>> ADVANTAGE_ESTIMATORS["gpg"](scores, torch.ones(4, 1), torch.zeros(4, dtype=int)).flatten()
    tensor([ 3., -1., -1., -1.])
    """
    scored = ((sample_scores(rewards) != 0) & groups.participates).sum().clamp(min=1)
    return dr_grpo(rewards, used, groups) * groups.participates.sum() / scored


def grpo_passk(
    rewards: Tensor, used: Tensor, groups: Groups, *, eps: float = 1e-6, normalize: bool = True
) -> Tensor:
    """The best sample alone learns: by its lead s_(1) - s_(2), over std + eps if `normalize`.

    The gradient of the best of k (Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives using
    Reinforcement Learning"): the others would have scored the same without it. A tie at the top leaves no sample a lead.

    >>> scores = torch.tensor([[1.], [5.], [3.]])
    >>> ADVANTAGE_ESTIMATORS["grpo_passk"](scores, torch.ones(3, 1), torch.zeros(3, dtype=int), normalize=False).flatten()
    tensor([0., 2., 0.])
    """
    scores, participates = sample_scores(rewards), groups.participates
    on_top = participates & (scores == -groups.lowest(-scores, participates))
    leads = on_top & (groups.total(on_top) == 1)
    lead = torch.where(leads, scores + groups.lowest(-scores, participates & ~on_top), 0)
    if not normalize:
        return lead
    return over(lead, groups.deviation(groups.centred(scores, participates), participates) + eps)


def grpo_batch_std(
    rewards: Tensor, used: Tensor, groups: Groups, *, eps: float = 1e-6, centred: bool = True
) -> Tensor:
    """(s_i - mean of the group) / (std + eps), std over the samples of the whole batch, ddof 1. Batch-coupled.

    Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute for LLMs" (ScaleRL): the deviation is that of
    what stands above the fraction bar. centred=False takes that of the scores themselves, as Lite PPO (Liu et al. 2025,
    "Tricks or Traps?"). A sample counts once, whatever its length.

    >>> scores = torch.tensor([[1.], [0.], [1.], [1.]])  # centred 1/2 -1/2 0 0: std sqrt(1/6); the scores': 1/2
    >>> estimator = ADVANTAGE_ESTIMATORS["grpo_batch_std"]
    >>> estimator(scores, torch.ones(4, 1), torch.tensor([0, 0, 1, 1])).flatten()
    tensor([ 1.2247, -1.2247,  0.0000,  0.0000])
    >>> estimator(scores, torch.ones(4, 1), torch.tensor([0, 0, 1, 1]), centred=False).flatten()
    tensor([ 1.0000, -1.0000,  0.0000,  0.0000])
    """
    scores = sample_scores(rewards)
    above = groups.centred(scores, groups.participates)
    pool = (above if centred else scores)[groups.participates]
    deviation = torch.zeros_like(pool[0])
    if not (pool == pool[0]).all():
        scale = power_of_two_near(pool.abs().max())  # or the squares of small scores would vanish
        deviation = scale * (pool / scale).std()
    return over(above, (deviation + eps).expand_as(above))


def reinforce_plus_plus_baseline(rewards: Tensor, used: Tensor, groups: Groups) -> Tensor:
    """s_i - mean over the group on each of its tokens, whitened over all tokens of the batch (Hu et al. 2025).

    "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization". Batch-coupled.

    >>> rewards = torch.tensor([[0., 0., 1.], [0., 0., 0.]])
    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])  # pool .5 .5 .5 -.5: mean 1/4, variance 1/4
    >>> ADVANTAGE_ESTIMATORS["reinforce_plus_plus_baseline"](rewards, mask, torch.zeros(2, dtype=int))
    tensor([[ 0.5000,  0.5000,  0.5000],
            [-1.5000,  0.0000,  0.0000]])
    """
    return whitened(dr_grpo(rewards, used, groups).expand_as(used), used)


def gdpo(
    rewards: dict[str, Tensor],
    used: Tensor,
    groups: Groups,
    *,
    eps: float = 1e-6,
    weights: dict[str, float] | None = None,
) -> Tensor:
    """whitened(sum over components k of w_k * grpo(component k)) (Liu et al. 2026, "GDPO", arXiv 2601.05242).

    `rewards` maps a component's name to its (B, T), `weights` to its weight, 1 where not named. Whitened over the tokens
    of the batch. Batch-coupled. ValueError: a weight for no component.

    >>> rewards = {"right": torch.tensor([[1.], [0.], [0.]]), "short": torch.tensor([[0.], [0.], [100.]])}
    >>> gdpo = ADVANTAGE_ESTIMATORS["gdpo"]  # (2 -1 -1)/sqrt(3) - (-1 -1 2)/sqrt(3)/2: 5/2 -1/2 -2, over sqrt(21/4)
    >>> gdpo(rewards, torch.ones(3, 1), torch.zeros(3, dtype=int), weights={"short": -0.5}).flatten()
    tensor([ 1.0911, -0.2182, -0.8729])
    """
    shares = {name: (weights or {}).get(name, 1.0) for name in rewards}
    parts = [share * grpo(rewards[name], used, groups, eps=eps) for name, share in shares.items()]
    return whitened(torch.stack(parts).sum(dim=0).expand_as(used), used)
