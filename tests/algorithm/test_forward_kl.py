"""The KL divergence from a teacher over its most probable tokens, against loops, and its gradient."""

import math

import pytest
import torch

from async_grpo.algorithm.forward_kl import forward_kl
from async_grpo.modeling.top_logprobs import chunked_logprobs_of, chunked_top_logprobs

LOGITS = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TEACHER = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(1)


def test_the_value_is_the_sum_over_the_tokens_of_the_teacher():
    top = TEACHER.topk(3, dim=1)
    logprobs = LOGITS.log_softmax(1)
    mask = torch.tensor([[True, True, False, True, True]])
    got = forward_kl(logprobs.gather(1, top.indices)[None], top.values[None], mask)
    for place in range(5):
        expected = 0.0
        for token in top.indices[place].tolist():
            log_teacher = TEACHER[place, token].item()
            expected += math.exp(log_teacher) * (log_teacher - logprobs[place, token].item())
        assert got[0, place].item() == pytest.approx(expected if mask[0, place] else 0.0, abs=1e-12)


def test_over_the_whole_vocabulary_the_gradient_is_that_of_the_forward_kl():
    """Of the logits: the policy's probabilities minus the teacher's."""
    logits = LOGITS.clone().requires_grad_()
    forward_kl(
        logits.log_softmax(1)[None], TEACHER[None], torch.ones(1, 5, dtype=torch.bool)
    ).sum().backward()
    torch.testing.assert_close(logits.grad, LOGITS.softmax(1) - TEACHER.exp(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("missing", [math.nan, -math.inf])
def test_missing_tokens_and_masked_positions_change_neither_value_nor_gradient(missing):
    logprobs = LOGITS.log_softmax(1)[None].clone().requires_grad_()
    teacher = TEACHER[None].clone()
    teacher[0, 1, 2:] = missing
    mask = torch.tensor([[True, True, True, True, False]])
    noisy = torch.where(mask[..., None], logprobs, math.nan)
    value = forward_kl(noisy, teacher, mask)
    value.sum().backward()
    expected = (TEACHER[1, :2].exp() * (TEACHER[1, :2] - LOGITS.log_softmax(1)[1, :2])).sum()
    assert value[0, 1].item() == pytest.approx(expected.item(), abs=1e-12) and value[0, 4] == 0
    assert torch.isfinite(logprobs.grad).all() and (logprobs.grad[0, 1, 2:] == 0).all()


@pytest.mark.parametrize("chunk", [1, 2, 9])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_chunked_log_probs_of_several_tokens_are_those_of_the_whole_head(chunk, with_bias):
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    hidden, weight = drawn(6, 4), drawn(11, 4)
    bias = drawn(11) if with_bias else None
    ids = torch.randint(0, 11, (6, 3), generator=generator)
    ids[0] = 5  # the same token twice
    pull = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    got = chunked_logprobs_of(ids, hidden, weight, bias, 0.7, chunk)
    logits = hidden @ weight.T + (0 if bias is None else bias)
    whole = (logits / 0.7).log_softmax(1)
    torch.testing.assert_close(got, whole.gather(1, ids), rtol=0, atol=1e-12)
    gradients = torch.autograd.grad((got * pull).sum(), inputs)
    expected = torch.autograd.grad((whole.gather(1, ids) * pull).sum(), inputs)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-12)
    top_ids, top = chunked_top_logprobs(3, hidden, weight, bias, 0.7, chunk)
    torch.testing.assert_close(top, whole.topk(3, dim=1).values, rtol=0, atol=1e-12)
    assert torch.equal(top_ids, whole.topk(3, dim=1).indices)


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_get_the_same():
    """The gradient of the head would be as large as the head in float32."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(6, 4, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(11, 4, dtype=torch.float64, generator=generator)
    bias = torch.randn(11, dtype=torch.float64, generator=generator)
    ids = torch.randint(0, 11, (6, 3), generator=generator)
    results = []
    for is_frozen in (True, False):
        logprobs = chunked_logprobs_of(
            ids,
            hidden,
            weight.clone().requires_grad_(not is_frozen),
            bias.clone().requires_grad_(not is_frozen),
            0.7,
            4,
        )
        results.append(logprobs.grad_fn.apply(torch.ones_like(logprobs)))
    frozen, trained = results
    assert frozen[2] is None and frozen[3] is None
    assert trained[2] is not None and trained[3] is not None
    assert torch.equal(frozen[1], trained[1])
