"""Which tokens of another policy are trained on, and with what weight: the off-policy settings of a run."""

from dataclasses import dataclass

from torch import Tensor

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.algorithm.off_policy import (
    importance_weights,
    rejection_mask,
    weight_totals,
)


@dataclass(frozen=True)
class OffPolicyCorrection:
    """Importance weights and rejection between a policy and the engine; level "none" and no statistic: neither."""

    config: AlgorithmConfig

    @property
    def weighs(self) -> bool:
        return self.config.importance_level != "none"

    @property
    def rejects(self) -> bool:
        return self.config.rejection_statistic is not None

    @property
    def averages(self) -> bool:
        """Whether the weights are divided by their mean over the whole step."""
        return self.weighs and self.config.importance_normalize

    def keep(self, logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        """The part of the mask that is not rejected; (B, T) like everything here."""
        if not self.rejects:
            return mask
        assert self.config.rejection_statistic is not None
        return rejection_mask(
            logprobs,
            behaviour_logprobs,
            mask,
            statistic=self.config.rejection_statistic,
            low=self.config.rejection_low,
            high=self.config.rejection_high,
            sequence_ids=ids,
        )

    def weights(
        self,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        mask: Tensor,
        ids: Tensor,
        mean: Tensor | float | None = None,
    ) -> Tensor | None:
        """The weights, or None; `mean` is that of the whole step and divides them if they are normalised."""
        if not self.weighs:
            return None
        return importance_weights(
            logprobs,
            behaviour_logprobs,
            mask,
            level=self.config.importance_level,
            mode=self.config.importance_mode,
            low=self.config.importance_low,
            high=self.config.importance_high,
            normalize=self.config.importance_normalize and mean is not None,
            mean=mean,
            sequence_ids=ids,
        )

    def totals(
        self, logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(sum, count) of the weights that are not normalised yet, additive over micro-batches."""
        weights = self.weights(logprobs, behaviour_logprobs, mask, ids)
        assert weights is not None
        return weight_totals(weights, mask, level=self.config.importance_level, sequence_ids=ids)
