"""The loss of DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117), which trains on finished pictures.

A picture x_0 with a reward is mixed with noise e at a time t, x_t = (1 - t) x_0 + t e. The velocity there is v = e - x_0.
Two policies are made of the trained velocity v_theta and of the velocity v_old of the policy that draws:

    v+ = (1 - beta) v_old + beta v_theta        v- = (1 + beta) v_old - beta v_theta

With the probability r that the picture is good, the loss is r |v+ - v|^2 + (1 - r) |v- - v|^2. Its minimum is at

    v_theta = v_old + E[(2 r - 1) (v - v_old) | x_t] / beta,

so that good pictures attract the velocity, bad ones repel it, and r = 1/2 changes nothing.

In the annotations, `pairs` is an axis of (picture, time) pairs, and `...` stands for the axes of one picture.
"""

from jaxtyping import Float
from torch import Tensor

from async_grpo.algorithm.flow.config import ADAPTIVE, VELOCITY

MIN_ERROR = 1e-5  # lower bound of the mean error by which the adaptive weighting divides


def good_probabilities(advantages: Float[Tensor, "*shape"], clip: float) -> Float[Tensor, "*shape"]:
    """Return r = 1/2 + 1/2 clip(advantage / clip, -1, 1), the probability that a picture is good.

    An advantage is the reward minus the mean of the group, divided by a standard deviation: that of the group or of the
    batch, as the estimator says. So the normalizer Z of the paper is `clip` times this standard deviation.
    """
    return 0.5 + 0.5 * (advantages / clip).clamp(-1, 1)


def noised(
    pictures: Float[Tensor, "pairs ..."], noise: Float[Tensor, "pairs ..."], t: Float[Tensor, " pairs"]
) -> Float[Tensor, "pairs ..."]:
    """Return x_t = (1 - t) x_0 + t e."""
    times = t.reshape(-1, *[1] * (pictures.ndim - 1))
    return (1 - times) * pictures + times * noise


def branch_losses(
    velocity: Float[Tensor, "pairs ..."],
    old_velocity: Float[Tensor, "pairs ..."],
    target: Float[Tensor, "pairs ..."],
    t: Float[Tensor, " pairs"],
    beta: float,
    weighting: str = ADAPTIVE,
) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """Return the losses of the positive and of the negative policy, as means over the numbers of a picture.

    Args:
        velocity: The trained velocity v_theta.
        old_velocity: The velocity v_old, without gradient.
        target: The velocity v of the noised picture.
        t: Time of each pair.
        beta: Share of the trained velocity in v+; it bounds how far the policy moves from the old one.
        weighting: `velocity` takes the squared error of the velocity. `adaptive` is the form of the paper: the squared
            error of the predicted picture x_t - t v, divided by its mean absolute error, which is a constant for the
            gradient.
    """
    positive = (1 - beta) * old_velocity + beta * velocity
    negative = (1 + beta) * old_velocity - beta * velocity
    return (
        _squared_error(positive - target, t, weighting),
        _squared_error(negative - target, t, weighting),
    )


def _squared_error(
    velocity_error: Float[Tensor, "pairs ..."], t: Float[Tensor, " pairs"], weighting: str
) -> Float[Tensor, " pairs"]:
    errors = velocity_error.flatten(1)
    if weighting == VELOCITY:
        return errors.square().mean(dim=1)
    # x_t - t v is x_0 for the true velocity, so the error of the predicted picture is t times that of the velocity
    picture_errors = t[:, None] * errors
    mean_errors = picture_errors.detach().abs().mean(dim=1).clamp(min=MIN_ERROR)
    return picture_errors.square().mean(dim=1) / mean_errors


def old_decay(iteration: int, growth: float, maximum: float) -> float:
    """Return eta = min(growth * iteration, maximum), with which old <- eta * old + (1 - eta) * trained.

    Args:
        iteration: Number of finished iterations, at least 1.
        growth: Increase per iteration. The first iterations follow the trained policy closely, and learn fast.
        maximum: Largest decay.

    >>> [old_decay(iteration, 0.1, 0.25) for iteration in (1, 2, 3)]
    [0.1, 0.2, 0.25]
    """
    return min(growth * iteration, maximum)
