"""Log-probs over the tokens that top-p, top-k and min-p keep, against the rules written out token by token in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from grammar_masks import masks_of, random_table
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.messages import Truncation
from async_grpo.modeling import truncated
from async_grpo.modeling.logprobs import chunked_logprobs
from async_grpo.modeling.token_masks import TokenMasks
from async_grpo.modeling.truncated import lowest_logits

HIDDEN = 6
RULES = st.builds(
    Truncation,
    top_p=st.sampled_from([1.0, 0.95, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 2, 5, 20, 1000]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
)


def head(seed: int, tokens: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(vocab, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=generator)


def kept_tokens(logits: list[float], rule: Truncation) -> set[int]:
    """Return the tokens that vLLM's rules keep, in their order: min-p, top-k, top-p over what is left."""
    highest = max(logits)
    probable = {t for t, z in enumerate(logits) if z > -math.inf and math.exp(z - highest) >= rule.min_p}
    ranked = sorted(probable, key=lambda token: -logits[token])
    if rule.top_k:
        ranked = ranked[: rule.top_k]
    if rule.top_p == 1:
        return set(ranked)
    total = sum(math.exp(logits[token]) for token in ranked)
    nucleus: set[int] = set()
    mass = 0.0
    for token in ranked:
        if mass >= rule.top_p:
            break
        nucleus.add(token)
        mass += math.exp(logits[token]) / total
    return nucleus


def by_hand(logits, targets, rule, table=None):
    """Return (log-probs, entropies, whether the rules do not keep the target) of each row."""
    results = []
    for number, (row, target) in enumerate(zip(logits.tolist(), targets.tolist(), strict=True)):
        allowed = [-math.inf if table is not None and not table[number][t] else z for t, z in enumerate(row)]
        support = kept_tokens(allowed, rule)
        is_outside = target not in support
        support.add(target)
        total = sum(math.exp(row[token]) for token in support)
        probs = [math.exp(row[token]) / total for token in support]
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        results.append((row[target] - math.log(total), entropy, float(is_outside)))
    return np.array(results).T


