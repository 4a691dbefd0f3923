"""Compute the terms of a loss that depend on all micro-batches of a step, before any gradient is computed.

Some terms are not sums over tokens: whitened advantages with a critic (GAE), importance weights divided by their mean,
the few tokens with the largest covariance (clip_cov, kl_cov), the tokens with the highest entropy
(`--top-entropy-quantile`), the number of tokens of a group that are not rejected (prompt_mean), and the number of tokens
of environments (`--observation-coef`). This module computes these terms so that they do not depend on the packing. This
takes an additional forward pass of every micro-batch, unless only tokens are counted.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_grpo.algorithm.aggregation import count_units
from async_grpo.algorithm.covariance import num_selected, select, token_sums, top_scores
from async_grpo.algorithm.off_policy import weight_totals
from async_grpo.algorithm.policy_losses import LossBatch
from async_grpo.algorithm.policy_masks import entropy_scores, num_in_top_quantile
from async_grpo.algorithm.statistics import merge_moments, whitened, whitening_moments
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.critic import Critic
from async_grpo.training.distributed import Ranks
from async_grpo.training.objective import Objective
from async_grpo.training.sharding import release_gathered
from async_grpo.training.trajectories import joined_trajectories

# Prime number that multiplies the parts of a token's key before they are added, so that different tokens get different
# keys. Products may overflow int64, which does no harm to a hash
MIXER = 1_000_003


def add_step_terms(
    policy: PolicyModel,
    objective: Objective,
    rows: Sequence[BatchTensors],
    ranks: Ranks,
    step: int,
    critic: Critic | None = None,
) -> None:
    """Write the terms that the objective needs into the rows. A collective.

    Args:
        policy: The policy.
        objective: The objective of the training.
        rows: The micro-batches of this rank. Every rank must pass the same number.
        ranks: The ranks of the training.
        step: Number of the step. It is added to the seed of clip_cov's random selection.
        critic: The critic, if it is a separate model.
    """
    if objective.needs_first_forward:
        with torch.no_grad():
            for row in rows:
                row.logprobs, row.entropy, *further_outputs = objective.forward(policy, row)
                release_gathered(policy)
                # In later passes over a batch, advantages, returns and old values are those of the first pass
                if objective.has_value_head and not row.is_repeated:
                    row.old_values = further_outputs[0]
                if critic is not None and not row.is_repeated:
                    row.old_values = critic.values(row)
                row.kept = objective.kept_tokens(row.logprobs, row)
    else:
        for row in rows:
            row.kept = row.mask
    if objective.has_critic and not rows[0].is_repeated:
        _estimate_advantages(rows, objective, ranks)
    if objective.rejects_from_groups:
        _count_kept(rows, ranks)
    if objective.averages_weights:
        _average_weights(rows, objective, ranks)
    if objective.loss.needs_selection:
        _select(rows, objective, ranks, step)
    if objective.selects_high_entropy:
        _select_high_entropy(rows, objective, ranks)
    if objective.trains_observations:
        _count_observations(rows, objective, ranks)


def _estimate_advantages(rows: Sequence[BatchTensors], objective: Objective, ranks: Ranks) -> None:
    """Set `advantages` and `returns`, estimated along each trajectory in time.

    If the estimator asks for it, the advantages are whitened over the step. Rejected tokens also get advantages and
    returns, and count in the mean and variance of the whitening.
    """
    assert objective.critic_returns is not None
    # This must come before the loop, which overwrites the rewards in `row.advantages`
    trajectories = joined_trajectories(rows, ranks)
    for row in rows:
        assert row.old_values is not None
        lengths = row.cu_seqlens.diff().tolist()
        is_token = _by_sequence(torch.ones_like(row.mask), lengths)  # False at padding
        advantages, returns = objective.critic_returns(
            _by_sequence(row.advantages, lengths),
            _by_sequence(row.old_values, lengths),
            _by_sequence(row.mask, lengths),
        )
        row.advantages = advantages[is_token][None]
        row.returns = returns[is_token][None]
    if trajectories is not None:
        trajectories.estimate(objective.critic_returns)
    if objective.whitens:
        moments_of_rows = [whitening_moments(row.advantages, row.mask) for row in rows]
        moments = merge_moments(torch.stack(moments_of_rows))
        moments = merge_moments(ranks.gathered(moments)).to(moments.device)
        for row in rows:
            row.advantages = whitened(row.advantages, row.mask, moments)


def _by_sequence(
    values: Shaped[Tensor, "1 packed"], lengths: list[int]
) -> Shaped[Tensor, "sequences tokens"]:
    """Return the values of packed sequences as a padded table with one row for each sequence."""
    return pad_sequence(list(values[0].split(lengths)), batch_first=True)


def _count_kept(rows: Sequence[BatchTensors], ranks: Ranks) -> None:
    """Set `group_tokens` of every kept token to the number of kept tokens in its group, counted over all ranks."""
    kept_ids = torch.cat([row.group_ids[row.kept] for row in rows])
    # The group ids of a step are close together, so a table with one entry for each id from the lowest to the highest
    # is short
    bounds = [float(-kept_ids.min()), float(kept_ids.max())] if len(kept_ids) else [-math.inf, -math.inf]
    negated_lowest, highest = ranks.max(bounds)
    if highest == -math.inf:
        # All tokens of the step were rejected
        return
    first = int(-negated_lowest)
    num_groups = int(highest) - first + 1
    totals = ranks.gathered(torch.bincount(kept_ids - first, minlength=num_groups)).sum(dim=0)
    for row in rows:
        places = (row.group_ids - first).clamp(0, len(totals) - 1)
        counts = totals.to(places.device)[places]
        row.group_tokens = torch.where(row.kept, counts, 0).long()


def _count_observations(rows: Sequence[BatchTensors], objective: Objective, ranks: Ranks) -> None:
    """Set `units_per_observation` and `tokens_per_observation` from the counts of the step, over all ranks.

    At the end of the step, its loss is divided by the number of units. Example: 10 units and 50 observation tokens. The
    sum of their cross-entropies is multiplied by 10 / 50 and later divided by 10, so it becomes their mean.
    """
    num_units = 0.0
    num_tokens = 0.0
    num_observations = 0.0
    for row in rows:
        counts = count_units(row.kept, row.sequence_ids, group_tokens=row.group_tokens)
        num_units += counts[objective.unit].item() if objective.unit else 0.0
        num_tokens += counts["tokens"].item()
        num_observations += row.observations.sum().item()
    num_units, num_tokens, num_observations = ranks.sum([num_units, num_tokens, num_observations])
    if objective.unit is None:
        num_units = 1.0
    for row in rows:
        row.units_per_observation = num_units / max(num_observations, 1.0)
        row.tokens_per_observation = num_tokens / max(num_observations, 1.0)


def _average_weights(rows: Sequence[BatchTensors], objective: Objective, ranks: Ranks) -> None:
    """Set `weight_mean` to the mean importance weight of the step, over all ranks."""
    level = objective.config.importance_level
    totals = []
    for row in rows:
        weights = objective.token_weights(row.logprobs, row, row.kept)
        totals.append(weight_totals(weights, row.kept, level=level, sequence_ids=row.sequence_ids))
    sums, counts = zip(*totals, strict=True)
    total, count = ranks.sum([torch.stack(sums).sum().item(), torch.stack(counts).sum().item()])
    for row in rows:
        row.weight_mean = total / max(count, 1.0)


def _select(rows: Sequence[BatchTensors], objective: Objective, ranks: Ranks, step: int) -> None:
    """Set `selected` to True at the tokens whose scores are the highest among the tokens of all ranks."""
    loss = objective.loss
    options: dict[str, Any] = loss.options | objective.loss_settings
    assert loss.scores is not None
    if "seed" in options:
        options["seed"] += step
    batches = []
    for row in rows:
        old_logprobs = objective.ratio_denominator_logprobs(row.logprobs, row)
        batches.append(LossBatch(row.logprobs, old_logprobs, row.advantages, row.kept))
    sums = torch.stack([token_sums(batch) for batch in batches]).sum(dim=0)
    sums = sums.new_tensor(ranks.sum(sums.tolist()))
    scores_of_rows = []
    for batch, row in zip(batches, rows, strict=True):
        scores_of_rows.append(loss.scores(batch, sums, _token_keys(row), **options))
    num_tokens = sums[2].item()
    threshold = _lowest_of_top(scores_of_rows, num_selected(options["ratio"], num_tokens), ranks)
    for row, scores in zip(rows, scores_of_rows, strict=True):
        row.selected = select(scores, threshold.to(scores.device))


def _select_high_entropy(rows: Sequence[BatchTensors], objective: Objective, ranks: Ranks) -> None:
    """Set `has_high_entropy` to True at the tokens whose entropy is in the top quantile over all ranks."""
    scores_of_rows = [entropy_scores(row.entropy, row.kept) for row in rows]
    (num_tokens,) = ranks.sum([float(sum(row.kept.sum().item() for row in rows))])
    count = num_in_top_quantile(objective.config.top_entropy_quantile, int(num_tokens))
    threshold = _lowest_of_top(scores_of_rows, count, ranks)
    for row, scores in zip(rows, scores_of_rows, strict=True):
        row.has_high_entropy = select(scores, threshold.to(scores.device))


def _lowest_of_top(
    scores_of_rows: Sequence[Float[Tensor, "1 packed"]], count: int, ranks: Ranks
) -> Float64[Tensor, ""]:
    """Return the lowest of the `count` highest scores of all ranks. A collective.

    If there are fewer scores than `count`, return -inf.
    """
    top_of_rank = top_scores(torch.cat([scores.flatten() for scores in scores_of_rows]), count)
    return top_scores(ranks.gathered(top_of_rank), count)[-1]


def _token_keys(row: BatchTensors) -> Int64[Tensor, "1 packed"]:
    """Return a distinct number for each token, which does not depend on the packing.

    It is a hash of the token's group, its position, and the engine's log-probs of its sequence.
    """
    ids = row.sequence_ids[0]  # in ascending order
    position = torch.arange(len(ids), device=ids.device) - torch.searchsorted(ids, ids)
    bits = torch.where(row.mask[0], row.behaviour_logprobs[0].float(), 0).view(torch.int32).long()
    # Group and position alone do not identify a token: the members of a group have tokens at the same positions, and
    # may even begin with the same tokens and log-probs. So the key contains a hash of the log-probs of the whole
    # sequence
    contents = torch.zeros(int(ids[-1]) + 1, dtype=torch.int64, device=ids.device)
    contents = contents.index_add(0, ids, bits * (2 * position + 1))
    return (contents[ids] * MIXER + row.group_ids[0] * MIXER**2 + position)[None]
