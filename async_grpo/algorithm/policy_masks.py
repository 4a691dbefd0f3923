"""Masks that set the policy loss of some tokens to 0.

A masked token still counts in the denominator of the loss. Its KL penalty, entropy bonus and value loss stay. This differs
from rejection (`off_policy.rejection_mask`), which removes a token from all terms and from the denominator.
"""

import math

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from async_grpo.algorithm.aggregation import compact_ids, sequence_sums
from async_grpo.algorithm.covariance import select, top_scores
from async_grpo.algorithm.off_policy import log_ratio
from async_grpo.options.fields import refuse

# A position in a sorted list that is this close to a whole number differs from it only by rounding
ROUNDING = 1e-9


def off_policy_sequence_mask(
    logprobs: Float[Tensor, "batch tokens"],
    behaviour_logprobs: Float[Tensor, "batch tokens"],
    advantages: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    *,
    threshold: float,
    sequence_ids: Int[Tensor, "batch tokens"] | None = None,
) -> Bool[Tensor, "batch tokens"]:
    """Return True at the tokens whose policy loss stays, and False wherever the mask is False.

    A token is left out if its advantage is negative and the mean of log mu - log pi over its sequence is above the
    threshold (DeepSeek-AI 2025, "DeepSeek-V3.2", eq. 9). pi is the policy that is trained, and mu the engine's. So the
    loss does not push the policy further away from bad sequences that it has already become unlikely to write.

    Args:
        logprobs: log pi. No gradient flows through the mask.
        behaviour_logprobs: log mu.
        advantages: The advantage of each token.
        mask: True at the tokens that are trained on.
        threshold: delta of the paper, in nats per token.
        sequence_ids: Any integers. None means that each row is one sequence.

    Raises:
        ConfigurationError: The threshold is negative.

    >>> logprobs = torch.tensor([[-3.0, -3.0], [-3.0, -3.0]])
    >>> behaviour, advantages = torch.full((2, 2), -1.0), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    >>> off_policy_sequence_mask(logprobs, behaviour, advantages, torch.ones(2, 2), threshold=1.0).tolist()  # 2 > 1
    [[True, True], [False, False]]
    """
    refuse(not threshold >= 0, f"the threshold of the off-policy mask is {threshold}; it cannot be negative")
    mask = mask.bool()
    ids = compact_ids(sequence_ids, mask)
    lengths = sequence_sums(mask.long(), ids).clamp(min=1)
    mean_gaps = -sequence_sums(log_ratio(logprobs, behaviour_logprobs, mask), ids) / lengths
    is_off_policy = mean_gaps > threshold
    return mask & ~((advantages < 0) & is_off_policy[ids])


def num_in_top_quantile(quantile: float, num_tokens: int) -> int:
    """Return how many tokens are in the top quantile: the number of values >= their (1 - quantile) quantile, at least 1.

    The values are assumed to be different. Quantiles are interpolated linearly between sorted values, as in
    `torch.quantile`. So a value counts if its index in ascending order is at least (1 - quantile) (num_tokens - 1).

    Raises:
        ConfigurationError: The quantile is outside of [0, 1].

    >>> [num_in_top_quantile(quantile, 11) for quantile in (0.0, 0.2, 0.25, 1.0)]  # positions 10, 8, 7.5, 0
    [1, 3, 3, 11]
    """
    refuse(not 0 <= quantile <= 1, f"the top entropy quantile is {quantile}; it must lie between 0 and 1")
    first_index = math.ceil((1 - quantile) * (num_tokens - 1) - ROUNDING)
    return max(1, num_tokens - first_index)


def entropy_scores(
    entropy: Float[Tensor, "batch tokens"], mask: Shaped[Tensor, "batch tokens"]
) -> Float[Tensor, "batch tokens"]:
    """Return the entropy of each unmasked token, and -inf at masked tokens, so that these are never selected."""
    return torch.where(mask.bool(), entropy.detach(), -math.inf)


def high_entropy_mask(
    entropy: Float[Tensor, "batch tokens"], mask: Shaped[Tensor, "batch tokens"], *, quantile: float
) -> Bool[Tensor, "batch tokens"]:
    """Return True at the unmasked tokens whose entropy is in the top quantile of the batch, ties included.

    Wang et al. 2025, "Beyond the 80/20 Rule", compute the policy loss only at these tokens, with a quantile of 0.2. This
    function needs the whole batch at once. The trainer selects the tokens over all parts of a minibatch and all ranks
    instead (`training.whole_step`).

    Args:
        entropy: The entropy of the policy at each token, in nats.
        mask: True at the tokens that are trained on.
        quantile: Share of tokens to select. 1 selects all tokens, and 0 only those with the highest entropy.

    >>> entropy = torch.tensor([[0.1, 0.9, 0.5, 0.7]])
    >>> high_entropy_mask(entropy, torch.tensor([[1, 0, 1, 1]]), quantile=0.5).tolist()
    [[False, False, True, True]]
    """
    scores = entropy_scores(entropy, mask)
    count = num_in_top_quantile(quantile, int(mask.bool().sum()))
    return select(scores, top_scores(scores, count)[-1])


def mask_policy_loss(
    token_losses: Float[Tensor, "batch tokens"],
    logprobs: Float[Tensor, "batch tokens"],
    behaviour_logprobs: Float[Tensor, "batch tokens"],
    advantages: Float[Tensor, "batch tokens"],
    mask: Bool[Tensor, "batch tokens"],
    *,
    threshold: float | None = None,
    has_high_entropy: Bool[Tensor, "batch tokens"] | None = None,
    sequence_ids: Int[Tensor, "batch tokens"] | None = None,
) -> tuple[Float[Tensor, "batch tokens"], dict[str, Bool[Tensor, "batch tokens"]]]:
    """Return the policy losses, set to 0 at the tokens that a mask leaves out, and the metrics of the masks.

    Args:
        token_losses: The policy loss of each token.
        logprobs: Log-probs of the policy that is trained.
        behaviour_logprobs: Log-probs of the engine.
        advantages: The advantage of each token.
        mask: True at the tokens that are trained on.
        threshold: The threshold of `off_policy_sequence_mask`; None does not use this mask.
        has_high_entropy: True at the tokens that keep their loss; None keeps the loss of all tokens.
        sequence_ids: Any integers. None means that each row is one sequence.

    Returns:
        The losses, and by name: `off_policy_masked_frac` is True at the tokens that the off-policy mask left out, and
        `high_entropy_frac` at those of high entropy.
    """
    metrics = {}
    if threshold is not None:
        is_kept = off_policy_sequence_mask(
            logprobs,
            behaviour_logprobs,
            advantages,
            mask,
            threshold=threshold,
            sequence_ids=sequence_ids,
        )
        token_losses = torch.where(is_kept, token_losses, 0)
        metrics["off_policy_masked_frac"] = mask & ~is_kept
    if has_high_entropy is not None:
        token_losses = torch.where(has_high_entropy, token_losses, 0)
        metrics["high_entropy_frac"] = mask & has_high_entropy
    return token_losses, metrics
