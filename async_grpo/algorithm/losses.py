"""Per-token policy losses by name, or by `FILE.py:NAME` where they are the user's own.

Masked positions may hold anything, NaN and inf included: they are replaced *before* the maths, because the gradient of
`where(mask, f(x), 0)` is 0 * inf = NaN when f overflows at a masked x. Every loss reports `ratio_mean` and `ratio_max`;
those with a clip also `clip_frac_low` and `clip_frac_high`, each token 1 that the clip holds. No other module knows a
loss by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_grpo.algorithm import covariance, policy_losses
from async_grpo.algorithm.advantages import keywords
from async_grpo.algorithm.policy_losses import LossAndMetrics, LossBatch
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse

TENSOR_INPUTS = ("proximal_logprobs", "selected")  # given per batch, (B, T), so they are no settings


@dataclass(frozen=True)
class PolicyLoss:
    """One policy loss and what the rest of the library must know of it.

    `function`: (`LossBatch`, *, settings) -> (loss, metrics), (B, T) each. Its keywords are the settings, and whichever
    of TENSOR_INPUTS it wants. `uses_ratio`: its value or gradient contains pi / pi_old, which already corrects for the
    policy behind `old_logprobs`; importance weights for the behaviour policy on top would correct twice, unless
    `old_logprobs` are the proximal policy's. `needs_proximal`: the option `proximal_logprobs` must be given, and
    `old_logprobs` are the behaviour policy's. `sequence_level`: a token's loss depends on its whole sequence, which must
    not be split. `idle_at_ratio_one`: its pull to the old policy vanishes where that is the policy itself.
    `scores`: (batch, token sums, token keys, **settings) -> (B, T), by what the tokens are chosen over the whole minibatch,
    for a loss that does so (see `covariance`).
    """

    function: Callable[..., LossAndMetrics]
    needs_proximal: bool = False
    uses_ratio: bool = True
    sequence_level: bool = False
    idle_at_ratio_one: bool = False
    scores: Callable[..., Tensor] | None = None

    @property
    def needs_selection(self) -> bool:
        """It treats some tokens apart, ranked over the whole minibatch (`covariance` says how)."""
        return self.scores is not None

    @property
    def options(self) -> dict[str, Any]:
        """Its settings and their defaults, without the tensors of a batch."""
        known = keywords(self.function)
        return {name: default for name, default in known.items() if name not in TENSOR_INPUTS}

    def check_options(self, **options: Any) -> None:
        """ConfigurationError: a name or a value that the loss would refuse. Needs no batch."""
        empty, mask = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool)
        inputs: dict[str, Any] = {"proximal_logprobs": empty} if self.needs_proximal else {}
        try:
            self(empty, empty, empty, mask, **inputs, **options)
        except ConfigurationError:
            raise
        except Exception as error:  # of the user's code
            raise ConfigurationError(
                f"the loss {self.function.__name__} fails on a batch of one token, {type(error).__name__}: {error}; it "
                "must return (loss (B, T), metrics by name)"
            ) from error

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        importance_weights: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        **options: Any,
    ) -> LossAndMetrics:
        """(per-token loss, metrics), everything (B, T) and zero where the mask is False.

        old_logprobs: what the ratio is taken against, by default the behaviour policy's. importance_weights (B, T):
        multiply the loss. sequence_ids (B, T): any numbers in any order (None: a row is a sequence). options: its settings,
        and what it needs of proximal_logprobs (B, T) and selected (B, T) bool. Only `logprobs` gets a gradient. Metrics
        are averaged over tokens, or by their maximum where the name ends in `_max`. ConfigurationError: an unknown option
        or value, or missing proximal log-probs.

        >>> one = torch.ones(1, 1)
        >>> loss, metrics = POLICY_LOSSES["ppo_clip"](one.log() + 1, 0 * one, 2 * one, one)  # ratio e > 1.28
        >>> round(loss.item(), 2), metrics["clip_frac_high"].item()
        (-2.56, 1.0)
        """
        name, known = self.function.__name__, keywords(self.function)
        unknown = ", ".join(sorted(options.keys() - known.keys()))
        refuse(bool(unknown), f"the loss {name} has no option {unknown}; known: {', '.join(known) or 'none'}")
        lacks = self.needs_proximal and options.get("proximal_logprobs") is None
        refuse(lacks, f"the loss {name} needs proximal_logprobs: run a proximal logprob worker")
        mask, given = mask.bool(), (logprobs, old_logprobs.detach(), advantages.detach())
        logprobs, old_logprobs, advantages = (torch.where(mask, values, 0) for values in given)
        batch = LossBatch(logprobs, old_logprobs, advantages, mask, sequence_ids)
        for key in TENSOR_INPUTS:
            if options.get(key) is not None:
                options[key] = options[key].detach().masked_fill(~mask, 0)
        loss, metrics = self.function(batch, **options)
        if importance_weights is not None:
            loss = loss * torch.where(mask, importance_weights.detach(), 0)
        zeroed = {key: torch.where(mask, m.detach().to(loss.dtype), 0) for key, m in metrics.items()}
        return torch.where(mask, loss, 0), zeroed


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
    "dro": PolicyLoss(policy_losses.dro, idle_at_ratio_one=True),
    "clip_cov": PolicyLoss(covariance.clip_cov, scores=covariance.clip_cov_scores),
    "kl_cov": PolicyLoss(covariance.kl_cov, idle_at_ratio_one=True, scores=covariance.kl_cov_scores),
}
