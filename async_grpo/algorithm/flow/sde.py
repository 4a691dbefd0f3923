"""One denoising step of a flow-matching sampler: as an ordinary or as a stochastic differential equation.

The equations are those of Flow-GRPO (Liu et al. 2025, arXiv 2505.05470, sections 3 and 4). Time t falls from 1 (noise) to 0
(picture). A step goes from t to t' < t, with d = t - t' > 0:

    ODE:  x' = x - d v
    SDE:  x' = x - d (v + s^2 / (2 t) (x + (1 - t) v)) + s sqrt(d) e,    e ~ N(0, 1),    s = a sqrt(t / (1 - t))

Both have the same marginal distributions in the limit of small steps. `a` is the noise level. At t = 1 the scale s would be
infinite, so it is computed at most at the time `t_max`, the beginning of the second step.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def sde_noise_scale(
    t: Float[Tensor, " steps"], t_max: Float[Tensor, " steps"] | float, noise_level: float
) -> Float[Tensor, " steps"]:
    """Return s = a sqrt(t / (1 - t)) of each step, the standard deviation of the noise per square root of time.

    Args:
        t: Times at which the steps begin.
        t_max: Latest time at which the scale is computed; below 1.
        noise_level: The factor a.
    """
    bounded_t = torch.minimum(t, torch.as_tensor(t_max, dtype=t.dtype, device=t.device))
    return noise_level * torch.sqrt(bounded_t / (1 - bounded_t))


def ode_step(
    x: Float[Tensor, "steps ..."],
    velocity: Float[Tensor, "steps ..."],
    t: Float[Tensor, " steps"],
    t_next: Float[Tensor, " steps"],
) -> Float[Tensor, "steps ..."]:
    """Return the state after a deterministic step from the times `t` to `t_next`."""
    return x - _as_latent(t - t_next, x) * velocity


def sde_moments(
    x: Float[Tensor, "steps ..."],
    velocity: Float[Tensor, "steps ..."],
    t: Float[Tensor, " steps"],
    t_next: Float[Tensor, " steps"],
    scale: Float[Tensor, " steps"],
) -> tuple[Float[Tensor, "steps ..."], Float[Tensor, " steps"]]:
    """Return the mean and the standard deviation of the state after a stochastic step.

    Args:
        x: States before the steps.
        velocity: The model's velocity at these states.
        t: Times at which the steps begin; above 0.
        t_next: Times at which the steps end.
        scale: The result of `sde_noise_scale`.
    """
    duration = t - t_next
    # With the noise s, the drift gets a term that pulls towards likely states, so that the marginals stay the same
    pull = scale.square() / (2 * t)
    drift = velocity + _as_latent(pull, x) * (x + _as_latent(1 - t, x) * velocity)
    return x - _as_latent(duration, x) * drift, scale * torch.sqrt(duration)


def step_logprobs(
    x_next: Float[Tensor, "steps ..."],
    mean: Float[Tensor, "steps ..."],
    std: Float[Tensor, " steps"],
) -> Float[Tensor, " steps"]:
    """Return the log-prob of each stochastic step, as the mean over the numbers of the picture.

    Flow-GRPO also takes the mean. It makes the policy ratio of a large picture as sensitive as that of a small one. The
    log-density of the whole picture is the mean times the count of its numbers.
    """
    z = (x_next - mean) / _as_latent(std, mean)
    squares = z.square().flatten(1).mean(dim=1)
    return -0.5 * squares - torch.log(std) - 0.5 * math.log(2 * math.pi)


def step_entropies(std: Float[Tensor, " steps"]) -> Float[Tensor, " steps"]:
    """Return the entropy of each stochastic step, as the mean over the numbers of the picture."""
    return torch.log(std) + 0.5 * (1 + math.log(2 * math.pi))


def step_kl(
    mean: Float[Tensor, "steps ..."],
    reference_mean: Float[Tensor, "steps ..."],
    std: Float[Tensor, " steps"],
) -> Float[Tensor, " steps"]:
    """Return the KL divergence of each step from the reference policy's step, as the mean over the picture's numbers.

    Both steps are normal with the same standard deviation, so it is (mean - reference mean)^2 / (2 std^2) (Flow-GRPO,
    section 4.1): a squared difference of the two velocities.
    """
    z = (mean - reference_mean) / _as_latent(std, mean)
    return 0.5 * z.square().flatten(1).mean(dim=1)


def _as_latent(values: Float[Tensor, " steps"], x: Float[Tensor, "steps ..."]) -> Float[Tensor, "steps ..."]:
    """Return one value per step with axes of length 1, so that it is broadcast over the numbers of the pictures."""
    return values.reshape(-1, *[1] * (x.ndim - 1))
