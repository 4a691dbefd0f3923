"""The steps of the flow-matching sampler: exact marginals, log-probs and divergences, in float64."""

import math
from itertools import pairwise

import pytest
import torch
from gaussian_flow import MEAN, STD, gaussian_velocity
from torch.distributions import Independent, Normal, kl_divergence

from async_grpo.algorithm.flow.sde import (
    ode_step,
    sde_moments,
    sde_noise_scale,
    step_entropies,
    step_kl,
    step_logprobs,
)
from async_grpo.algorithm.flow.windows import stochastic_steps
from async_grpo.errors import ConfigurationError

NUM_DRAWS = 10_000
NUM_VALUES = 12  # independent numbers of each draw
NUM_STEPS = 250


def draw(noise_level, seed):
    """Return NUM_DRAWS pictures of NUM_VALUES numbers, and the same at the middle of the path."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_DRAWS, NUM_VALUES, generator=random, dtype=torch.float64)
    times = torch.linspace(1, 0, NUM_STEPS + 1, dtype=torch.float64)
    middle = None
    for t, t_next in pairwise(times):
        velocity = gaussian_velocity(x, t)
        if noise_level:
            scale = sde_noise_scale(t[None], times[1], noise_level)
            mean, std = sde_moments(x, velocity, t[None], t_next[None], scale)
            x = mean + std * torch.randn(x.shape, generator=random, dtype=torch.float64)
        else:
            x = ode_step(x, velocity, t[None], t_next[None])
        if abs(t_next - 0.5) < 1e-9:
            middle = x
    return x, middle


@pytest.mark.parametrize("noise_level", [0.0, 0.7, 1.0])
def test_the_sampler_draws_the_distribution_of_an_analytic_flow(noise_level):
    pictures, middle = draw(noise_level, seed=3)
    assert pictures.mean().item() == pytest.approx(MEAN, rel=0.01)
    assert pictures.std().item() == pytest.approx(STD, rel=0.01)
    assert middle.mean().item() == pytest.approx(0.5 * MEAN, rel=0.01)
    assert middle.std().item() == pytest.approx(math.hypot(0.5 * STD, 0.5), rel=0.01)
    # The fourth moment, which is 3 for a normal distribution
    standard = (pictures - pictures.mean()) / pictures.std()
    assert standard.pow(4).mean().item() == pytest.approx(3, rel=0.03)


def steps_at_random(count=50):
    random = torch.Generator().manual_seed(0)
    shape = (count, 2, 3, 5)
    x, velocity, x_next = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(3))
    t = 0.05 + 0.9 * torch.rand(count, generator=random, dtype=torch.float64)
    return x, velocity, x_next, t, 0.8 * t


def test_the_drift_is_the_velocity_minus_half_the_squared_noise_times_the_score():
    x, velocity, _, t, t_next = steps_at_random()
    scale = sde_noise_scale(t, 0.9, 0.7)
    mean, std = sde_moments(x, velocity, t, t_next, scale)
    for k in range(len(x)):
        # Of the path x_t = (1 - t) x_0 + t e, the score is -E[e | x_t] / t, and E[e | x_t] = x + (1 - t) v
        time = t[k].item()
        bounded_time = min(time, 0.9)
        noise = 0.7 * math.sqrt(bounded_time / (1 - bounded_time))
        score = -(x[k] + (1 - time) * velocity[k]) / time
        duration = time - t_next[k].item()
        expected = x[k] - duration * (velocity[k] - 0.5 * noise**2 * score)
        torch.testing.assert_close(mean[k], expected)
        assert std[k].item() == pytest.approx(noise * math.sqrt(duration))


def test_the_log_prob_of_a_step_is_that_of_torch_per_number():
    x, velocity, x_next, t, t_next = steps_at_random()
    mean, std = sde_moments(x, velocity, t, t_next, sde_noise_scale(t, 0.9, 0.7))
    normal = Independent(Normal(mean, std[:, None, None, None]), 3)
    num_numbers = x[0].numel()
    torch.testing.assert_close(step_logprobs(x_next, mean, std), normal.log_prob(x_next) / num_numbers)
    torch.testing.assert_close(step_entropies(std), normal.entropy() / num_numbers)
    other_mean = mean + 0.1 * velocity
    other = Independent(Normal(other_mean, std[:, None, None, None]), 3)
    torch.testing.assert_close(step_kl(mean, other_mean, std), kl_divergence(normal, other) / num_numbers)


def test_on_policy_the_ratio_of_a_step_is_one():
    x, velocity, x_next, t, t_next = steps_at_random()
    moments = [sde_moments(x, velocity, t, t_next, sde_noise_scale(t, 0.9, 0.7)) for _ in range(2)]
    first, second = (step_logprobs(x_next, *pair) for pair in moments)
    assert torch.equal(torch.exp(first - second), torch.ones(len(x), dtype=torch.float64))


def test_a_random_window_lies_anywhere_and_follows_from_the_seed():
    def window(seed):
        return stochastic_steps(10, 4, "random", seed=seed, policy_version=seed, versions_per_place=1)

    begins = [window(seed).start for seed in range(400)]
    assert set(begins) == set(range(7))
    assert window(5) == window(5) and len(window(5)) == 4


def test_a_sliding_window_moves_and_begins_again():
    begins = [
        stochastic_steps(5, 3, "sliding", seed=1, policy_version=version, versions_per_place=2).start
        for version in range(9)
    ]
    assert begins == [0, 0, 1, 1, 2, 2, 0, 0, 1]


def test_a_window_longer_than_the_denoising_is_refused():
    with pytest.raises(ConfigurationError, match="longer than the 5 denoising steps"):
        stochastic_steps(5, 6, "random", seed=1, policy_version=0, versions_per_place=1)
