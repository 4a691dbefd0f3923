"""The tokens among which a truncated sampler draws, by sorting the whole vocabulary."""

import torch


def in_support(
    logits: torch.Tensor, tokens: torch.Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> torch.Tensor:
    """Return for each row (R, V) of logits which tokens min-p, then top-k, then top-p keep, or which is its token (R)."""
    probs, order = logits.detach().double().softmax(-1).sort(-1, descending=True)
    is_kept = probs >= min_p * probs[:, :1]
    is_kept &= torch.arange(logits.shape[-1]) < (top_k or logits.shape[-1])
    probs = torch.where(is_kept, probs, 0)
    probs /= probs.sum(-1, keepdim=True)
    if top_p < 1:
        is_kept &= probs.cumsum(-1) - probs < top_p
    return torch.zeros_like(is_kept).scatter(-1, order, is_kept).scatter(-1, tokens[:, None], True)
