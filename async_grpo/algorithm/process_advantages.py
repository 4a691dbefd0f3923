"""Estimators that know which token a reward stands on, and the loss of the critic that one of them has.

The contract of an estimator's function: see `outcome_advantages`.

Masked tokens inside a completion (a tool's answer, say) are skipped: they neither pay nor discount, and what was earned
after them reaches the tokens before them.
"""

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from async_grpo.algorithm.statistics import Groups, decay_on, returns_to_go, reverse_scan, whitened
from async_grpo.types import Sample

NO_VARIANCE = 1e-6  # of the mean square: a smaller difference of two float32 sums is rounding


def reinforce_plus_plus(rewards: Tensor, used: Tensor, groups: Groups, *, gamma: float = 1.0) -> Tensor:
    """Discounted returns-to-go, whitened over all tokens of the batch (Hu et al. 2025, "REINFORCE++"). Batch-coupled.

    >>> ADVANTAGE_ESTIMATORS["reinforce_plus_plus"](  # returns 1 2, 1 0: mean 1, variance 2/3
    ...     torch.tensor([[0., 2.], [1., 0.]]), torch.ones(2, 2), torch.zeros(2, dtype=int), gamma=0.5)
    tensor([[ 0.0000,  1.2247],
            [ 0.0000, -1.2247]])
    """
    return whitened(returns_to_go(rewards, used, gamma), used)


def remax(rewards: Tensor, used: Tensor, groups: Groups, *, baselines: Tensor) -> Tensor:
    """sum_{u>=t} r_iu - b_i, with the reward b (B,) of the greedy completion (Li et al. 2024, "ReMax"). Unbiased.

    >>> rewards, baselines = torch.tensor([[0., 1.], [0., 0.]]), torch.tensor([.25, .25])
    >>> ADVANTAGE_ESTIMATORS["remax"](rewards, torch.ones(2, 2), torch.zeros(2, dtype=int), baselines=baselines)
    tensor([[ 0.7500,  0.7500],
            [-0.2500, -0.2500]])
    """
    return returns_to_go(rewards, used) - baselines[:, None]


