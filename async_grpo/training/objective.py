"""The objective of one micro-batch: its loss before normalisation, the counts that divide it, and sums for the metrics.

The results of all micro-batches and ranks are added up (or the maximum is taken, for a few metrics), so that a step does
not depend on the packing. Terms that depend on the whole step are computed first, and written into `BatchTensors` (see
`whole_step`).
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from async_grpo.algorithm.aggregation import count_units, get_aggregation
from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.algorithm.forward_kl import forward_kl
from async_grpo.algorithm.kl import kl_penalty, kl_since
from async_grpo.algorithm.off_policy import importance_weights, mismatch_sums, ratio_histogram, rejection_mask
from async_grpo.algorithm.process_advantages import value_loss
from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.errors import ConfigurationError
from async_grpo.messages import MicroBatch
from async_grpo.modeling.image_models import ImageInputs
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.metric_totals import metric_totals, or_zeros
from async_grpo.types import ImageReference


class BatchTensors:
    """A micro-batch on the trainer's device, as one packed row.

    If the objective has terms that depend on the whole step, `whole_step` sets `logprobs`, `kept` and, as far as the
    objective needs them, `returns`, `old_values`, `selected` and `weight_mean` before the backward pass. It may replace
    `advantages` and `group_tokens`.
    """

    returns: Float[Tensor, "1 packed"] | None = None  # targets of the critic
    old_values: Float[Tensor, "1 packed"] | None = None  # the critic's values before the step
    selected: Bool[Tensor, "1 packed"] | None = None  # tokens that the losses clip_cov and kl_cov select
    # KL divergence of each denoising step from the reference policy; set if the policy draws and has a reference
    kl_to_reference: Float[Tensor, "1 packed"] | None = None
    # The policy's log-probs of the teacher's most probable tokens, with gradients; `Objective.forward` sets them
    further_logprobs: Float[Tensor, "1 packed k"] | None = None
    weight_mean: float | None = None  # mean importance weight of the step, by which the weights are divided
    # Log-probs under the weights before the first pass over the batch; None in the first pass
    start_logprobs: Float[Tensor, "1 packed"] | None = None

    # Log-probs under the weights before the step, without gradient
    logprobs: Float[Tensor, "1 packed"]
    kept: Bool[Tensor, "1 packed"]  # `mask` without rejected tokens

    input_ids: Int64[Tensor, " packed"]
    cu_seqlens: Int[Tensor, " boundaries"]
    mask: Bool[Tensor, "1 packed"]
    sequence_ids: Int64[Tensor, "1 packed"]
    group_ids: Int64[Tensor, "1 packed"]
    group_tokens: Int64[Tensor, "1 packed"]
    advantages: Float[Tensor, "1 packed"]
    behaviour_logprobs: Float[Tensor, "1 packed"]
    ref_logprobs: Float[Tensor, "1 packed"] | None
    proximal_logprobs: Float[Tensor, "1 packed"] | None
    # Ids of the teacher's most probable tokens at each position, and the teacher's log-probs of them
    teacher_top_ids: Int64[Tensor, "packed k"] | None = None
    teacher_top_logprobs: Float[Tensor, "1 packed k"] | None = None
    members: Int64[Tensor, "1 packed"] | None
    times: Int[Tensor, "1 packed"] | None
    allowed: AllowedTokens | None
    images: tuple[tuple[ImageReference, ...], ...]
    # The images as the policy reads them, once `Objective.forward` needs them
    image_inputs: ImageInputs | None = None
    latents: Float[Tensor, "packed 2 channels height width"] | None  # set if the policy draws

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        def row(values: np.ndarray) -> Tensor:
            return torch.tensor(values, device=device)[None]

        def optional_row(values: np.ndarray | None) -> Tensor | None:
            return None if values is None else row(values)

        is_trained = batch.loss_mask.copy()
        # The first token of a sequence cannot be trained on, because no token before it predicts it
        first_tokens = batch.cu_seqlens[:-1]
        is_trained[first_tokens] = False
        sequence_ids = batch.sequence_ids()

        self.input_ids = torch.tensor(batch.input_ids, dtype=torch.int64, device=device)  # (N,)
        self.cu_seqlens = torch.tensor(batch.cu_seqlens)  # (S + 1,)
        self.mask = row(is_trained)
        self.sequence_ids = row(sequence_ids)
        self.group_ids = row(batch.group_ids[sequence_ids])
        self.group_tokens = row(batch.group_tokens[sequence_ids])
        self.advantages = row(batch.advantages)
        self.behaviour_logprobs = row(batch.behaviour_logprobs)
        self.ref_logprobs = optional_row(batch.ref_logprobs)
        self.proximal_logprobs = optional_row(batch.proximal_logprobs)
        if batch.teacher_top is not None:
            # The id of a missing token is NaN or 0; its log-prob is NaN, so that the id does not matter
            top_ids = np.nan_to_num(batch.teacher_top[:, 0])
            self.teacher_top_ids = torch.tensor(top_ids, dtype=torch.int64, device=device)
            self.teacher_top_logprobs = row(batch.teacher_top[:, 1])
        # For each token, the index of its sample in the group, and its index in time within its trajectory
        self.members = None if batch.members is None else row(batch.members[sequence_ids])
        self.times = optional_row(batch.times)
        self.allowed = batch.allowed  # the tokens among which each token was sampled
        self.images = batch.images  # the images of each sequence
        self.latents = None if batch.latents is None else torch.tensor(batch.latents, device=device)
        if batch.first_pass is not None:
            self.start_logprobs = row(batch.first_pass.logprobs)
            self.returns = optional_row(batch.first_pass.returns)
            self.old_values = optional_row(batch.first_pass.values)
            if batch.first_pass.advantages is not None:
                self.advantages = row(batch.first_pass.advantages)

    @property
    def is_repeated(self) -> bool:
        """Return whether an earlier pass has trained on this micro-batch."""
        return self.start_logprobs is not None


class Objective:
    """Policy loss + kl_coef * KL to the reference - entropy_coef * entropy + value loss, aggregated over tokens.

    The policy's log-probs are computed at the sampling temperature, and over the tokens that the sampler keeps, as the
    engine's were. The denominator of the policy ratio is the policy that `config.old_policy` names. "current" means the
    trained policy before the first pass over the minibatch. In the first pass, which is usually the only one, the value of
    the ratio is 1, and only its gradient matters.

    Args:
        config: The algorithm's options.
        max_completion_tokens: Completion tokens that fit in the context even after the longest prompt. The aggregation
            `constant_length` divides by this number. 0 means `--max-generation-tokens`.
        reference_is_base: Whether the reference of the KL penalty is the policy without its LoRA adapter. The trainer
            then computes the reference log-probs itself (see `base_reference`), because the samples come without them.

    Raises:
        ConfigurationError: The loss or the estimator does not have an option that is set.
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
        # The sum of the losses is divided by the number of "tokens", "sequences" or "groups". None divides by 1
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
        # A group's loss is divided by its number of tokens, which must be counted again after tokens are rejected
        self.rejects_from_groups = self.unit == "groups" and config.rejection_statistic is not None
        # Whether the loss of a micro-batch can be computed only when all micro-batches of the step have arrived
        self.needs_whole_step = (
            self.has_critic or self.loss.needs_selection or self.averages_weights or self.rejects_from_groups
        )

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
        if self.config.needs_proximal and batch.proximal_logprobs is None:
            raise ConfigurationError(
                f"the loss {self.config.policy_loss} with the ratio to the {self.config.old_policy} policy needs proximal "
                "log-probs but the samples carry none; run a proximal logprob worker or choose another loss"
            )

    def forward(self, policy: PolicyModel, batch: BatchTensors) -> tuple[Float[Tensor, "1 packed"], ...]:
        """Return (log-probs, entropies) of the trained tokens, and with a critic also the values.

        With a truncation, the last result is 1 at the tokens that the truncation alone would not keep, and 0 at all others.
        """
        masks = None if batch.allowed is None else policy.token_masks(batch.allowed)
        if batch.images and batch.image_inputs is None:
            batch.image_inputs = policy.image_inputs(
                batch.images, batch.input_ids.cpu().numpy(), batch.cu_seqlens.numpy()
            )
        images = () if batch.image_inputs is None else (batch.image_inputs,)
        options: dict[str, Any] = {} if self.truncation is None else {"truncation": self.truncation}
        if batch.teacher_top_ids is not None:
            options["further_ids"] = batch.teacher_top_ids
        outputs = policy(
            batch.input_ids,
            batch.cu_seqlens,
            batch.mask[0],
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
        if self.config.entropy_coef:
            # Skipped if the coefficient is 0, because the gradient of the entropy costs time in the backward pass
            token_losses = token_losses - self.config.entropy_coef * entropy_of_trained
        if batch.teacher_top_logprobs is not None:
            assert batch.further_logprobs is not None, "`forward` sets them"
            teacher_kl = forward_kl(batch.further_logprobs, batch.teacher_top_logprobs, mask)
            token_losses = token_losses + self.config.teacher_coef * teacher_kl
            metrics["teacher_forward_kl"] = teacher_kl
        if self.has_value_head:
            value_losses, value_metrics = self.value_losses(further_outputs[0], batch, mask)
            token_losses = token_losses + self.config.critic_coef * value_losses
            metrics |= value_metrics | {"value_loss": value_losses}
        loss = self.aggregate(token_losses, batch, mask)

        if self.truncation is not None:
            metrics["outside_support_share"] = torch.where(mask, further_outputs[-1], 0)
        if batch.start_logprobs is not None:
            metrics["pass_kl"] = kl_since(batch.start_logprobs, logprobs.detach(), mask)
        metrics["entropy"] = entropy_of_trained
        metrics["avg_kl_div"] = kl
        totals = metric_totals(metrics)
        totals["avg_loss"] = policy_loss.detach()
        totals["backward_loss"] = loss.detach()
        totals |= count_units(mask, batch.sequence_ids, group_tokens=batch.group_tokens)
        # The metrics of the mismatch with the engine include rejected tokens
        totals |= mismatch_sums(
            logprobs,
            batch.behaviour_logprobs,
            batch.mask,
            sequence_ids=batch.sequence_ids,
        )
        totals["histogram"] = ratio_histogram(logprobs, batch.behaviour_logprobs, batch.mask)
        return loss, totals

    def _policy_loss(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> tuple[Float[Tensor, "1 packed"], dict[str, Float[Tensor, "1 packed"]]]:
        """Return the policy loss of each token, and the metrics that the loss reports."""
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
        return token_losses, metrics

    def _kl_to_reference(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> Float[Tensor, "1 packed"]:
        """Return the KL penalty of each token; 0 if there is no reference, or where the mask is False."""
        if batch.ref_logprobs is None:
            return torch.zeros_like(logprobs)
        return kl_penalty(
            torch.where(mask, logprobs, 0),
            torch.where(mask, batch.ref_logprobs, 0),
            self.config.kl_kind,
            clamp=self.config.kl_clamp,
        )

    def value_losses(
        self, values: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> tuple[Float[Tensor, "1 packed"], dict[str, Float[Tensor, "1 packed"]]]:
        """Return the critic's loss of each token, and its metrics."""
        assert batch.returns is not None and batch.old_values is not None, "`whole_step` sets them first"
        return value_loss(values, batch.returns, batch.old_values, mask, clip=self.config.critic_clip)

    def aggregate(
        self, token_losses: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> Float[Tensor, ""]:
        """Return the sum of the micro-batch's losses, which is later divided by the number of units of the step."""
        return self._aggregation.total(token_losses, mask, batch.sequence_ids, batch.group_tokens)

    def kept_tokens(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors
    ) -> Bool[Tensor, "1 packed"]:
        """Return the mask without tokens that are rejected because trainer and engine disagree on their probability.

        Every pass over a batch rejects the same tokens.
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

        The weights are divided by `batch.weight_mean` if it is set. In later passes over a batch, the ratio of the loss
        corrects for what the policy has changed since the first pass. If the loss has no ratio, the weights do so.
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

        For a loss that reads `proximal_logprobs` itself, the denominator is the engine's policy also with
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
        of_first_pass: In later passes over a batch, return the trainer's log-probs before the first pass.
    """
    if batch.proximal_logprobs is not None:
        return batch.proximal_logprobs
    if of_first_pass and batch.start_logprobs is not None:
        return batch.start_logprobs
    return logprobs.detach()
