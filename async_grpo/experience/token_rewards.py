"""Verdicts as padded tensors: what each token of each sample is paid, for the estimators to read."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from async_grpo.algorithm.estimator import COMPONENTS, SOURCES, TOTAL
from async_grpo.algorithm.kl import kl_penalty
from async_grpo.errors import RunFailed
from async_grpo.experience.config import OUTCOME, OVERLONG, BatchConfig, RunFacts
from async_grpo.types import Group, RewardStatus, Sample


class RewardTensors:
    """Groups as padded tensors: rows are samples, columns tokens, (B, T) float64.

    With `one_column` there is a single column, which stands for all tokens of its row: enough where each sample has one
    reward, on its last token. (4,096 samples of 8,192 tokens would be 268 MB of zeros for every tensor.) The length
    penalty is taken off the last token's reward, a KL to the reference (`--kl-in-reward`) off every token's.
    """

    def __init__(
        self,
        config: BatchConfig,
        facts: RunFacts,
        groups: Sequence[Group],
        samples: Sequence[Sample],
        *,
        one_column: bool = False,
    ) -> None:
        self._config, self._facts, self._groups, self._samples = config, facts, groups, samples
        self._lengths = [len(sample.completion) for sample in samples]
        lengths = torch.tensor(self._lengths)
        self._shape = (len(samples), 1 if one_column else max(self._lengths))
        # (B, T): how many tokens each entry stands for
        self.tokens = lengths[:, None] if one_column else torch.arange(self._shape[1]) < lengths[:, None]
        self.group_ids = torch.repeat_interleave(
            torch.arange(len(groups)), torch.tensor([len(group.samples) for group in groups])
        )

    @property
    def has_baseline(self) -> Tensor:
        """(B,): the greedy completion of the sample's prompt has a reward."""
        found = [g.baseline is not None and g.baseline.status is RewardStatus.OK for g in self._groups]
        return torch.tensor(found)[self.group_ids]

    @property
    def rewards(self) -> Tensor:
        """Everything that pays, on the token that it pays for; an outcome stands on the last one."""
        steps = [self._steps(name) * self._facts.weight(name) for name in self._process]
        return sum(steps, start=self._outcomes()) - self._kl()

    @property
    def step_mask(self) -> Tensor:
        """Where a reward stands."""
        places = [self._places(name) for name in self._process]
        return torch.stack([*places, self._outcome_places()]).any(dim=0)

    @property
    def sources(self) -> dict[str, Tensor]:
        """Each process reward, and the best outcome (if any sample has one), apart."""
        sources = {name: self._steps(name) for name in self._process}
        return sources | ({OUTCOME: self._outcomes()} if self._outcome_places().any() else {})

    @property
    def source_masks(self) -> dict[str, Tensor]:
        """The tokens that the rewards of each source stand on."""
        masks = {name: self._places(name) for name in self._process}
        return masks | ({OUTCOME: places} if (places := self._outcome_places()).any() else {})

    @property
    def components(self) -> dict[str, Tensor]:
        """The reward of each adapter on the last token, apart; the length penalty is a component of its own."""
        names = sorted({result.adapter for sample in self._samples for result in sample.verdict.results})
        components = {
            name: self._on_last([self._component(sample, name) for sample in self._samples]) for name in names
        }
        if self._config.overlong_buffer:
            components[OVERLONG] = self._on_last([-self._overlong(n) for n in self._lengths])
        return components

    @property
    def baselines(self) -> Tensor:
        """(B,): the reward of the greedy completion of each sample's prompt, 0 where it is missing."""
        rewards = [
            group.baseline.reward if group.baseline is not None and group.baseline.reward is not None else 0.0
            for group in self._groups
        ]
        return torch.tensor(rewards, dtype=torch.float64)[self.group_ids]

    def weights(self, names: Iterable[str]) -> dict[str, float]:
        """The user's weight of each name, 1 where there is none."""
        return {name: self._facts.weight(name) for name in names}

    def own_input(self, name: str, read: Callable[[Sample], Any]) -> Tensor:
        """What an estimator asks of every sample: (B,) for a number each, (B, T) for a number per token.

        Raises:
            RunFailed: it cannot be read of a sample, or is of another shape; says which.
        """
        try:
            values = [torch.as_tensor(read(sample), dtype=torch.float64) for sample in self._samples]
        except Exception as error:
            raise RunFailed(
                f"the estimator's input {name} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if all(value.dim() == 0 for value in values):
            return torch.stack(values)
        placed = torch.zeros(self._shape, dtype=torch.float64)
        for row, (value, length) in enumerate(zip(values, self._lengths, strict=True)):
            if value.shape != (length,) or self._shape[1] < length:
                raise RunFailed(
                    f"the estimator's input {name} has the shape {tuple(value.shape)} for a completion of {length} tokens: "
                    "give every sample a number, or (unless the estimator is per_sample) one per token"
                )
            placed[row, :length] = value
        return placed

    def _overlong(self, num_tokens: int) -> float:
        return self._config.overlong_cost(num_tokens, self._facts.max_completion_tokens)

    @property
    def _process(self) -> tuple[str, ...]:
        return self._facts.process

    def _outcomes(self) -> Tensor:
        scores = [
            (self._outcome(s) or 0.0) - self._overlong(n)
            for s, n in zip(self._samples, self._lengths, strict=True)
        ]
        return self._on_last(scores)

    def _outcome_places(self) -> Tensor:
        """The last token of each sample that has an outcome: who abstained has said nothing, and no 0."""
        judged = [self._outcome(sample) is not None for sample in self._samples]
        return self._on_last([float(found or bool(self._config.overlong_buffer)) for found in judged]).bool()

    def _outcome(self, sample: Sample) -> float | None:
        if not self._process:
            return sample.verdict.reward
        others = [
            r.reward
            for r in sample.verdict.results
            if r.adapter not in self._process and r.reward is not None
        ]
        return max(others, default=None)

    def _component(self, sample: Sample, name: str) -> float:
        return next(
            (r.reward for r in sample.verdict.results if r.adapter == name and r.reward is not None), 0.0
        )

    def _steps(self, adapter: str) -> Tensor:
        rewards = torch.zeros(self._shape, dtype=torch.float64)
        for row, steps in enumerate(self._steps_of(adapter)):
            for token, reward in steps:
                rewards[row, token] += reward
        return rewards

    def _places(self, adapter: str) -> Tensor:
        places = torch.zeros(self._shape, dtype=torch.bool)
        for row, steps in enumerate(self._steps_of(adapter)):
            places[row, [token for token, _ in steps]] = True
        return places

    def _steps_of(self, adapter: str) -> list[tuple[tuple[int, float], ...]]:
        return [
            next((result.steps for result in sample.verdict.results if result.adapter == adapter), ())
            for sample in self._samples
        ]

    def _kl(self) -> Tensor:
        kl = torch.zeros(self._shape, dtype=torch.float64)
        if self._config.reward_kl_coef:
            for row, (sample, length) in enumerate(zip(self._samples, self._lengths, strict=True)):
                behaviour = torch.tensor(sample.completion.logprobs, dtype=torch.float64)
                reference = torch.tensor(sample.ref_logprobs, dtype=torch.float64)
                kl[row, :length] = kl_penalty(
                    behaviour, reference, self._config.kl_kind, clamp=self._config.kl_clamp
                )
        return self._config.reward_kl_coef * kl

    def _on_last(self, scores: Sequence[float]) -> Tensor:
        values = torch.tensor(scores, dtype=torch.float64)
        if self._shape[1] == 1:
            return values[:, None]
        placed = torch.zeros(self._shape, dtype=torch.float64)
        placed[torch.arange(len(scores)), torch.tensor(self._lengths) - 1] = values
        return placed


# How the rewards reach an estimator (its entry's `rewards`), and the inputs that it gets if its function has a keyword
# of that name
REWARDS: dict[str, Callable[[RewardTensors], Any]] = {
    TOTAL: lambda batch: batch.rewards,
    COMPONENTS: lambda batch: batch.components,
    SOURCES: lambda batch: batch.sources,
}
INPUTS: dict[str, Callable[[RewardTensors, Any], Any]] = {
    "baselines": lambda batch, rewards: batch.baselines,
    "step_mask": lambda batch, rewards: batch.step_mask,
    "masks": lambda batch, rewards: batch.source_masks,
    "weights": lambda batch, rewards: batch.weights(rewards),
}