@given(
    tokens=st.integers(1, 12),
    vocab=st.sampled_from([3, 33, 70]),
    chunk_tokens=st.integers(1, 14),
    temperature=st.sampled_from([0.4, 1.0, 1.7]),
    rule=RULES,
    most_probable=st.sampled_from([2, 16, 1024]),
    seed=st.integers(0, 1000),
    has_grammar=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_log_probs_and_entropies_are_those_over_the_kept_tokens_and_the_sampled_one(
    tokens, vocab, chunk_tokens, temperature, rule, most_probable, seed, has_grammar
):
    """Also where top-p needs more tokens than those that are tried first, and where a grammar forbids tokens."""
    hidden, weight, targets = head(seed, tokens, vocab)
    logits = (hidden @ weight.T / temperature).detach()
    table, masks = None, None
    if has_grammar:
        table = random_table(np.random.default_rng(seed), targets.tolist(), vocab)
        masks = TokenMasks.of(masks_of(table), vocab, torch.device("cpu")) if not table.all() else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncated, "MOST_PROBABLE", most_probable)
        patch.setattr(truncated, "ROWS_SORTED_AT_ONCE", 2)
        results = chunked_logprobs(hidden, weight, None, targets, temperature, chunk_tokens, masks, rule)
    for got, expected in zip(results, by_hand(logits, targets, rule, table), strict=True):
        np.testing.assert_allclose(got.detach(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "rule",
    [
        Truncation(top_p=0.9),
        Truncation(top_k=20),
        Truncation(min_p=0.05),
        Truncation(top_p=0.8, top_k=30, min_p=0.01),
    ],
)
def test_the_kept_tokens_are_those_of_vllms_own_functions(rule):
    """Of its sampler on the CPU, in float32, for peaked and for flat distributions over a large vocabulary."""
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    scales = torch.linspace(0.3, 4, 64)[:, None]
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(1)) * scales
    expected = logits.clone()
    if rule.min_p:
        probs = expected.softmax(-1)
        expected.masked_fill_(probs < rule.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    top_k = torch.full((64,), rule.top_k) if rule.top_k else None
    top_p = torch.full((64,), rule.top_p) if rule.top_p < 1 else None
    expected = sampler.apply_top_k_top_p_pytorch(expected, top_k, top_p)
    is_kept = logits >= lowest_logits(logits, rule)[:, None]
    assert torch.equal(is_kept, expected.isfinite())
    assert is_kept.sum(-1).min() < 21


def test_the_gradient_is_that_of_finite_differences():
    hidden, weight, targets = head(3, 6, 9)
    rule = Truncation(top_p=0.8, top_k=6, min_p=0.01)
    targets[:3] = (hidden @ weight.T).argmax(dim=1)[:3]
    *_, is_outside = chunked_logprobs(hidden, weight, None, targets, 0.7, 2, None, rule)
    assert not is_outside[:3].any() and is_outside[3:].any()
    assert torch.autograd.gradcheck(
        lambda hidden, weight: chunked_logprobs(hidden, weight, None, targets, 0.7, 4, None, rule)[:2],
        (hidden, weight),
    )


@pytest.mark.parametrize("rule", [Truncation(top_p=0.7), Truncation(top_k=3), Truncation(min_p=0.2)])
def test_the_expected_gradient_over_all_completions_is_that_of_the_truncated_policys_mean_reward(rule):
    """Completions of two tokens out of six: each state is a row of `states`, the second depends on the first token."""
    vocab = 6
    random = torch.Generator().manual_seed(2)
    states = torch.randn(1 + vocab, HIDDEN, dtype=torch.float64, generator=random)
    weight = torch.randn(vocab, HIDDEN, dtype=torch.float64, generator=random)
    rewards = torch.randn(vocab, vocab, dtype=torch.float64, generator=random)

    def mean_reward(weight: torch.Tensor) -> float:
        logits = (states @ weight.T).tolist()
        total = 0.0
        for first, second in itertools.product(range(vocab), repeat=2):
            prob = truncated_prob(logits[0], first) * truncated_prob(logits[1 + first], second)
            total += prob * rewards[first, second].item()
        return total

    def truncated_prob(logits: list[float], token: int) -> float:
        support = kept_tokens(logits, rule)
        mass = sum(math.exp(logits[t]) for t in support)
        return math.exp(logits[token]) / mass if token in support else 0.0

    expected = torch.zeros_like(weight)
    step = 1e-6
    for place in itertools.product(range(vocab), range(HIDDEN)):
        change = torch.zeros_like(weight)
        change[place] = step
        expected[place] = (mean_reward(weight + change) - mean_reward(weight - change)) / (2 * step)

    weight.requires_grad_()
    pairs = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
    rows = torch.stack([torch.zeros_like(pairs[:, 0]), 1 + pairs[:, 0]], dim=1).flatten()
    logprobs, _, is_outside = chunked_logprobs(
        states[rows], weight, None, pairs.flatten(), 1.0, 5, None, rule
    )
    logprobs = logprobs.view(-1, 2).sum(dim=1)
    # The truncated policy never samples a completion with a token outside of its support
    probs = torch.where(is_outside.view(-1, 2).any(dim=1), 0, logprobs.detach().exp())
    assert probs.sum().item() == pytest.approx(1.0, abs=1e-12) and (probs == 0).any()
    (gradient,) = torch.autograd.grad((probs * rewards.flatten() * logprobs).sum(), weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_large_coefficients_of_the_entropy_leave_float32_gradients_finite():
    hidden, weight, targets = head(4, 5, 40)
    hidden = hidden.detach().float().requires_grad_()
    weight = weight.detach().float().requires_grad_()
    _, entropies, _ = chunked_logprobs(hidden, weight, None, targets, 0.01, 5, None, Truncation(top_k=2))
    for gradient in torch.autograd.grad(1e4 * entropies.sum(), (hidden, weight)):
        assert gradient.isfinite().all()


def test_a_rule_that_keeps_every_token_changes_not_one_bit():
    hidden, weight, targets = head(5, 7, 40)
    plain = chunked_logprobs(hidden, weight, None, targets, 0.7, 3)
    *results, is_outside = chunked_logprobs(
        hidden, weight, None, targets, 0.7, 3, None, Truncation(top_k=40, min_p=1e-30)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))
    assert not is_outside.any()


def test_logits_that_are_no_numbers_give_log_probs_that_are_none():
    hidden, weight, targets = head(6, 2, 8)
    hidden = hidden.detach()
    hidden[0] = torch.nan
    logprobs, *_ = chunked_logprobs(hidden, weight, None, targets, 1.0, 2, None, Truncation(0.9, 4, 0.1))
    assert logprobs[0].isnan() and logprobs[1].isfinite()
