"""Estimators whose result depends on which token a reward is placed on, and the loss of the critic for `gae`.

The arguments of an estimator's function are described in `outcome_advantages`. "Batch-coupled" estimators use
statistics of the whole batch.

Masked tokens inside a completion, such as a tool's answer, are skipped. They add no reward and no discount, and the
tokens before them still get credit for rewards after them.
"""

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from async_grpo.algorithm.statistics import Groups, decay_on, returns_to_go, reverse_scan, whitened
from async_grpo.types import Sample

# If the variance is below this share of the mean square, it counts as 0, because float32 sums have such rounding errors
NO_VARIANCE = 1e-6


def reinforce_plus_plus(
    rewards: Float64[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    gamma: float = 1.0,
) -> Float64[Tensor, "batch tokens"]:
    """Return discounted returns-to-go, whitened over all tokens of the batch. Batch-coupled.

    Hu et al. 2025, "REINFORCE++".

    >>> ADVANTAGE_ESTIMATORS["reinforce_plus_plus"](  # returns 1 2, 1 0: mean 1, variance 2/3
    ...     torch.tensor([[0., 2.], [1., 0.]]), torch.ones(2, 2), torch.zeros(2, dtype=int), gamma=0.5)
    tensor([[ 0.0000,  1.2247],
            [ 0.0000, -1.2247]])
    """
    return whitened(returns_to_go(rewards, used, gamma), used)


def remax(
    rewards: Float64[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    baselines: Float64[Tensor, " batch"],
) -> Float64[Tensor, "batch tokens"]:
    """Return sum_{u>=t} r_iu - b_i, where b_i is the reward of the greedy completion (Li et al. 2024, "ReMax").

    The estimator is unbiased: its expected gradient is the true gradient.

    >>> rewards, baselines = torch.tensor([[0., 1.], [0., 0.]]), torch.tensor([.25, .25])
    >>> ADVANTAGE_ESTIMATORS["remax"](rewards, torch.ones(2, 2), torch.zeros(2, dtype=int), baselines=baselines)
    tensor([[ 0.7500,  0.7500],
            [-0.2500, -0.2500]])
    """
    return returns_to_go(rewards, used) - baselines[:, None]


@torch.no_grad()
def gae_returns(
    rewards: Float[Tensor, "batch tokens"],
    values: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    *,
    gamma: float = 1.0,
    lam: float | Float64[Tensor, "batch 1"] = 1.0,
) -> tuple[Float[Tensor, "batch tokens"], Float[Tensor, "batch tokens"]]:
    """Return (advantages before any whitening, returns = advantages + values), zero where masked.

    Schulman et al. 2016, "Generalized Advantage Estimation", eq. 16, over the unmasked tokens of a row. The value after
    the last unmasked token is 0. The returns are the targets of the critic. The results carry no gradient, and masked
    inputs may contain anything. `lam` is one number, or one for each row.
    """
    used = mask.bool()
    used_rewards = torch.where(used, rewards, 0).double()
    used_values = torch.where(used, values, 0).double()
    # The scan copies the value of each unmasked token to the masked tokens before it. So the entry after an unmasked token
    # is always the value of the next unmasked token
    carried_values = reverse_scan(used_values, (~used).double())
    next_values = pad(carried_values[:, 1:], (0, 1))
    deltas = torch.where(used, used_rewards + gamma * next_values - used_values, 0)
    advantages = reverse_scan(deltas, decay_on(used, gamma * lam))
    advantages = torch.where(used, advantages, 0)
    returns = advantages + used_values
    return advantages.to(rewards.dtype), returns.to(rewards.dtype)


def gae(
    rewards: Float64[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    values: Float64[Tensor, "batch tokens"],
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> Float64[Tensor, "batch tokens"]:
    """Return generalized advantages (`gae_returns`), whitened over all tokens of the batch. Batch-coupled.

    `values` are the critic's values. If the batch is spread over ranks, pass whiten=False, and whiten the result with
    the merged moments of all ranks (`statistics.whitened`).

    >>> ADVANTAGE_ESTIMATORS["gae"](torch.tensor([[0., 1.], [0., 0.]]), torch.ones(2, 2), torch.zeros(2, dtype=int),
    ...     values=torch.tensor([[.5, .75], [.5, .25]]), whiten=False)
    tensor([[ 0.5000,  0.2500],
            [-0.5000, -0.2500]])
    """
    advantages, _ = gae_returns(rewards, values, used, gamma=gamma, lam=lam)
    return whitened(advantages, used) if whiten else advantages


def value_loss(
    values: Float[Tensor, "batch tokens"],
    returns: Float[Tensor, "batch tokens"],
    old_values: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    *,
    clip: float = 0.5,
) -> tuple[Float[Tensor, "batch tokens"], dict[str, Float[Tensor, "batch tokens"]]]:
    """Return (per-token loss, metrics), with the loss 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

    V are the critic's values, R the returns. This is the value loss of PPO's reference implementation (OpenAI
    baselines, ppo2). With an infinite clip it is 1/2 (V - R)^2. Where the mask is False, inputs may contain anything, and
    loss and metrics are 0. Only `values` gets a gradient. A token counts as clipped, and has no gradient, if the
    clipped error is the larger one. V has then moved from V_old towards R by more than `clip`. The caller averages the
    metrics over tokens. `value_error` is V - R.
    """
    is_used = mask.bool()
    values = torch.where(is_used, values, 0)
    returns = torch.where(is_used, returns.detach(), 0)
    old_values = torch.where(is_used, old_values.detach(), 0)
    error = values - returns
    square = error.square()
    clipped_square = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    is_clipped = clipped_square > square
    larger_square = torch.maximum(square, clipped_square)
    metrics = {
        "value_clip_frac": is_clipped.to(square.dtype),
        "value_error": error.detach(),
        "value_error_square": error.detach().square(),
        "return_mean": returns,
        "return_square": returns.square(),
    }
    return larger_square / 2, metrics


def explained_variance(means: Mapping[str, float]) -> float:
    """Return 1 - Var(R - V) / Var(R) over tokens, from the means over tokens of the metrics of `value_loss`.

    At 1, the critic predicts every return up to a constant. At 0, it is no better than predicting the mean return.
    Below 0, it is worse. The result is also 0 if all returns are equal.
    """
    variance = means["return_square"] - means["return_mean"] ** 2
    unexplained_variance = means["value_error_square"] - means["value_error"] ** 2
    if variance > NO_VARIANCE * means["return_square"]:
        return 1 - unexplained_variance / variance
    return 0.0


def grpo_process(
    rewards: Float64[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    eps: float = 1e-6,
    step_mask: Bool[Tensor, "batch tokens"] | None = None,
) -> Float64[Tensor, "batch tokens"]:
    """Return sum_{u>=t} z_iu, with z = (r - mean) / (std + eps) over the step rewards of the whole group.

    Shao et al. 2024, "DeepSeekMath", 4.1.3. The std has ddof 1. `step_mask` is True at the tokens with a step reward.
    If it is None, every unmasked token has one. Tokens without a step reward have z = 0 and are not part of the
    statistics. (If they counted as rewards of 0, their z would be -mean / (std + eps).) A group with fewer than two
    step rewards gets zeros. If the mean is positive, additional steps with a reward of 0 lower the advantage.

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
    rewards: dict[str, Float64[Tensor, "batch tokens"]],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    weights: dict[str, float] | None = None,
    masks: dict[str, Bool[Tensor, "batch tokens"]] | None = None,
) -> Float64[Tensor, "batch tokens"]:
    """Return returns-to-go of leave-one-out step rewards, summed over sources and whitened over the batch's tokens.

    Cui et al. 2025, "Process Reinforcement through Implicit Rewards" (PRIME). The leave-one-out reward of a source is
    x_it = r_it * n/(n-1) - (sum_j rbar_j)/(n-1) at the tokens with a reward from the source, and 0 at other tokens.
    rbar_j is the mean of sample j's rewards, and n the number of samples of the group that have rewards. If n < 2, the
    rewards of the source are 0 in the whole group. Note that the sum of the n means is divided by n-1. Batch-coupled.

    Args:
        rewards: The rewards of each source (process, outcome, ...), by name.
        used: See `outcome_advantages`.
        groups: See `outcome_advantages`.
        weights: Weight of each source, by name. A source without an entry has the weight 1.
        masks: A mask for each source, by name, which is True at the tokens with a reward. None means all unmasked
            tokens.

    >>> steps = [.1, .2, .3], [.4, .5], [.2, .1, .2, .1], [.3, .4, .3]
    >>> mask = torch.arange(4) < torch.tensor([len(row) for row in steps])[:, None]
    >>> rewards = torch.zeros(4, 4).masked_scatter(mask, torch.tensor(sum(steps, [])))
    >>> ADVANTAGE_ESTIMATORS["prime_rloo"](rewards, mask, torch.zeros(4, dtype=int))[mask]
    tensor([-0.6572,  0.0259,  0.3363,  1.5161,  1.0815, -1.7128, -1.4023, -0.7193,
            -0.4088,  0.8331,  0.7710,  0.3363])
    """
    weights = weights or {}
    total = torch.zeros_like(used, dtype=torch.float64)
    for source, values in rewards.items():
        counted = used if masks is None else masks[source]
        above = groups.above_lowest(values, counted)
        count = counted.sum(dim=1, keepdim=True)
        size = groups.total(count > 0)
        sum_of_means = groups.total(above.sum(dim=1, keepdim=True) / count.clamp(min=1))
        differences = (above * size - sum_of_means) / (size - 1).clamp(min=1)
        total += weights.get(source, 1.0) * torch.where(counted & (size >= 2), differences, 0)
    return whitened(returns_to_go(total, used), used)


def gigpo(
    rewards: Float64[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    groups: Groups,
    *,
    turns: Float64[Tensor, "batch tokens"],
    states: Float64[Tensor, "batch tokens"],
    gamma: float = 0.95,
    omega: float = 1.0,
    eps: float = 1e-6,
) -> Float64[Tensor, "batch tokens"]:
    """Return the advantage of the sample in its group (as `grpo`), plus omega times the advantage of the token's turn.

    Feng et al. 2025, "Group-in-Group Policy Optimization", eq. 3, 6, 7 and 8. The advantage of a turn is its return,
    standardised over all turns of the group that began in the same state, if there are at least two. The return of a
    turn is the sum of its rewards and the rewards of the sample's later turns, discounted by gamma per turn.

    Args:
        rewards: See `outcome_advantages`.
        used: See `outcome_advantages`.
        groups: See `outcome_advantages`.
        turns: Index in time of each token's turn, from 0.
        states: A number that identifies the state in which the token's turn began (`turn_states`). Turns with the number 0
            are not compared.
        gamma: Discount per turn.
        omega: Weight of the turns' advantages.
        eps: Added to the standard deviations.

    >>> ADVANTAGE_ESTIMATORS["gigpo"](torch.tensor([[0., 1.], [0., 0.]]), torch.ones(2, 2), torch.zeros(2, dtype=int),
    ...     turns=torch.tensor([[0, 1], [0, 1]]), states=torch.tensor([[5, 6], [5, 7]]))
    tensor([[ 1.4142,  0.7071],
            [-1.4142, -0.7071]])
    """
    sample_advantages = groups.standardised(rewards.sum(dim=1, keepdim=True), groups.participates, eps)
    ranks = turns.long()
    num_turns = int(turns.max()) + 1

    def by_turn(values: Tensor, reduction: str) -> Tensor:
        """Return the values (B, T) of used tokens, reduced over each turn to (B, turns)."""
        zeros = rewards.new_zeros((len(rewards), num_turns), dtype=torch.float64)
        return zeros.scatter_reduce(1, ranks, torch.where(used, values, 0).double(), reduction)

    turn_rewards = by_turn(rewards, "sum")
    has_turn = by_turn(torch.ones_like(rewards), "amax").bool()
    states_of_turns = by_turn(states, "amax")
    returns = returns_to_go(turn_rewards, has_turn, gamma)

    is_compared = has_turn & (states_of_turns > 0) & groups.participates
    groups_of_turns = groups.index[:, None].expand(returns.shape)
    pairs = torch.stack([groups_of_turns, states_of_turns.long()], dim=-1).reshape(-1, 2)
    _, pair_ids = torch.unique(pairs, dim=0, return_inverse=True)
    same_state = Groups.of(pair_ids, is_compared.flatten())
    turn_advantages = same_state.standardised(returns.reshape(-1, 1), same_state.participates, eps)
    return sample_advantages + omega * turn_advantages.reshape(returns.shape).gather(1, ranks)


def _turn_lengths(sample: Sample) -> list[int]:
    """Return the number of tokens of each turn, in the order of `completion.turns`."""
    return [turn.num_tokens for turn in sample.completion.turns] or [len(sample.completion)]


def turn_numbers(sample: Sample) -> Int[np.ndarray, " tokens"]:
    """Return, for each token, the index in time of its turn, from 0."""
    return np.repeat(sample.completion.turn_ranks, _turn_lengths(sample))


def turn_states(sample: Sample) -> Int[np.ndarray, " tokens"]:
    """Return, for each token, a number that identifies the state in which its turn began.

    Turns of one group that began in the same state get the same number. It is computed from the name that the environment
    gave to the state (`Outcome.states`), and is 0 if the environment gave no name.
    """
    outcome = sample.completion.outcome
    if outcome is None or not outcome.states:
        return np.zeros(len(sample.completion), np.int64)
    numbers = np.array([_state_number(state) for state in outcome.states])
    return np.repeat(numbers, _turn_lengths(sample))


def _state_number(state: str) -> int:
    """Return a positive number for the name of a state, and 0 for "". It is small enough to be exact as a float64."""
    if not state:
        return 0
    digest = blake2b(state.encode(errors="surrogatepass"), digest_size=6).digest()
    return 1 + int.from_bytes(digest)
