"""Forecast a run: fit a metric as a sigmoid of the compute, by least squares.

The curve is that of Khatri et al. (2025), "The Art of Scaling Reinforcement Learning Compute":

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

A bootstrap of the residuals gives 95 % intervals. They apply to the curve, not to the values of single steps.

Suffixes of names denote the axes of arrays: `T` steps, `G` grid points, `2` the two parameters that are searched (C_mid
and B). In `curve_2T` and `block_2T`, `2` denotes the rows x and y.
"""

from typing import Any, NamedTuple

import numpy as np

from async_grpo.options.fields import refuse

MIN_POINTS = 12
MAX_POINTS = 100  # if there are more points, they are averaged in this number of blocks
NUM_RESAMPLES = 200
# The BIC (Bayesian information criterion) of the sigmoid must be better than that of a straight line by this number,
# which is "very strong" evidence (Kass and Raftery 1995)
MIN_BIC_GAIN = 10
NUM_SIGMOID_PARAMETERS = 4


class Sigmoid(NamedTuple):
    """Parameters of the fitted curve R(C)."""

    start: float  # R0
    asymptote: float  # A
    log_middle: float  # logarithm of C_mid, the compute at which half of the rise is reached
    log_exponent: float  # logarithm of B

    def at(self, x_T: np.ndarray) -> np.ndarray:
        """Return the values (T,) of the curve at compute `x_T`."""
        return self.start + (self.asymptote - self.start) * _rise(x_T, self.log_middle, self.log_exponent)


def _rise(x_T: np.ndarray, log_middle: Any, log_exponent: Any) -> np.ndarray:
    """Return the share of the rise, from 0 to 1, that is reached at each x.

    Args:
        x_T: Compute, shape (T,).
        log_middle: Logarithm of C_mid; a number, or shape (G, 1).
        log_exponent: Logarithm of B, of the same shape.

    Returns:
        Shape (T,) or (G, T).
    """
    with np.errstate(over="ignore"):  # at x = 0 the exponential is infinite, and the share is 0
        return 1 / (1 + np.exp(np.exp(log_exponent) * (log_middle - np.log(np.maximum(x_T, 1e-300)))))


def fit(x_T: np.ndarray, y_T: np.ndarray) -> Sigmoid:
    """Fit the curve by least squares.

    For given C_mid and B, R is a linear function of `_rise`, so linear regression gives R0 and A. C_mid and B are
    searched on a grid over their whole range, and then on smaller and smaller grids around the best pair.

    Args:
        x_T: Compute, in increasing order, not negative.
        y_T: The metric.
    """
    low_2 = np.log([x_T[x_T > 0][0] / 10, 0.2])
    high_2 = np.log([x_T[-1] * 100, 20])
    best_2 = (low_2 + high_2) / 2
    reach_2 = (high_2 - low_2) / 2
    num_fine_points = 7
    for num_points in (31, *[num_fine_points] * 45):
        side = np.linspace(-1, 1, num_points)
        offsets_2G = np.stack(np.meshgrid(side, side)).reshape(2, -1)
        grid_G2 = np.clip(best_2 + reach_2 * offsets_2G.T, low_2, high_2)
        rise_GT = _rise(x_T, *grid_G2.T[..., None])
        centered_GT = rise_GT - rise_GT.mean(1, keepdims=True)
        # The small number avoids a division by 0 for a curve that does not rise within the data. Its slope becomes 0
        slope_G = centered_GT @ y_T / ((centered_GT**2).sum(1) + 1e-12)
        residuals_GT = y_T - y_T.mean() - slope_G[:, None] * centered_GT
        best = int((residuals_GT**2).sum(1).argmin())
        best_2 = grid_G2[best]
        reach_2 = reach_2 * (0.6 if num_points == num_fine_points else 0.2)
    start = y_T.mean() - slope_G[best] * rise_GT[best].mean()
    return Sigmoid(start, start + slope_G[best], *best_2)


