"""What one micro-batch adds to a step: an un-normalised loss, the counts that divide it, metric sums.

Everything is additive over micro-batches and ranks, so a step is the same whatever the packing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from async_grpo.algorithm.aggregation import count_units, get_aggregation
from async_grpo.algorithm.kl import KL_KINDS, kl_penalty
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.errors import ConfigurationError
from async_grpo.modeling.policy import PolicyModel
from async_grpo.types import MicroBatch


@dataclass(frozen=True)
class Contribution:
    """0-dim tensors. `loss` is a sum, still to be divided; `sums` are sums over tokens, and the counts."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """Policy loss + kl_coef * KL to the reference, aggregated over tokens.

    temperature: the sampling temperature; the engine's log-probs were taken at it, so the policy's must be.
    aggregation_scale: the constant length of `constant_length`. ConfigurationError: an unknown name.
    """

    policy_loss: str = "ppo_clip"
    policy_loss_options: Mapping[str, float] = field(default_factory=dict)
    aggregation: str = "token_mean"
    aggregation_scale: float | None = None
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for setting, value, known in (
            ("policy_loss", self.policy_loss, POLICY_LOSSES),
            ("kl_kind", self.kl_kind, KL_KINDS),
        ):
            if value not in known:
                raise ConfigurationError(f"unknown {setting} {value!r}; choose one of {', '.join(known)}")
        get_aggregation(self.aggregation, self.aggregation_scale)
        if self.temperature <= 0:
            raise ConfigurationError(
                f"temperature is {self.temperature}, but training needs the log-probs of sampled tokens: "
                "it must be positive"
            )

    @property
    def unit(self) -> str:
        """The count that divides the loss: "tokens" or "sequences"."""
        return get_aggregation(self.aggregation, self.aggregation_scale).unit

    def __call__(self, policy: PolicyModel, batch: MicroBatch) -> Contribution:
        """One forward of `policy` over `batch`; `loss.backward()` is the caller's.

        ConfigurationError: the loss or the KL term needs log-probs that the micro-batch does not carry.
        """
        self._check_inputs(batch)
        arrays = _BatchTensors(batch, policy.device)
        logprobs, entropy = policy(arrays.input_ids, arrays.cu_seqlens, arrays.mask[0], self.temperature)
        logprobs = logprobs[None]
        mask, ids = arrays.mask, arrays.sequence_ids
        per_token, metrics = POLICY_LOSSES[self.policy_loss](
            logprobs,
            arrays.old_logprobs,
            arrays.advantages,
            mask,
            sequence_ids=ids,
            **self.policy_loss_options,
        )
        kl = self._kl(logprobs, arrays, mask)
        policy_loss = self._total(per_token, mask, ids)
        loss = self._total(per_token + self.kl_coef * kl, mask, ids) if self.kl_coef else policy_loss
        mismatch = kl_penalty(_where(mask, arrays.behaviour_logprobs), logprobs.detach(), "k3")
        token_metrics = metrics | {"entropy": entropy, "avg_kl_div": kl.detach(), "mismatch_kl": mismatch}
        sums, maxima = _reduce_metrics(token_metrics)
        sums |= {"avg_loss": policy_loss.detach(), "backward_loss": loss.detach()} | count_units(mask, ids)
        return Contribution(loss, sums, maxima)

    def _check_inputs(self, batch: MicroBatch) -> None:
        if batch.is_dummy:
            return
        if self.kl_coef and batch.ref_logprobs is None:
            raise ConfigurationError(
                f"kl_coef is {self.kl_coef} but the samples carry no reference log-probs; "
                "run a reference logprob worker or set kl_coef to 0"
            )
        if POLICY_LOSSES[self.policy_loss].needs_proximal and batch.proximal_logprobs is None:
            raise ConfigurationError(
                f"the loss {self.policy_loss} needs proximal log-probs but the samples carry none; "
                "run a proximal logprob worker or choose another loss"
            )

    def _kl(self, logprobs: Tensor, arrays: "_BatchTensors", mask: Tensor) -> Tensor:
        if arrays.ref_logprobs is None:
            return torch.zeros_like(logprobs)
        kl = kl_penalty(_where(mask, logprobs), _where(mask, arrays.ref_logprobs), self.kl_kind)
        return _where(mask, kl)

    def _total(self, per_token: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        aggregation = get_aggregation(self.aggregation, self.aggregation_scale)
        return aggregation.total(per_token, mask, ids, self.aggregation_scale)


class _BatchTensors:
    """A micro-batch on the device, as one row (1, N); `mask` leaves out the first token of every sequence."""

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        def row(values: np.ndarray | None) -> Tensor | None:
            return None if values is None else torch.tensor(values, device=device)[None]

        trained = batch.loss_mask.copy()
        trained[batch.cu_seqlens[:-1]] = False
        self.input_ids = torch.tensor(batch.input_ids, dtype=torch.int64, device=device)
        self.cu_seqlens = torch.tensor(batch.cu_seqlens)
        self.mask = row(trained)
        self.sequence_ids = row(batch.sequence_ids())
        self.advantages = row(batch.advantages)
        self.behaviour_logprobs = row(batch.behaviour_logprobs)
        self.ref_logprobs = row(batch.ref_logprobs)
        proximal = row(batch.proximal_logprobs)
        self.old_logprobs = self.behaviour_logprobs if proximal is None else proximal


def _where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, 0)


def _reduce_metrics(metrics: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Per-token metrics -> (sums, maxima); the name says which: `_max` at its end."""
    sums = {name: value.detach().sum() for name, value in metrics.items() if not name.endswith("_max")}
    maxima = {name: value.detach().max() for name, value in metrics.items() if name.endswith("_max")}
    return sums, maxima
