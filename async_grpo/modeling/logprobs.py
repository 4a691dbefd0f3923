"""Log-probs of sampled tokens from hidden states, without storing the logits of all tokens at once.

The logits of 36,000 tokens over a vocabulary of 152,000 would take 20 GiB. So the head is applied to one chunk of
tokens at a time, in the forward and again in the backward pass. Only a few numbers per token are kept in between.
"""

from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.autograd.function import once_differentiable

from async_grpo.messages import Truncation
from async_grpo.modeling.token_masks import TokenMasks, forbid
from async_grpo.modeling.truncated import forbid_below, lowest_logits

# Number of tokens whose logits are in memory at once on a CPU if the head is float32 and frozen. Small chunks need less
# memory; with SmolLM2's head they take a quarter more time than chunks of 256 tokens (docs/log.md, 2026-11-28). They
# would take much longer for a head with a gradient, to which each chunk adds, and for a bfloat16 head, which each chunk
# converts to float32
FROZEN_CHUNK_TOKENS_ON_CPU = 64
PRODUCT_ROWS = 1 << 14  # rows of the head whose gradient is computed at once on a GPU


def chunked_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    targets: Int64[Tensor, " tokens"],
    temperature: float,
    chunk_tokens: int,
    masks: TokenMasks | None = None,
    truncation: Truncation | None = None,
) -> tuple[Float[Tensor, " tokens"], ...]:
    """Return log softmax((hidden @ weight.T + bias) / temperature)[targets], and the softmax's entropy.

    If the loss does not use the entropy, the backward skips its gradient. The logits are float32, or float64 for
    float64 input.

    With a truncation, each softmax is taken over the tokens that the truncation keeps, and the target. The gradient
    treats this set of tokens as fixed. It is the exact gradient of the truncated policy, except at single values of the
    weights at which the set changes.

    Args:
        hidden: The hidden state from which each target token is predicted.
        weight: The weight of the head.
        bias: The bias of the head, if it has one.
        targets: The token ids whose log-probs are computed.
        temperature: Divisor of the logits.
        chunk_tokens: Number of tokens whose logits are in memory at once.
        masks: The tokens over which each softmax is taken; None if it is always over all tokens. A target must be among
            them.
        truncation: The rule by which the sampler keeps only probable tokens; None if it keeps all of them.

    Returns:
        (log-probs, entropies). With a truncation also a third tensor: 1 for each target that this softmax keeps only
        because it is the target, although the truncation excludes it, and 0 for the others.

    >>> zeros = torch.zeros(3, 2)
    >>> logprobs, _ = chunked_logprobs(zeros, torch.ones(4, 2), None, torch.tensor([0, 1, 3]), 0.7, 2)
    >>> (logprobs.exp()).tolist()
    [0.25, 0.25, 0.25]
    """
    if weight.dtype is torch.float32 and not (weight.requires_grad or weight.is_cuda):
        chunk_tokens = min(chunk_tokens, FROZEN_CHUNK_TOKENS_ON_CPU)
    indices = None if masks is None else masks.indices
    bits = None if masks is None else masks.bits
    logprobs, entropies, is_outside = _ChunkedHead.apply(
        hidden, weight, bias, targets, temperature, chunk_tokens, indices, bits, truncation
    )
    return (logprobs, entropies) if truncation is None else (logprobs, entropies, is_outside)


