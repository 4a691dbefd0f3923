"""Estimators of KL(pi || ref) from log-probs of sampled tokens (Schulman 2020, "Approximating KL").

What an estimator averages to and what its gradient averages to are two things. Over the policy's own samples
k1 and k3 are unbiased as values, but their gradients average to 0 and to the gradient of KL(ref || pi); it is
k2 whose gradient averages to that of KL(pi || ref) (Tang and Munos 2025, "On a few pitfalls in KL divergence
gradient estimation for RL"). A name that ends in `+` has the value of its base and the gradient of k2.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from async_grpo.options.fields import refuse


def _k1(difference: Tensor) -> Tensor:
    return difference


def _k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def _k3(difference: Tensor) -> Tensor:
    # exp overflows at 88.7 in float32, 709.8 in float64: held a tenth below, so that a sum is finite too
    log_ratio = (-difference).clamp(max=0.9 * math.log(torch.finfo(difference.dtype).max))
    return torch.expm1(log_ratio) - log_ratio


KL_KINDS: dict[str, Callable[[Tensor], Tensor]] = {  # functions of logprobs - ref_logprobs
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "abs": torch.abs,
    "k1+": _k1,
    "k2+": _k2,
    "k3+": _k3,
    "abs+": torch.abs,
}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str, *, clamp: float | None = None) -> Tensor:
    """Per-token KL estimate, the shape of `logprobs`, in nats; d = logprobs - ref_logprobs.

    k1: d (unbiased, can be negative). k2: d^2 / 2 (biased; its gradient is the one of the KL).
    k3: exp(-d) - 1 + d (unbiased, never negative). abs: |d|.
    k1+, k2+, k3+, abs+: that value, with the gradient of k2, d * grad(logprobs) (straight-through).

    k3 is held where exp would overflow (d < -79 in float32). `clamp` holds the value of any kind to [-clamp, clamp] and its
    gradient beyond is 0; a `+` kind keeps the gradient of k2 there too. Masked positions are the caller's to replace
    beforehand. ConfigurationError: another kind, or a clamp that is not positive.

    >>> kl_penalty(torch.tensor(-1.), torch.tensor(-2.), "k1").item()
    1.0
    >>> kl_penalty(torch.tensor(-9.), torch.tensor(-1.), "k3", clamp=10).item()  # e^8 - 1 - 8 = 2972
    10.0
    """
    refuse(kind not in KL_KINDS, f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_KINDS)}")
    bad = clamp is not None and not clamp > 0
    refuse(bad, f"the clamp of a KL penalty must be positive, not {clamp}; None leaves it out")
    difference = logprobs - ref_logprobs
    value = KL_KINDS[kind](difference)
    if clamp is not None:
        value = value.clamp(-clamp, clamp)
    if kind.endswith("+"):
        k2 = KL_KINDS["k2"](difference)
        value = value.detach() + (k2 - k2.detach())
    return value
