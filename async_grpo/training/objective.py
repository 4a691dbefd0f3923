"""What one micro-batch adds to a step: an un-normalised loss, the counts that divide it, metric sums.

Everything is additive over micro-batches and ranks, so a step is the same whatever the packing. What can only be known
of the whole step (`whole_step`) is worked out before, and handed in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.algorithm.aggregation import count_units, get_aggregation
from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.algorithm.diagnostics import mismatch_sums, ratio_histogram
from async_grpo.algorithm.kl import kl_penalty
from async_grpo.algorithm.value_loss import value_loss
from async_grpo.errors import ConfigurationError
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.correction import OffPolicyCorrection
from async_grpo.types import MicroBatch


@dataclass(frozen=True)
class StepTerms:
    """What a micro-batch is told of its whole step; (1, N) tensors, None where the objective needs none."""

    advantages: Tensor | None = None  # in place of the micro-batch's own
    returns: Tensor | None = None
    old_values: Tensor | None = None
    selected: Tensor | None = None  # the tokens that clip_cov or kl_cov chose
    weight_mean: float | None = None  # of the importance weights
    group_tokens: Tensor | None = (
        None  # of each token's group without the rejected, in place of the batch's own
    )


@dataclass(frozen=True)
class Contribution:
    """`loss` (0-dim) is a sum, still to be divided; `sums` are sums over tokens, and the counts; all additive."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    ratio_histogram: Tensor


