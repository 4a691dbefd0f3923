"""Verdicts -> advantages: what each sample of a group is worth, and which of its tokens are trained on.

The verdicts themselves stay as they are, and are logged; what changes a reward on its way stands in `RewardTensors`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_grpo.algorithm.advantages import COMPONENTS, SOURCES, TOTAL
from async_grpo.algorithm.kl import kl_penalty
from async_grpo.errors import RunFailed
from async_grpo.experience.config import NO_FACTS, OUTCOME, OVERLONG, BatchConfig, RunFacts
from async_grpo.experience.groups import num_scored
from async_grpo.types import Completion, Group, RewardStatus, Sample, Verdict


class RewardTensors:
    """Groups as padded tensors: rows are samples, columns tokens, (B, T) float64.

    With `one_column` a single column stands for all tokens of its row: enough where each sample has one reward.
    (4,096 samples of 8,192 tokens would be 268 MB of zeros for every tensor.)
    """

    def __init__(
        self, config: BatchConfig, facts: RunFacts, groups: Sequence[Group], one_column: bool
    ) -> None:
        self._config, self.facts = config, facts
        self._samples = [sample for group in groups for sample in group.samples]
        lengths = [len(sample.completion) for sample in self._samples]
        self._lengths = torch.tensor(lengths)[:, None]
        self._width = 1 if one_column else max(lengths)
        # (B, T): how many tokens each entry stands for
        self.tokens = self._lengths if one_column else torch.arange(self._width) < self._lengths
        sizes = torch.tensor([len(group.samples) for group in groups])
        self.group_ids = torch.arange(len(groups)).repeat_interleave(sizes)
        self._overlong = _numbers(config.overlong_cost(n, facts.max_completion_tokens) for n in lengths)
        # (B,): the reward of the greedy completion of each sample's prompt; NaN where it has none
        greedy = [group.baseline.reward if group.baseline else None for group in groups]
        self.baselines = _numbers(greedy, missing=math.nan)[self.group_ids]

    @property
    def rewards(self) -> Tensor:
        """Everything that pays, on the token that it pays for; an outcome less the length penalty on the last one."""
        paid = self._outcome()[0] - self._kl()
        for name in self.facts.process:
            paid += self.facts.weight(name) * self._steps(name)[0]
        return paid

    @property
    def sources(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(rewards, their tokens) of each process reward, and of the best outcome if there is any."""
        sources = {name: self._steps(name) for name in self.facts.process}
        outcome, judged = self._outcome()
        return sources | ({OUTCOME: (outcome, judged)} if judged.any() else {})

    @property
    def step_mask(self) -> Tensor:
        """Where a reward stands."""
        places = [self._steps(name)[1] for name in self.facts.process]
        return torch.stack([*places, self._outcome()[1]]).any(dim=0)

    @property
    def components(self) -> dict[str, Tensor]:
        """The reward of each adapter on the last token, apart; the length penalty is a component of its own."""
        said = [{r.adapter: r.reward for r in s.verdict.results} for s in self._samples]
        names = sorted({name for rewards in said for name in rewards})
        components = {name: _numbers(rewards.get(name) for rewards in said) for name in names}
        if self._config.overlong_buffer:
            components[OVERLONG] = -self._overlong
        return {name: self._on_last(rewards) for name, rewards in components.items()}

    def own_input(self, name: str, read: Callable[[Sample], Any]) -> Tensor:
        """What an estimator asks of every sample, (B,) or per token (B, T); RunFailed: it has none, or another shape."""
        try:
            values = [torch.as_tensor(read(sample), dtype=torch.float64) for sample in self._samples]
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise RunFailed(f"the estimator's input {name} cannot be read: {why}") from error
        if all(value.dim() == 0 for value in values):
            return torch.stack(values)
        for value, length in zip(values, self._lengths[:, 0].tolist(), strict=True):
            if value.shape != (length,) or self._width < length:
                raise RunFailed(
                    f"the estimator's input {name} has the shape {tuple(value.shape)} for a completion of {length} tokens: "
                    "give every sample a number, or (unless the estimator is per_sample) one per token"
                )
        return pad_sequence(values, batch_first=True)

    def _outcome(self) -> tuple[Tensor, Tensor]:
        """(the best reward that is no process reward, its place); who abstained has not said 0."""
        found = [self._best_outcome(sample) for sample in self._samples]
        judged = [reward is not None or bool(self._config.overlong_buffer) for reward in found]
        return self._on_last(_numbers(found) - self._overlong), self._on_last(torch.tensor(judged))

    def _best_outcome(self, sample: Sample) -> float | None:
        if not self.facts.process:
            return sample.verdict.reward
        others = [r for r in sample.verdict.results if r.adapter not in self.facts.process]
        return max((r.reward for r in others if r.reward is not None), default=None)

    def _steps(self, adapter: str) -> tuple[Tensor, Tensor]:
        """(rewards, places) of a process reward."""
        rewards = torch.zeros(len(self._samples), self._width, dtype=torch.float64)
        places = torch.zeros(rewards.shape, dtype=torch.bool)
        for row, sample in enumerate(self._samples):
            for result in sample.verdict.results:
                if result.adapter == adapter and result.steps:
                    tokens, paid = zip(*result.steps, strict=True)
                    rewards[row].index_add_(0, torch.tensor(tokens), torch.tensor(paid, dtype=torch.float64))
                    places[row, list(tokens)] = True
        return rewards, places

    def _kl(self) -> Tensor:
        config, rows = self._config, []
        for sample in self._samples if config.reward_kl_coef else ():
            own, reference = map(torch.tensor, (sample.completion.logprobs, sample.ref_logprobs))
            rows.append(kl_penalty(own.double(), reference.double(), config.kl_kind, clamp=config.kl_clamp))
        return config.reward_kl_coef * pad_sequence(rows, batch_first=True) if rows else torch.zeros(1)

    def _on_last(self, values: Tensor) -> Tensor:
        """(B,) -> (B, T): on the last token of each sample."""
        placed = values.new_zeros(len(values), self._width)
        return placed.scatter(1, (self._lengths - 1).clamp(max=self._width - 1), values[:, None])


