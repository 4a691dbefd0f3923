"""Losses, KL and aggregation against hand arithmetic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.aggregation import AGGREGATIONS, aggregate_loss
from async_grpo.algorithm.kl import KL_KINDS, kl_penalty
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.errors import ConfigurationError

PPO, GRPO = POLICY_LOSSES["ppo_clip"], POLICY_LOSSES["grpo"]


def one_token(loss, ratio, advantage, **options):
    """(value, gradient with respect to the log-prob, metrics) of a single token with that ratio."""
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zero, advantage = torch.zeros_like(logprob), torch.full_like(logprob, advantage)
    value, metrics = loss(logprob, zero, advantage, torch.ones(1, 1, dtype=torch.bool), **options)
    value.sum().backward()
    return value.item(), logprob.grad.item(), {name: metric.item() for name, metric in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, None),  # on policy: the plain policy gradient
        (1.2, 2.0, -2.4, -2.4, None),  # inside the upper bound 1.28
        (1.5, 2.0, -2.56, 0.0, "high"),  # -2 * 1.28, held
        (0.5, 2.0, -1.0, -1.0, None),  # a good token that became rare is pulled back, unclipped
        (0.7, -2.0, 1.6, 0.0, "low"),  # 2 * 0.8, held
        (1.5, -2.0, 3.0, 3.0, None),  # a bad token that became frequent is pushed down, unclipped
    ],
)
def test_ppo_clip_values_gradients_and_clip_fractions(ratio, advantage, value, gradient, clipped):
    got_value, got_gradient, metrics = one_token(PPO, ratio, advantage)
    assert (got_value, got_gradient) == pytest.approx((value, gradient))
    assert metrics["clip_frac_low"] == (clipped == "low")
    assert metrics["clip_frac_high"] == (clipped == "high")
    assert metrics["ratio_mean"] == metrics["ratio_max"] == pytest.approx(ratio)


def test_the_clip_bounds_are_options():
    assert one_token(PPO, 1.5, 1.0, clip_high=1.0)[0] == pytest.approx(-1.5)
    assert one_token(PPO, 0.7, -1.0, clip_low=0.1)[0] == pytest.approx(0.9)


def test_the_grpo_loss_has_the_value_minus_a_and_the_gradient_minus_a():
    value, gradient, metrics = one_token(GRPO, 3.0, 0.7)
    assert (value, gradient) == pytest.approx((-0.7, -0.7))
    assert metrics["ratio_mean"] == pytest.approx(3.0)


def test_importance_weights_multiply_the_loss_and_get_no_gradient():
    weights = torch.full((1, 1), 0.25, dtype=torch.float64, requires_grad=True)
    value, gradient, _ = one_token(GRPO, 1.0, 2.0, importance_weights=weights)
    assert (value, gradient) == pytest.approx((-0.5, -0.5))
    assert weights.grad is None


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_in_masked_positions_changes_neither_values_nor_gradients(name, garbage):
    torch.manual_seed(0)
    mask = torch.rand(3, 7) < 0.6
    clean = [torch.randn(3, 7, dtype=torch.float64) for _ in range(4)]
    dirty = [torch.where(mask, values, garbage) for values in clean]

    def run(logprobs, old, advantages, weights):
        logprobs.requires_grad_()
        loss, metrics = POLICY_LOSSES[name](logprobs, old, advantages, mask, importance_weights=weights)
        aggregate_loss(loss, mask, "token_mean").backward()
        return loss, logprobs.grad, metrics

    for expected, got in zip(run(*clean)[:2], run(*dirty)[:2], strict=True):
        assert torch.equal(torch.where(mask, expected, 0), got)
    metrics = run(*[values.detach().clone() for values in dirty])[2]
    assert all(torch.isfinite(metric).all() and metric[~mask].eq(0).all() for metric in metrics.values())


def test_a_ratio_beyond_e_to_the_20_stays_finite():
    logprobs = torch.tensor([[0.0, -200.0]], requires_grad=True)
    old, advantages = torch.tensor([[-200.0, 0.0]]), torch.tensor([[-1.0, -1.0]])
    loss, _ = PPO(logprobs, old, advantages, torch.ones(1, 2))
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize(
    ("kind", "value"),
    [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5), ("abs", 0.5)],
)
def test_kl_estimators_at_a_difference_of_a_half(kind, value):
    logprobs = torch.tensor(-1.0, dtype=torch.float64)
    assert kl_penalty(logprobs, logprobs - 0.5, kind).item() == pytest.approx(value)


def test_k1_and_k3_average_to_the_exact_kl_over_the_whole_distribution():
    torch.manual_seed(0)
    p, q = ((torch.randn(50, dtype=torch.float64) / 2).log_softmax(0) for _ in range(2))  # k3 < 10 everywhere
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    for kind in ("k1", "k3"):
        assert torch.allclose((p.exp() * kl_penalty(p, q, kind)).sum(), exact)


@pytest.mark.parametrize("difference", [-30.0, 30.0])
def test_k3_is_held_finite_far_from_the_reference(difference):
    logprobs = torch.tensor(difference, requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor(0.0), "k3")
    penalty.backward()
    assert penalty.item() == 10 and logprobs.grad.item() == 0


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=", ".join(KL_KINDS)):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ConfigurationError, match="token_mean"):
        aggregate_loss(torch.zeros(1, 1), torch.ones(1, 1), "mean")


LOSS = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "value"),
    [("token_mean", 10 / 3), ("sequence_mean_token_mean", (1.5 + 7) / 2), ("constant_length", 10 / (2 * 5))],
)
def test_aggregation_on_the_three_row_example(mode, value):
    assert aggregate_loss(LOSS, MASK, mode, scale=5).item() == pytest.approx(value)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_nothing_unmasked_gives_zero_not_nan(mode):
    assert aggregate_loss(LOSS * math.nan, torch.zeros(3, 3), mode, scale=5).item() == 0


def test_constant_length_without_its_length_is_refused():
    with pytest.raises(ConfigurationError, match="maximum number of completion tokens"):
        aggregate_loss(LOSS, MASK, "constant_length")


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    mode=st.sampled_from(list(AGGREGATIONS)),
    split=st.integers(0, 8),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=100, deadline=None)
def test_parts_with_global_counts_add_up_to_the_whole_and_packing_does_not_matter(lengths, mode, split, seed):
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(len(lengths), 6, dtype=torch.float64, generator=generator)
    mask = torch.arange(6)[None, :] < torch.tensor(lengths)[:, None]
    counts = {"global_tokens": max(1, sum(lengths)), "global_sequences": max(1, sum(n > 0 for n in lengths))}
    whole = aggregate_loss(loss, mask, mode, scale=6)
    parts = [
        aggregate_loss(loss[part], mask[part], mode, scale=6, **counts)
        for part in (slice(0, split), slice(split, None))
    ]
    assert torch.allclose(sum(parts), whole)
    packed_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    packed = aggregate_loss(
        loss[mask][None], torch.ones_like(packed_ids), mode, sequence_ids=packed_ids, scale=6
    )
    assert torch.allclose(packed, whole)
