"""Log-probs of several tokens at each position: those that a teacher finds most probable, or the model's own.

As in `logprobs`, only the logits of one chunk of tokens are in memory at a time, in the forward and in the backward
pass.
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from async_grpo.modeling.logprobs import add_product, chunks, scaled_logits


def chunked_logprobs_of(
    token_ids: Int64[Tensor, "tokens k"],
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    temperature: float,
    chunk_tokens: int,
) -> Float[Tensor, "tokens k"]:
    """Return log softmax((hidden @ weight.T + bias) / temperature) at k token ids of each position, with gradients.

    The logits are float32, or float64 for float64 input.

    >>> ids = torch.tensor([[0, 3], [1, 2]])
    >>> chunked_logprobs_of(ids, torch.zeros(2, 2), torch.ones(4, 2), None, 1.0, 1).exp().tolist()
    [[0.25, 0.25], [0.25, 0.25]]
    """
    return _ChunkedTokens.apply(token_ids, hidden, weight, bias, temperature, chunk_tokens)


@torch.no_grad()
def chunked_top_logprobs(
    k: int,
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Int64[Tensor, "tokens k"], Float[Tensor, "tokens k"]]:
    """Return the ids of the k most probable tokens at each position, and their log-probs, the most probable first.

    >>> ids, logprobs = chunked_top_logprobs(1, torch.ones(1, 1), torch.tensor([[0.0], [2.0]]), None, 1.0, 8)
    >>> ids.tolist(), round(logprobs.item(), 4)  # -log(1 + exp(-2))
    ([[1]], -0.1269)
    """
    ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.zeros(len(hidden), k, dtype=_result_dtype(hidden), device=hidden.device)
    for rows in chunks(len(hidden), chunk_tokens):
        logits = scaled_logits(hidden[rows], weight, bias, temperature)
        values, ids[rows] = logits.topk(k, dim=1)
        logprobs[rows] = values - logits.logsumexp(dim=1, keepdim=True)
    return ids, logprobs


def _result_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


class _ChunkedTokens(torch.autograd.Function):
    """Log-probs of k tokens at each position, with a backward that computes the logits again.

    With logits z / T and their softmax p, the gradient of sum_j g_j logprob_j is (sum_j g_j onehot_j - p sum_j g_j) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        token_ids: Int64[Tensor, "tokens k"],
        hidden: Float[Tensor, "tokens hidden"],
        weight: Float[Tensor, "vocab hidden"],
        bias: Float[Tensor, " vocab"] | None,
        temperature: float,
        chunk_tokens: int,
    ) -> Float[Tensor, "tokens k"]:
        logprobs = torch.empty(token_ids.shape, dtype=_result_dtype(hidden), device=hidden.device)
        for rows in chunks(len(hidden), chunk_tokens):
            logits = scaled_logits(hidden[rows], weight, bias, temperature)
            logprobs[rows] = logits.gather(1, token_ids[rows]) - logits.logsumexp(dim=1, keepdim=True)
        ctx.save_for_backward(token_ids, hidden, weight, bias)
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Float[Tensor, "tokens k"]) -> tuple[Tensor | None, ...]:
        token_ids, hidden, weight, bias = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # With LoRA the head is frozen and needs no gradient, which would be as large as the head in float32
        _, _, needs_grad_weight, needs_grad_bias, *_ = ctx.needs_input_grad
        # Sum over chunks in float32. A bfloat16 sum would be rounded with each chunk
        grad_weight = torch.zeros_like(weight, dtype=grad_logprobs.dtype) if needs_grad_weight else None
        grad_bias = torch.zeros_like(bias, dtype=grad_logprobs.dtype) if needs_grad_bias else None
        for rows in chunks(len(hidden), ctx.chunk_tokens):
            scale = grad_logprobs[rows] / ctx.temperature
            probs = scaled_logits(hidden[rows], weight, bias, ctx.temperature).softmax(dim=1)
            grad_logits = probs.mul_(-scale.sum(dim=1, keepdim=True)).scatter_add_(1, token_ids[rows], scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad_logits, hidden[rows])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return None, grad_hidden, grad_weight, grad_bias, None, None
