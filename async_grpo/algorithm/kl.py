"""Estimators of KL(pi || ref) from log-probs of sampled tokens (Schulman 2020, "Approximating KL")."""

from collections.abc import Callable

import torch
from torch import Tensor

from async_grpo.errors import ConfigurationError

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0  # k3 grows like an exponential: one token far from the reference must not own the step


def _k3(difference: Tensor) -> Tensor:
    log_ratio = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(log_ratio) - log_ratio).clamp(-K3_LIMIT, K3_LIMIT)


KL_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: difference.square() / 2,
    "k3": _k3,
    "abs": torch.abs,
}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token KL estimate, the shape of `logprobs`; d = logprobs - ref_logprobs.

    k1: d (unbiased, can be negative). k2: d^2 / 2 (its gradient is the one of the KL). k3: exp(-d) - 1 + d
    (unbiased, never negative, held at 10). abs: |d|. ConfigurationError: another kind.

    >>> kl_penalty(torch.tensor(-1.), torch.tensor(-2.), "k1").item()
    1.0
    """
    if kind not in KL_KINDS:
        raise ConfigurationError(f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_KINDS)}")
    return KL_KINDS[kind](logprobs - ref_logprobs)
