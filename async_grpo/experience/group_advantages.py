"""Turn the verdicts of a group into advantages, and decide which tokens are trained on.

A failed reward never becomes a zero silently. `--on-reward-failure` sets for each adapter what happens. By default, the
sample is left out of the training. `group_mean` gives the sample the mean reward of its group. `refill` replaces the
group by a group of another prompt. The fourth value, `constant`, is handled in `rewards/combine.py`.

`RewardTensors` applies penalties and weights to the rewards, and lays them out for an estimator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_grpo.algorithm.advantages import COMPONENTS, TOTAL
from async_grpo.algorithm.running_mean import running_baselines
from async_grpo.algorithm.teacher_advantages import teacher_advantages
from async_grpo.experience.config import NO_FACTS, BatchConfig, RunFacts
from async_grpo.experience.reward_tensors import REWARD_TENSOR_INPUTS, RewardTensors, repeated, token_times
from async_grpo.experience.running_means import RunningMeans, numbered
from async_grpo.types import Group, RewardStatus, Sample, Verdict


class GroupAdvantages:
    """Turns the verdicts of groups into advantages, according to the run's options.

    A truncated completion that is left out of the loss still counts in the statistics of its group, such as the mean
    reward. A group that `--zero-variance filter` leaves out counts neither in statistics nor in the denominator of the
    loss.
    """

    def __init__(self, config: BatchConfig, facts: RunFacts = NO_FACTS) -> None:
        self.config = config
        self.facts = facts
        self.estimator = config.estimator
        self._options = config.estimator_settings
        # The means of earlier rewards; None if the estimator does not compare with them
        self.running_means: RunningMeans | None = None
        if self.estimator.has_running_mean:
            self.running_means = RunningMeans(config.running_mean_column)
        # Whether groups are processed one by one, without the other groups of their step. This includes runs with a
        # critic: for these, only the rewards of tokens are computed here, and the trainer computes the advantages over
        # the whole step
        self.group_local = self.estimator.group_local or self.estimator.needs_critic

    def memory(self, step: int) -> dict[str, float]:
        """Return the running means as they were before a step, for a checkpoint; {} if the estimator uses none."""
        return {} if self.running_means is None else self.running_means.state(step)

    def restore(self, memory: Mapping[str, float]) -> None:
        """Continue with the running means of a checkpoint."""
        if self.running_means is not None:
            self.running_means.restore(memory)

    def weights_live(self, version: int) -> None:
        """Forget the earlier values of running means that only checkpoints of versions before `version` would need.

        No such checkpoint will be saved any more, because the engines use the weights of `version` now.
        """
        if self.running_means is not None:
            self.running_means.forget_before(version)

    def mean_reward(self, group: Group) -> float | None:
        """Return the mean reward of the group, or None if it has fewer rewards than `--min-valid-samples`."""
        rewards = group.rewards
        if len(rewards) < self.config.min_rewards:
            return None
        return sum(rewards) / len(rewards)

    def wants_refill(self, group: Group) -> bool:
        """Return whether a reward with `--on-reward-failure refill` failed in the group."""
        verdicts = [sample.verdict for sample in group.samples]
        if group.baseline is not None:
            verdicts.append(group.baseline)
        return any("refill" in self._failure_policies(verdict) for verdict in verdicts)

    def with_group_mean(self, group: Group) -> Group:
        """Return the group, with its mean reward as the reward of samples whose rewards failed.

        Only a sample whose failed rewards all have `--on-reward-failure group_mean` gets the mean reward.
        """
        mean_reward = self.mean_reward(group)
        if mean_reward is None:
            return group
        samples = []
        for sample in group.samples:
            verdict = sample.verdict
            if verdict.status.is_lost and self._failure_policies(verdict) == {"group_mean"}:
                verdict = Verdict(RewardStatus.OK, mean_reward, verdict.results, filled=True)
                sample = replace(sample, verdict=verdict)
            samples.append(sample)
        return replace(group, samples=tuple(samples))

    def _failure_policies(self, verdict: Verdict) -> set[str | None]:
        """Return the values of `--on-reward-failure` for the adapters that failed."""
        policies = self.facts.failure_policies
        return {policies.get(result.adapter) for result in verdict.results if result.status.is_lost}

    def has_signal(self, group: Group) -> bool:
        """Return whether the estimator may give the group advantages other than 0.

        Most estimators compare the rewards within the group, so the rewards must differ. With a greedy completion, at
        least one reward must differ from the reward of the greedy completion. If rewards are compared with the whole
        batch, with a critic or with a running mean, one reward is enough.
        """
        if self.estimator.ignores_rewards:
            return True
        # Estimators ignore completions without tokens
        verdicts = [
            sample.verdict for sample in group.samples if len(sample.completion) and self._is_readable(sample)
        ]
        if self.estimator.compares_with_batch:
            return bool(verdicts)
        if self.estimator.compares_with_greedy:
            if group.baseline is None or group.baseline.reward is None:
                return False
            return any(verdict.reward != group.baseline.reward for verdict in verdicts)
        return len({self._comparison_key(verdict) for verdict in verdicts}) > 1

    def num_without_signal(self, groups: Sequence[Group]) -> int:
        """Return the number of groups without signal."""
        return sum(not self.has_signal(group) for group in groups)

    def _comparison_key(self, verdict: Verdict) -> Any:
        """Return a value that differs between two verdicts if the estimator distinguishes them.

        For an estimator that reads several rewards or step rewards, samples with equal totals may still differ.
        """
        if self.estimator.rewards == COMPONENTS or self.facts.process_rewards:
            return tuple((result.adapter, result.reward, result.steps) for result in verdict.results)
        return verdict.reward

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        """Return the groups with advantages on all samples that `step` trains on. All other samples have None.

        Args:
            groups: The groups of a minibatch. A single group is enough if the estimator compares only within a group.
            step: The last step of the cycle that trains the groups (`PassPlan.last_step`); with one pass, the step that
                trains them. Its number equals the policy version that it trains.

        Raises:
            RunFailed: An advantage exceeds float32, or an input that the estimator declares cannot be read.
        """
        samples = [sample for group in groups for sample in group.samples]
        batch = RewardTensors(self.config, self.facts, groups, self._by_token())
        valid = self._valid_samples(groups, batch)
        # With a critic, the field `advantages` has the rewards of the tokens, and the trainer computes the advantages
        advantages = batch.total if self.estimator.needs_critic else self._estimate(batch, samples, valid)
        batch.refuse_beyond_float32(advantages, valid)
        if self.running_means is not None:
            self._update_running_means(self.running_means, samples, batch, valid, step)

        trained_samples = []
        for sample, is_valid, token_advantages in zip(
            samples, valid.tolist(), batch.per_token(advantages), strict=True
        ):
            loss_mask = self._loss_mask(sample, is_valid, step)
            if loss_mask is not None and sample.teacher_logprobs is not None:
                token_advantages, loss_mask = self._with_teacher(sample, loss_mask, token_advantages)
            trained_samples.append(self._with_advantages(sample, loss_mask, token_advantages))

        trained_groups = []
        first = 0
        for group in groups:
            beyond = first + len(group.samples)
            trained_groups.append(_with_group_tokens(group, trained_samples[first:beyond]))
            first = beyond
        return trained_groups

    def _by_token(self) -> bool:
        """Return whether the estimator needs one column of the reward tensors for each token.

        Otherwise, a column stands for several consecutive tokens, the last of which has a reward (`RewardTensors`).
        """
        # With a discount, the advantage of a token depends on its distance to the rewards, in tokens
        if self._options.get("gamma", 1.0) != 1.0:
            return True
        # An estimator with `sums` reads only the sum of a sample's rewards, not the tokens at which they are
        if self.estimator.sums:
            return False
        # With a KL penalty, each token has its own reward
        has_kl = bool(self.config.reward_kl_coef)
        # Without `flat_between_rewards`, tokens between two rewards may get different advantages
        return has_kl or not self.estimator.flat_between_rewards

    def _valid_samples(self, groups: Sequence[Group], batch: RewardTensors) -> Tensor:
        """Return a mask (B,) of the samples that count in the estimator's statistics, for the B samples of all groups.

        Samples without the needed rewards, in filtered groups, or in groups with too few rewards do not count.
        """
        is_kept_group = []
        for group in groups:
            has_enough_rewards = (
                len(group.rewards) >= self.config.min_rewards or self.estimator.ignores_rewards
            )
            is_filtered = self.config.zero_variance == "filter" and not self.has_signal(group)
            is_kept_group.append(has_enough_rewards and not is_filtered)
        is_readable = [self._is_readable(sample) for group in groups for sample in group.samples]
        valid = torch.tensor(is_readable) & torch.tensor(is_kept_group)[batch.group_ids]
        if self.estimator.compares_with_greedy:
            valid = valid & ~batch.baselines.isnan()
        return valid

    def _estimate(self, batch: RewardTensors, samples: Sequence[Sample], valid: Tensor) -> Tensor:
        """Call the estimator, and return the advantages (B, K). The K columns are those of `RewardTensors`.

        `estimator.rewards` names the attribute of `batch` that the estimator gets as its rewards. In addition, it gets

        - the inputs that it declares in `estimator.inputs`, read from each sample,
        - each attribute of `batch` in REWARD_TENSOR_INPUTS (baselines, masks) for which it has a keyword,
        - the running means and their keys, if it compares with them,
        - the weights of the rewards, if it has the keyword `weights`.
        """
        rewards = getattr(batch, self.estimator.rewards)
        inputs: dict[str, Any] = {}
        for name, read in self.estimator.inputs.items():
            inputs[name] = batch.declared_input(name, read)
        for name in REWARD_TENSOR_INPUTS:
            if name in self.estimator.keywords:
                inputs[name] = getattr(batch, name)
        if self.running_means is not None:
            keys = [self.running_means.key(sample.prompt) for sample in samples]
            inputs["keys"] = torch.tensor(numbered(keys))
            means = [self.running_means.mean(key) for key in keys]
            inputs["means"] = torch.tensor(means, dtype=torch.float64)
        if "weights" in self.estimator.keywords:
            inputs["weights"] = {name: self.facts.weight(name) for name in rewards}
        return self.estimator(rewards, batch.tokens, batch.group_ids, valid=valid, **self._options, **inputs)

    def _update_running_means(
        self,
        running_means: RunningMeans,
        samples: Sequence[Sample],
        batch: RewardTensors,
        valid: Tensor,
        step: int,
    ) -> None:
        """Change the running means by the scores of a step, in the order of its samples."""
        keys = [running_means.key(sample.prompt) for sample in samples]
        key_numbers = numbered(keys)
        has_tokens = (batch.tokens > 0).any(dim=1)
        decay = self._options.get("decay", self.estimator.options["decay"])
        _, latest_means = running_baselines(
            scores=batch.total.sum(dim=1).tolist(),
            is_counted=(valid & has_tokens).tolist(),
            keys=key_numbers,
            means=[running_means.mean(key) for key in keys],
            decay=decay,
        )
        key_of_number = dict(zip(key_numbers, keys, strict=True))
        running_means.update(step, {key_of_number[number]: mean for number, mean in latest_means.items()})

    def _is_readable(self, sample: Sample) -> bool:
        """Return whether the sample has every reward that the estimator reads."""
        verdict = sample.verdict
        if self.estimator.ignores_rewards:
            # A failed trajectory may have ended at any point, so it is not trained on, even if rewards are ignored
            return not sample.completion.failure
        if verdict.status is not RewardStatus.OK:
            return False
        reads_rewards_separately = self.estimator.rewards != TOTAL or bool(self.facts.process_rewards)
        if self.estimator.needs_all_rewards and reads_rewards_separately:
            # A sample that lacks any of its rewards is left out. Otherwise, the missing reward would count as 0
            return {result.status for result in verdict.results} == {RewardStatus.OK}
        return True

    def _loss_mask(self, sample: Sample, is_valid: bool, step: int) -> np.ndarray | None:
        """Return a mask (T,) of the tokens that are trained on, or None if the sample is not trained on."""
        completion = sample.completion
        if not is_valid:
            return None
        if len(completion) == 0:
            # The sample failed before its first token, so there is nothing to train on. It may still count as valid,
            # because `--on-reward-failure` can replace the reward of a failed sample by a number
            return None
        if self.config.mask_truncated and completion.truncated:
            return None
        if self.config.max_token_staleness is None:
            # A view of a single value, which takes no memory
            return repeated(np.array(True), len(completion))
        return step - completion.versions <= self.config.max_token_staleness

    def _with_teacher(
        self, sample: Sample, loss_mask: np.ndarray, advantages: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Add the teacher's advantages (see `teacher_advantages`) to those of the rewards.

        A token for which the teacher gave no log-prob is left out of the loss. With an advantage of 0, the token would
        count as one on which teacher and policy agree.

        Returns:
            The advantages (T,) float32, and the mask (T,) without these tokens, or None if no token is left.
        """
        assert sample.teacher_logprobs is not None
        further_advantages, is_covered = teacher_advantages(
            sample.teacher_logprobs, sample.completion.logprobs, self.config.teacher_coef
        )
        if self.config.teacher_top_k:
            # With `teacher_top_k`, the trainer adds a KL divergence to the loss instead of these advantages
            further_advantages = np.zeros_like(further_advantages)
        loss_mask = loss_mask & is_covered
        summed = (advantages + further_advantages).astype(np.float32)
        return summed, loss_mask if loss_mask.any() else None

    def _with_advantages(
        self, sample: Sample, loss_mask: np.ndarray | None, advantages: np.ndarray
    ) -> Sample:
        """Return the sample with its mask (T,) and its advantages (T,), which are 0 where the mask is False.

        If `loss_mask` is None, the sample is not trained on, and both fields are None.
        """
        if loss_mask is None:
            return replace(sample, advantages=None, loss_mask=None, times=None)
        if not loss_mask.all():
            advantages = np.where(loss_mask, advantages, np.float32(0))
        # A critic's returns are sums over the whole trajectory, but the sequences of a trajectory may be in different
        # micro-batches. `times` says in which order the tokens of all sequences were sampled
        needs_times = self.estimator.needs_critic and len(sample.sequences) > 1
        times = token_times(sample) if needs_times else None
        return replace(sample, advantages=advantages, loss_mask=loss_mask, times=times)


def _with_group_tokens(group: Group, samples: Sequence[Sample]) -> Group:
    """Return the group with these samples, and set their `group_tokens` to the number of tokens trained in the group."""
    num_tokens = 0
    for sample in samples:
        if sample.loss_mask is not None:
            num_tokens += int(np.count_nonzero(sample.loss_mask))
    samples = [replace(sample, group_tokens=num_tokens) for sample in samples]
    return replace(group, samples=tuple(samples))
