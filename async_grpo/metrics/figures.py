"""Draws the metrics of runs: what is no finite number is a gap in the line, a step without the key is none."""

import html
import io
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.errors import ConfigurationError
from async_grpo.metrics.reader import Run, load_runs, read_run
from async_grpo.options.fields import refuse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_VARIABLES = ("avg_reward", "avg_max_reward_in_group", "avg_output_tokens", "avg_kl_div")
PICTURE_SUFFIXES = (".svg", ".png", ".pdf", ".html")
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#000000", "#f0e442")
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
</head><body>{}</body></html>
"""

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

    `output`: see `picture`. `smooth_window`: steps of a moving average drawn over the faded raw line. Raises
    ConfigurationError for the user's mistakes, RunFailed if scp fails.
    """
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
    picture(output, lambda figure: draw(figure, runs, variables, x_key, smooth_window, legend))


def picture(output: Path | None, fill: Callable[["Figure"], None]) -> None:
    """`fill` an empty figure, and write it in the format that the suffix of `output` names; None: show it in a window.

    ConfigurationError: of no such format, there is no display, or the file cannot be written.
    """
    refuse(
        output is not None and output.suffix.lower() not in PICTURE_SUFFIXES,
        f"cannot write {output}: the name must end in {', '.join(PICTURE_SUFFIXES)}",
    )
    try:
        import matplotlib
        import matplotlib.pyplot as plt
        from matplotlib.backends.registry import BackendFilter, backend_registry
        from matplotlib.figure import Figure

        backend = plt.get_backend()
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"matplotlib cannot draw ({error}); unset MPLBACKEND") from error
    content = io.BytesIO()
    # A "$" in a key or a file name would be parsed as a formula, and fail if it is not one.
    with matplotlib.rc_context({"text.parse_math": False}):
        if output is None:
            windows = backend_registry.list_builtin(BackendFilter.INTERACTIVE)
            nothing = backend.lower() not in map(str.lower, windows)
            refuse(nothing, f"matplotlib's backend {backend!r} has no display; pass -o FILE")
            fill(plt.figure())
            plt.show()
            return
        figure = Figure()  # without pyplot: the canvas follows the file's format, no display is looked for
        fill(figure)
        suffix = output.suffix.lower()
        figure.savefig(content, format="svg" if suffix == ".html" else suffix[1:], dpi=150)
    written = content.getvalue()
    if suffix == ".html":
        _, begin, svg = written.decode().partition("<svg")
        written = PAGE.format(html.escape(output.stem), begin + svg).encode()
    try:
        output.write_bytes(written)
    except OSError as error:
        raise ConfigurationError(f"cannot write {output}: {error.strerror}") from error


def draw(
    figure: "Figure", runs: list[Run], variables: list[str], x_key: str, window: int | None, legend: bool
) -> None:
    """Fill an empty figure with a subplot for each variable, and one legend above all."""
    from matplotlib.lines import Line2D

    colours = colours_for(len(runs))
    for ax, key in zip(subplots(figure, variables, x_key), variables, strict=True):
        for run, colour in zip(runs, colours, strict=True):
            x_T, y_T = series = run.series(x_key, key)
            # A number between two gaps has no line segment: without a marker it would be invisible.
            drawn = np.pad(np.isfinite(series).all(axis=0), 1)
            lone = np.flatnonzero(drawn[1:-1] & ~drawn[:-2] & ~drawn[2:]).tolist()
            style: dict[str, Any] = dict(color=colour, marker="o", markersize=4, markevery=lone)
            faded: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.3} if window else {"linewidth": 1.6}
            ax.plot(x_T, y_T, **style, **faded)
            if window:
                ax.plot(x_T, moving_average(y_T, window), linewidth=2.0, **style)
    if legend:
        handles = [Line2D([], [], color=colour, linewidth=2) for colour in colours]
        names = [run.name for run in runs]
        figure.legend(handles, names, loc="outside upper center", ncols=min(4, len(runs)), frameon=False)


def draw_staleness(path: Path, output: Path | None) -> None:
    """Draw how old the trained tokens were: over the steps, and, if the run counted them, the share of each age.

    ConfigurationError: the run does not say it.
    """
    run = read_run(path)
    step_T, mean_T, most_T = map(run.column, ("step", "staleness_mean", "staleness_max"))
    refuse(not np.isfinite(mean_T).any(), f"{run.source} does not say how old its tokens were")
    ages = [key for key in run.keys if key.startswith("staleness_tokens.")]
    tokens = np.array([np.nansum(run.column(key)) for key in ages])
    bound = run.options.get("max_staleness")
    words = f"mean of the steps {np.nanmean(mean_T):.3g}, largest {np.nanmax(most_T):g}"

    def fill(figure: "Figure") -> None:
        over_steps, *shares = subplots(
            figure, ["staleness", "share of tokens"][: 1 + bool(ages)], "step", words
        )
        over_steps.plot(step_T, mean_T, color=OKABE_ITO[0], label="mean over tokens")
        over_steps.plot(step_T, most_T, color=OKABE_ITO[3], label="largest")
        if bound is not None:
            over_steps.axhline(bound, color=OKABE_ITO[1], linestyle="--", label=f"bound: {bound}")
        over_steps.legend(frameon=False)
        for ax in shares:
            ax.bar([int(key.partition(".")[2]) for key in ages], tokens / tokens.sum(), color=OKABE_ITO[0])
            ax.set_xlabel("steps between the policy that wrote a token and the trained one")

    picture(output, fill)


def colours_for(count: int) -> list[Any]:
    """So many colours that the colour-blind, too, can tell apart: of Okabe and Ito, beyond their eight of viridis."""
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 1, count)))


def subplots(figure: "Figure", titles: Sequence[str], x_label: str, caption: str = "") -> "list[Axes]":
    """A subplot for each title, in up to two columns; the figure is sized to their number."""
    columns = min(2, len(titles))
    rows = math.ceil(len(titles) / columns)
    figure.set_size_inches((8.0, 4.8) if columns == 1 else (12.0, 3.6 * rows + 0.6))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[len(titles) :]:
        unused.remove()
    for ax, title in zip(axes, titles, strict=False):
        ax.set(title=title, xlabel=x_label, axisbelow=True)
        ax.grid(True, color="0.88", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.02)
    if caption:
        figure.supxlabel(caption, fontsize="small", color="0.35")
    return axes[: len(titles)]


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
