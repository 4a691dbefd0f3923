"""Find the tokens among which a truncated sampler (top-p, top-k, min-p) draws, from the logits of all tokens.

Each rule keeps the tokens whose logits are at least a certain number. So one number describes the kept tokens of a
position: their lowest logit.

vLLM does not report which tokens it kept. The trainer applies the same rules to its own logits. In float32 both keep
the same tokens, except where the probabilities add up to top-p within rounding errors. A sampled token always counts as
kept. It might otherwise have probability 0 for the trainer, because of rounding, or because the policy was trained
since.
"""

import math

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from async_grpo.messages import Truncation
from async_grpo.modeling.token_masks import FORBIDDEN_LOGIT

# Number of most probable tokens among which top-p is tried first. The whole vocabulary is sorted only for positions
# that need more tokens
MOST_PROBABLE = 1024
# Number of positions for which the whole vocabulary is sorted at once. One position takes about 6 MB with a vocabulary
# of 152,000
ROWS_SORTED_AT_ONCE = 32


def lowest_logits(logits: Float[Tensor, "tokens vocab"], truncation: Truncation) -> Float[Tensor, " tokens"]:
    """Return the lowest logit that the truncation keeps, for each row.

    If several tokens have exactly this logit, all are kept. vLLM does so for top-k and min-p, but its top-p may keep
    only some.

    Args:
        logits: The logits, divided by the temperature, with FORBIDDEN_LOGIT at tokens that a grammar forbids.
        truncation: The rule.

    >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    >>> lowest_logits(logits, Truncation(top_p=0.7)).exp()  # 0.5 is less than 0.7
    tensor([0.3000])
    >>> lowest_logits(logits, Truncation(top_k=3, top_p=0.9)).exp()  # 0.8 of 0.95 is less than 0.9
    tensor([0.1500])
    """
    highest = logits.amax(dim=1)
    lowest = torch.full_like(highest, -math.inf)
    if truncation.min_p:
        lowest = highest + math.log(truncation.min_p)
    if 0 < truncation.top_k < logits.shape[1]:
        lowest = torch.maximum(lowest, logits.topk(truncation.top_k, dim=1).values[:, -1])
    if truncation.top_p < 1:
        lowest = torch.maximum(lowest, _lowest_of_nuclei(logits, lowest, truncation.top_p))
    return lowest


def forbid_below(
    logits: Float[Tensor, "tokens vocab"],
    lowest: Float[Tensor, " tokens"],
    targets: Int64[Tensor, " tokens"],
) -> Bool[Tensor, " tokens"]:
    """Set logits below the lowest logit of their row to FORBIDDEN_LOGIT, in place, except those of the targets.

    Returns:
        True where the target's logit is below the lowest one.
    """
    target_logits = logits.gather(1, targets[:, None])
    logits.masked_fill_(logits < lowest[:, None], FORBIDDEN_LOGIT)
    logits.scatter_(1, targets[:, None], target_logits)
    return target_logits[:, 0] < lowest


def _lowest_of_nuclei(
    logits: Float[Tensor, "tokens vocab"], lowest: Float[Tensor, " tokens"], top_p: float
) -> Float[Tensor, " tokens"]:
    """Return the lowest logit that top-p keeps among the logits that are at least `lowest`."""
    is_kept = logits >= lowest[:, None]
    normalisers = logits.masked_fill(~is_kept, -math.inf).logsumexp(dim=1)
    num_most_probable = min(MOST_PROBABLE, logits.shape[1])
    most_probable = logits.topk(num_most_probable, dim=1).values
    results, masses = _lowest_in_sorted(most_probable, lowest, normalisers, top_p)
    if num_most_probable < logits.shape[1]:
        needs_more = (masses < top_p) & (most_probable[:, -1] >= lowest)
        for rows in needs_more.nonzero().flatten().split(ROWS_SORTED_AT_ONCE):
            all_sorted = logits[rows].sort(dim=1, descending=True).values
            results[rows], _ = _lowest_in_sorted(all_sorted, lowest[rows], normalisers[rows], top_p)
    return results


def _lowest_in_sorted(
    descending: Float[Tensor, "tokens sorted"],
    lowest: Float[Tensor, " tokens"],
    normalisers: Float[Tensor, " tokens"],
    top_p: float,
) -> tuple[Float[Tensor, " tokens"], Float64[Tensor, " tokens"]]:
    """Return the lowest logit that top-p keeps among sorted logits, and the sum of the probabilities of these logits.

    A token is kept if the probabilities of the tokens before it add up to less than top-p. So the first token is always
    kept.
    """
    probs = (descending.double() - normalisers[:, None]).exp()
    probs = probs.masked_fill(descending < lowest[:, None], 0)
    sums = probs.cumsum(dim=1)
    is_kept = (sums - probs < top_p) & (descending >= lowest[:, None])
    # Keep at least one token, even if all logits are NaN
    num_kept = is_kept.sum(dim=1).clamp(min=1)
    return descending.gather(1, num_kept[:, None] - 1)[:, 0], sums[:, -1]
