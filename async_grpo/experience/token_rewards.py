"""Verdicts as padded tensors: what each token of each sample is paid, for the estimators to read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from async_grpo.algorithm.estimator import COMPONENTS, SOURCES, TOTAL
from async_grpo.algorithm.kl import kl_penalty
from async_grpo.errors import RunFailed
from async_grpo.types import Group, RewardStatus, Sample

OVERLONG = "overlong"  # the name of the length penalty among COMPONENTS
OUTCOME = "outcome"  # the name of the best outcome reward among SOURCES


@dataclass(frozen=True)
class TokenRewardConfig:
    """What a run pays for.

    Args:
        process_adapters: the rewards that come step by step.
        reward_weights: of components, of sources and of summed process rewards; 1 where not named.
        overlong_buffer, overlong_penalty: the last so many tokens before `max_completion_tokens` cost up to that much
            (Yu et al. 2025, "DAPO", eq. 13); 0 tokens: nothing.
        kl_coef, kl_kind, kl_clamp: of a KL to the reference that is taken off every token's reward; 0: none.
    """

    process_adapters: tuple[str, ...] = ()
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    max_completion_tokens: int = 0
    kl_coef: float = 0.0
    kl_kind: str = "k1"
    kl_clamp: float | None = None

    def weight(self, name: str) -> float:
        return self.reward_weights.get(name, 1.0)

    def overlong(self, num_tokens: int) -> float:
        """What a completion of that many tokens loses by its length: 0 up to the buffer, then linearly more.

        >>> payment = TokenRewardConfig(overlong_buffer=20, overlong_penalty=1.0, max_completion_tokens=100)
        >>> payment.overlong(80), payment.overlong(90), payment.overlong(100)
        (0.0, 0.5, 1.0)
        """
        if not self.overlong_buffer:
            return 0.0
        over = num_tokens - (self.max_completion_tokens - self.overlong_buffer)
        return self.overlong_penalty * min(max(over, 0) / self.overlong_buffer, 1.0)


class RewardTensors:
    """Groups as padded tensors: rows are samples, columns tokens, (B, T) float64.

    With `one_column` there is a single column, which stands for all tokens of its row: enough where each sample has one
    reward, on its last token. (4,096 samples of 8,192 tokens would be 268 MB of zeros for every tensor.)
    """

    def __init__(
        self,
        payment: TokenRewardConfig,
        groups: Sequence[Group],
        samples: Sequence[Sample],
        *,
        one_column: bool = False,
    ) -> None:
        self._payment, self._groups, self._samples = payment, groups, samples
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
        steps = [self._steps(name) * self._payment.weight(name) for name in self._process]
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
        if self._payment.overlong_buffer:
            components[OVERLONG] = self._on_last([-self._payment.overlong(n) for n in self._lengths])
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
        return {name: self._payment.weight(name) for name in names}

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

    @property
    def _process(self) -> tuple[str, ...]:
        return self._payment.process_adapters

    def _outcomes(self) -> Tensor:
        scores = [
            (self._outcome(s) or 0.0) - self._payment.overlong(n)
            for s, n in zip(self._samples, self._lengths, strict=True)
        ]
        return self._on_last(scores)

    def _outcome_places(self) -> Tensor:
        """The last token of each sample that has an outcome: who abstained has said nothing, and no 0."""
        judged = [self._outcome(sample) is not None for sample in self._samples]
        return self._on_last([float(found or bool(self._payment.overlong_buffer)) for found in judged]).bool()

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
        if self._payment.kl_coef:
            for row, (sample, length) in enumerate(zip(self._samples, self._lengths, strict=True)):
                behaviour = torch.tensor(sample.completion.logprobs, dtype=torch.float64)
                reference = torch.tensor(sample.ref_logprobs, dtype=torch.float64)
                kl[row, :length] = kl_penalty(
                    behaviour, reference, self._payment.kl_kind, clamp=self._payment.kl_clamp
                )
        return self._payment.kl_coef * kl

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
