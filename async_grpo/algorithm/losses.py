"""Per-token policy losses by name. A user's own loss is selected by `FILE.py:NAME`.

Masked positions may contain anything, including NaN and inf. These values are replaced *before* the computation, because
the gradient of `where(mask, f(x), 0)` is 0 * inf = NaN if f overflows at a masked x. Every loss reports `ratio_mean`
and `ratio_max`. A loss with a clip also reports `clip_frac_low` and `clip_frac_high` (`topr` only `clip_frac_high`),
which are 1 at every clipped token. Other modules decide by the attributes of a loss, and never by its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from async_grpo.algorithm import covariance, policy_losses
from async_grpo.algorithm.advantages import keywords
from async_grpo.algorithm.policy_losses import LossAndMetrics, LossBatch
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse

# Keywords of a loss that are (B, T) tensors of a batch rather than settings
TENSOR_INPUTS = ("proximal_logprobs", "selected")


@dataclass(frozen=True)
class PolicyLoss:
    """One policy loss, and what the rest of the library must know about it.

    Args:
        function: (`LossBatch`, *, settings) -> (loss, metrics). Its keywords are its settings, plus
            `proximal_logprobs` and `selected` if it reads them.
        needs_proximal: `proximal_logprobs` is required, and `old_logprobs` are those of the policy that sampled the
            tokens (the behaviour policy).
        uses_ratio: The value or the gradient contains pi / pi_old, which already corrects for the policy that computed
            `old_logprobs`. If `old_logprobs` are those of the behaviour policy, importance weights would correct for
            this policy a second time.
        sequence_level: The loss of a token depends on its whole sequence, which must not be split.
        idle_at_ratio_one: The loss pulls the policy towards the old policy. This pull is 0 if both policies are equal.
        scores: (batch, sums, token_keys, **settings) -> the score of each token. The tokens with the highest scores in
            the whole minibatch become `selected`. `sums` (3,) are the `covariance.token_sums` of the minibatch.
            `token_keys` is None or contains a distinct number for each token. A function whose scores are random computes
            them from these numbers. A loss that selects no tokens has None in place of this function.
    """

    function: Callable[..., LossAndMetrics]
    needs_proximal: bool = False
    uses_ratio: bool = True
    sequence_level: bool = False
    idle_at_ratio_one: bool = False
    scores: Callable[..., Float[Tensor, "batch tokens"]] | None = None

    @property
    def needs_selection(self) -> bool:
        """Return whether the loss treats the tokens with the highest scores in the whole minibatch in a special way."""
        return self.scores is not None

    @property
    def options(self) -> dict[str, Any]:
        """Return the settings of the loss and their defaults. TENSOR_INPUTS are not settings."""
        defaults = keywords(self.function)
        return {name: default for name, default in defaults.items() if name not in TENSOR_INPUTS}

    def check_options(self, **options: Any) -> None:
        """Check settings by computing the loss of a single masked token.

        Raises:
            ConfigurationError: The loss refuses the name or the value of a setting, or raises any other error.
        """
        zeros = torch.zeros(1, 1)
        mask = torch.zeros(1, 1, dtype=torch.bool)
        inputs: dict[str, Any] = {"proximal_logprobs": zeros} if self.needs_proximal else {}
        try:
            self(zeros, zeros, zeros, mask, **inputs, **options)
        except ConfigurationError:
            raise
        except Exception as error:  # a user's loss may raise anything
            raise ConfigurationError(
                f"the loss {self.function.__name__} fails on a batch of one token, {type(error).__name__}: {error}; it "
                "must return (loss (B, T), metrics by name)"
            ) from error

    def __call__(
        self,
        logprobs: Float[Tensor, "batch tokens"],
        old_logprobs: Float[Tensor, "batch tokens"],
        advantages: Float[Tensor, "batch tokens"],
        mask: Shaped[Tensor, "batch tokens"],
        *,
        importance_weights: Float[Tensor, "batch tokens"] | None = None,
        sequence_ids: Int[Tensor, "batch tokens"] | None = None,
        **options: Any,
    ) -> LossAndMetrics:
        """Return (per-token loss, metrics), zero where the mask is False.

        Args:
            logprobs: Log-probs of the policy, the only input that gets a gradient.
            old_logprobs: Log-probs of the policy in the denominator of the ratio, by default the behaviour policy.
            advantages: The advantage of each token.
            mask: True at the tokens that are trained on.
            importance_weights: Factors by which the loss of each token is multiplied.
            sequence_ids: Any integers in any order. None means that each row is one sequence.
            options: Settings of the loss, plus `proximal_logprobs` (B, T) and `selected` (B, T) bool if it reads them.

        Returns:
            The loss, and the values of its metrics at each token, by name. The caller averages a metric over tokens, or
            takes its maximum if the name ends in `_max`.

        Raises:
            ConfigurationError: An option is unknown or has a wrong value, or proximal log-probs are missing.

        >>> one = torch.ones(1, 1)
        >>> loss, metrics = POLICY_LOSSES["ppo_clip"](one, 0 * one, 2 * one, one)  # ratio exp(1 - 0) = e > 1.28
        >>> round(loss.item(), 2), metrics["clip_frac_high"].item()
        (-2.56, 1.0)
        """
        self._check_names(options)
        mask = mask.bool()
        batch = LossBatch(
            logprobs=torch.where(mask, logprobs, 0),
            old_logprobs=torch.where(mask, old_logprobs.detach(), 0),
            advantages=torch.where(mask, advantages.detach(), 0),
            mask=mask,
            sequence_ids=sequence_ids,
        )
        for name in TENSOR_INPUTS:
            if options.get(name) is not None:
                options[name] = options[name].detach().masked_fill(~mask, 0)
        loss, metrics = self.function(batch, **options)
        if importance_weights is not None:
            loss = loss * torch.where(mask, importance_weights.detach(), 0)

        masked_metrics = {}
        for name, values in metrics.items():
            masked_metrics[name] = torch.where(mask, values.detach().to(loss.dtype), 0)
        return torch.where(mask, loss, 0), masked_metrics

    def _check_names(self, options: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if an option is unknown, or proximal log-probs are missing."""
        name = self.function.__name__
        names = keywords(self.function)
        unknown = ", ".join(sorted(options.keys() - names.keys()))
        refuse(bool(unknown), f"the loss {name} has no option {unknown}; known: {', '.join(names) or 'none'}")
        lacks_proximal = self.needs_proximal and options.get("proximal_logprobs") is None
        refuse(lacks_proximal, f"the loss {name} needs proximal_logprobs: run a proximal logprob worker")


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(policy_losses.ppo_clip),
    "grpo": PolicyLoss(policy_losses.grpo, uses_ratio=False),
    "dual_clip": PolicyLoss(policy_losses.dual_clip),
    "decoupled": PolicyLoss(policy_losses.decoupled, needs_proximal=True),
    "gspo": PolicyLoss(policy_losses.gspo, sequence_level=True),
    "cispo": PolicyLoss(policy_losses.cispo),
    "sapo": PolicyLoss(policy_losses.sapo),
    "gpg": PolicyLoss(policy_losses.gpg, uses_ratio=False),
    "geo_mean": PolicyLoss(policy_losses.geo_mean, sequence_level=True),
    "dppo_tv": PolicyLoss(policy_losses.dppo_tv),
    "dppo_kl": PolicyLoss(policy_losses.dppo_kl),
    "topr": PolicyLoss(policy_losses.topr, sequence_level=True),
    "vespo": PolicyLoss(policy_losses.vespo, sequence_level=True),
    "dro": PolicyLoss(policy_losses.dro, idle_at_ratio_one=True),
    "clip_cov": PolicyLoss(covariance.clip_cov, scores=covariance.clip_cov_scores),
    "kl_cov": PolicyLoss(covariance.kl_cov, idle_at_ratio_one=True, scores=covariance.kl_cov_scores),
}
