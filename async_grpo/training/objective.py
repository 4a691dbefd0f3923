"""What one micro-batch adds to a step: an un-normalised loss, the counts that divide it, metric sums.

Everything is additive over micro-batches and ranks, so a step is the same whatever the packing. What can only be known
of the whole step (`whole_step`) is written into the rows before.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from async_grpo.algorithm.aggregation import count_units, get_aggregation
from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.algorithm.kl import kl_penalty
from async_grpo.algorithm.off_policy import importance_weights, mismatch_sums, ratio_histogram, rejection_mask
from async_grpo.algorithm.process_advantages import value_loss
from async_grpo.errors import ConfigurationError
from async_grpo.messages import MicroBatch
from async_grpo.modeling.policy import PolicyModel


class BatchTensors:
    """A micro-batch on the trainer's device: one packed row, (1, N) each."""

    # Of the whole step, None where the objective needs none; so may `advantages` and `group_tokens` be replaced
    returns: Tensor | None = None
    old_values: Tensor | None = None
    selected: Tensor | None = None  # the tokens that clip_cov or kl_cov chose
    weight_mean: float | None = None  # of the importance weights
    # Under the weights that the step starts from, without gradient
    logprobs: Tensor
    kept: Tensor  # the mask without what is rejected

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        def row(values: np.ndarray) -> Tensor:
            return torch.tensor(values, device=device)[None]

        trained = batch.loss_mask.copy()
        trained[batch.cu_seqlens[:-1]] = False  # the first token of a sequence, which nothing predicts
        ids = batch.sequence_ids()
        self.input_ids = torch.tensor(batch.input_ids, dtype=torch.int64, device=device)  # (N,)
        self.cu_seqlens = torch.tensor(batch.cu_seqlens)  # (S + 1,)
        self.mask = row(trained)
        self.sequence_ids = row(ids)
        self.group_ids = row(batch.group_ids[ids])
        self.group_tokens = row(batch.group_tokens[ids])
        self.advantages = row(batch.advantages)
        self.behaviour_logprobs = row(batch.behaviour_logprobs)
        self.ref_logprobs = None if batch.ref_logprobs is None else row(batch.ref_logprobs)
        self.proximal_logprobs = None if batch.proximal_logprobs is None else row(batch.proximal_logprobs)
        # (1, N) both, or None: the member of the group that each token is of, and its place in its trajectory's time
        self.members = None if batch.members is None else row(batch.members[ids])
        self.times = None if batch.times is None else row(batch.times)


