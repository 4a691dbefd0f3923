"""Draws the metrics of runs: what is no finite number is a gap in the line, a step without the key is none."""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.errors import ConfigurationError
from async_grpo.metrics.reader import Run, load_runs
from async_grpo.options.fields import refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_VARIABLES = ("avg_reward", "avg_max_reward_in_group", "avg_output_tokens", "avg_kl_div")
PICTURE_SUFFIXES = (".svg", ".png", ".pdf")

log = logging.getLogger(__name__)


def plot_runs(
    files: list[Path],
    variables: list[str] | None,
    x_key: str,
    output: Path | None,
    names: list[str] | None = None,
    smooth_window: int | None = None,
    remote: str | None = None,
) -> None:
    """Draw `variables` (default: those of DEFAULT_VARIABLES that the files hold) over `x_key` for all files.

    `output`: a .svg, .png or .pdf file, None = an interactive window. `smooth_window`: steps of a moving average drawn
    over the faded raw line. Raises ConfigurationError for the user's mistakes, RunFailed if scp fails.
    """
    refuse(
        output is not None and output.suffix.lower() not in PICTURE_SUFFIXES,
        f"cannot write {output}: the name must end in {', '.join(PICTURE_SUFFIXES)}",
    )
    runs = load_runs(files, names, remote)
    if not variables:
        found = [key for key in DEFAULT_VARIABLES if any(key in run.plottable_keys for run in runs)]
        variables = found or list(DEFAULT_VARIABLES)
        if skipped := [key for key in DEFAULT_VARIABLES if key not in variables]:
            log.warning("skipped, not in any file: %s", ", ".join(skipped))
    variables = list(dict.fromkeys(variables))
    known = ", ".join(sorted({key for run in runs for key in run.plottable_keys})) or "none"
    for key in variables:
        without = [run.name for run in runs if not np.isfinite(run.series(x_key, key)).all(axis=0).any()]
        nowhere = len(without) == len(runs)
        refuse(nowhere, f"no step has numbers for both {key!r} and {x_key!r}; -v and -x may name: {known}")
        if without:
            log.warning("%s: nothing to draw in %s", key, ", ".join(without))
    legend = len(runs) > 1 or bool(names)
    try:
        import matplotlib.pyplot as plt
        from matplotlib.backends.registry import BackendFilter, backend_registry
        from matplotlib.figure import Figure

        backend = plt.get_backend()
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"matplotlib cannot draw ({error}); unset MPLBACKEND") from error
    if output is None:
        windows = backend_registry.list_builtin(BackendFilter.INTERACTIVE)
        nothing = backend.lower() not in map(str.lower, windows)
        refuse(nothing, f"matplotlib's backend {backend!r} has no display; pass -o FILE")
        draw(plt.figure(), runs, variables, x_key, smooth_window, legend)
        plt.show()
        return
    figure = Figure()  # without pyplot: the canvas follows the file's format, no display is looked for
    draw(figure, runs, variables, x_key, smooth_window, legend)
    try:
        figure.savefig(output, format=output.suffix.lower()[1:], dpi=150)
    except OSError as error:
        raise ConfigurationError(f"cannot write {output}: {error.strerror}") from error


def draw(
    figure: "Figure", runs: list[Run], variables: list[str], x_key: str, window: int | None, legend: bool
) -> None:
    """Fill an empty figure: up to two columns of subplots, sized to their number, one legend above all."""
    import matplotlib
    from matplotlib.lines import Line2D

    columns = min(2, len(variables))
    rows = math.ceil(len(variables) / columns)
    figure.set_size_inches((8.0, 4.8) if columns == 1 else (12.0, 3.6 * rows + 0.6))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    colours = matplotlib.colormaps["turbo"](np.linspace(0, 1, len(runs)))
    if len(runs) <= 10:
        colours = matplotlib.colormaps["tab10"](np.arange(len(runs)))
    # A "$" in a key or a file name would be parsed as a formula, and fail if it is not one.
    with matplotlib.rc_context({"text.parse_math": False}):
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for ax, key in zip(axes, variables, strict=False):
            for run, colour in zip(runs, colours, strict=True):
                x_T, y_T = series = run.series(x_key, key)
                # A number between two gaps has no line segment: without a marker it would be invisible.
                drawn = np.pad(np.isfinite(series).all(axis=0), 1)
                lone = np.flatnonzero(drawn[1:-1] & ~drawn[:-2] & ~drawn[2:]).tolist()
                style: dict[str, Any] = dict(color=colour, marker="o", markersize=4, markevery=lone)
                faded = {"linewidth": 1.0, "alpha": 0.3} if window else {"linewidth": 1.6}
                ax.plot(x_T, y_T, **style, **faded)
                if window:
                    ax.plot(x_T, moving_average(y_T, window), linewidth=2.0, **style)
            ax.set(title=key, xlabel=x_key, axisbelow=True)
            ax.grid(True, color="0.88", linewidth=0.8)
            ax.spines[["top", "right"]].set_visible(False)
            ax.margins(x=0.02)
        for unused in axes[len(variables) :]:
            unused.remove()
        if legend:
            handles = [Line2D([], [], color=colour, linewidth=2) for colour in colours]
            names = [run.name for run in runs]
            figure.legend(handles, names, loc="outside upper center", ncols=min(4, len(runs)), frameon=False)


def moving_average(values_T: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average, shape (T,), of the steps t - window//2 to t + (window-1)//2, as far as they exist.
    NaN stays NaN and counts in no average.

    >>> moving_average(np.array([0.0, 2.0, 7.0, np.nan, 4.0]), 3)
    array([1. , 3. , 4.5, nan, 4. ])
    """
    steps = range(len(values_T))
    width = min(window, len(steps))
    near = [values_T[max(0, t - width // 2) : t + (width - 1) // 2 + 1] for t in steps]
    return np.array([np.nanmean(near[t]) if np.isfinite(values_T[t]) else np.nan for t in steps])
