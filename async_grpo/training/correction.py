"""Which tokens of another policy are trained on, and with what weight: the off-policy settings of a run."""

from dataclasses import dataclass

from torch import Tensor

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.algorithm.off_policy import importance_weights, rejection_mask, weight_totals
from async_grpo.training.batch_tensors import BatchTensors


@dataclass(frozen=True)
class OffPolicyCorrection:
    """Importance weights and rejection between a policy and the engine; level "none" and no statistic: neither.

    The policy whose distance to the engine is corrected is the proximal one if there is one, else the policy itself,
    whose `logprobs` (1, N) the methods get. Results are (1, N), without gradient.
    """

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

    def keep(self, logprobs: Tensor, row: BatchTensors) -> Tensor:
        """The part of the mask that is not rejected."""
        if self.config.rejection_statistic is None:
            return row.mask
        return rejection_mask(
            _corrected(logprobs, row),
            row.behaviour_logprobs,
            row.mask,
            statistic=self.config.rejection_statistic,
            low=self.config.rejection_low,
            high=self.config.rejection_high,
            sequence_ids=row.sequence_ids,
        )

    def weights(
        self, logprobs: Tensor, row: BatchTensors, mask: Tensor, mean: float | None = None
    ) -> Tensor | None:
        """The weights, or None; `mean` is that of the whole step and divides them if they are normalised."""
        if not self.weighs:
            return None
        return importance_weights(
            _corrected(logprobs, row),
            row.behaviour_logprobs,
            mask,
            level=self.config.importance_level,
            mode=self.config.importance_mode,
            low=self.config.importance_low,
            high=self.config.importance_high,
            normalize=self.config.importance_normalize and mean is not None,
            mean=mean,
            sequence_ids=row.sequence_ids,
        )

    def totals(self, logprobs: Tensor, row: BatchTensors, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, count) of the weights that are not normalised yet, additive over micro-batches."""
        weights = self.weights(logprobs, row, mask)
        assert weights is not None
        return weight_totals(weights, mask, level=self.config.importance_level, sequence_ids=row.sequence_ids)


def _corrected(logprobs: Tensor, row: BatchTensors) -> Tensor:
    return logprobs.detach() if row.proximal_logprobs is None else row.proximal_logprobs
