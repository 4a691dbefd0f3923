"""The loss of DiffusionNFT: by hand, at its minimum, and as an improvement of an analytic flow, in float64."""

import math
from itertools import pairwise

import pytest
import torch
from gaussian_flow import MEAN, STD, gaussian_velocity

from async_grpo.algorithm.flow.config import ADAPTIVE, VELOCITY
from async_grpo.algorithm.flow.nft import branch_losses, good_probabilities, noised, old_decay
from async_grpo.algorithm.flow.sde import ode_step

SHAPE = (5, 2, 3)
BETA = 0.6


def random_numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(v, v_old, picture, noise, t, is_good, beta, weighting):
    """Return the loss of one picture at one time, number by number."""
    loss = 0.0
    for share, sign in ((is_good, 1), (1 - is_good, -1)):
        errors = []
        for index in range(v.numel()):
            x0, e = picture.flatten()[index], noise.flatten()[index]
            x_t = (1 - t) * x0 + t * e
            old = v_old.flatten()[index]
            branch = old + sign * beta * (v.flatten()[index] - old)
            error = (x_t - t * branch) - x0 if weighting == ADAPTIVE else branch - (e - x0)
            errors.append(error)
        divisor = 1.0
        if weighting == ADAPTIVE:
            divisor = sum(abs(error.item()) for error in errors) / len(errors)
        loss = loss + share * sum(error**2 for error in errors) / len(errors) / divisor
    return loss


@pytest.mark.parametrize("weighting", [ADAPTIVE, VELOCITY])
def test_loss_and_gradient_equal_those_computed_number_by_number(weighting):
    v = random_numbers(0, *SHAPE).requires_grad_()
    v_old, pictures, noise = (random_numbers(seed, *SHAPE) for seed in (1, 2, 3))
    t = torch.tensor([0.05, 0.3, 0.5, 0.8, 1.0], dtype=torch.float64)
    is_good = torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0], dtype=torch.float64)
    positive, negative = branch_losses(v, v_old, noise - pictures, t, BETA, weighting)
    losses = is_good * positive + (1 - is_good) * negative
    expected = torch.stack(
        [
            by_hand(v[k], v_old[k], pictures[k], noise[k], t[k], is_good[k], BETA, weighting)
            for k in range(len(t))
        ]
    )
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(losses.sum(), v)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), v)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_probabilities_are_half_at_the_mean_and_bounded():
    advantages = torch.tensor([-9.0, -2.0, -0.5, 0.0, 1.0, 2.0, 9.0])
    expected = [0.0, 0.0, 0.375, 0.5, 0.75, 1.0, 1.0]
    assert good_probabilities(advantages, clip=2.0).tolist() == expected


def test_the_minimum_moves_from_the_old_velocity_to_that_of_good_pictures_and_away_from_bad_ones():
    """The velocity at one x_t is a number, and several pictures with noise lead to it. Search the loss on a grid."""
    targets = torch.tensor([-1.0, 0.5, 2.0, 3.0], dtype=torch.float64)
    v_old = torch.full_like(targets, 0.7)
    t = torch.full_like(targets, 0.5)

    def best(is_good):
        grid = torch.linspace(-12, 12, 240001, dtype=torch.float64)
        total = torch.zeros_like(grid)
        for index in range(len(targets)):
            target, old, time = (
                targets[index].expand(len(grid), 1),
                v_old[index].expand(len(grid), 1),
                t[index],
            )
            positive, negative = branch_losses(
                grid[:, None], old, target, time.expand(len(grid)), BETA, VELOCITY
            )
            total += is_good[index] * positive + (1 - is_good[index]) * negative
        return grid[total.argmin()].item()

    # All good: plain flow matching, whose minimum is the mean of the targets, for v+ = old + beta (v - old)
    assert best([1, 1, 1, 1]) == pytest.approx(0.7 + (targets.mean().item() - 0.7) / BETA, abs=1e-4)
    assert best([0.5] * 4) == pytest.approx(0.7, abs=1e-4)
    mixed = [0.1, 0.4, 0.8, 1.0]
    pull = sum((2 * r - 1) * (v.item() - 0.7) for r, v in zip(mixed, targets, strict=True)) / 4
    assert best(mixed) == pytest.approx(0.7 + pull / BETA, abs=1e-4)


