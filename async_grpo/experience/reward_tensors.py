"""Rewards as tensors for an estimator, with as many columns per sample as the estimator needs."""

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

# Inputs that an estimator gets if it has a keyword of that name. They are attributes of `RewardTensors`
REWARD_TENSOR_INPUTS = (
    "baselines",
    "step_mask",
    "masks",
)


class RewardTensors:
    """Rewards of groups as padded tensors (B, K), float64: a row is a sample, a column is one token or a run of tokens.

    A run of tokens ends at a reward. Runs save memory: with one column per token, each tensor of 4,096 samples of up to
    8,192 tokens would have 268 MB of mostly zeros.

    Columns are in time order, because a reward must not count for tokens that were sampled after it. The tokens of a
    completion, in contrast, are stored sequence by sequence. The two orders differ if the turns of several sequences
    alternated.

    An estimator gets one of the properties `total`, `components` and `sources`: the one that `Estimator.rewards` names.
    """

    def __init__(self, config: BatchConfig, facts: RunFacts, groups: Sequence[Group], by_token: bool) -> None:
        self._config = config
        self.facts = facts
        self._by_token = by_token
        self._samples = [sample for group in groups for sample in group.samples]
        self._lengths = [len(sample.completion) for sample in self._samples]
        # Position in time order of each token of a sample, or None if the tokens already are in time order
        self._times = [sample.completion.times for sample in self._samples]
        # The number of tokens in each column of a sample (1, or the length of a run). `_runs` has one array (K,) per
        # sample, and `tokens` is the same as a padded tensor (B, K)
        self._runs = [self._runs_of(row, sample) for row, sample in enumerate(self._samples)]
        self.tokens = pad_sequence([torch.from_numpy(runs) for runs in self._runs], batch_first=True)
        # (B, 1): the column of each row's last token, or 0 for a row without tokens
        num_columns = (self.tokens > 0).sum(dim=1, keepdim=True)
        self._last = (num_columns - 1).clamp(min=0)
        group_sizes = torch.tensor([len(group.samples) for group in groups])
        self.group_ids = torch.arange(len(groups)).repeat_interleave(group_sizes)
        self._overlong = _numbers(config.overlong_cost(n, facts.max_completion_tokens) for n in self._lengths)
        # (B,): the reward of the greedy completion of each sample's prompt, or NaN if there is none
        greedy_rewards = [group.baseline.reward if group.baseline else None for group in groups]
        self.baselines = _numbers(greedy_rewards, missing=math.nan)[self.group_ids]

    def _runs_of(self, row: int, sample: Sample) -> np.ndarray:
        """Return the number of tokens (K,) in each column of a sample.

        A run of tokens ends at a step's reward or at the end of the completion. If there is a column for each token,
        every run is a single token.
        """
        if self._by_token:
            # Every row has at least one column. The only column of a sample without tokens stands for 0 tokens
            num_tokens = self._lengths[row]
            return np.ones(num_tokens, bool) if num_tokens else np.zeros(1, bool)
        ends = {len(sample.completion)}
        for result in sample.verdict.results:
            if result.adapter in self.facts.process_rewards and result.steps:
                tokens = [token for token, _ in result.steps]
                ends |= {time + 1 for time in self._times_of(row, tokens)}
        return np.diff(sorted(ends), prepend=0) if len(ends) > 1 else np.array([*ends])

    def per_token(self, columns: Tensor) -> Iterator[np.ndarray]:
        """Yield (T,) float32 for each sample: every token gets the value of its column of `columns` (B, K).

        Tokens are in the order of the completion, which may differ from their order in time.
        """
        rows = zip(columns.numpy().astype(np.float32), self._runs, self._times, strict=True)
        for values, runs, times in rows:
            values = values[: len(runs)].copy()  # a view would keep the padding in memory
            if len(runs) == 1:
                yield repeated(values, int(runs[0]))
                continue
            values = np.repeat(values, runs)
            yield values if times is None else values[times]

    def refuse_beyond_float32(self, columns: Tensor, valid: Tensor) -> None:
        """Raise RunFailed if a valid row has a value that overflows in float32, the dtype of the trained advantages."""
        is_fine = (columns.abs() <= torch.finfo(torch.float32).max).all(dim=1)
        for row in (valid & ~is_fine).nonzero().flatten().tolist():
            sample = self._samples[row]
            raise RunFailed(
                f"prompt {sample.prompt.ordinal}, member {sample.completion.member}: with the reward "
                f"{sample.verdict.reward:g} an advantage is {columns[row].abs().max():g}, which float32 cannot hold: "
                "give rewards of a plausible size"
            )

    def _times_of(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Return the positions in time order of some tokens of a sample.

        Args:
            row: Index of the sample.
            tokens: Indices of the tokens in the completion.
        """
        times = self._times[row]
        return list(tokens) if times is None else times[list(tokens)].tolist()

    def _in_time(self, row: int, values: Tensor) -> Tensor:
        """Return the values (T,) of a sample's tokens, rearranged into time order."""
        times = self._times[row]
        if times is None:
            return values
        return torch.empty_like(values).scatter(0, torch.from_numpy(times).long(), values)

    @property
    def total(self) -> Tensor:
        """Return the sum of all rewards (B, K), minus the KL penalty.

        A step reward is at the column of its token. The outcome reward, minus the length penalty, is at the last token.
        """
        outcome, _ = self._outcome()
        total = outcome - self._kl()
        for name in self.facts.process_rewards:
            rewards, _ = self._steps(name)
            total += self.facts.weight(name) * rewards
        return total

    @property
    def sources(self) -> dict[str, Tensor]:
        """Return each process reward (B, K) at its columns, and the outcome reward, if any, at the last token."""
        return {name: rewards for name, (rewards, _) in self._sources.items()}

    @property
    def masks(self) -> dict[str, Tensor]:
        """Return, by name of the reward, a mask (B, K) that is True where a column of a sample has this reward."""
        return {name: places for name, (_, places) in self._sources.items()}

    @cached_property
    def _sources(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, by name of the reward, its values and a mask of the columns that have it, both (B, K)."""
        sources = {name: self._steps(name) for name in self.facts.process_rewards}
        outcome, places = self._outcome()
        if places.any():
            sources[OUTCOME] = (outcome, places)
        return sources

    @property
    def step_mask(self) -> Tensor:
        """Return a mask (B, K) that is True where a column of a sample has any reward."""
        places = [self._steps(name)[1] for name in self.facts.process_rewards]
        places.append(self._outcome()[1])
        return torch.stack(places).any(dim=0)

    @property
    def components(self) -> dict[str, Tensor]:
        """Return the reward of each adapter (B, K) at the last token. The length penalty is a separate component."""
        rewards_of_samples = []
        for sample in self._samples:
            rewards_of_samples.append({result.adapter: result.reward for result in sample.verdict.results})
        names = sorted(set().union(*rewards_of_samples))
        components = {}
        for name in names:
            components[name] = _numbers(rewards.get(name) for rewards in rewards_of_samples)
        if self._config.overlong_buffer:
            components[OVERLONG] = -self._overlong
        return {name: self._on_last(rewards) for name, rewards in components.items()}

    def declared_input(self, name: str, read: Callable[[Sample], Any]) -> Tensor:
        """Return an additional input that an estimator declares, read from every sample.

        Args:
            name: Name of the input, for the error message.
            read: The declared function, which gets a sample and returns its input.

        Returns:
            (B,) if `read` returns a number, (B, T) if it returns one number per token.

        Raises:
            RunFailed: The input cannot be read, or its shape is wrong.
        """
        try:
            values = [torch.as_tensor(read(sample), dtype=torch.float64) for sample in self._samples]
        except Exception as error:
            raise RunFailed(
                f"the estimator's input {name} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if all(value.dim() == 0 for value in values):
            return torch.stack(values)
        for value, length in zip(values, self._lengths, strict=True):
            if value.shape != (length,) or not self._by_token:
                raise RunFailed(
                    f"the estimator's input {name} has the shape {tuple(value.shape)} for a completion of {length} tokens: "
                    "give every sample a number, or (unless the estimator is flat_between_rewards) one per token"
                )
        return self._padded(values)

    def _padded(self, values: Sequence[Tensor]) -> Tensor:
        """Return (B, T) in time order from the values (T,) of each sample's tokens. T is at least 1."""
        values_in_time = [self._in_time(row, sample_values) for row, sample_values in enumerate(values)]
        # Add a row of one column, and remove it after the padding. So T is at least 1
        single_column = values[0].new_zeros(1)
        return pad_sequence([*values_in_time, single_column], batch_first=True)[:-1]

    def _outcome(self) -> tuple[Tensor, Tensor]:
        """Return the outcome rewards and a mask of their columns, both (B, K).

        The outcome is the sample's reward (without process rewards) minus the length penalty. A sample whose adapters
        abstained has no outcome, which differs from an outcome of 0.
        """
        outcomes = [self._best_outcome(sample) for sample in self._samples]
        has_penalty = bool(self._config.overlong_buffer)
        has_reward = torch.tensor([outcome is not None or has_penalty for outcome in outcomes])
        return self._on_last(_numbers(outcomes) - self._overlong), self._on_last(has_reward)

    def _best_outcome(self, sample: Sample) -> float | None:
        """Return the sample's outcome reward, or None if it has none.

        In a run with process rewards, this is the highest reward of the adapters that are not process rewards.
        """
        if not self.facts.process_rewards:
            return sample.verdict.reward
        rewards = []
        for result in sample.verdict.results:
            if result.adapter not in self.facts.process_rewards and result.reward is not None:
                rewards.append(result.reward)
        return max(rewards, default=None)

    def _steps(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Return the step rewards of a process reward, and a mask of the columns with a step reward, both (B, K).

        Args:
            adapter: Name of the process reward.
        """
        rewards = torch.zeros(self.tokens.shape, dtype=torch.float64)
        places = torch.zeros(rewards.shape, dtype=torch.bool)
        for row, sample in enumerate(self._samples):
            for result in sample.verdict.results:
                if result.adapter == adapter and result.steps:
                    tokens, step_rewards = zip(*result.steps, strict=True)
                    ends = torch.from_numpy(self._runs[row]).cumsum(0)
                    times = torch.tensor(self._times_of(row, tokens))
                    columns = torch.searchsorted(ends, times, right=True)
                    rewards[row].index_add_(0, columns, torch.tensor(step_rewards, dtype=torch.float64))
                    places[row, columns] = True
        return rewards, places

    def _kl(self) -> Tensor:
        """Return the KL penalty (B, K) for the distance to the reference policy, or a single 0 if there is no penalty.

        If columns are runs of tokens, the last column has the sum of the sample's penalties.
        """
        config = self._config
        if not config.reward_kl_coef:
            return torch.zeros(1)
        logprobs_of_samples = [sample.completion.logprobs for sample in self._samples]
        ref_logprobs_of_samples: list[Any] = [sample.ref_logprobs for sample in self._samples]
        logprobs = torch.from_numpy(np.concatenate(logprobs_of_samples)).double()
        reference = torch.from_numpy(np.concatenate(ref_logprobs_of_samples)).double()
        token_kl = kl_penalty(logprobs, reference, config.kl_kind, clamp=config.kl_clamp)
        kl_of_samples = token_kl.split(self._lengths)
        if not self._by_token:
            sums = torch.stack([sample_kl.sum() for sample_kl in kl_of_samples])
            return config.reward_kl_coef * self._on_last(sums)
        return config.reward_kl_coef * self._padded(kl_of_samples)

    def _on_last(self, values: Tensor) -> Tensor:
        """Return (B, K) with the values (B,) at the last token of each sample."""
        return values.new_zeros(self.tokens.shape).scatter(1, self._last, values[:, None])


def _numbers(values: Iterable[float | None], missing: float = 0.0) -> Tensor:
    """Return the values as a tensor (B,) of float64, with `missing` for None."""
    return torch.tensor([missing if value is None else value for value in values], dtype=torch.float64)


def token_times(sample: Sample) -> np.ndarray:
    """Return the position (T,) in time order of each token of a trajectory, as int32."""
    times = sample.completion.times
    if times is None:
        return np.arange(len(sample.completion), dtype=np.int32)
    return times


def repeated(value: np.ndarray, length: int) -> np.ndarray:
    """Return a read-only view (length,) that repeats the first value. It is ten times as fast as `np.broadcast_to`."""
    view = np.ndarray(length, value.dtype, value, strides=(0,))
    view.flags.writeable = False
    return view
