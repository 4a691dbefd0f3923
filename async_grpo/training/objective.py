"""The objective of one micro-batch: the sum of its losses, the counts that later divide the sum, and sums for the metrics.

The results of all micro-batches and ranks are added up (for a few metrics, the maximum is taken). So the result of a
step does not depend on which sequences share a micro-batch. Terms that depend on the whole step are computed before,
and written into `BatchTensors` (see `whole_step`).
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from async_grpo.algorithm.aggregation import count_units, get_aggregation
from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.algorithm.forward_kl import forward_kl
from async_grpo.algorithm.kl import kl_penalty, kl_since
from async_grpo.algorithm.off_policy import (
    clamp_log_ratio,
    importance_weights,
    mismatch_sums,
    ratio_histogram,
    rejection_mask,
)
from async_grpo.algorithm.policy_masks import mask_policy_loss
from async_grpo.algorithm.process_advantages import value_loss
from async_grpo.errors import ConfigurationError
from async_grpo.messages import MicroBatch
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.metric_totals import metric_totals, or_zeros


class Objective:
    """Policy loss + kl_coef * KL to the reference - entropy_coef * entropy + value loss, aggregated over tokens.

    The policy's log-probs are computed as the engine computed its own: at the sampling temperature, and over the tokens
    that the sampler keeps (`--top-p`, `--top-k`). The denominator of the policy ratio is the policy that
    `config.old_policy` names. "current" means the trained policy before the first pass over the minibatch. In the first
    pass, which is usually the only one, the value of the ratio is 1, and only its gradient matters.

    Args:
        config: The algorithm's options.
        max_completion_tokens: Completion tokens that fit in the context even after the longest prompt. The aggregation
            `constant_length` divides by this number. 0 means `--max-generation-tokens`.
        reference_is_base: Whether the reference of the KL penalty is the policy without its LoRA adapter. The trainer
            then computes the reference log-probs itself (see `base_reference`), because the samples come without them.

    Raises:
        ConfigurationError: An option is set that the loss or the estimator does not have.
    """

    def __init__(
        self, config: AlgorithmConfig, max_completion_tokens: int = 0, *, reference_is_base: bool = False
    ) -> None:
        self.config = config
        self.truncation = config.truncation
        self.needs_base_logprobs = reference_is_base and config.loss_kl_coef > 0
        self.loss = config.loss
        self.loss_settings = config.loss_settings
        length_scale = float(max_completion_tokens or config.max_generation_tokens)
        self._aggregation = get_aggregation(config.loss_aggregation, length_scale)
        # Name of the units whose number divides the sum of the losses: "tokens", "sequences" or "groups". None divides
        # by 1
        self.unit = self._aggregation.unit

        estimator_settings = dict(config.estimator_settings)
        whitens_by_default = config.estimator.options.get("whiten", False)
        # Whether the advantages of an estimator with a critic are whitened over the step
        self.whitens = bool(estimator_settings.pop("whiten", whitens_by_default))
        self.has_critic = config.estimator.critic_returns is not None
        # Whether the critic is a value head on the policy, so that the policy's forward pass returns the values
        self.has_value_head = self.has_critic and config.critic_model is None
        # Function (rewards, values, mask) -> (advantages before any whitening, returns), all (S, T); None without a
        # critic
        self.critic_returns = None
        if config.estimator.critic_returns is not None:
            self.critic_returns = partial(config.estimator.critic_returns, **estimator_settings)

        self._importance_options: dict[str, Any] = {
            "level": config.importance_level,
            "mode": config.importance_mode,
            "low": config.importance_low,
            "high": config.importance_high,
        }
        self._rejection_options: dict[str, Any] = {
            "statistic": config.rejection_statistic,
            "low": config.rejection_low,
            "high": config.rejection_high,
        }
        self.has_importance_weights = config.importance_level != "none"
        self.averages_weights = self.has_importance_weights and config.importance_normalize
        # With the unit "groups", the loss of a group is divided by its number of tokens. If tokens are rejected, this
        # number must be counted again over the whole step
        self.rejects_from_groups = self.unit == "groups" and config.rejection_statistic is not None
        self.selects_high_entropy = config.top_entropy_quantile < 1
        # Whether the loss also contains the cross-entropy of the tokens that the environment wrote
        self.trains_observations = config.observation_coef > 0
        # Whether the first gradient of the step must wait for a forward pass of all its micro-batches, on whose results a
        # term of the loss depends
        self.needs_first_forward = (
            self.has_critic  # the advantages are computed from its values
            or self.loss.needs_selection  # tokens are selected by scores that depend on their log-probs
            or self.averages_weights  # importance weights are divided by their mean
            or self.rejects_from_groups  # the tokens of a group that are not rejected are counted
            or self.selects_high_entropy  # tokens are selected by their entropy
            # The factor of the observations' cross-entropy (see `__call__`) depends on how many tokens are rejected
            or (self.trains_observations and config.rejection_statistic is not None)
        )
        # Whether the loss of a micro-batch can be computed only after all micro-batches of the step have arrived
        self.needs_whole_step = self.needs_first_forward or self.trains_observations

    def check_inputs(self, batch: MicroBatch) -> None:
        """Check that a batch has the reference and proximal log-probs that the objective needs.

        Raises:
            ConfigurationError: Log-probs are missing. The message names the missing worker.
        """
        if batch.is_dummy:
            return
        if self.config.loss_kl_coef and batch.ref_logprobs is None and not self.needs_base_logprobs:
            raise ConfigurationError(
                f"kl_coef is {self.config.loss_kl_coef} but the samples carry no reference log-probs; "
                "run a reference logprob worker or set kl_coef to 0"
            )
        if self.config.teacher_top_k and batch.teacher_top is None:
            raise ConfigurationError(
                f"--teacher-top-k is {self.config.teacher_top_k} but the samples carry no log-probs of a teacher's most "
                "probable tokens: set it to 0"
            )
        if self.config.needs_proximal and batch.proximal_logprobs is None:
            raise ConfigurationError(
                f"the loss {self.config.policy_loss} with the ratio to the {self.config.old_policy} policy needs proximal "
                "log-probs but the samples carry none; run a proximal logprob worker or choose another loss"
            )

    def forward(self, policy: PolicyModel, batch: BatchTensors) -> tuple[Float[Tensor, "1 packed"], ...]:
        """Compute the policy's log-probs and entropies at the trained tokens, and what else the objective needs.

        Returns:
            Log-probs and entropies; with a value head, the values; with `--top-p` or `--top-k`, as the last tensor, 1
            at each trained token that these options exclude under the trainer's probabilities, although the engine
            could sample it, and 0 elsewhere. If observations are trained on, the log-probs include theirs.
        """
        masks = None if batch.allowed is None else policy.token_masks(batch.allowed)
        if batch.images and batch.image_inputs is None:
            batch.image_inputs = policy.image_inputs(
                batch.images, batch.input_ids.cpu().numpy(), batch.cu_seqlens.numpy()
            )
        images = () if batch.image_inputs is None else (batch.image_inputs,)
        options: dict[str, Any] = {} if self.truncation is None else {"truncation": self.truncation}
        if batch.teacher_top_ids is not None:
            batch.leave_out_unknown_teacher_tokens(policy.vocab_size)
            options["further_ids"] = batch.teacher_top_ids
        mask = batch.mask | batch.observations if self.trains_observations else batch.mask
        outputs = policy(
            batch.input_ids,
            batch.cu_seqlens,
            mask[0],
            self.config.temperature,
            masks,
            *images,
            **options,
        )
        if batch.teacher_top_ids is not None:
            *outputs, further_logprobs = outputs
            batch.further_logprobs = further_logprobs[None]
        return tuple(output[None] for output in outputs)

    def __call__(
        self, policy: PolicyModel, batch: BatchTensors
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Compute the loss of a micro-batch by one forward pass.

        Returns:
            The loss, and totals for the metrics by name. The loss and most totals are sums, not yet averaged. The totals
            also contain the counts by which the caller divides these sums: `tokens`, `sequences` and `groups`. A total
            whose name ends in `_max` is a maximum instead of a sum.
        """
        logprobs, entropy, *further_outputs = self.forward(policy, batch)
        batch.logprobs = logprobs.detach()
        mask = self.kept_tokens(logprobs, batch)
        entropy_of_trained = torch.where(mask, entropy, 0)
        kl = self._kl_to_reference(logprobs, batch, mask)

        token_losses, metrics = self._policy_loss(logprobs, batch, mask)
        policy_loss = self.aggregate(token_losses, batch, mask)
        if self.config.loss_kl_coef:
            token_losses = token_losses + self.config.loss_kl_coef * kl
        if self.config.log_ratio_coef:
            metrics["log_ratio_square"] = self._log_ratio(logprobs, batch, mask).square()
            token_losses = token_losses + self.config.log_ratio_coef * metrics["log_ratio_square"]
        if self.config.entropy_coef:
            # If the coefficient is 0, the term is left out, because its gradient would cost time in the backward pass
            token_losses = token_losses - self.config.entropy_coef * entropy_of_trained
        if self.config.teacher_top_k:
            teacher_kl = self._kl_from_teacher(logprobs, batch, mask)
            token_losses = token_losses + self.config.teacher_coef * teacher_kl
            metrics["teacher_forward_kl"] = teacher_kl
        if self.has_value_head:
            value_losses, value_metrics = self.value_losses(further_outputs[0], batch, mask)
            token_losses = token_losses + self.config.critic_coef * value_losses
            metrics |= value_metrics | {"value_loss": value_losses}
        loss = self.aggregate(token_losses, batch, mask)
        cross_entropy = self._cross_entropy_of_observations(logprobs, batch)
        # The sum over observation tokens must become their mean. The caller divides the loss by the step's number of units
        # instead, and the metric below by its number of trained tokens. Each factor replaces this divisor by the number of
        # observation tokens: `units_per_observation` for the loss, `tokens_per_observation` for the metric
        loss = loss + self.config.observation_coef * cross_entropy * batch.units_per_observation
        if self.truncation is not None:
            metrics["outside_support_share"] = torch.where(mask, further_outputs[-1], 0)
        if batch.start_logprobs is not None:
            metrics["pass_kl"] = kl_since(batch.start_logprobs, logprobs.detach(), mask)
        metrics["entropy"] = entropy_of_trained
        metrics["avg_kl_div"] = kl
        totals = metric_totals(metrics)
        if self.trains_observations:
            totals["observation_nll"] = cross_entropy.detach() * batch.tokens_per_observation
        totals["avg_loss"] = policy_loss.detach()
        totals["backward_loss"] = loss.detach()
        totals |= count_units(mask, batch.sequence_ids, group_tokens=batch.group_tokens)
        # `batch.mask`: the metrics of the mismatch between trainer and engine include rejected tokens
        totals |= mismatch_sums(
            logprobs, batch.behaviour_logprobs, batch.mask, sequence_ids=batch.sequence_ids
        )
        totals["histogram"] = ratio_histogram(logprobs, batch.behaviour_logprobs, batch.mask)
        return loss, totals

    def _policy_loss(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> tuple[Float[Tensor, "1 packed"], dict[str, Float[Tensor, "1 packed"]]]:
        """Return the policy loss of each token, and the metrics of the loss by name."""
        options = dict(self.loss_settings)
        if self.loss.needs_proximal:
            options["proximal_logprobs"] = or_zeros(batch.proximal_logprobs, logprobs)
        if self.loss.needs_selection:
            options["selected"] = batch.selected
        if self.has_importance_weights:
            options["importance_weights"] = self.token_weights(logprobs, batch, mask)
        token_losses, metrics = self.loss(
            logprobs,
            self.ratio_denominator_logprobs(logprobs, batch),
            batch.advantages,
            mask,
            sequence_ids=batch.sequence_ids,
            **options,
        )
        if self.has_importance_weights:
            metrics["importance_weight"] = options["importance_weights"]
        token_losses, mask_metrics = mask_policy_loss(
            token_losses,
            logprobs,
            batch.behaviour_logprobs,
            batch.advantages,
            mask,
            threshold=self.config.off_policy_mask_threshold,
            has_high_entropy=batch.has_high_entropy,
            sequence_ids=batch.sequence_ids,
        )
        return token_losses, metrics | mask_metrics

    def _kl_to_reference(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> Float[Tensor, "1 packed"]:
        """Return the KL penalty of each token; 0 if there is no reference, or where the mask is False."""
        if batch.ref_logprobs is None:
            return torch.zeros_like(logprobs)
        log_ratio = None
        if self.config.unbiased_kl:
            log_ratio = clamp_log_ratio(self._log_ratio(logprobs, batch, mask))
        return kl_penalty(
            torch.where(mask, logprobs, 0),
            torch.where(mask, batch.ref_logprobs, 0),
            self.config.kl_kind,
            clamp=self.config.kl_clamp,
            log_ratio=log_ratio,
        )

    def _log_ratio(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> Float[Tensor, "1 packed"]:
        """Return log(pi / pi_old) with its gradient; 0 where the mask is False.

        The value is not clamped. A clamp has gradient 0 outside of its bounds, where the pull towards pi_old is needed
        most.
        """
        old_logprobs = self.ratio_denominator_logprobs(logprobs, batch)
        return torch.where(mask, logprobs, 0) - torch.where(mask, old_logprobs, 0)

    def _cross_entropy_of_observations(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors
    ) -> Float[Tensor, ""]:
        """Return the sum of -log pi over the observations of the micro-batch; 0 if they are not trained on."""
        if not self.trains_observations:
            return logprobs.new_zeros(())
        return -torch.where(batch.observations, logprobs, 0).sum()

    def _kl_from_teacher(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> Float[Tensor, "1 packed"]:
        """Return the forward KL of each token from the teacher to the policy; 0 in a dummy micro-batch.

        A dummy has this metric as well, because the totals of all ranks must have the same names in the same order.
        """
        if batch.teacher_top_logprobs is None:
            return torch.zeros_like(logprobs)
        assert batch.further_logprobs is not None, "`forward` sets them"
        return forward_kl(batch.further_logprobs, batch.teacher_top_logprobs, mask)

    def value_losses(
        self, values: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> tuple[Float[Tensor, "1 packed"], dict[str, Float[Tensor, "1 packed"]]]:
        """Return the critic's loss of each token, and its metrics."""
        assert batch.returns is not None and batch.old_values is not None, "`whole_step` sets them first"
        return value_loss(values, batch.returns, batch.old_values, mask, clip=self.config.critic_clip)

    def aggregate(
        self, token_losses: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> Float[Tensor, ""]:
        """Return the sum of the micro-batch's losses, later divided by the step's number of units (see `self.unit`)."""
        return self._aggregation.total(token_losses, mask, batch.sequence_ids, batch.group_tokens)

    def kept_tokens(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors
    ) -> Bool[Tensor, "1 packed"]:
        """Return the mask without the tokens that the rejection options leave out (`--rejection-*`).

        A token is left out if trainer and engine disagree too much on its probability. Every pass over a batch leaves
        out the same tokens.
        """
        if self.config.rejection_statistic is None:
            return batch.mask
        return rejection_mask(
            _logprobs_to_compare(logprobs, batch, of_first_pass=True),
            batch.behaviour_logprobs,
            batch.mask,
            sequence_ids=batch.sequence_ids,
            **self._rejection_options,
        )

    def token_weights(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> Float[Tensor, "1 packed"]:
        """Return the importance weight of each token, which corrects for the difference between trainer and engine.

        The weights are divided by `batch.weight_mean` if it is set. In later passes over a batch, the policy has also
        changed since the first pass. A loss with a policy ratio corrects for this change by the ratio. For other
        losses, the weights do.
        """
        return importance_weights(
            _logprobs_to_compare(logprobs, batch, of_first_pass=self.loss.uses_ratio),
            batch.behaviour_logprobs,
            mask,
            sequence_ids=batch.sequence_ids,
            mean=batch.weight_mean,
            **self._importance_options,
        )

    def ratio_denominator_logprobs(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors
    ) -> Float[Tensor, "1 packed"]:
        """Return the log-probs of the policy in the denominator of the policy ratio.

        Some losses read `proximal_logprobs` themselves. For these, the denominator is the engine's policy even with
        `--old-policy proximal`.
        """
        if self.config.old_policy == "current":
            return logprobs.detach() if batch.start_logprobs is None else batch.start_logprobs
        if self.config.old_policy == "proximal" and not self.loss.needs_proximal:
            return or_zeros(batch.proximal_logprobs, logprobs)
        return batch.behaviour_logprobs


def _logprobs_to_compare(
    logprobs: Float[Tensor, "1 packed"], batch: BatchTensors, *, of_first_pass: bool
) -> Float[Tensor, "1 packed"]:
    """Return the log-probs to compare with the engine's: proximal log-probs if there are any, else the trainer's.

    Args:
        logprobs: The trainer's log-probs.
        batch: The micro-batch.
        of_first_pass: In later passes over a batch, return the trainer's log-probs from the first pass.
    """
    if batch.proximal_logprobs is not None:
        return batch.proximal_logprobs
    if of_first_pass and batch.start_logprobs is not None:
        return batch.start_logprobs
    return logprobs.detach()
