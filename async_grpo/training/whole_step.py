"""What can only be known of a whole step: one forward over all its micro-batches, before any gradient.

Some terms of a loss are no sums over tokens: advantages whitened with the critic's values (GAE), importance weights
divided by their mean, the few tokens with the largest covariance (clip_cov, kl_cov), the tokens that a group is left
with after rejection (prompt_mean). They are worked out here over all micro-batches of all ranks, with the weights that
the step starts from, and are the same whatever the packing. It costs a forward, and the step cannot begin before its
last micro-batch has come.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from async_grpo.algorithm.covariance import num_selected, select, token_sums, top_scores
from async_grpo.algorithm.loss_batch import LossBatch
from async_grpo.algorithm.statistics import merge_moments, whitened, whitening_moments
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.distributed import Ranks
from async_grpo.training.objective import Objective, StepTerms
from async_grpo.training.sharding import release_gathered
from async_grpo.types import MicroBatch

MIXER = 1_000_003  # keeps sums of different things apart; int64 wraps around, which is no harm


@dataclasses.dataclass
class _Seen:
    """A micro-batch under the weights that the step starts from; (1, N) tensors without gradient."""

    row: BatchTensors
    logprobs: Tensor
    values: Tensor | None
    mask: Tensor  # without what is rejected
    terms: StepTerms

    @property
    def advantages(self) -> Tensor:
        return self.row.advantages if self.terms.advantages is None else self.terms.advantages


def step_terms(
    policy: PolicyModel, objective: Objective, batches: Sequence[MicroBatch], ranks: Ranks, step: int
) -> list[StepTerms]:
    """The terms of each micro-batch; a collective: every rank must bring the same number of micro-batches.

    Args:
        step: seeds the random choice of clip_cov, the same for every packing and different in every step.
    """
    seen = [_look(policy, objective, batch) for batch in batches]
    if objective.has_critic:
        _estimate_advantages(seen, objective, ranks)
    if objective.rejects_from_groups:
        _count_kept(seen, ranks)
    if objective.correction.averages:
        _average_weights(seen, objective, ranks)
    if objective.loss.needs_selection:
        _select(seen, objective, ranks, step)
    return [micro_batch.terms for micro_batch in seen]


@torch.no_grad()
def _look(policy: PolicyModel, objective: Objective, batch: MicroBatch) -> _Seen:
    row = BatchTensors(batch, policy.device)
    temperature, with_values = objective.config.temperature, objective.has_critic
    outputs = policy(row.input_ids, row.cu_seqlens, row.mask[0], temperature, with_values=with_values)
    release_gathered(policy)
    logprobs, _, *values = (output[None] for output in outputs)
    mask = objective.correction.keep(logprobs, row)
    return _Seen(row, logprobs, values[0] if values else None, mask, StepTerms())


def _estimate_advantages(seen: Sequence[_Seen], objective: Objective, ranks: Ranks) -> None:
    """GAE per sequence, over all its trained tokens, rejected or not; whitened over all tokens of the step."""
    estimated = []
    for one in seen:
        assert one.values is not None
        rows = _Rows(one.row.sequence_ids[0])
        rewards, values, mask = (
            rows.unpack(tensor[0]) for tensor in (one.row.advantages, one.values, one.row.mask)
        )
        advantages, returns = objective.critic_returns(rewards, values, mask)
        estimated.append((rows.pack(advantages)[None], rows.pack(returns)[None]))
    moments = _all_moments([(a, one.row.mask) for (a, _), one in zip(estimated, seen, strict=True)], ranks)
    for (advantages, returns), one in zip(estimated, seen, strict=True):
        if objective.whitens:
            advantages = whitened(advantages, one.row.mask, moments)
        one.terms = dataclasses.replace(
            one.terms, advantages=advantages, returns=returns, old_values=one.values
        )


def _all_moments(parts: Sequence[tuple[Tensor, Tensor]], ranks: Ranks) -> Tensor:
    """The whitening moments (3,) of (values, mask) of all micro-batches of all ranks."""
    own = merge_moments(torch.stack([whitening_moments(values, mask) for values, mask in parts]))
    table = torch.zeros(ranks.world_size, 3, dtype=torch.float64)
    table[ranks.rank] = own.cpu()
    return merge_moments(_summed(table, ranks)).to(own.device)


def _summed(table: Tensor, ranks: Ranks) -> Tensor:
    """The element-wise sum of a tensor over all ranks: an all-gather, where each rank filled its own row."""
    return torch.tensor(ranks.sum(table.flatten().tolist()), dtype=torch.float64).view_as(table)


def _count_kept(seen: Sequence[_Seen], ranks: Ranks) -> None:
    """At every token the tokens of its group that are not rejected, over all micro-batches of all ranks."""
    kept = torch.cat([one.row.group_ids[one.mask] for one in seen])
    # The groups of a step are neighbours in the order of prompts, so a table from the first to the last is short
    bounds = [float(-kept.min()), float(kept.max())] if len(kept) else [-math.inf, -math.inf]
    lowest, highest = ranks.max(bounds)
    if highest == -math.inf:  # every token of the step was rejected
        return
    first = int(-lowest)
    table = torch.bincount(kept - first, minlength=int(highest) - first + 1)
    totals = _summed(table.cpu(), ranks)
    for one in seen:
        places = (one.row.group_ids - first).clamp(0, len(totals) - 1)
        counts = torch.where(one.mask, totals.to(places.device)[places], 0)
        one.terms = dataclasses.replace(one.terms, group_tokens=counts.long())


def _average_weights(seen: Sequence[_Seen], objective: Objective, ranks: Ranks) -> None:
    totals = [objective.correction.totals(one.logprobs, one.row, one.mask) for one in seen]
    total, count = ranks.sum([sum(column).item() for column in zip(*totals, strict=True)])
    for one in seen:
        one.terms = dataclasses.replace(one.terms, weight_mean=total / max(count, 1.0))


def _select(seen: Sequence[_Seen], objective: Objective, ranks: Ranks, step: int) -> None:
    """The tokens with the highest scores of all micro-batches of all ranks."""
    loss, options = objective.loss, {**objective.loss.options, **objective.loss_settings}
    inputs = [
        (one.logprobs, objective.ratio_denominator_logprobs(one.logprobs, one.row), one.advantages, one.mask)
        for one in seen
    ]
    sums = _summed(
        torch.stack([token_sums(LossBatch(*tensors)) for tensors in inputs]).sum(dim=0).cpu(), ranks
    )
    scores = [
        loss.selection_scores(
            *tensors,
            sums=sums.to(tensors[0].device),
            token_keys=_token_keys(one.row),
            **{**options, **({"seed": int(options["seed"]) + step} if "seed" in options else {})},
        )
        for tensors, one in zip(inputs, seen, strict=True)
    ]
    count = num_selected(options["ratio"], sums[2].item())
    table = torch.zeros(ranks.world_size, count, dtype=torch.float64)
    table[ranks.rank] = top_scores(torch.cat([score.flatten() for score in scores]), count).cpu()
    threshold = top_scores(_summed(table, ranks), count)[-1]
    for one, score in zip(seen, scores, strict=True):
        one.terms = dataclasses.replace(one.terms, selected=select(score, threshold.to(score.device)))


def _token_keys(row: BatchTensors) -> Tensor:
    """(1, N) int64: a number of each token's own, whatever it is packed with: its group, place and engine log-prob."""
    ids = row.sequence_ids[0]
    place = torch.arange(len(ids), device=ids.device) - torch.searchsorted(
        ids, ids
    )  # ids ascend along the row
    bits = torch.where(row.mask[0], row.behaviour_logprobs[0].float(), 0).view(torch.int32).long()
    # Members of a group may begin with the same tokens; what tells them apart is the whole of their log-probs
    contents = torch.zeros(int(ids[-1]) + 1, dtype=torch.int64, device=ids.device)
    contents = contents.index_add(0, ids, bits * (2 * place + 1))
    return (contents[ids] * MIXER + row.group_ids[0] * MIXER**2 + place)[None]


class _Rows:
    """Sequences of one packed row (N,) as rows of a padded tensor (S, T), and back."""

    def __init__(self, sequence_ids: Tensor) -> None:
        starts = torch.searchsorted(sequence_ids, sequence_ids)  # ids ascend along a packed row
        self._index = (sequence_ids, torch.arange(len(sequence_ids), device=sequence_ids.device) - starts)
        self._shape = (int(sequence_ids[-1]) + 1, int(self._index[1].max()) + 1)

    def unpack(self, values: Tensor) -> Tensor:
        rows = values.new_zeros(self._shape)
        rows[self._index] = values
        return rows

    def pack(self, rows: Tensor) -> Tensor:
        return rows[self._index]