@pytest.mark.parametrize("weighting", [ADAPTIVE, VELOCITY])
def test_without_differences_of_rewards_nothing_changes(weighting):
    v_old, target = random_numbers(1, *SHAPE), random_numbers(2, *SHAPE)
    v = v_old.clone().requires_grad_()
    t = torch.rand(SHAPE[0], dtype=torch.float64)
    positive, negative = branch_losses(v, v_old, target, t, BETA, weighting)
    is_good = good_probabilities(torch.zeros(SHAPE[0], dtype=torch.float64), 1.0)
    (is_good * positive + (1 - is_good) * negative).sum().backward()
    assert v.grad.abs().max() < 1e-15


def test_the_old_policy_first_follows_fast_and_then_slowly():
    assert [old_decay(iteration, 0.001, 0.5) for iteration in (1, 499, 500, 9000)] == [0.001, 0.499, 0.5, 0.5]
    assert old_decay(7, 0.0, 0.5) == 0


NUM_STEPS = 200


def test_the_minimum_of_the_loss_draws_numbers_of_higher_reward_by_enumeration():
    """Numbers are drawn from N(1.5, 0.6^2), and the reward is the number: r = Phi-like, by its clipped advantage.

    The minimum of the loss at each (x, t) is an integral over the pictures that lead there, here over a fine grid. The
    flow with this velocity must draw numbers with a higher mean reward, and with a larger beta, less so.
    """
    pictures = MEAN + STD * torch.linspace(-6, 6, 2001, dtype=torch.float64)
    log_prior = -0.5 * ((pictures - MEAN) / STD) ** 2
    is_good = good_probabilities((pictures - MEAN) / STD, 1.0)

    def best_velocity(x, t, beta):
        noise = (x[:, None] - (1 - t) * pictures) / t
        weights = torch.softmax(log_prior - 0.5 * noise**2, dim=1)
        v_old = gaussian_velocity(x, t)
        pull = (weights * (2 * is_good - 1) * (noise - pictures - v_old[:, None])).sum(dim=1)
        return v_old + pull / beta

    def drawn(velocity):
        quantiles = torch.linspace(0, 1, 402, dtype=torch.float64)[1:-1]
        x = math.sqrt(2) * torch.erfinv(2 * quantiles - 1)
        for t, t_next in pairwise(torch.linspace(1, 0, NUM_STEPS + 1, dtype=torch.float64)):
            x = ode_step(x[:, None], velocity(x, t)[:, None], t[None], t_next[None])[:, 0]
        return x

    old = drawn(gaussian_velocity).mean().item()
    cautious = drawn(lambda x, t: best_velocity(x, t, 2.0)).mean().item()
    bold = drawn(lambda x, t: best_velocity(x, t, 1.0)).mean().item()
    assert old == pytest.approx(MEAN, abs=0.01)
    assert old + 0.1 < cautious < bold


def test_a_gradient_step_on_drawn_numbers_raises_their_mean():
    """The trained velocity is the old one plus a constant, whose gradient step must raise the drawn mean."""
    generator = torch.Generator().manual_seed(4)
    pictures = MEAN + STD * torch.randn(20_000, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(20_000, 1, generator=generator, dtype=torch.float64)
    t = torch.rand(20_000, generator=generator, dtype=torch.float64).clamp(min=0.01)
    x_t = noised(pictures, noise, t)
    v_old = gaussian_velocity(x_t, t[:, None])
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    is_good = good_probabilities((pictures[:, 0] - MEAN) / STD, 1.0)
    positive, negative = branch_losses(v_old + shift, v_old, noise - pictures, t, 1.0, ADAPTIVE)
    (is_good * positive + (1 - is_good) * negative).mean().backward()
    # The drawn number falls by the constant, so that it must be negative
    assert shift.grad > 0.1
