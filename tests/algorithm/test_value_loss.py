"""The value loss against plain Python, token by token; explained variance against numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.process_advantages import explained_variance, value_loss

METRICS = {"value_clip_frac", "value_error", "value_error_square", "return_mean", "return_square"}


def random_inputs(seed, rows=3, tokens=11, garbage=math.nan):
    """(values, returns, old values, mask), all (rows, tokens); about half of the values beyond a clip of 0.5.

    What is masked is garbage.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.randn(rows, tokens, dtype=torch.float64, generator=generator) for _ in range(3))
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    return *(torch.where(mask, values, garbage) for values in numbers), mask


def by_hand(value, target, old, clip):
    """(loss, its derivative, clipped) of one token."""
    held = min(max(value, old - clip), old + clip)
    free, clipped = (value - target) ** 2, (held - target) ** 2
    if clipped > free:
        return clipped / 2, 0.0, True
    return free / 2, value - target, False


@given(seed=st.integers(0, 10_000), clip=st.sampled_from([0.1, 0.5, 2.0, math.inf]))
@settings(max_examples=60, deadline=None)
def test_losses_gradients_and_metrics_are_those_of_a_loop_over_tokens(seed, clip):
    values, returns, old, mask = random_inputs(seed)
    values.requires_grad_()
    loss, metrics = value_loss(values, returns, old, mask, clip=clip)
    loss.sum().backward()
    assert metrics.keys() == METRICS
    for row, t in np.ndindex(*mask.shape):
        got = [loss[row, t].item(), values.grad[row, t].item()]
        got += [metrics[name][row, t].item() for name in sorted(METRICS)]
        expected = [0.0] * len(got)
        if mask[row, t]:
            value, target, before = (numbers[row, t].item() for numbers in (values, returns, old))
            total, slope, clipped = by_hand(value, target, before, clip)
            error = value - target
            expected = [total, slope, target, target**2, float(clipped), error, error**2]
        assert got == pytest.approx(expected, abs=1e-10, rel=1e-10)


def token_means(parts):
    """The means that the accumulator would report: sums over micro-batches, divided once."""
    sums, tokens = dict.fromkeys(METRICS, 0.0), 0
    for values, returns, old, mask in parts:
        _, metrics = value_loss(values, returns, old, mask)
        sums = {name: sums[name] + metrics[name].sum().item() for name in METRICS}
        tokens += int(mask.sum())
    return {name: total / tokens for name, total in sums.items()}


@given(seed=st.integers(0, 1000), cut=st.integers(1, 10))
@settings(max_examples=20, deadline=None)
def test_explained_variance_is_that_of_all_tokens_however_they_were_cut(seed, cut):
    inputs = random_inputs(seed)
    inputs[1].mul_(0.3).add_(inputs[0])  # returns that the values say something about
    parts = [[given[:, :cut] for given in inputs], [given[:, cut:] for given in inputs]]
    values, returns, mask = (inputs[i].numpy() for i in (0, 1, 3))
    expected = 1 - np.var((returns - values)[mask]) / np.var(returns[mask])
    assert explained_variance(token_means(parts)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("target", [0.0, 0.1, 0.3, -0.7, 1.1, 1 / 3, 12.3])
def test_equal_returns_leave_nothing_to_explain(target):
    """Whose float32 squares do not average to exactly the square of their average."""
    values, _, old, mask = (given.float() for given in random_inputs(0, tokens=1000))
    assert explained_variance(token_means([(values, torch.full_like(values, target), old, mask.bool())])) == 0
