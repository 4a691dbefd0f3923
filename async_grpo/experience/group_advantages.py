"""Verdicts -> advantages: what each sample of a group is worth, and which of its tokens are trained on.

Everything that changes a reward between the verifier and the estimator happens here: the length penalty, a KL in the
reward, process rewards on the tokens that earned them (`reward_tensors`). The verdicts themselves stay as they are, and
are logged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.experience.groups import different_rewards, num_scored
from async_grpo.experience.token_rewards import RewardTensors, TokenRewardConfig
from async_grpo.types import Group, Sample

COMPLETE = ("gae", "reinforce_plus_plus")  # compare whole returns, so every adapter must have paid its part
IN_TRAINER = ("gae",)  # their advantages need the critic; the samples carry token rewards there instead


@dataclass(frozen=True)
class AdvantageConfig:
    """How a run's verdicts become advantages.

    Args:
        options: the estimator's scalar options.
        payment: what each token is paid.
        mask_truncated: leave truncated completions out of the loss (they stay in the baseline).
        filter_groups: leave groups without signal out of the loss, and so out of its denominators.
        min_valid: groups with fewer rewards are left out as well.
        max_token_staleness: older tokens are left out of the loss, the rest of their sample is not; None: all are in.
    """

    estimator: str = "grpo"
    options: Mapping[str, Any] = field(default_factory=dict)
    payment: TokenRewardConfig = field(default_factory=TokenRewardConfig)
    mask_truncated: bool = True
    filter_groups: bool = False
    min_valid: int = 2
    max_token_staleness: int | None = None

    @property
    def group_local(self) -> bool:
        """Whether a group's advantages depend on that group alone, so that it need not wait for the others."""
        return ADVANTAGE_ESTIMATORS[self.estimator].group_local or self.estimator in IN_TRAINER

    def has_signal(self, group: Group) -> bool:
        """Whether the estimator finds any difference between the group's samples, or (ReMax) to the greedy one."""
        if self.estimator == "remax":
            greedy = None if group.baseline is None else group.baseline.reward
            rewards = {sample.verdict.reward for sample in group.samples} - {None}
            return greedy is not None and rewards != {greedy}
        apart = self.estimator == "gdpo" or bool(self.payment.process_adapters)
        return different_rewards(group, apart=apart) > 1

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups with advantages on every sample that is trained on in `step`; the others keep None."""
        samples = [sample for group in groups for sample in group.samples]
        batch = RewardTensors(self.payment, groups, samples)
        # What is left out is left out of every statistic as well: it must not dilute the others' scale
        kept = torch.tensor([not self._left_out(group) for group in groups])
        valid = self._valid(batch) & kept[batch.group_ids]
        advantages = batch.rewards if self.estimator in IN_TRAINER else self._estimate(batch, valid)
        trained = [
            self._trained(sample, advantage, step) if valid else sample
            for sample, advantage, valid in zip(samples, advantages, valid.tolist(), strict=True)
        ]
        return [
            self._regrouped(group, trained[first : first + len(group.samples)])
            for group, first in zip(groups, _firsts(groups), strict=True)
        ]

    def _estimate(self, batch: RewardTensors, valid: Tensor) -> Tensor:
        estimator = ADVANTAGE_ESTIMATORS[self.estimator]
        inputs: dict[str, Any] = dict(self.options)
        rewards: Tensor | dict[str, Tensor] = batch.rewards
        match self.estimator:
            case "remax":
                inputs["baselines"] = batch.baselines
            case "grpo_process":
                inputs["step_mask"] = batch.step_mask
            case "prime_rloo":
                rewards, inputs["masks"] = batch.sources
                inputs["weights"] = {name: self.payment.weight(name) for name in rewards}
            case "gdpo":
                rewards = batch.components
                inputs["weights"] = {name: self.payment.weight(name) for name in rewards}
        return estimator(rewards, batch.mask, batch.group_ids, valid=valid, **inputs)

    def _valid(self, batch: RewardTensors) -> Tensor:
        """(B,): whether the sample has everything that the estimator reads."""
        if self.estimator == "remax":
            return batch.valid & batch.has_baseline
        if self.estimator == "gdpo" or (self.payment.process_adapters and self.estimator in COMPLETE):
            return (
                batch.valid & batch.complete
            )  # what one adapter did not say must not count as 0 beside the others
        return batch.valid

    def _trained(self, sample: Sample, advantages: Tensor, step: int) -> Sample:
        completion = sample.completion
        if self.mask_truncated and completion.truncated:
            return sample
        loss_mask = np.ones(len(completion), bool)
        if self.max_token_staleness is not None:
            loss_mask = step - completion.versions <= self.max_token_staleness
        values = advantages[: len(completion)].numpy().astype(np.float32)
        return replace(sample, advantages=np.where(loss_mask, values, np.float32(0)), loss_mask=loss_mask)

    def _left_out(self, group: Group) -> bool:
        return num_scored(group) < self.min_valid or (self.filter_groups and not self.has_signal(group))

    @staticmethod
    def _regrouped(group: Group, samples: Sequence[Sample]) -> Group:
        tokens = sum(int(s.loss_mask.sum()) for s in samples if s.loss_mask is not None)
        return replace(group, samples=tuple(replace(s, group_tokens=tokens) for s in samples))


def _firsts(groups: Sequence[Group]) -> list[int]:
    """The index of the first sample of each group among all samples."""
    sizes = [len(group.samples) for group in groups]
    return np.cumsum([0, *sizes])[:-1].tolist()
