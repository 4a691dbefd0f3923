"""Per-token policy losses by name. Each one says what its metrics are; `aggregation` says how tokens are averaged.

`logprobs` carries the gradient; `old_logprobs` is what the ratio is taken against: the behaviour policy's by
default. Masked positions may hold anything, NaN and inf included: they are replaced *before* the maths,
because the gradient of `where(mask, f(x), 0)` is 0 * inf = NaN when f overflows at a masked x.

Metrics are per token. Every loss reports `ratio_mean` and `ratio_max`; those with a clip also `clip_frac_low` and
`clip_frac_high`, each token 1 that the clip holds (a loss without a clip leaves them out).

A loss of one's own is a `PolicyLoss`, or the function of one, in a file: `--policy-loss FILE.py:NAME`. Its entry says
everything that the rest of the library must know; no other module knows a loss by its name.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_grpo.algorithm import covariance, sequence_losses, token_losses
from async_grpo.algorithm.loss_batch import LossAndMetrics, LossBatch
from async_grpo.errors import ConfigurationError
from async_grpo.options.source_file import find_entry

TENSOR_INPUTS = ("proximal_logprobs", "selected")  # given per batch, (B, T), so they are no settings

Option = float | int | str | None


@dataclass(frozen=True)
class PolicyLoss:
    """One policy loss and what the rest of the library must know of it.

    `function`: (`LossBatch`, *, settings) -> (loss, metrics), (B, T) each. Its keywords are the settings, and whichever
    of TENSOR_INPUTS it wants. `uses_ratio`: its value or gradient contains pi / pi_old, which already corrects for the
    policy behind `old_logprobs`; importance weights for the behaviour policy on top would correct twice, unless
    `old_logprobs` are the proximal policy's. `needs_proximal`: the option `proximal_logprobs` must be given, and
    `old_logprobs` are the behaviour policy's. `sequence_level`: a token's loss depends on its whole sequence, which must
    not be split. `idle_at_ratio_one`: its pull to the old policy vanishes where that is the policy itself.
    `scores`: how a token is chosen over the whole minibatch, for a loss that does so.
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
    def options(self) -> dict[str, Option]:
        """Its settings and their defaults, without the tensors of a batch.

        >>> POLICY_LOSSES["ppo_clip"].options
        {'clip_low': 0.2, 'clip_high': 0.28}
        """
        keywords = _keywords(self.function)
        return {name: default for name, default in keywords.items() if name not in TENSOR_INPUTS}

    def check_options(self, **options: Any) -> None:
        """ValueError: a name or a value that the loss would refuse. Needs no batch."""
        empty, mask = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool)
        inputs: dict[str, Any] = {"proximal_logprobs": empty} if self.needs_proximal else {}
        self(empty, empty, empty, mask, **inputs, **options)

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

        importance_weights (B, T): multiply the loss, without gradient. sequence_ids (B, T): the sequence that
        each token of a packed row belongs to, any numbers in any order (None: a row is a sequence). options: its
        settings, and what it needs of proximal_logprobs (B, T) and selected (B, T) bool. Only `logprobs` gets
        a gradient. Metrics have none; they are averaged over tokens, or by their maximum where the name ends in
        `_max`. ValueError: an unknown option or value, or missing proximal log-probs.

        >>> one = torch.ones(1, 1)
        >>> loss, metrics = POLICY_LOSSES["ppo_clip"](one.log() + 1, 0 * one, 2 * one, one)  # ratio e > 1.28
        >>> round(loss.item(), 2), metrics["clip_frac_high"].item()
        (-2.56, 1.0)
        """
        batch = self._batch(logprobs, old_logprobs, advantages, mask, sequence_ids)
        loss, metrics = self.function(batch, **self._checked(options, batch.mask))
        if importance_weights is not None:
            loss = loss * torch.where(batch.mask, importance_weights.detach(), 0)
        zeroed = {
            name: torch.where(batch.mask, value.detach().to(loss.dtype), 0) for name, value in metrics.items()
        }
        return torch.where(batch.mask, loss, 0), zeroed

    def selection_scores(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        sums: Tensor,
        *,
        token_keys: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """(B, T) float64: the score by which a token is selected, -inf for no candidate.

        sums (3,): `covariance.token_sums` of the whole minibatch. token_keys (B, T) int64: see
        `covariance.clip_cov_scores`. options: the settings that the loss is called with. ValueError: an unknown
        option, or a loss without a selection.
        """
        if self.scores is None:
            raise ConfigurationError(f"the loss {self.function.__name__} selects no tokens")
        batch = self._batch(logprobs, old_logprobs, advantages, mask)
        settings = self.options | self._checked(options, batch.mask)
        wanted = {name: value for name, value in settings.items() if name in _keywords(self.scores)}
        return self.scores(batch, sums, token_keys, **wanted)

    @staticmethod
    def _batch(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        sequence_ids: Tensor | None = None,
    ) -> LossBatch:
        mask = mask.bool()
        return LossBatch(
            torch.where(mask, logprobs, 0),
            torch.where(mask, old_logprobs.detach(), 0),
            torch.where(mask, advantages.detach(), 0),
            mask,
            sequence_ids,
        )

    def _checked(self, options: dict[str, Any], mask: Tensor) -> dict[str, Any]:
        """The options with their tensors clean at masked positions."""
        name, known = self.function.__name__, _keywords(self.function)
        unknown = options.keys() - known.keys()
        if unknown:
            raise ConfigurationError(
                f"the loss {name} has no option {', '.join(sorted(unknown))}; known: {', '.join(known) or 'none'}"
            )
        if self.needs_proximal and options.get("proximal_logprobs") is None:
            raise ConfigurationError(
                f"the loss {name} needs proximal_logprobs; run a proximal logprob worker or choose another loss"
            )
        tensors = {key: options[key] for key in TENSOR_INPUTS if options.get(key) is not None}
        return options | {key: value.detach().masked_fill(~mask, 0) for key, value in tensors.items()}


def _keywords(function: Callable) -> dict[str, Option]:
    """Keyword-only parameters and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(token_losses.ppo_clip),
    "grpo": PolicyLoss(token_losses.grpo, uses_ratio=False),
    "dual_clip": PolicyLoss(token_losses.dual_clip),
    "decoupled": PolicyLoss(token_losses.decoupled, needs_proximal=True),
    "gspo": PolicyLoss(sequence_losses.gspo, sequence_level=True),
    "cispo": PolicyLoss(token_losses.cispo),
    "sapo": PolicyLoss(token_losses.sapo),
    "gpg": PolicyLoss(token_losses.gpg, uses_ratio=False),
    "geo_mean": PolicyLoss(sequence_losses.geo_mean, sequence_level=True),
    "dppo_tv": PolicyLoss(token_losses.dppo_tv),
    "dppo_kl": PolicyLoss(token_losses.dppo_kl),
    "topr": PolicyLoss(sequence_losses.topr, sequence_level=True),
    "dro": PolicyLoss(token_losses.dro, idle_at_ratio_one=True),
    "clip_cov": PolicyLoss(covariance.clip_cov, scores=covariance.clip_cov_scores),
    "kl_cov": PolicyLoss(covariance.kl_cov, idle_at_ratio_one=True, scores=covariance.kl_cov_scores),
}


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss of that name, or the user's own that `FILE.py:NAME` names. ConfigurationError: there is none."""
    return find_entry(name, POLICY_LOSSES, PolicyLoss, "policy-loss")


def losses_without_ratio() -> list[str]:
    """The losses that importance weights for the engine's policy go with, whatever the ratio is taken against.

    >>> losses_without_ratio()
    ['grpo', 'gpg']
    """
    return [name for name, loss in POLICY_LOSSES.items() if not loss.uses_ratio]
