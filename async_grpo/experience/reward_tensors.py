"""Rewards as tensors for an estimator: who said what, on which token, as finely as the estimator looks at it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_grpo.algorithm.kl import kl_penalty
from async_grpo.errors import RunFailed
from async_grpo.experience.config import OUTCOME, OVERLONG, BatchConfig, RunFacts
from async_grpo.types import Group, Sample

LAID_OUT = ("baselines", "step_mask", "masks")  # inputs of an estimator: properties of these names


class RewardTensors:
    """Groups as padded tensors: rows are samples, columns tokens or the runs of them up to each reward, (B, K) float64.

    Columns are in time. The tokens of a completion stand by sequence, which is another order where a trajectory's
    sequences took turns: a reward must not be a return of what was sampled after it.

    Rewards reach an estimator as the property that its entry's `rewards` names: TOTAL, COMPONENTS or SOURCES.
    (4,096 samples of up to 8,192 tokens would be 268 MB of mostly zeros for every tensor, were columns always tokens.)
    """

    def __init__(self, config: BatchConfig, facts: RunFacts, groups: Sequence[Group], by_token: bool) -> None:
        self._config, self.facts, self._by_token = config, facts, by_token
        self._samples = [sample for group in groups for sample in group.samples]
        self._lengths = [len(sample.completion) for sample in self._samples]
        self._times = [sample.completion.times for sample in self._samples]  # None: the tokens stand in time
        # (K,) of each sample, and padded (B, K): how many tokens each entry stands for
        self._runs = [self._runs_of(row, sample) for row, sample in enumerate(self._samples)]
        self.tokens = pad_sequence([torch.from_numpy(runs) for runs in self._runs], batch_first=True)
        # (B, 1): the column of a row's last token
        self._last = ((self.tokens > 0).sum(dim=1, keepdim=True) - 1).clamp(min=0)  # nothing was sampled
        self.group_ids = torch.tensor([i for i, group in enumerate(groups) for _ in group.samples])
        self._overlong = _numbers(config.overlong_cost(n, facts.max_completion_tokens) for n in self._lengths)
        # (B,): the reward of the greedy completion of each sample's prompt; NaN where it has none
        greedy = [group.baseline.reward if group.baseline else None for group in groups]
        self.baselines = _numbers(greedy, missing=math.nan)[self.group_ids]

    def _runs_of(self, row: int, sample: Sample) -> np.ndarray:
        """Return how many tokens go up to each reward, and on to the end; or one by one."""
        if self._by_token:
            # Without a token there is a column, as every row has one, but it stands for none
            return np.ones(self._lengths[row], bool) if self._lengths[row] else np.zeros(1, bool)
        ends = {len(sample.completion)}
        for result in sample.verdict.results:
            if result.adapter in self.facts.process and result.steps:
                tokens = [token for token, _ in result.steps]
                ends |= {time + 1 for time in self._times_of(row, tokens)}
        return np.diff(sorted(ends), prepend=0) if len(ends) > 1 else np.array([*ends])

    def per_token(self, columns: Tensor) -> Iterator[np.ndarray]:
        """Yield the (T,) float32 of every sample, as its tokens stand, from (B, K)."""
        rows = zip(columns.numpy().astype(np.float32), self._runs, self._times, strict=True)
        for values, runs, times in rows:
            values = values[: len(runs)].copy()  # or the padding would live on in a view
            if len(runs) == 1:
                yield repeated(values, int(runs[0]))
                continue
            values = np.repeat(values, runs)
            yield values if times is None else values[times]

    def refuse_beyond_float32(self, columns: Tensor, valid: Tensor) -> None:
        """Raise RunFailed if a valid row's column is no finite float32, for it would be infinite from here on."""
        is_fine = (columns.abs() <= torch.finfo(torch.float32).max).all(dim=1)
        for row in (valid & ~is_fine).nonzero().flatten().tolist():
            sample = self._samples[row]
            raise RunFailed(
                f"prompt {sample.prompt.ordinal}, member {sample.completion.member}: with the reward "
                f"{sample.verdict.reward:g} an advantage is {columns[row].abs().max():g}, which float32 cannot hold: "
                "give rewards of a plausible size"
            )

    def _times_of(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Return the places in time of tokens of a sample."""
        times = self._times[row]
        return list(tokens) if times is None else times[list(tokens)].tolist()

    def _in_time(self, row: int, values: Tensor) -> Tensor:
        """Return (T,) values of a sample, which are as its tokens stand, in time."""
        times = self._times[row]
        if times is None:
            return values
        return torch.empty_like(values).scatter(0, torch.from_numpy(times).long(), values)

    @property
    def total(self) -> Tensor:
        """Everything that pays, on the token that it pays for; an outcome less the length penalty on the last one."""
        paid = self._outcome()[0] - self._kl()
        for name in self.facts.process:
            paid += self.facts.weight(name) * self._steps(name)[0]
        return paid

    @property
    def sources(self) -> dict[str, Tensor]:
        """Each process reward on its tokens, and the best outcome on the last one if there is any."""
        return {name: rewards for name, (rewards, _) in self._sources.items()}

    @property
    def masks(self) -> dict[str, Tensor]:
        """Where a reward of each source stands."""
        return {name: places for name, (_, places) in self._sources.items()}

    @cached_property
    def _sources(self) -> dict[str, tuple[Tensor, Tensor]]:
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
        for value, length in zip(values, self._lengths, strict=True):
            if value.shape != (length,) or not self._by_token:
                raise RunFailed(
                    f"the estimator's input {name} has the shape {tuple(value.shape)} for a completion of {length} tokens: "
                    "give every sample a number, or (unless the estimator is per_sample) one per token"
                )
        values = [self._in_time(row, value) for row, value in enumerate(values)]
        one = values[0].new_zeros(1)  # a sample without a token has a column, too
        return pad_sequence([*values, one], batch_first=True)[:-1]

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
        rewards = torch.zeros(self.tokens.shape, dtype=torch.float64)
        places = torch.zeros(rewards.shape, dtype=torch.bool)
        for row, sample in enumerate(self._samples):
            for result in sample.verdict.results:
                if result.adapter == adapter and result.steps:
                    tokens, paid = zip(*result.steps, strict=True)
                    ends = torch.from_numpy(self._runs[row]).cumsum(0)
                    times = torch.tensor(self._times_of(row, tokens))
                    columns = torch.searchsorted(ends, times, right=True)
                    rewards[row].index_add_(0, columns, torch.tensor(paid, dtype=torch.float64))
                    places[row, columns] = True
        return rewards, places

    def _kl(self) -> Tensor:
        """(B, K): what the distance to the reference costs; all of it on the last of several runs: their sum counts."""
        if not (config := self._config).reward_kl_coef:
            return torch.zeros(1)
        own, reference = (
            torch.from_numpy(np.concatenate(parts)).double()
            for parts in zip(*((s.completion.logprobs, s.ref_logprobs) for s in self._samples), strict=True)
        )
        costs = kl_penalty(own, reference, config.kl_kind, clamp=config.kl_clamp).split(self._lengths)
        if not self._by_token:
            return config.reward_kl_coef * self._on_last(torch.stack([cost.sum() for cost in costs]))
        costs_in_time = [self._in_time(row, cost) for row, cost in enumerate(costs)]
        one = costs[0].new_zeros(1)  # a sample without a token has a column, too
        return config.reward_kl_coef * pad_sequence([*costs_in_time, one], batch_first=True)[:-1]

    def _on_last(self, values: Tensor) -> Tensor:
        """(B,) -> (B, K): on the last token of each sample."""
        return values.new_zeros(self.tokens.shape).scatter(1, self._last, values[:, None])


def _numbers(values: Iterable[float | None], missing: float = 0.0) -> Tensor:
    """(B,), `missing` for None."""
    return torch.tensor([missing if value is None else value for value in values], dtype=torch.float64)


def token_times(sample: Sample) -> np.ndarray:
    """Return (T,) int32 the place in time of each token of a trajectory."""
    times = sample.completion.times
    return np.arange(len(sample.completion), dtype=np.int32) if times is None else times


def repeated(value: np.ndarray, length: int) -> np.ndarray:
    """(length,) of the first value: a view, and made ten times as fast as by `broadcast_to`."""
    view = np.ndarray(length, value.dtype, value, strides=(0,))
    view.flags.writeable = False
    return view
