"""Log-probs and entropies over the tokens that a grammar allowed, against a softmax that is written out in float64."""

import numpy as np
import pytest
import torch
from grammar_masks import masks_of, random_table
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import VOCAB, tiny_model

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.modeling.logprobs import chunked_logprobs
from async_grpo.modeling.policy import PolicyModel
from async_grpo.modeling.token_masks import TokenMasks

HIDDEN = 6


def head(seed: int, tokens: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(vocab, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=generator)


def by_hand(logits: np.ndarray, targets: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probs and entropies of a softmax over the allowed tokens alone: the others are left out."""
    logprobs = []
    entropies = []
    for row, target, is_allowed in zip(logits, targets, table, strict=True):
        weights = {token: np.exp(row[token] - row.max()) for token in np.flatnonzero(is_allowed)}
        total = sum(weights.values())
        probs = {token: weight / total for token, weight in weights.items()}
        logprobs.append(np.log(probs[target]))
        entropies.append(-sum(p * np.log(p) for p in probs.values() if p > 0))
    return np.array(logprobs), np.array(entropies)


@given(
    tokens=st.integers(1, 12),
    vocab=st.sampled_from([3, 31, 32, 33, 70]),
    chunk_tokens=st.integers(1, 14),
    temperature=st.sampled_from([0.4, 1.0, 1.7]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_log_probs_and_entropies_are_those_over_the_allowed_tokens(
    tokens, vocab, chunk_tokens, temperature, seed
):
    hidden, weight, targets = head(seed, tokens, vocab)
    table = random_table(np.random.default_rng(seed), targets.tolist(), vocab)
    masks = TokenMasks.of(masks_of(table), vocab, torch.device("cpu")) if not table.all() else None
    logprobs, entropies = chunked_logprobs(hidden, weight, None, targets, temperature, chunk_tokens, masks)
    logits = (hidden @ weight.T / temperature).detach().numpy()
    expected_logprobs, expected_entropies = by_hand(logits, targets.numpy(), table)
    np.testing.assert_allclose(logprobs.detach(), expected_logprobs, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(entropies.detach(), expected_entropies, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("only_one_is_allowed", [False, True])
def test_the_gradient_is_that_of_finite_differences(only_one_is_allowed):
    hidden, weight, targets = head(3, 5, 9)
    table = random_table(np.random.default_rng(3), targets.tolist(), 9)
    if only_one_is_allowed:
        table[2] = False
        table[2, targets[2]] = True
    masks = TokenMasks.of(masks_of(table), 9, torch.device("cpu"))
    assert torch.autograd.gradcheck(
        lambda hidden, weight: chunked_logprobs(hidden, weight, None, targets, 0.7, 2, masks),
        (hidden, weight),
    )
    logprobs, entropies = chunked_logprobs(hidden, weight, None, targets, 0.7, 2, masks)
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropies.sum(), weight)
    never_allowed = ~torch.tensor(table).any(dim=0)
    assert gradient.isfinite().all() and (gradient[never_allowed] == 0).all()
    if only_one_is_allowed:
        assert logprobs[2] == 0 and entropies[2] == 0


def test_large_coefficients_of_the_entropy_leave_float32_gradients_finite():
    hidden, weight, targets = head(4, 5, 40)
    hidden = hidden.detach().float().requires_grad_()
    weight = weight.detach().float().requires_grad_()
    table = random_table(np.random.default_rng(4), targets.tolist(), 40)
    masks = TokenMasks.of(masks_of(table), 40, torch.device("cpu"))
    _, entropies = chunked_logprobs(hidden, weight, None, targets, 0.01, 5, masks)
    for gradient in torch.autograd.grad(1e4 * entropies.sum(), (hidden, weight)):
        assert gradient.isfinite().all()


def test_masks_that_allow_everything_change_not_one_bit():
    hidden, weight, targets = head(5, 7, 40)
    everything = AllowedTokens(np.full(7, -1, np.int32), masks_of(np.eye(1, 40, dtype=bool)).masks)
    masks = TokenMasks.of(everything, 40, torch.device("cpu"))
    plain = chunked_logprobs(hidden, weight, None, targets, 0.7, 3)
    masked = chunked_logprobs(hidden, weight, None, targets, 0.7, 3, masks)
    assert all(torch.equal(a, b) for a, b in zip(plain, masked, strict=True))


def test_masks_of_another_vocabulary_are_refused():
    masks = masks_of(np.eye(2, 40, dtype=bool))
    for vocab_size in (30, 65):
        with pytest.raises(ValueError, match=f"a vocabulary of {vocab_size} needs"):
            TokenMasks.of(masks, vocab_size, torch.device("cpu"))


def test_packed_sequences_with_a_common_beginning_have_masks_of_their_own():
    """The packed forward computes equal beginnings once; the masks of their last tokens differ nevertheless."""
    random = np.random.default_rng(6)
    model = tiny_model()
    beginning = random.integers(0, VOCAB, 6)
    sequences = [np.concatenate([beginning, random.integers(0, VOCAB, n)]) for n in (4, 1, 7)]
    tables = [random_table(random, ids.tolist(), VOCAB) for ids in sequences]
    policy = PolicyModel(model)
    ids = torch.tensor(np.concatenate(sequences))
    bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    masks = policy.token_masks(masks_of(np.concatenate(tables)))
    everything = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        logprobs, entropies = policy(ids, bounds, everything, 0.7, masks)
    model.set_attn_implementation("eager")
    for sequence, table, begin in zip(sequences, tables, bounds.tolist(), strict=False):
        with torch.no_grad():
            logits = model(torch.tensor(sequence)[None]).logits[0, :-1].double() / 0.7
        expected = by_hand(logits.numpy(), sequence[1:], table[1:])
        rows = slice(begin + 1, begin + len(sequence))
        np.testing.assert_allclose(logprobs[rows], expected[0], atol=1e-5)
        np.testing.assert_allclose(entropies[rows], expected[1], atol=1e-5)