def fits(curve_2T: np.ndarray, label: str) -> tuple[Sigmoid, list[Sigmoid]]:
    """Return the best fit to the data, and the fits to resampled data.

    Args:
        curve_2T: Shape (2, T), with rows compute and metric, and increasing compute.
        label: Name of the curve in error messages.

    Raises:
        ConfigurationError: The data do not determine the curve. The message says why.
    """
    refusal = f"no forecast of {label}: "
    count = min(MAX_POINTS, curve_2T.shape[1])
    refuse(count < MIN_POINTS, f"{refusal}{count} points are too few, {MIN_POINTS} are needed")
    blocks = np.array_split(curve_2T, count, axis=1)
    x_T, y_T = np.stack([block_2T.mean(1) for block_2T in blocks], axis=1)
    refuse(np.ptp(y_T) == 0, f"{refusal}it is {y_T[0]:g} throughout")
    best = fit(x_T, y_T)
    fitted_T = best.at(x_T)
    residuals_T = y_T - fitted_T
    line_residuals_T = y_T - np.polyval(np.polyfit(x_T, y_T, 1), x_T)
    # Both sums of squares get a lower limit. Without it, a perfect fit (sum 0) would count as infinitely better
    min_squares = 1e-12 * y_T.var() * count
    squares = max(residuals_T @ residuals_T, min_squares)
    line_squares = max((line_residuals_T**2).sum(), min_squares)
    variance_factor = _variance_factor(residuals_T, squares)
    # The sigmoid has two parameters more than the line
    bic_gain = count / variance_factor * np.log(line_squares / squares) - 2 * np.log(count)
    refuse(
        bic_gain < MIN_BIC_GAIN,
        f"{refusal}a sigmoid fits hardly better than a straight line (BIC gain {bic_gain:.1f}, needed: {MIN_BIC_GAIN})",
    )
    rise = fitted_T[-1] - fitted_T[0]
    refuse(rise <= 0, f"{refusal}it falls")
    scaled_residuals_T = residuals_T * np.sqrt(variance_factor * count / (count - NUM_SIGMOID_PARAMETERS))
    random = np.random.default_rng(0)
    resampled_fits = []
    for _ in range(NUM_RESAMPLES):
        noise_T = random.choice(scaled_residuals_T, count)
        resampled_fits.append(fit(x_T, fitted_T + noise_T))
    low, high = np.exp(interval([curve.log_middle for curve in resampled_fits]))
    refuse(
        high > x_T[-1],
        f"{refusal}half of the rise may lie beyond the end of the data, {x_T[-1]:g}: between {low:g} and {high:g}",
    )
    low, high = interval([curve.asymptote for curve in resampled_fits])
    refuse(
        high - low > rise,
        f"{refusal}its asymptote may lie between {low:g} and {high:g}, an interval wider than the rise so far, {rise:g}",
    )
    return best, resampled_fits


def _variance_factor(residuals_T: np.ndarray, squares: float) -> float:
    """Return the factor by which correlation between neighboring residuals increases the variance of a mean.

    A lag-one correlation r of the noise gives the factor (1 + r) / (1 - r). The correlation of the residuals is smaller
    than r by about 4 / T, because the fit has four parameters, so 4 / T is added to it.

    Args:
        residuals_T: The residuals.
        squares: Sum of the squared residuals, not 0.
    """
    num_points = len(residuals_T)
    correlation = (residuals_T[1:] * residuals_T[:-1]).sum() / squares
    correlation = np.clip(correlation + NUM_SIGMOID_PARAMETERS / num_points, 0, 0.99)
    return float((1 + correlation) / (1 - correlation))


def interval(values: Any) -> np.ndarray:
    """Return the two limits, shape (2, ...), between which 95 % of the values along the first axis lie."""
    return np.quantile(values, [0.025, 0.975], axis=0)
