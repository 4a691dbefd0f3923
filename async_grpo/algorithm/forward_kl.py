"""KL divergence from a teacher to the policy, over the teacher's most probable tokens."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def forward_kl(
    logprobs: Float[Tensor, "batch tokens k"],
    teacher_logprobs: Float[Tensor, "batch tokens k"],
    mask: Bool[Tensor, "batch tokens"],
) -> Float[Tensor, "batch tokens"]:
    """Return sum_v p_T(v) (log p_T(v) - log pi(v)) over the teacher's k most probable tokens v, at each position.

    The probabilities p_T are not normalized over these k tokens, so they add up to less than 1. The gradient is
    -sum_v p_T(v) grad log pi(v), so the policy also learns the probability of the k tokens together. The sum of
    KL(pi || p_T) over the same tokens would not work: a policy could lower it by giving them no probability at all.

    Args:
        logprobs: log pi of the teacher's tokens.
        teacher_logprobs: log p_T of the same tokens; -inf or NaN for a missing token.
        mask: True at the positions that count. The result is 0 at all other positions.

    >>> half = torch.tensor([[[0.5, 0.5]]]).log()
    >>> policy = torch.tensor([[[0.25, 0.75]]]).log()  # 0.5 log 2 + 0.5 log(2/3) = 0.1438
    >>> round(forward_kl(policy, half, torch.tensor([[True]])).item(), 4)
    0.1438
    """
    is_used = mask[..., None] & torch.isfinite(teacher_logprobs)
    # Replaced before any arithmetic, because 0 * inf and the gradient of a masked NaN are NaN
    teacher = torch.where(is_used, teacher_logprobs, 0)
    policy = torch.where(is_used, logprobs, 0)
    return torch.where(is_used, teacher.exp() * (teacher - policy), 0).sum(dim=-1)
