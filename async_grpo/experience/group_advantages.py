"""Verdicts -> advantages: what each sample of a group is worth, and which of its tokens are trained on.

A reward that could not be had is no silent zero. By the adapter that failed (`--on-reward-failure`) it masks its sample
(the default), `group_mean` gives the sample the mean reward of its group, and `refill` drops the group for another prompt
(a constant is the combination's matter). What changes a reward on its way to an estimator stands in `RewardTensors`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_grpo.algorithm.advantages import COMPONENTS, TOTAL
from async_grpo.experience.config import NO_FACTS, BatchConfig, RunFacts
from async_grpo.experience.reward_tensors import LAID_OUT, RewardTensors, repeated, token_times
from async_grpo.types import Group, RewardStatus, Sample, Verdict


class GroupAdvantages:
    """How a run's verdicts become advantages.

    Truncated completions that are left out of the loss stay in the baseline; filtered groups leave its denominators too.
    """

    def __init__(self, config: BatchConfig, facts: RunFacts = NO_FACTS) -> None:
        self.config, self.facts = config, facts
        self.entry, self._options = config.estimator, config.estimator_settings
        # Whether a group need not wait for the others. A critic's advantages are computed by the trainer, over its whole
        # step; the samples carry token rewards there.
        self.group_local = self.entry.group_local or self.entry.needs_critic

    def mean_reward(self, group: Group) -> float | None:
        """Of the samples that have one; None if they are too few (`--min-valid-samples`)."""
        rewards = group.rewards
        return sum(rewards) / len(rewards) if len(rewards) >= self.config.min_valid_samples else None

    def wants_refill(self, group: Group) -> bool:
        """Whether one of its failures asks for another group in its place."""
        verdicts = [group.baseline, *(sample.verdict for sample in group.samples)]
        return any("refill" in self._asked_for(verdict) for verdict in verdicts if verdict is not None)

    def with_group_mean(self, group: Group) -> Group:
        """The group with its mean reward where all failures of a sample ask for it."""
        mean, samples = self.mean_reward(group), []
        for sample in group.samples:
            verdict, asked_for = sample.verdict, self._asked_for(sample.verdict)
            if asked_for == {"group_mean"} and verdict.status.is_lost and mean is not None:
                verdict = Verdict(RewardStatus.OK, mean, verdict.results, filled=True)
            samples.append(replace(sample, verdict=verdict))
        return replace(group, samples=tuple(samples))

    def _asked_for(self, verdict: Verdict) -> set[str | None]:
        """What `--on-reward-failure` says of each adapter that failed."""
        return {self.facts.failure_policies.get(one.adapter) for one in verdict.results if one.status.is_lost}

    def has_signal(self, group: Group) -> bool:
        """Whether the estimator finds a difference in the group, or to the greedy completion."""
        # A completion without tokens is in no statistic of the estimator
        with_tokens = [sample for sample in group.samples if len(sample.completion)]
        readable = [sample.verdict for sample in with_tokens if self._readable(sample)]
        if len(readable) < 2:
            return False
        if self.entry.compares_with_greedy:
            greedy = None if group.baseline is None else group.baseline.reward
            return greedy is not None and {verdict.reward for verdict in readable} != {greedy}
        return len({self._earned(verdict) for verdict in readable}) > 1

    def _earned(self, verdict: Verdict) -> Any:
        """What two verdicts are compared by: two samples of one total may have earned it in different places."""
        if self.entry.rewards == COMPONENTS or self.facts.process:
            return tuple((r.adapter, r.reward, r.steps) for r in verdict.results)
        return verdict.reward

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups with advantages on every sample that is trained on in `step`; the others keep None."""
        samples = [sample for group in groups for sample in group.samples]
        batch = RewardTensors(self.config, self.facts, groups, self._by_token())
        # What is left out is left out of every statistic as well: it must not dilute the others' scale
        enough = [len(group.rewards) >= self.config.min_valid_samples for group in groups]
        teaches = [self.config.zero_variance != "filter" or self.has_signal(group) for group in groups]
        kept = torch.tensor(enough) & torch.tensor(teaches)
        valid = torch.tensor([self._readable(sample) for sample in samples]) & kept[batch.group_ids]
        if self.entry.compares_with_greedy:
            valid &= ~batch.baselines.isnan()
        advantages = batch.total if self.entry.needs_critic else self._estimate(batch, valid)
        batch.refuse_beyond_float32(advantages, valid)
        masks = [self._loss_mask(*row, step) for row in zip(samples, valid.tolist(), strict=True)]
        rows = iter(zip(samples, masks, batch.per_token(advantages), strict=True))
        return [self._trained(group, list(islice(rows, len(group.samples)))) for group in groups]

    def _by_token(self) -> bool:
        """How rewards are laid out: discounts go by tokens, and so does a KL unless only sums count."""
        in_runs = self.entry.sums or (self.entry.per_sample and not self.config.reward_kl_coef)
        return not in_runs or self._options.get("gamma", 1.0) != 1.0

    def _estimate(self, batch: RewardTensors, valid: Tensor) -> Tensor:
        entry, rewards = self.entry, getattr(batch, self.entry.rewards)
        inputs: dict[str, Any] = {name: batch.own_input(name, read) for name, read in entry.inputs.items()}
        inputs |= {name: getattr(batch, name) for name in LAID_OUT if name in entry.keywords}
        if "weights" in entry.keywords:
            inputs["weights"] = {name: self.facts.weight(name) for name in rewards}
        return entry(rewards, batch.tokens, batch.group_ids, valid=valid, **self._options, **inputs)

    def _readable(self, sample: Sample) -> bool:
        """Whether the sample has everything that the estimator reads of it."""
        verdict = sample.verdict
        if verdict.status is not RewardStatus.OK:
            return False
        if self.entry.needs_all_rewards and (self.entry.rewards != TOTAL or self.facts.process):
            # What one adapter did not say must not count as 0 beside the others
            return {result.status for result in verdict.results} == {RewardStatus.OK}
        return True

    def _loss_mask(self, sample: Sample, is_valid: bool, step: int) -> np.ndarray | None:
        """(T,): the tokens that are trained on; None: the sample is not."""
        completion = sample.completion
        # One that failed before its first token has none, although its reward may be filled in
        if not is_valid or not len(completion) or (self.config.mask_truncated and completion.truncated):
            return None
        if self.config.max_token_staleness is None:
            return repeated(np.array(True), len(completion))
        return step - completion.versions <= self.config.max_token_staleness

    def _trained(self, group: Group, rows: Sequence[tuple[Sample, np.ndarray | None, np.ndarray]]) -> Group:
        """Return the group with its advantages; a row is (sample, loss mask, advantages), (T,) each."""
        tokens = sum(int(np.count_nonzero(mask)) for _, mask, _ in rows if mask is not None)
        samples = []
        for sample, mask, values in rows:
            if mask is not None and not mask.all():
                values = np.where(mask, values, np.float32(0))
            found = None if mask is None else values
            is_apart = self.entry.needs_critic and mask is not None and len(sample.sequences) > 1
            times = token_times(sample) if is_apart else None
            trained = replace(sample, advantages=found, loss_mask=mask, group_tokens=tokens, times=times)
            samples.append(trained)
        return replace(group, samples=tuple(samples))