class Objective:
    """Policy loss + kl_coef * KL to the reference - entropy_coef * entropy + value loss, aggregated over tokens.

    The policy's log-probs are taken at the sampling temperature, as the engine's were. The ratio is taken against
    `config.old_policy`; "current" is the policy itself: each step trains on its minibatch once, so the ratio is 1.
    `max_completion_tokens`, for which even the longest prompt leaves room, is the scale of the aggregation
    `constant_length`; 0: `--max-generation-tokens`. ConfigurationError: an option that loss or estimator does not have.
    """

    def __init__(self, config: AlgorithmConfig, max_completion_tokens: int = 0) -> None:
        self.config, self.loss, self.loss_settings = config, config.loss, config.loss_settings
        scale = float(max_completion_tokens or config.max_generation_tokens)
        self._aggregation = get_aggregation(config.loss_aggregation, scale)
        # The count that divides the loss: "tokens", "sequences", "groups", or nothing
        self.unit = self._aggregation.unit
        estimator, settings = config.estimator, dict(config.estimator_settings)
        # Whether the critic's advantages are whitened over the step: an option of the estimator
        self.whitens = bool(settings.pop("whiten", estimator.options.get("whiten", False)))
        # (rewards, values, mask), (S, T) each, -> (advantages before any whitening, returns); None without a critic
        returns = estimator.critic_returns
        self.critic_returns = returns and partial(returns, **settings)
        self.has_critic = returns is not None
        # The options of `importance_weights` and `rejection_mask`, which have the same names there
        importance, rejection = ("level", "mode", "low", "high"), ("statistic", "low", "high")
        self._importance = {name: getattr(config, f"importance_{name}") for name in importance}
        self._rejection = {name: getattr(config, f"rejection_{name}") for name in rejection}
        # The tokens of a group, which weigh its loss, must be counted anew after rejection
        self.rejects_from_groups = self.unit == "groups" and config.rejection_statistic is not None
        self.averages_weights = config.importance_level != "none" and config.importance_normalize
        looks_ahead = self.critic_returns or self.loss.needs_selection or self.averages_weights
        # Micro-batches must wait for the end of their step, and be looked at together first
        self.needs_whole_step = bool(looks_ahead or self.rejects_from_groups)

    def check_inputs(self, batch: MicroBatch) -> None:
        """ConfigurationError: the batch lacks log-probs that the loss or the KL term needs."""
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

    def forward(self, policy: PolicyModel, row: BatchTensors) -> tuple[Tensor, ...]:
        """(log-probs, entropies) and, with a critic, values; (1, N) each."""
        outputs = policy(row.input_ids, row.cu_seqlens, row.mask[0], self.config.temperature)
        return tuple(output[None] for output in outputs)

    def __call__(self, policy: PolicyModel, row: BatchTensors) -> tuple[Tensor, dict[str, Tensor]]:
        """One forward of `policy`: (loss, totals); all sums, still to be divided, but for names that end in `_max`."""
        logprobs, entropy, *values = self.forward(policy, row)
        row.logprobs = logprobs.detach()
        mask = self.keep(logprobs, row)
        options = dict(self.loss_settings)
        if self.loss.needs_proximal:
            options["proximal_logprobs"] = _or_zeros(row.proximal_logprobs, logprobs)
        if self.loss.needs_selection:
            options["selected"] = row.selected
        if weighs := self.config.importance_level != "none":
            options["importance_weights"] = self.weights(logprobs, row, mask)
        old_logprobs = self.ratio_denominator_logprobs(logprobs, row)
        per_token, metrics = self.loss(
            logprobs, old_logprobs, row.advantages, mask, sequence_ids=row.sequence_ids, **options
        )
        metrics |= {"importance_weight": options["importance_weights"]} if weighs else {}
        policy_loss = self._aggregation.total(per_token, mask, row.sequence_ids, row.group_tokens)
        kl = torch.zeros_like(logprobs)
        if row.ref_logprobs is not None:
            own, reference = torch.where(mask, logprobs, 0), torch.where(mask, row.ref_logprobs, 0)
            kl = kl_penalty(own, reference, self.config.kl_kind, clamp=self.config.kl_clamp)
        if self.config.loss_kl_coef:
            per_token = per_token + self.config.loss_kl_coef * kl
        if self.config.entropy_coef:  # without it, no gradient of the whole vocabulary is computed
            per_token = per_token - self.config.entropy_coef * torch.where(mask, entropy, 0)
        if self.has_critic:
            assert row.returns is not None and row.old_values is not None
            before, clip = row.old_values, self.config.critic_clip
            value_losses, value_metrics = value_loss(values[0], row.returns, before, mask, clip=clip)
            per_token = per_token + self.config.critic_coef * value_losses
            metrics |= value_metrics | {"value_loss": value_losses}
        loss = self._aggregation.total(per_token, mask, row.sequence_ids, row.group_tokens)
        metrics |= {"entropy": torch.where(mask, entropy, 0), "avg_kl_div": kl}
        totals = {
            name: (value.max() if name.endswith("_max") else value.sum()).detach()
            for name, value in metrics.items()
        }
        totals |= {"avg_loss": policy_loss.detach(), "backward_loss": loss.detach()}
        totals |= count_units(mask, row.sequence_ids, group_tokens=row.group_tokens)
        totals |= mismatch_sums(logprobs, row.behaviour_logprobs, row.mask, sequence_ids=row.sequence_ids)
        return loss, totals | {"histogram": ratio_histogram(logprobs, row.behaviour_logprobs, row.mask)}

    def keep(self, logprobs: Tensor, row: BatchTensors) -> Tensor:
        """The part of the mask that is not rejected for its distance to the engine."""
        if self.config.rejection_statistic is None:
            return row.mask
        corrected, behaviour = _corrected(logprobs, row), row.behaviour_logprobs
        ids, how = row.sequence_ids, self._rejection
        return rejection_mask(corrected, behaviour, row.mask, sequence_ids=ids, **how)

    def weights(self, logprobs: Tensor, row: BatchTensors, mask: Tensor) -> Tensor:
        """Importance weights for the engine's policy; divided by `row.weight_mean` if it is known."""
        return importance_weights(
            _corrected(logprobs, row),
            row.behaviour_logprobs,
            mask,
            sequence_ids=row.sequence_ids,
            mean=row.weight_mean,
            **self._importance,
        )

    def ratio_denominator_logprobs(self, logprobs: Tensor, row: BatchTensors) -> Tensor:
        """What the ratio is taken against; for a loss with a proximal policy of its own, the engine's."""
        if self.config.old_policy == "current":
            return logprobs.detach()
        if self.config.old_policy == "proximal" and not self.loss.needs_proximal:
            return _or_zeros(row.proximal_logprobs, logprobs)
        return row.behaviour_logprobs


def _or_zeros(values: Tensor | None, like: Tensor) -> Tensor:
    """Zeros for a dummy, which carries nothing."""
    return torch.zeros_like(like) if values is None else values


def _corrected(logprobs: Tensor, row: BatchTensors) -> Tensor:
    """The policy whose distance to the engine is corrected: the proximal one if there is one."""
    return logprobs.detach() if row.proximal_logprobs is None else row.proximal_logprobs