class _ChunkedHead(torch.autograd.Function):
    """Log-probs and entropies, with a backward that computes the logits again.

    With logits z / T, their softmax p and its entropy H, the gradients are d logprob / dz = (onehot - p) / T and dH /
    dz = -p (log p + H) / T. A token outside of the mask or the truncation has p = 0, so that both of its gradients are
    0. The backward does not apply the rule of the truncation again. It compares the logits with the lowest logit that
    the forward kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "tokens hidden"],
        weight: Float[Tensor, "vocab hidden"],
        bias: Float[Tensor, " vocab"] | None,
        targets: Int64[Tensor, " tokens"],
        temperature: float,
        chunk_tokens: int,
        mask_indices: Int64[Tensor, " tokens"] | None,
        mask_bits: UInt8[Tensor, "masks bytes"] | None,
        truncation: Truncation | None,
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        result_dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(hidden), dtype=result_dtype)
        entropies = torch.empty_like(logprobs)
        normalisers = torch.empty_like(logprobs)
        lowest = torch.empty_like(logprobs)
        is_outside = torch.zeros_like(logprobs)
        for rows in chunks(len(hidden), chunk_tokens):
            logits = scaled_logits(hidden[rows], weight, bias, temperature)
            if mask_indices is not None and mask_bits is not None:
                forbid(logits, mask_indices[rows], mask_bits)
            if truncation is not None:
                lowest[rows] = lowest_logits(logits, truncation)
                is_outside[rows] = forbid_below(logits, lowest[rows], targets[rows]).to(result_dtype)
            normalisers[rows] = logits.logsumexp(dim=1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - normalisers[rows]
            probs = (logits - normalisers[rows, None]).exp_()
            # Multiply in place: the product would otherwise be one more tensor of the logits' size
            entropies[rows] = normalisers[rows] - probs.mul_(logits).sum(dim=1)
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            targets,
            normalisers,
            entropies,
            mask_indices,
            mask_bits,
            None if truncation is None else lowest,
        )
        ctx.mark_non_differentiable(is_outside)
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        # If the entropy is not used, let autograd pass None as its gradient. Zeros, the default, would cost as much as
        # a real gradient
        ctx.set_materialize_grads(False)
        return logprobs, entropies, is_outside

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs: Float[Tensor, " tokens"] | None,
        grad_entropies: Float[Tensor, " tokens"] | None,
        _grad_is_outside: None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalisers, entropies, mask_indices, mask_bits, lowest = (
            ctx.saved_tensors
        )
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalisers)
        grad_hidden = torch.empty_like(hidden)
        # With LoRA the head is frozen and needs no gradient, which would be as large as the head in float32
        _, needs_grad_weight, needs_grad_bias, *_ = ctx.needs_input_grad
        # Sum over chunks in float32. A bfloat16 sum would be rounded with each chunk
        grad_weight = torch.zeros_like(weight, dtype=normalisers.dtype) if needs_grad_weight else None
        grad_bias = torch.zeros_like(bias, dtype=normalisers.dtype) if needs_grad_bias else None
        for rows in chunks(len(hidden), ctx.chunk_tokens):
            scale = pull = grad_logprobs[rows, None] / ctx.temperature
            logits = scaled_logits(hidden[rows], weight, bias, ctx.temperature)
            if mask_indices is not None:
                forbid(logits, mask_indices[rows], mask_bits)
            if lowest is not None:
                forbid_below(logits, lowest[rows], targets[rows])
            log_probs = logits.sub_(normalisers[rows, None])
            if grad_entropies is not None:
                entropy_scale = grad_entropies[rows, None] / ctx.temperature
                pull = (log_probs + entropies[rows, None]).mul_(entropy_scale).add_(scale)
            grad_logits = log_probs.exp_().mul_(-pull)
            grad_logits.scatter_add_(1, targets[rows, None], scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is None:
                continue
            if grad_logits.is_cuda and grad_logits.dtype != grad_weight.dtype:
                add_product(grad_weight, grad_logits, hidden[rows])
            else:
                # addmm_ adds in place, so it allocates no second tensor of the head's size
                grad_weight.addmm_(grad_logits.T.to(grad_weight.dtype), hidden[rows].to(grad_weight.dtype))
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 6


def chunks(total: int, size: int) -> list[slice]:
    """Return slices of at most `size` rows that cover `total` rows."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def scaled_logits(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    temperature: float,
) -> Float[Tensor, "tokens vocab"]:
    """Return the logits, divided by the temperature, in float32 (float64 for float64 input)."""
    logits = _product(hidden, weight.T)
    if bias is not None:
        logits += bias
    return logits.div_(temperature)


def add_product(
    total: Float[Tensor, "vocab hidden"],
    grad_logits: Float[Tensor, "tokens vocab"],
    hidden: Float[Tensor, "tokens hidden"],
) -> None:
    """Add `grad_logits.T @ hidden` to `total`, in float32.

    The product is computed for PRODUCT_ROWS tokens of the vocabulary at a time. All at once, it would be a second
    tensor of the head's size: 2.2 GB for a vocabulary of 151,936 and 3,584 hidden units.
    """
    for vocab in chunks(len(total), PRODUCT_ROWS):
        total[vocab] += _product(grad_logits[:, vocab].T, hidden)


def _product(left: Float[Tensor, "m k"], right: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """Return left @ right with a result in float32 (float64 for float64 input).

    In bfloat16, logits near 20 would be rounded to multiples of 0.125.
    """
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
