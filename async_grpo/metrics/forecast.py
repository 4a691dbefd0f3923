"""Where a run is heading: the sigmoid of Khatri et al. (2025), "The Art of Scaling Reinforcement Learning Compute",

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

by least squares. Intervals are of the curve, not of single steps: 95 %, by a bootstrap of the residuals.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from async_grpo.metrics.compare import curve
from async_grpo.metrics.figures import OKABE_ITO, picture, subplots
from async_grpo.metrics.reader import read_run
from async_grpo.options.fields import refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST, MOST = 12, 100  # points of a fit: of more, means of so many blocks
RESAMPLES, TIMES = 200, (1, 2, 4)  # how far a forecast looks, in multiples of what was seen
VERY_STRONG = 10  # evidence, as a difference in BIC (Kass and Raftery 1995)


class Sigmoid(NamedTuple):
    start: float  # R0
    asymptote: float  # A
    log_middle: float  # of C_mid, where half of the rise is done
    log_exponent: float  # of B

    def at(self, x_T: np.ndarray) -> np.ndarray:
        """(T,)"""
        rise_T = _rise(x_T, self.log_middle, self.log_exponent)
        return self.start + (self.asymptote - self.start) * rise_T


def _rise(x_T: np.ndarray, log_middle: Any, log_exponent: Any) -> np.ndarray:
    """From 0 to 1, (T,), or (G, T) of (G, 1)."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(np.exp(log_exponent) * (log_middle - _log(x_T))))


def _log(x_T: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(x_T, 1e-300))  # at 0 nothing has risen


def fit(x_T: np.ndarray, y_T: np.ndarray) -> Sigmoid:
    """The least squares; `x_T` rises and is not negative.

    With C_mid and B given, R is a straight line in the rise: R0 and A follow, so a grid of those two is tried first. From
    its best the method of Levenberg and Marquardt goes on.
    """
    low_2, high_2 = np.log([x_T[x_T > 0][0] / 10, 0.2]), np.log([x_T[-1] * 100, 20])
    grid_2G = np.stack(np.meshgrid(*np.linspace(low_2, high_2, 31).T)).reshape(2, -1)
    rise_GT = _rise(x_T, *grid_2G[..., None])
    along_GT = rise_GT - rise_GT.mean(1, keepdims=True)
    power_G = (along_GT**2).sum(1) + 1e-12  # a curve that does not rise within the data explains nothing
    slope_G = along_GT @ y_T / power_G
    best = int((slope_G**2 * power_G).argmax())
    start = y_T.mean() - slope_G[best] * rise_GT[best].mean()
    found_4, damping = np.array([start, start + slope_G[best], *grid_2G[:, best]]), 1e-3
    for _ in range(30):
        one = Sigmoid(*found_4)
        left_T, rise_T = y_T - one.at(x_T), _rise(x_T, *found_4[2:])
        bend_T = (one.start - one.asymptote) * np.exp(one.log_exponent) * rise_T * (1 - rise_T)
        slopes_4T = np.stack([1 - rise_T, rise_T, bend_T, bend_T * (one.log_middle - _log(x_T))])
        square_44 = slopes_4T @ slopes_4T.T
        damped_44 = square_44 + np.diag(damping * square_44.diagonal() + 1e-12)
        tried_4 = found_4 + np.linalg.solve(damped_44, slopes_4T @ left_T)
        tried_4[2:] = np.clip(tried_4[2:], low_2, high_2)
        better = ((y_T - Sigmoid(*tried_4).at(x_T)) ** 2).sum() < (left_T**2).sum()
        found_4, damping = (tried_4, damping / 4) if better else (found_4, damping * 4)
    return Sigmoid(*found_4)


def forecast(x_T: np.ndarray, y_T: np.ndarray, what: str) -> tuple[Sigmoid, list[Sigmoid]]:
    """The best fit, and those of resampled data. ConfigurationError: the data do not bear a forecast of `what`."""
    no, count = f"no forecast of {what}: ", len(x_T)
    refuse(count < FEWEST, f"{no}{count} points are too few, {FEWEST} are needed")
    refuse(np.ptp(y_T) == 0, f"{no}it is {y_T[0]:g} throughout")
    best = fit(x_T, y_T)
    fitted_T, line_T = best.at(x_T), np.polyval(np.polyfit(x_T, y_T, 1), x_T)
    squares, straight = (
        max(((y_T - of_T) ** 2).sum(), 1e-12 * y_T.var() * count) for of_T in (fitted_T, line_T)
    )
    left_T = y_T - fitted_T
    # Points that err alike tell less: noise of lag-one correlation r counts as (1 + r) / (1 - r) times its variance.
    # What is left of a fit of four parameters is less alike by some 4 / count than the noise.
    alike = np.clip((left_T[1:] * left_T[:-1]).sum() / squares + 4 / count, 0, 0.99)
    excess = (1 + alike) / (1 - alike)
    gain = count / excess * np.log(straight / squares) - 2 * np.log(
        count
    )  # the curve has two parameters more
    weak = f"a sigmoid fits hardly better than a straight line (BIC better by {gain:.1f}, not {VERY_STRONG})"
    refuse(gain < VERY_STRONG, no + weak)
    rise = fitted_T[-1] - fitted_T[0]
    refuse(rise <= 0, f"{no}it falls")
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
    """The ends, shape (2, ...), between which 95 % of the values along the first axis lie."""
    return np.quantile(values, [0.025, 0.975], axis=0)


def forecast_run(
    path: Path, unit: str, key: str, output: Path | None, begin: float = 0, gpus: int | None = None
) -> list[str]:
    """The forecast of a run in words; with `output` also drawn. `begin`: what lies before it is left out."""
    seen_2T = curve(read_run(path), unit, key, gpus)
    seen_2T = seen_2T[:, seen_2T[0] >= begin]
    x_T, y_T = seen_2T
    if len(x_T) > MOST:
        x_T, y_T = np.stack([of.mean(1) for of in np.array_split(seen_2T, MOST, axis=1)], axis=1)
    best, resampled = forecast(x_T, y_T, f"{key} over {unit}")
    ahead_T = seen_2T[0, -1] * np.array(TIMES)
    names = ["R0", "A", "C_mid", "B", *(f"after {far:.6g} {unit}" for far in ahead_T)]
    values = np.array([[*one[:2], *np.exp(one[2:]), *one.at(ahead_T)] for one in (best, *resampled)])
    found = zip(names, values[0], *interval(values[1:]), strict=True)
    words = [f"{name} = {value:.4g} ({low:.4g} to {high:.4g})" for name, value, low, high in found]

    def fill(figure: "Figure") -> None:
        formula = "R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B); band and brackets: 95 % intervals"
        (ax,) = subplots(figure, [key], unit, f"{formula}\n{'; '.join(words[:4])}")
        far_T = np.linspace(x_T[0], ahead_T[-1], 300)
        low_T, high_T = interval([one.at(far_T) for one in resampled])
        ax.plot(*seen_2T, color="0.6", linewidth=0.8, label="measured")
        ax.plot(far_T, best.at(far_T), color=OKABE_ITO[0], linewidth=2, label="forecast")
        ax.fill_between(far_T, low_T, high_T, color=OKABE_ITO[0], alpha=0.2, linewidth=0)
        ax.axhline(best.asymptote, color=OKABE_ITO[1], linestyle="--", label="A, its asymptote")
        ax.axvline(ahead_T[0], color="0.4", linestyle=":", label="end of the data")
        ax.legend(frameon=False, loc="lower right")

    if output is not None:
        picture(output, fill)
    return words
