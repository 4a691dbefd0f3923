"""Estimators of KL(pi || ref) from log-probs of sampled tokens (Schulman 2020, "Approximating KL").

An estimator with an unbiased value may have a biased gradient. If the policy itself sampled the tokens, the values of
k1 and k3 are unbiased, but the gradient of k1 averages to 0, and the gradient of k3 to that of KL(ref || pi). Only the
gradient of k2 averages to that of KL(pi || ref) (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient
estimation for RL"). The estimators `k1+`, `k2+`, `k3+` and `abs+` have the value of the estimator without the `+`, and
the gradient of k2.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from async_grpo.options.fields import refuse


def _k1(difference: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return difference


def _k2(difference: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return difference.square() / 2


def _k3(difference: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    # exp overflows above 88.7 in float32 and above 709.8 in float64. The clamp is a tenth lower, so that sums over
    # tokens are also finite
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


def kl_since(
    earlier_logprobs: Float[Tensor, "*shape"], logprobs: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return an estimate of KL(earlier policy || policy) at each token, in nats; 0 where the mask is False.

    It is r - 1 - log r, with r the policy's probability divided by the earlier policy's. It is unbiased for tokens that
    the earlier policy has sampled.

    >>> earlier = torch.tensor([0.0, 0.0])
    >>> kl_since(earlier, torch.tensor([1.0, float("nan")]), torch.tensor([True, False])).numpy().round(4)
    array([0.7183, 0.    ], dtype=float32)
    """
    difference = torch.where(mask, earlier_logprobs, 0) - torch.where(mask, logprobs, 0)
    return _k3(difference)


def kl_penalty(
    logprobs: Float[Tensor, "*shape"],
    ref_logprobs: Float[Tensor, "*shape"],
    kind: str,
    *,
    clamp: float | None = None,
    log_ratio: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Return the per-token KL estimate in nats.

    With d = logprobs - ref_logprobs:

    - k1: d. Unbiased; can be negative.
    - k2: d^2 / 2. Biased; its gradient is that of KL(pi || ref).
    - k3: exp(-d) - 1 + d. Unbiased and never negative; clamped where exp would overflow (d < -79 in float32).
    - abs: |d|.
    - k1+, k2+, k3+, abs+: the value of k1, k2, k3 or abs, with the gradient of k2, d * grad(logprobs)
      (straight-through).

    Args:
        logprobs: Log-probs of the policy. The caller must already have replaced masked positions by finite numbers.
        ref_logprobs: Log-probs of the reference policy.
        kind: A name of KL_KINDS.
        clamp: Restrict the value to [-clamp, clamp]. The gradient of a clamped value is 0, except that a `+` kind keeps
            the gradient of k2. None does not clamp.
        log_ratio: log(pi / pi_old) with its gradient, if pi_old sampled the tokens. The estimate is multiplied by the
            ratio pi / pi_old (DeepSeek-AI 2025, "DeepSeek-V3.2", eq. 7). For k1 and k3, value and gradient then average
            to those of KL(pi || ref) over samples of pi_old.

    Raises:
        ConfigurationError: The kind is unknown, or the clamp is not positive.

    >>> kl_penalty(torch.tensor(-1.), torch.tensor(-2.), "k1").item()
    1.0
    >>> kl_penalty(torch.tensor(-9.), torch.tensor(-1.), "k3", clamp=10).item()  # e^8 - 1 - 8 = 2972
    10.0
    >>> half = torch.tensor(0.5)
    >>> round(kl_penalty(half, torch.tensor(0.), "k3", log_ratio=torch.tensor(1.25).log()).item(), 6)  # 1.25 * 0.106531
    0.133163
    """
    refuse(kind not in KL_KINDS, f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_KINDS)}")
    is_bad_clamp = clamp is not None and not clamp > 0
    refuse(is_bad_clamp, f"the clamp of a KL penalty must be positive, not {clamp}; None leaves it out")
    difference = logprobs - ref_logprobs
    value = KL_KINDS[kind](difference)
    if clamp is not None:
        value = value.clamp(-clamp, clamp)
    if kind.endswith("+"):
        k2 = KL_KINDS["k2"](difference)
        value = value.detach() + (k2 - k2.detach())
    if log_ratio is not None:
        value = value * log_ratio.exp()
    return value