class Objective:
    """Policy loss + kl_coef * KL to the reference - entropy_coef * entropy + value loss, aggregated over tokens.

    The engine's log-probs were taken at the sampling temperature, so the policy's are as well. The ratio is taken against
    `config.old_policy`; "current" is the policy itself at the start of the step, as each step trains on its minibatch
    once: the ratio is then 1.

    Args:
        max_completion_tokens: for which even the longest prompt leaves room: the scale of the aggregation
            `constant_length`; 0: `--max-generation-tokens`.

    Raises:
        ConfigurationError: an option of the loss or of the estimator that it does not have.
    """

    def __init__(self, config: AlgorithmConfig, max_completion_tokens: int = 0) -> None:
        self.config, self.loss, self.loss_settings = config, config.loss, config.loss_settings
        self.correction = OffPolicyCorrection(config)
        self.has_critic, self._estimator = config.estimator.needs_critic, config.estimator
        self._estimator_settings = config.estimator_settings
        self._scale = float(max_completion_tokens or config.max_generation_tokens)
        self._aggregation = get_aggregation(config.loss_aggregation, self._scale)

    @property
    def unit(self) -> str | None:
        """The count that divides the loss: "tokens", "sequences", "groups", or nothing."""
        return self._aggregation.unit

    @property
    def needs_whole_step(self) -> bool:
        """Whether micro-batches must wait for the end of their step, and be looked at together first."""
        return (
            self.has_critic
            or self.loss.needs_selection
            or self.correction.averages
            or self.rejects_from_groups
        )

    @property
    def rejects_from_groups(self) -> bool:
        """Whether the tokens of a group, which weigh its loss, must be counted anew after rejection."""
        return self.unit == "groups" and self.correction.rejects

    @property
    def whitens(self) -> bool:
        """Whether the critic's advantages are whitened over the step: an option of the estimator."""
        return bool((self._estimator.options | self._estimator_settings).get("whiten", False))

    def critic_returns(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(advantages before any whitening, returns), (S, T) each, by the estimator that has a critic."""
        options = {name: value for name, value in self._estimator_settings.items() if name != "whiten"}
        assert self._estimator.critic_returns is not None
        return self._estimator.critic_returns(rewards, values, mask, **options)

    def __call__(
        self, policy: PolicyModel, batch: MicroBatch, terms: StepTerms | None = None
    ) -> Contribution:
        """One forward of `policy` over `batch`; `loss.backward()` is the caller's.

        ConfigurationError: the loss or the KL term needs log-probs that the micro-batch does not carry.
        """
        self.check_inputs(batch)
        terms = terms or StepTerms()
        row = BatchTensors(batch, policy.device)
        if terms.group_tokens is not None:
            row.group_tokens = terms.group_tokens
        outputs = policy(
            row.input_ids, row.cu_seqlens, row.mask[0], self.config.temperature, with_values=self.has_critic
        )
        logprobs, entropy, *values = (output[None] for output in outputs)
        mask = self.correction.keep(logprobs, row)
        per_token, metrics = self._policy_loss(logprobs, row, mask, terms)
        policy_loss = self._total(per_token, mask, row)
        kl = self._kl(logprobs, row, mask)
        if self.config.loss_kl_coef:
            per_token = per_token + self.config.loss_kl_coef * kl
        if (
            self.config.entropy_coef
        ):  # else its gradient, a product with the whole vocabulary, is not computed
            per_token = per_token - self.config.entropy_coef * _where(mask, entropy)
        if self.has_critic:
            assert terms.returns is not None and terms.old_values is not None
            value_losses, value_metrics = value_loss(
                values[0], terms.returns, terms.old_values, mask, clip=self.config.critic_clip
            )
            per_token = per_token + self.config.critic_coef * value_losses
            metrics |= value_metrics | {"value_loss": value_losses.detach()}
        loss = self._total(per_token, mask, row)
        metrics |= {"entropy": _where(mask, entropy.detach()), "avg_kl_div": kl.detach()}
        sums, maxima = _reduce_metrics(metrics)
        sums |= {"avg_loss": policy_loss.detach(), "backward_loss": loss.detach()}
        sums |= count_units(mask, row.sequence_ids, group_tokens=row.group_tokens)
        sums |= mismatch_sums(logprobs, row.behaviour_logprobs, row.mask, sequence_ids=row.sequence_ids)
        return Contribution(loss, sums, maxima, ratio_histogram(logprobs, row.behaviour_logprobs, row.mask))

    def ratio_denominator_logprobs(self, logprobs: Tensor, row: BatchTensors) -> Tensor:
        """What the ratio is taken against; for a loss with a proximal policy of its own, the engine's."""
        if self.config.old_policy == "current":
            return logprobs.detach()
        if self.config.old_policy == "proximal" and not self.loss.needs_proximal:
            return _or_zeros(row.proximal_logprobs, logprobs)
        return row.behaviour_logprobs

    def check_inputs(self, batch: MicroBatch) -> None:
        """ConfigurationError: the batch lacks log-probs that the objective needs."""
        if batch.is_dummy:
            return
        if self.config.loss_kl_coef and batch.ref_logprobs is None:
            raise ConfigurationError(
                f"kl_coef is {self.config.loss_kl_coef} but the samples carry no reference log-probs; "
                "run a reference logprob worker or set kl_coef to 0"
            )
        if self.config.needs_proximal and batch.proximal_logprobs is None:
            raise ConfigurationError(
                f"the loss {self.config.policy_loss} with the ratio to the {self.config.old_policy} policy needs proximal "
                "log-probs but the samples carry none; run a proximal logprob worker or choose another loss"
            )

    def _policy_loss(
        self, logprobs: Tensor, row: BatchTensors, mask: Tensor, terms: StepTerms
    ) -> tuple[Tensor, dict[str, Tensor]]:
        options = dict(self.loss_settings)
        if self.loss.needs_proximal:
            options["proximal_logprobs"] = _or_zeros(row.proximal_logprobs, logprobs)
        if self.loss.needs_selection:
            options["selected"] = terms.selected
        weights = self.correction.weights(logprobs, row, mask, terms.weight_mean)
        per_token, metrics = self.loss(
            logprobs,
            self.ratio_denominator_logprobs(logprobs, row),
            row.advantages if terms.advantages is None else terms.advantages,
            mask,
            importance_weights=weights,
            sequence_ids=row.sequence_ids,
            **options,
        )
        return per_token, metrics | ({} if weights is None else {"importance_weight": weights})

    def _kl(self, logprobs: Tensor, row: BatchTensors, mask: Tensor) -> Tensor:
        if row.ref_logprobs is None:
            return torch.zeros_like(logprobs)
        kl = kl_penalty(
            _where(mask, logprobs),
            _where(mask, row.ref_logprobs),
            self.config.kl_kind,
            clamp=self.config.kl_clamp,
        )
        return _where(mask, kl)

    def _total(self, per_token: Tensor, mask: Tensor, row: BatchTensors) -> Tensor:
        return self._aggregation.total(
            per_token, mask, row.sequence_ids, self._scale, group_tokens=row.group_tokens
        )


def _where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, 0)


def _or_zeros(values: Tensor | None, like: Tensor) -> Tensor:
    """Zeros for a dummy, which carries nothing."""
    return torch.zeros_like(like) if values is None else values


def _reduce_metrics(metrics: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Per-token metrics -> (sums, maxima); the name says which: `_max` at its end."""
    sums = {name: value.detach().sum() for name, value in metrics.items() if not name.endswith("_max")}
    maxima = {name: value.detach().max() for name, value in metrics.items() if name.endswith("_max")}
    return sums, maxima
