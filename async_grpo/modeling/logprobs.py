"""Log-probs of sampled tokens from hidden states; 36,000 tokens times a vocabulary of 152,000 would be 20 GiB.

So the head is applied to a chunk of tokens at a time, forward and again in the backward, and one number per token kept.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature)[targets], and that softmax's entropy; (M,).

    hidden (M, H), weight (V, H), bias (V,) or None, targets (M,) int64. Logits are float32 (float64 for
    float64 input); at most `chunk_tokens` rows of them exist at a time. A result that the loss does not use costs nothing.

    >>> zeros = torch.zeros(3, 2)
    >>> logprobs, _ = chunked_logprobs(zeros, torch.ones(4, 2), None, torch.tensor([0, 1, 3]), 0.7, 2)
    >>> (logprobs.exp()).tolist()
    [0.25, 0.25, 0.25]
    """
    return _ChunkedHead.apply(hidden, weight, bias, targets, temperature, chunk_tokens)


class _ChunkedHead(torch.autograd.Function):
    """With logits z / T and p their softmax: d logprob / dz = (onehot - p) / T, and dH / dz = -p (log p + H) / T."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        out_dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropies, normalisers = (hidden.new_empty(len(hidden), dtype=out_dtype) for _ in range(3))
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, bias, temperature)
            normalisers[rows] = logits.logsumexp(dim=1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - normalisers[rows]
            probs = (logits - normalisers[rows, None]).exp_()
            entropies[rows] = normalisers[rows] - torch.linalg.vecdot(probs, logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk
        ctx.set_materialize_grads(False)  # zeros for an unused entropy would pay for its gradient
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalisers)
        grad_hidden = torch.empty_like(hidden)
        # float32 while it is summed over chunks: in bfloat16 every further chunk would round the sum again
        grad_weight = torch.zeros_like(weight, dtype=normalisers.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=normalisers.dtype)
        for rows in _chunks(len(hidden), ctx.chunk_tokens):
            scale = pull = grad_logprobs[rows, None] / ctx.temperature
            logps = _logits(hidden[rows], weight, bias, ctx.temperature).sub_(normalisers[rows, None])
            if grad_entropies is not None:
                entropy_scale = grad_entropies[rows, None] / ctx.temperature
                pull = (logps + entropies[rows, None]).mul_(entropy_scale).add_(scale)
            grad_logits = logps.exp_().mul_(-pull)
            grad_logits.scatter_add_(1, targets[rows, None], scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_logits.is_cuda and grad_logits.dtype != grad_weight.dtype:
                grad_weight += _product(grad_logits.T, hidden[rows])
            else:  # without another tensor of the head's size
                grad_weight.addmm_(grad_logits.T.to(grad_weight.dtype), hidden[rows].to(grad_weight.dtype))
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = _product(hidden, weight.T)
    if bias is not None:
        logits += bias
    return logits.div_(temperature)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right with a float32 result; bfloat16 logits near 20 would be rounded to steps of 0.125."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
