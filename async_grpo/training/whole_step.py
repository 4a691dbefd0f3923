"""What can only be known of a whole step: one forward over all its micro-batches, before any gradient.

Some terms of a loss are no sums over tokens: advantages whitened with the critic's values (GAE), importance weights
divided by their mean, the few tokens with the largest covariance (clip_cov, kl_cov), the tokens that a group is left
with after rejection (prompt_mean). They are the same whatever the packing; the price is that one more forward.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_grpo.algorithm.covariance import num_selected, select, token_sums, top_scores
from async_grpo.algorithm.off_policy import weight_totals
from async_grpo.algorithm.policy_losses import LossBatch
from async_grpo.algorithm.statistics import merge_moments, whitened, whitening_moments
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.distributed import Ranks
from async_grpo.training.objective import BatchTensors, Objective
from async_grpo.training.sharding import release_gathered
from async_grpo.training.trajectories import joined_trajectories

MIXER = 1_000_003  # keeps sums of different things apart; int64 wraps around, which is no harm


def add_step_terms(
    policy: PolicyModel, objective: Objective, rows: Sequence[BatchTensors], ranks: Ranks, step: int
) -> None:
    """Write into the rows what the objective needs of their step; a collective, with as many rows on every rank.

    `step` seeds the random choice of clip_cov.
    """
    with torch.no_grad():
        for row in rows:
            row.logprobs, _, *values = objective.forward(policy, row)
            release_gathered(policy)
            row.old_values = values[0] if values else None
            row.kept = objective.keep(row.logprobs, row)
    if objective.has_critic:
        _estimate_advantages(rows, objective, ranks)
    if objective.rejects_from_groups:
        _count_kept(rows, ranks)
    if objective.averages_weights:
        _average_weights(rows, objective, ranks)
    if objective.loss.needs_selection:
        _select(rows, objective, ranks, step)


def _estimate_advantages(rows: Sequence[BatchTensors], objective: Objective, ranks: Ranks) -> None:
    """Estimate advantages along each trajectory in time, over its trained tokens, rejected or not; whiten over the step."""
    assert objective.critic_returns is not None
    trajectories = joined_trajectories(rows, ranks)  # before the rewards become advantages
    for row in rows:
        assert row.old_values is not None
        lengths = row.cu_seqlens.diff().tolist()
        rewards, values, mask, inside = (
            pad_sequence(list(tensor[0].split(lengths)), batch_first=True)  # (S, T)
            for tensor in (row.advantages, row.old_values, row.mask, torch.ones_like(row.mask))
        )
        advantages, returns = objective.critic_returns(rewards, values, mask)
        row.advantages, row.returns = advantages[inside][None], returns[inside][None]
    if trajectories is not None:
        trajectories.estimate(objective.critic_returns)
    if objective.whitens:
        moments = merge_moments(torch.stack([whitening_moments(row.advantages, row.mask) for row in rows]))
        moments = merge_moments(ranks.gathered(moments)).to(moments.device)
        for row in rows:
            row.advantages = whitened(row.advantages, row.mask, moments)


def _count_kept(rows: Sequence[BatchTensors], ranks: Ranks) -> None:
    """At every token the tokens of its group that are not rejected, over all ranks."""
    kept = torch.cat([row.group_ids[row.kept] for row in rows])
    # The groups of a step are neighbours, so a table from the first to the last is short
    bounds = [float(-kept.min()), float(kept.max())] if len(kept) else [-math.inf, -math.inf]
    lowest, highest = ranks.max(bounds)
    if highest == -math.inf:  # every token of the step was rejected
        return
    first = int(-lowest)
    totals = ranks.gathered(torch.bincount(kept - first, minlength=int(highest) - first + 1)).sum(dim=0)
    for row in rows:
        places = (row.group_ids - first).clamp(0, len(totals) - 1)
        counts = totals.to(places.device)[places]
        row.group_tokens = torch.where(row.kept, counts, 0).long()


def _average_weights(rows: Sequence[BatchTensors], objective: Objective, ranks: Ranks) -> None:
    totals, level = [], objective.config.importance_level
    for row in rows:
        weights = objective.weights(row.logprobs, row, row.kept)
        totals.append(weight_totals(weights, row.kept, level=level, sequence_ids=row.sequence_ids))
    total, count = ranks.sum([torch.stack(parts).sum().item() for parts in zip(*totals, strict=True)])
    for row in rows:
        row.weight_mean = total / max(count, 1.0)


def _select(rows: Sequence[BatchTensors], objective: Objective, ranks: Ranks, step: int) -> None:
    """The tokens with the highest scores of all micro-batches of all ranks."""
    loss = objective.loss
    options: dict[str, Any] = loss.options | objective.loss_settings
    assert loss.scores is not None
    if "seed" in options:
        options["seed"] += step
    inputs = []
    for row in rows:
        old_logprobs = objective.ratio_denominator_logprobs(row.logprobs, row)
        inputs.append(LossBatch(row.logprobs, old_logprobs, row.advantages, row.kept))
    sums = torch.stack([token_sums(batch) for batch in inputs]).sum(dim=0)
    sums = sums.new_tensor(ranks.sum(sums.tolist()))
    scores = [
        loss.scores(batch, sums, _token_keys(row), **options) for batch, row in zip(inputs, rows, strict=True)
    ]
    count = num_selected(options["ratio"], sums[2].item())
    own_top = top_scores(torch.cat([score.flatten() for score in scores]), count)
    threshold = top_scores(ranks.gathered(own_top), count)[-1]
    for row, score in zip(rows, scores, strict=True):
        row.selected = select(score, threshold.to(score.device))


def _token_keys(row: BatchTensors) -> Tensor:
    """(1, N) int64: a number of each token's own: of its group, place and engine log-prob."""
    ids = row.sequence_ids[0]  # ascending
    place = torch.arange(len(ids), device=ids.device) - torch.searchsorted(ids, ids)
    bits = torch.where(row.mask[0], row.behaviour_logprobs[0].float(), 0).view(torch.int32).long()
    # Members of a group may begin with the same tokens: their log-probs tell them apart
    contents = torch.zeros(int(ids[-1]) + 1, dtype=torch.int64, device=ids.device)
    contents = contents.index_add(0, ids, bits * (2 * place + 1))
    return (contents[ids] * MIXER + row.group_ids[0] * MIXER**2 + place)[None]
