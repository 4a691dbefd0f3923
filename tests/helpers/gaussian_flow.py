"""A flow whose exact velocity is known: from normal noise to numbers with a normal distribution."""

MEAN = 1.5
STD = 0.6


def gaussian_velocity(x, t):
    """Return E[noise - x_0 | x_t = x] for x_0 ~ N(MEAN, STD^2), by the formula of conditional normal distributions."""
    variance = (1 - t) ** 2 * STD**2 + t**2
    centered = x - (1 - t) * MEAN
    return t / variance * centered - (MEAN + (1 - t) * STD**2 / variance * centered)
