"""Rewards -> advantages. Tensors are (B, T), a group is an id per row, statistics are float64.

Three rules hold for every estimator, because a reward that is missing or not a number must never move a
baseline: only *participants* (valid rows with at least one unmasked token) enter the statistics of their
group, a group with fewer than two of them teaches nothing, and the result is zero wherever the mask is False
or the row is invalid.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimator:
    """One advantage estimator and what the rest of the library must know of it.

    `group_local`: the result for a group depends on that group alone, so groups may be handed on as they
    complete; a batch-coupled estimator has to wait for its whole minibatch. `outcome`: it reads one score per
    row (the sum of the row's unmasked rewards), so a reward on the last token is all it needs.
    """

    function: Callable[..., Tensor]
    group_local: bool
    outcome: bool

    @property
    def options(self) -> dict[str, float]:
        """Its options and their defaults.

        >>> ADVANTAGE_ESTIMATORS["grpo"].options
        {'eps': 1e-06}
        """
        return dict(self.function.__kwdefaults__ or {})

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        group_ids: Tensor,
        *,
        valid: Tensor | None = None,
        **options: float,
    ) -> Tensor:
        """Advantages (B, T) of `rewards` (B, T), in their dtype.

        mask (B, T): True on the tokens that are trained on. group_ids (B,): rows of one prompt share an id.
        valid (B,): False where the reward is missing; such a row may hold NaN. `options` go to the estimator.
        ValueError: a shape that does not fit, or a participant whose reward is not finite.

        >>> rewards = torch.tensor([[0., 1.], [0., 0.], [0., 7.]])
        >>> ADVANTAGE_ESTIMATORS["dr_grpo"](rewards, torch.ones(3, 2), torch.tensor([4, 4, 9])).tolist()
        [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]
        """
        rows = rewards.shape[:1]
        if (
            rewards.shape != mask.shape
            or group_ids.shape != rows
            or (valid is not None and valid.shape != rows)
        ):
            raise ValueError(
                f"rewards {tuple(rewards.shape)} and mask {tuple(mask.shape)} must be (batch, tokens) alike, "
                f"group_ids {tuple(group_ids.shape)} and valid one per row"
            )
        mask = mask.bool()
        participates = mask.any(dim=1) if valid is None else mask.any(dim=1) & valid.bool()
        used = mask & participates[:, None]
        rewards64 = torch.where(used, rewards, 0).double()
        if not torch.isfinite(rewards64).all():
            bad = (~torch.isfinite(rewards64)).any(dim=1).nonzero().flatten().tolist()
            raise ValueError(
                f"the rewards of rows {bad} are not finite; a missing reward must be marked invalid"
            )
        advantages = self.function(rewards64, used, group_ids, **options)
        return torch.where(used, advantages, 0).to(rewards.dtype)


@dataclass(frozen=True)
class GroupStatistics:
    """Mean and standard deviation (ddof 1) of the scores of each row's group, (B,) float64."""

    mean: Tensor
    std: Tensor
    informative: Tensor  # (B,) bool: the participants of the row's group have at least two different scores


def group_statistics(scores: Tensor, participates: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Statistics over the participants of each group; scores (B,) float64.

    Equality of all scores is read from their minimum and maximum: seven times 0.1 has a mean that is not 0.1,
    and rounding noise divided by a tiny std would come out as a full-sized advantage.
    """
    distinct, group = torch.unique(group_ids, return_inverse=True)
    num_groups = len(distinct)

    def total(values: Tensor) -> Tensor:
        return scores.new_zeros(num_groups).index_add(0, group, torch.where(participates, values, 0))[group]

    def extreme(reduce: str, neutral: float) -> Tensor:
        start = scores.new_full((num_groups,), neutral)
        return start.scatter_reduce(0, group, torch.where(participates, scores, neutral), reduce)[group]

    size = total(torch.ones_like(scores))
    mean = total(scores) / size.clamp(min=1)
    std = (total((scores - mean).square()) / (size - 1).clamp(min=1)).sqrt()
    varied = extreme("amax", -torch.inf) > extreme("amin", torch.inf)
    return GroupStatistics(mean, std, varied)


def grpo(rewards: Tensor, used: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(s - mean) / (std + eps) over the group, std with ddof 1 (Shao et al. 2024, "DeepSeekMath", eq. 3)."""
    scores = rewards.sum(dim=1)
    group = group_statistics(scores, used.any(dim=1), group_ids)
    advantages = torch.where(group.informative, (scores - group.mean) / (group.std + eps), 0)
    return advantages[:, None].expand_as(rewards)


def dr_grpo(rewards: Tensor, used: Tensor, group_ids: Tensor) -> Tensor:
    """s - mean over the group, not divided by its std (Liu et al. 2025, "Dr. GRPO")."""
    scores = rewards.sum(dim=1)
    group = group_statistics(scores, used.any(dim=1), group_ids)
    return torch.where(group.informative, scores - group.mean, 0)[:, None].expand_as(rewards)


ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo, group_local=True, outcome=True),
    "dr_grpo": Estimator(dr_grpo, group_local=True, outcome=True),
}