def _numbers(values: Iterable[float | None], missing: float = 0.0) -> Tensor:
    """(B,), `missing` for None."""
    return torch.tensor([missing if value is None else value for value in values], dtype=torch.float64)


# How the rewards reach an estimator (its entry's `rewards`), and the inputs that it gets if its function has a keyword
# of that name
REWARDS: dict[str, Callable[[RewardTensors], Any]] = {
    TOTAL: lambda batch: batch.rewards,
    COMPONENTS: lambda batch: batch.components,
    SOURCES: lambda batch: {name: rewards for name, (rewards, _) in batch.sources.items()},
}
INPUTS: dict[str, Callable[[RewardTensors, Any], Any]] = {
    "baselines": lambda batch, rewards: batch.baselines,
    "step_mask": lambda batch, rewards: batch.step_mask,
    "masks": lambda batch, rewards: {name: at for name, (_, at) in batch.sources.items()},
    "weights": lambda batch, rewards: {name: batch.facts.weight(name) for name in rewards},
}


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

    def has_signal(self, group: Group) -> bool:
        """Whether the estimator finds a difference in the group, or to the greedy completion."""
        readable = [sample.verdict for sample in group.samples if self._readable(sample)]
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
        rewards_on_tokens = self.facts.process or self.config.reward_kl_coef
        discounts = self._options.get("gamma", 1.0) != 1.0
        one_column = self.entry.per_sample and not (rewards_on_tokens or discounts)
        batch = RewardTensors(self.config, self.facts, groups, one_column)
        # What is left out is left out of every statistic as well: it must not dilute the others' scale
        enough = [num_scored(group) >= self.config.min_valid_samples for group in groups]
        teaches = [self.config.zero_variance != "filter" or self.has_signal(group) for group in groups]
        kept = torch.tensor(enough) & torch.tensor(teaches)
        valid = torch.tensor([self._readable(sample) for sample in samples]) & kept[batch.group_ids]
        if self.entry.compares_with_greedy:
            valid &= ~batch.baselines.isnan()
        advantages = batch.rewards if self.entry.needs_critic else self._estimate(batch, valid)
        taught = zip(samples, valid.tolist(), strict=True)
        masks = [
            self._loss_mask(sample.completion, step) if is_valid else None for sample, is_valid in taught
        ]
        rows = iter(zip(samples, masks, advantages.numpy().astype(np.float32), strict=True))
        return [self._trained(group, list(islice(rows, len(group.samples)))) for group in groups]

    def _estimate(self, batch: RewardTensors, valid: Tensor) -> Tensor:
        entry, rewards = self.entry, REWARDS[self.entry.rewards](batch)
        inputs = {name: batch.own_input(name, read) for name, read in entry.inputs.items()}
        inputs |= {name: INPUTS[name](batch, rewards) for name in entry.keywords if name in INPUTS}
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

    def _loss_mask(self, completion: Completion, step: int) -> np.ndarray | None:
        """(T,): the tokens that are trained on; None: the sample is not."""
        if self.config.mask_truncated and completion.truncated:
            return None
        if self.config.max_token_staleness is None:
            return np.broadcast_to(True, len(completion))
        return step - completion.versions <= self.config.max_token_staleness

    @staticmethod
    def _trained(group: Group, rows: Sequence[tuple[Sample, np.ndarray | None, np.ndarray]]) -> Group:
        """The group with its advantages; a row is (sample, loss mask, advantages (T,), or (1,) for all its tokens)."""
        tokens = sum(int(np.count_nonzero(mask)) for _, mask, _ in rows if mask is not None)
        samples = []
        for sample, mask, values in rows:
            if mask is not None:
                values = np.broadcast_to(values[: len(mask)], len(mask))
                values = values if mask.all() else np.where(mask, values, np.float32(0))
                sample = replace(sample, advantages=values, loss_mask=mask)
            samples.append(replace(sample, group_tokens=tokens))
        return replace(group, samples=tuple(samples))