@torch.no_grad()
def gae_returns(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(advantages before any whitening, returns = advantages + values), (B, T) each, zero where masked.

    Schulman et al. 2016, "Generalized Advantage Estimation", eq. 16, over the unmasked tokens of a row, which ends in
    value 0. The returns are what a critic is trained towards; neither carries a gradient. What is masked is not read.
    """
    used = mask.bool()
    paid, worth = (torch.where(used, tensor, 0).double() for tensor in (rewards, values))
    worth_ahead = pad(reverse_scan(worth, (~used).double())[:, 1:], (0, 1))  # of the next unmasked token
    deltas = torch.where(used, paid + gamma * worth_ahead - worth, 0)
    advantages = reverse_scan(deltas, decay_on(used, gamma * lam))
    advantages = torch.where(used, advantages, 0)
    return advantages.to(rewards.dtype), (advantages + worth).to(rewards.dtype)


def gae(
    rewards: Tensor,
    used: Tensor,
    groups: Groups,
    *,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> Tensor:
    """Generalized advantages (`gae_returns`), whitened over all tokens of the batch. Batch-coupled.

    `values` (B, T) are the critic's. Where the batch is spread over ranks, whiten with their merged moments instead
    (`statistics.whitened`) and say whiten=False.

    >>> ADVANTAGE_ESTIMATORS["gae"](torch.tensor([[0., 1.], [0., 0.]]), torch.ones(2, 2), torch.zeros(2, dtype=int),
    ...     values=torch.tensor([[.5, .75], [.5, .25]]), whiten=False)
    tensor([[ 0.5000,  0.2500],
            [-0.5000, -0.2500]])
    """
    advantages, _ = gae_returns(rewards, values, used, gamma=gamma, lam=lam)
    return whitened(advantages, used) if whiten else advantages


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor, *, clip: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """(per-token loss, metrics): 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

    Everything is (B, T) and 0 where the mask is False; what stands there in the inputs is never looked at. Only `values`
    gets a gradient. An infinite clip: 1/2 (V - R)^2. It is that of PPO's reference implementation (OpenAI baselines, ppo2).
    A token counts as clipped when its gradient is zero for it: V is further from V_old than the clip and still nearer to
    R. The metrics are averaged over tokens; value_error is V - R.
    """
    given = (values, returns.detach(), old_values.detach())
    values, returns, old_values = (torch.where(mask.bool(), tensor, 0) for tensor in given)
    error = values - returns
    square = error.square()
    clipped_square = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    clipped, square = clipped_square > square, torch.maximum(square, clipped_square)
    metrics = {
        "value_clip_frac": clipped.to(square.dtype),
        "value_error": error.detach(),
        "value_error_square": error.detach().square(),
        "return_mean": returns,
        "return_square": returns.square(),
    }
    return square / 2, metrics


def explained_variance(means: Mapping[str, float]) -> float:
    """1 - Var(R - V) / Var(R) over tokens, from the token means of `value_loss`'s metrics.

    1: the critic knows every return, up to a constant; 0: no better than their mean; negative: worse. 0 also
    where all returns are the same and there is nothing to explain.
    """
    variance = means["return_square"] - means["return_mean"] ** 2
    unexplained = means["value_error_square"] - means["value_error"] ** 2
    return 1 - unexplained / variance if variance > NO_VARIANCE * means["return_square"] else 0.0


def grpo_process(
    rewards: Tensor, used: Tensor, groups: Groups, *, eps: float = 1e-6, step_mask: Tensor | None = None
) -> Tensor:
    """sum_{u>=t} z_iu, z = (r - mean) / (std + eps) over the step rewards of the whole group, std with ddof 1.

    Shao et al. 2024, "DeepSeekMath", 4.1.3. `step_mask` (B, T) says which tokens carry a step reward, all unmasked ones
    if it is not given; the others have z = 0 and stay out of the statistics, or each of them would get -mean / std. A
    group with fewer than two step rewards gets zeros. Steps cost where the mean is positive.

    >>> steps = [.1, .2, .3], [.4, .5], [.2, .1, .2, .1], [.3, .4, .3]
    >>> mask = torch.arange(4) < torch.tensor([len(row) for row in steps])[:, None]
    >>> rewards = torch.zeros(4, 4).masked_scatter(mask, torch.tensor(sum(steps, [])))
    >>> ADVANTAGE_ESTIMATORS["grpo_process"](rewards, mask, torch.zeros(4, dtype=int))[mask]
    tensor([-1.3345, -0.1271,  0.3177,  2.9231,  1.8428, -3.3044, -2.8596, -1.6522,
            -1.2074,  1.7157,  1.3980,  0.3177])
    """
    counted = used if step_mask is None else step_mask
    return returns_to_go(groups.standardised(rewards, counted, eps), used)


def prime_rloo(
    rewards: dict[str, Tensor],
    used: Tensor,
    groups: Groups,
    *,
    weights: dict[str, float] | None = None,
    masks: dict[str, Tensor] | None = None,
) -> Tensor:
    """Leave-one-out step rewards, summed over sources, then returns-to-go whitened over the tokens of the batch.

    Cui et al. 2025, "Process Reinforcement through Implicit Rewards" (PRIME). x_it = r_it * n/(n-1) - (sum_j rbar_j)/(n-1)
    on the tokens that carry the source's reward, rbar_j the mean of sample j's rewards, n the participants of the group
    that have any (below two: nothing to leave out, and the source is zero for the group). The sum of the means, over
    n-1, is not their mean. `rewards` maps the names of sources (process, outcome, ...) to tensors; `masks` likewise says
    which tokens carry a reward, all unmasked ones if not given; `weights` maps names, 1 where not named. Batch-coupled.
    ValueError: a weight or a mask for no source.

    >>> steps = [.1, .2, .3], [.4, .5], [.2, .1, .2, .1], [.3, .4, .3]
    >>> mask = torch.arange(4) < torch.tensor([len(row) for row in steps])[:, None]
    >>> rewards = torch.zeros(4, 4).masked_scatter(mask, torch.tensor(sum(steps, [])))
    >>> ADVANTAGE_ESTIMATORS["prime_rloo"](rewards, mask, torch.zeros(4, dtype=int))[mask]
    tensor([-0.6572,  0.0259,  0.3363,  1.5161,  1.0815, -1.7128, -1.4023, -0.7193,
            -0.4088,  0.8331,  0.7710,  0.3363])
    """
    total = torch.zeros_like(used, dtype=torch.float64)
    for source, values in rewards.items():
        counted = used if masks is None else masks[source]
        above = groups.above_lowest(values, counted)
        count = counted.sum(dim=1, keepdim=True)
        size = groups.total(count > 0)
        means = groups.total(above.sum(dim=1, keepdim=True) / count.clamp(min=1))
        left_out = (above * size - means) / (size - 1).clamp(min=1)
        total += (weights or {}).get(source, 1.0) * torch.where(counted & (size >= 2), left_out, 0)
    return whitened(returns_to_go(total, used), used)


def gigpo(
    rewards: Tensor,
    used: Tensor,
    groups: Groups,
    *,
    turns: Tensor,
    states: Tensor,
    gamma: float = 0.95,
    omega: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """The sample's standing in its group (as `grpo`), plus omega times each turn's among those that found the same state.

    Feng et al. 2025, "Group-in-Group Policy Optimization", eq. 3, 6, 7 and 8. turns (B, T): the place in
    time of each token's turn; states (B, T): a number for what it found, 0 where it is not named. A turn is worth what it
    and the later ones of its sample earned, times gamma for each turn between; compared are turns of one group and state,
    if there are two.

    >>> ADVANTAGE_ESTIMATORS["gigpo"](torch.tensor([[0., 1.], [0., 0.]]), torch.ones(2, 2), torch.zeros(2, dtype=int),
    ...     turns=torch.tensor([[0, 1], [0, 1]]), states=torch.tensor([[5, 6], [5, 7]]))
    tensor([[ 1.4142,  0.7071],
            [-1.4142, -0.7071]])
    """
    standing = groups.standardised(rewards.sum(dim=1, keepdim=True), groups.participates, eps)
    place, shape = turns.long(), (len(rewards), int(turns.max()) + 1)
    earned, taken, found = (
        rewards.new_zeros(shape, dtype=torch.float64).scatter_reduce(
            1, place, torch.where(used, of, 0).double(), how
        )
        for of, how in ((rewards, "sum"), (torch.ones_like(rewards), "amax"), (states, "amax"))
    )
    worth = returns_to_go(earned, taken.bool(), gamma)
    named = taken.bool() & (found > 0) & groups.participates
    cells = torch.stack([groups.index[:, None].expand(shape), found.long()], dim=-1).reshape(-1, 2)
    same = Groups.of(torch.unique(cells, dim=0, return_inverse=True)[1], named.flatten())
    steps = same.standardised(worth.reshape(-1, 1), same.participates, eps).reshape(shape)
    return standing + omega * steps.gather(1, place)


def _turn_lengths(sample: Sample) -> list[int]:
    """Return how many tokens each turn has, as the turns stand."""
    return [turn.tokens for turn in sample.completion.turns] or [len(sample.completion)]


def turn_numbers(sample: Sample) -> np.ndarray:
    """Return (T,) the place in time of the turn that each token belongs to."""
    return np.repeat(sample.completion.turn_ranks, _turn_lengths(sample))


def turn_states(sample: Sample) -> np.ndarray:
    """Return (T,) a number for the state that the token's turn found; 0 where its environment names none."""
    outcome = sample.completion.outcome
    if outcome is None or not outcome.states:
        return np.zeros(len(sample.completion), np.int64)
    names = (state.encode(errors="surrogatepass") for state in outcome.states)
    digests = (blake2b(name, digest_size=6).digest() if name else b"" for name in names)
    numbers = np.array([bool(digest) + int.from_bytes(digest) for digest in digests])  # exact as floats, too
    return np.repeat(numbers, _turn_lengths(sample))
