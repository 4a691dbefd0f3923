"""Generalized advantage estimation with one lambda for the policy's advantages and another for the critic's returns."""

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from async_grpo.algorithm.process_advantages import gae_returns
from async_grpo.algorithm.statistics import Groups, whitened


def policy_lam(used: Shaped[Tensor, "batch tokens"], lam: float, alpha: float) -> Float64[Tensor, "batch 1"]:
    """Return the lambda of each sample's advantages: `lam`, or 1 - 1/(alpha length) if alpha is above 0.

    Yue et al. 2025, "VAPO", 3.2: a longer sample needs a larger lambda, so that its reward reaches the first tokens. The
    length is the number of used tokens. For a sample shorter than 1/alpha tokens, the formula is negative, and the result
    is 0.
    """
    lengths = used.bool().double().sum(dim=1, keepdim=True)
    if alpha == 0:
        return torch.full_like(lengths, lam)
    return (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(min=0)


@torch.no_grad()
def decoupled_gae_returns(
    rewards: Float[Tensor, "batch tokens"],
    values: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    critic_lam: float = 1.0,
    alpha: float = 0.0,
) -> tuple[Float[Tensor, "batch tokens"], Float[Tensor, "batch tokens"]]:
    """Return (advantages before any whitening, returns), zero where masked.

    `gae_returns` is called twice: with the lambda of the policy (`policy_lam`) for the advantages, and with `critic_lam`
    for the returns, which the critic learns. With `critic_lam` = 1, a return is the sum of the rewards that follow, without
    a bias from the critic's own values (Yuan et al. 2025, "VC-PPO").
    """
    advantages, _ = gae_returns(rewards, values, mask, gamma=gamma, lam=policy_lam(mask, lam, alpha))
    _, returns = gae_returns(rewards, values, mask, gamma=gamma, lam=critic_lam)
    return advantages, returns


def decoupled_gae(
    rewards: Float64[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    values: Float64[Tensor, "batch tokens"],
    gamma: float = 1.0,
    lam: float = 0.95,
    critic_lam: float = 1.0,
    alpha: float = 0.0,
    whiten: bool = True,
) -> Float64[Tensor, "batch tokens"]:
    """Return the advantages of `decoupled_gae_returns`, whitened over all tokens of the batch. Batch-coupled.

    `critic_lam` changes only the returns. With the same lambda for both, the results are those of `gae`.

    >>> ADVANTAGE_ESTIMATORS["decoupled_gae"](  # 1 - 1/(1 * 2) = 0.5: A_1 = 0.25 and A_0 = 0.25 + 0.5 * 0.25
    ...     torch.tensor([[0., 1.]]), torch.ones(1, 2), torch.zeros(1, dtype=int),
    ...     values=torch.tensor([[.5, .75]]), alpha=1.0, whiten=False)
    tensor([[0.3750, 0.2500]])
    """
    advantages, _ = decoupled_gae_returns(
        rewards, values, used, gamma=gamma, lam=lam, critic_lam=critic_lam, alpha=alpha
    )
    return whitened(advantages, used) if whiten else advantages
