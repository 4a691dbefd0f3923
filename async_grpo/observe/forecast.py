"""Where a run is heading: a sigmoid of the compute.

Khatri et al. (2025), "The Art of Scaling Reinforcement Learning Compute":

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

by least squares. Intervals are of the curve, not of single steps: 95 %, by a bootstrap of the residuals.
"""

from typing import Any, NamedTuple

import numpy as np

from async_grpo.options.fields import refuse

FEWEST, MOST = 12, 100  # points of a fit: of more, means of so many blocks
RESAMPLES = 200
VERY_STRONG = 10  # evidence, as a difference in BIC (Kass and Raftery 1995)


class Sigmoid(NamedTuple):
    start: float  # R0
    asymptote: float  # A
    log_middle: float  # of C_mid, where half of the rise is done
    log_exponent: float  # of B

    def at(self, x_T: np.ndarray) -> np.ndarray:
        """Return the curve (T,) at these steps."""
        return self.start + (self.asymptote - self.start) * _rise(x_T, self.log_middle, self.log_exponent)


def _rise(x_T: np.ndarray, log_middle: Any, log_exponent: Any) -> np.ndarray:
    """From 0 to 1, (T,), or (G, T) of (G, 1)."""
    with np.errstate(over="ignore"):  # at 0 nothing has risen
        return 1 / (1 + np.exp(np.exp(log_exponent) * (log_middle - np.log(np.maximum(x_T, 1e-300)))))


def fit(x_T: np.ndarray, y_T: np.ndarray) -> Sigmoid:
    """Fit the curve by least squares; `x_T` rises and is not negative.

    With C_mid and B given, R is a straight line in the rise: R0 and A follow. Those two are looked for on a grid of all
    that they may be, and then on smaller and smaller ones around the best so far.
    """
    low_2, high_2 = np.log([x_T[x_T > 0][0] / 10, 0.2]), np.log([x_T[-1] * 100, 20])
    best_2, reach_2 = (low_2 + high_2) / 2, (high_2 - low_2) / 2
    for points in (31, *[7] * 45):
        around_2G = np.stack(np.meshgrid(*[np.linspace(-1, 1, points)] * 2)).reshape(2, -1)
        grid_G2 = np.clip(best_2 + reach_2 * around_2G.T, low_2, high_2)
        rise_GT = _rise(x_T, *grid_G2.T[..., None])
        along_GT = rise_GT - rise_GT.mean(1, keepdims=True)
        # a curve that does not rise within the data explains nothing
        slope_G = along_GT @ y_T / ((along_GT**2).sum(1) + 1e-12)
        left_GT = y_T - y_T.mean() - slope_G[:, None] * along_GT
        best = int((left_GT**2).sum(1).argmin())
        best_2, reach_2 = grid_G2[best], reach_2 * (0.6 if points == 7 else 0.2)
    start = y_T.mean() - slope_G[best] * rise_GT[best].mean()
    return Sigmoid(start, start + slope_G[best], *best_2)


def fits(seen_2T: np.ndarray, what: str) -> tuple[Sigmoid, list[Sigmoid]]:
    """Return the best fit and those of resampled data. ConfigurationError: the data do not bear a forecast."""
    no, count = f"no forecast of {what}: ", min(MOST, seen_2T.shape[1])
    refuse(count < FEWEST, f"{no}{count} points are too few, {FEWEST} are needed")
    x_T, y_T = np.stack([of.mean(1) for of in np.array_split(seen_2T, count, axis=1)], axis=1)
    refuse(np.ptp(y_T) == 0, f"{no}it is {y_T[0]:g} throughout")
    best = fit(x_T, y_T)
    fitted_T, line_T = best.at(x_T), np.polyval(np.polyfit(x_T, y_T, 1), x_T)
    left_T = y_T - fitted_T
    squares, straight = np.maximum([left_T @ left_T, ((y_T - line_T) ** 2).sum()], 1e-12 * y_T.var() * count)
    # Points that err alike tell less: noise of lag-one correlation r counts as (1 + r) / (1 - r) times its variance.
    # What is left of a fit of four parameters is less alike by some 4 / count than the noise.
    alike = np.clip((left_T[1:] * left_T[:-1]).sum() / squares + 4 / count, 0, 0.99)
    excess = (1 + alike) / (1 - alike)
    # The curve has two parameters more
    gain = count / excess * np.log(straight / squares) - 2 * np.log(count)
    weak = f"a sigmoid fits hardly better than a straight line (BIC better by {gain:.1f}, not {VERY_STRONG})"
    refuse(gain < VERY_STRONG, no + weak)
    refuse((rise := fitted_T[-1] - fitted_T[0]) <= 0, f"{no}it falls")
    left_T *= np.sqrt(excess * count / (count - 4))
    random = np.random.default_rng(0)
    resampled = [fit(x_T, fitted_T + random.choice(left_T, count)) for _ in range(RESAMPLES)]
    low, high = np.exp(interval([one.log_middle for one in resampled]))
    early = f"half of the rise may lie beyond the end of the data, {x_T[-1]:g}: between {low:g} and {high:g}"
    refuse(high > x_T[-1], no + early)
    low, high = interval([one.asymptote for one in resampled])
    wide = f"its asymptote may lie between {low:g} and {high:g}, an interval wider than the rise so far, {rise:g}"
    refuse(high - low > rise, no + wide)
    return best, resampled


def interval(values: Any) -> np.ndarray:
    """Return the ends, shape (2, ...), between which 95 % of the values along the first axis lie."""
    return np.quantile(values, [0.025, 0.975], axis=0)
