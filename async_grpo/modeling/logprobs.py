"""Log-probs of sampled tokens from hidden states, without ever holding the logits of all of them.

36,000 tokens times a vocabulary of 152,000 in float32 are 20 GiB. So the head is applied to a chunk of tokens
at a time, forward and again in the backward; what is kept between the two is one number per token.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def packed_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    input_ids: Tensor,
    needed: Tensor,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), both (N,) float32, of the tokens where `needed` (N,) is True; 0 elsewhere.

    hidden (N, H) of the token *before* speaks of a token, so `needed` must be False on the first of every
    sequence. The entropy (of the distribution that the token was drawn from) carries no gradient. With
    nothing needed the result still hangs on `hidden`: a rank with nothing to learn must run the same backward
    as the others.
    """
    positions = needed.nonzero().flatten()
    logprobs, entropies = chunked_logprobs(
        hidden.index_select(0, positions - 1),
        head_weight,
        head_bias,
        input_ids[positions],
        temperature,
        chunk_tokens,
    )
    empty = logprobs.new_zeros(len(input_ids))
    return empty.index_copy(0, positions, logprobs), empty.index_copy(0, positions, entropies)


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
    float64 input). At most `chunk_tokens` rows of logits exist at a time.

    >>> zeros = torch.zeros(3, 2)
    >>> logprobs, _ = chunked_logprobs(zeros, torch.ones(4, 2), None, torch.tensor([0, 1, 3]), 0.7, 2)
    >>> (logprobs.exp()).tolist()
    [0.25, 0.25, 0.25]
    """
    return _ChunkedHead.apply(hidden, weight, bias, targets, temperature, chunk_tokens)


class _ChunkedHead(torch.autograd.Function):
    """d logprob / d logits = (onehot - softmax) / temperature, recomputed from the kept log-normaliser."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        out_dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropies, normalisers = (hidden.new_empty(len(hidden), dtype=out_dtype) for _ in range(3))
        for rows in _chunks(len(hidden), chunk_tokens):
            logits = _logits(hidden[rows], weight, bias, temperature)
            normalisers[rows] = logits.logsumexp(dim=1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - normalisers[rows]
            probs = (logits - normalisers[rows, None]).exp_()
            entropies[rows] = normalisers[rows] - torch.linalg.vecdot(probs, logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalisers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # float32 while it is summed over chunks: in bfloat16 every further chunk would round the sum again
        grad_weight = torch.zeros_like(weight, dtype=grad_logprobs.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=grad_logprobs.dtype)
        for rows in _chunks(len(hidden), ctx.chunk_tokens):
            scale = grad_logprobs[rows, None] / ctx.temperature
            grad_logits = _logits(hidden[rows], weight, bias, ctx.temperature)
            grad_logits.sub_(normalisers[rows, None]).exp_().mul_(-scale)
            grad_logits.scatter_add_(1, targets[rows, None], scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight += _product(grad_logits.T, hidden[rows])
        grad_bias = None if bias is None else grad_bias.to(bias.dtype)
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
