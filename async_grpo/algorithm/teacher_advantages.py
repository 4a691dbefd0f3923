"""The advantage that a teacher gives to each sampled token (on-policy distillation)."""

import numpy as np
from jaxtyping import Bool, Float


def teacher_advantages(
    teacher_logprobs: Float[np.ndarray, " tokens"], logprobs: Float[np.ndarray, " tokens"], coef: float = 1.0
) -> tuple[Float[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
    """Return coef * (log pi_T - log pi) at each token, and a mask of the tokens for which the teacher gave a log-prob.

    Lu and Thinking Machines Lab 2025, "On-Policy Distillation". If pi sampled the tokens, the expected gradient of the
    loss -A log pi at a position is coef times the gradient of KL(pi || pi_T) at this position.

    Args:
        teacher_logprobs: log pi_T in nats. Values that are not finite are missing.
        logprobs: log pi in nats, of the policy that sampled the tokens, at the sampling temperature.
        coef: Weight of the advantages.

    Returns:
        The advantages, 0 where the teacher's log-prob is missing, and the mask.

    >>> advantages, is_covered = teacher_advantages(np.array([-1.0, np.nan]), np.array([-2.0, -1.0]))
    >>> advantages.tolist(), is_covered.tolist()
    ([1.0, 0.0], [True, False])
    """
    is_covered = np.isfinite(teacher_logprobs)
    difference = np.where(is_covered, teacher_logprobs, 0) - np.where(is_covered, logprobs, 0)
    return coef * difference, is_covered
