"""Which tokens of another policy are trained on, and with what weight: the off-policy settings of a run."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from async_grpo.algorithm.off_policy import (
    check_importance,
    check_rejection,
    importance_weights,
    rejection_mask,
    weight_totals,
)


@dataclass(frozen=True)
class OffPolicyCorrection:
    """Importance weights and rejection between a policy and the engine; `level` "none" and no statistic: neither.

    ConfigurationError: bounds or names that cannot work.
    """

    level: str = "none"  # "none", "token" or "sequence"
    mode: str = "truncate"
    low: float | None = None
    high: float = 2.0
    normalize: bool = False
    statistic: str | None = None
    rejection_low: float | None = None
    rejection_high: float | None = None

    def __post_init__(self) -> None:
        if self.weighs:
            check_importance(self.level, self.mode, self.low, self.high)
        if self.statistic is not None:
            check_rejection(self.statistic, self.rejection_low, self.rejection_high)

    @property
    def weighs(self) -> bool:
        return self.level != "none"

    @property
    def rejects(self) -> bool:
        return self.statistic is not None

    @property
    def averages(self) -> bool:
        """Whether the weights are divided by their mean over the whole step."""
        return self.weighs and self.normalize

    def keep(self, logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        """The part of the mask that is not rejected; (B, T) like everything here."""
        if not self.rejects:
            return mask
        assert self.statistic is not None
        bounds = {"low": self.rejection_low, "high": self.rejection_high}
        return rejection_mask(
            logprobs, behaviour_logprobs, mask, statistic=self.statistic, sequence_ids=ids, **bounds
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
        bounds: dict[str, Any] = {"level": self.level, "mode": self.mode, "low": self.low, "high": self.high}
        normalize = self.normalize and mean is not None
        return importance_weights(
            logprobs, behaviour_logprobs, mask, normalize=normalize, mean=mean, sequence_ids=ids, **bounds
        )

    def totals(
        self, logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(sum, count) of the weights that are not normalised yet, additive over micro-batches."""
        weights = self.weights(logprobs, behaviour_logprobs, mask, ids)
        assert weights is not None
        return weight_totals(weights, mask, level=self.level, sequence_ids=ids)
