"""Draw metrics and timelines with matplotlib.

A value that is not a finite number leaves a gap in a line. A step that lacks the key is skipped, without a gap.
"""

import html
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.errors import ConfigurationError
from async_grpo.observe.reader import RunMetrics
from async_grpo.options.fields import refuse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_SUFFIXES = (".svg", ".png", ".pdf", ".html")
MAX_STEP_LABELS = 25  # approximate maximum of step numbers that are written along a timeline
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#000000", "#f0e442")
# Color of each activity in a timeline, from the palette of Okabe and Ito. The page of `watch` has the same colors
COLOURS = dict(
    generate="#009e73", score="#e69f00", logprobs="#56b4e9", train="#0072b2",
    sync="#d55e00", save="#cc79a7", evaluate="#f0e442", wait="#c4c9d4",
)  # fmt: skip
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
</head><body>{}</body></html>
"""


@contextmanager
def picture(output: Path | None) -> Iterator["Figure"]:
    """Yield an empty figure for the caller to fill, then write it to a file or show it in a window.

    Args:
        output: File to write. Its suffix determines the format. None shows the figure in a window.

    Raises:
        ConfigurationError: The suffix is unknown, there is no display, or the file cannot be written.
    """
    suffix = output.suffix.lower() if output else ""
    if output is not None and suffix not in PICTURE_SUFFIXES:
        raise ConfigurationError(f"cannot write {output}: the name must end in {', '.join(PICTURE_SUFFIXES)}")
    try:
        import matplotlib
        import matplotlib.pyplot as plt
        from matplotlib.backends.registry import BackendFilter, backend_registry
        from matplotlib.figure import Figure

        backend = plt.get_backend()
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"matplotlib cannot draw ({error}); unset MPLBACKEND") from error
    # Do not parse formulas: matplotlib would take the text after a "$" in a key or file name for a formula, and fail if
    # it is invalid
    with matplotlib.rc_context({"text.parse_math": False}):
        if output is None:
            window_backends = map(str.lower, backend_registry.list_builtin(BackendFilter.INTERACTIVE))
            has_display = backend.lower() in window_backends
            refuse(not has_display, f"matplotlib's backend {backend!r} has no display; pass -o FILE")
            yield plt.figure()
            plt.show()
            return
        # Unlike `plt.figure`, `Figure` needs no display
        figure = Figure()
        yield figure
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg" if suffix == ".html" else suffix[1:], dpi=150)
    content = buffer.getvalue()
    if suffix == ".html":
        _, begin, svg = content.decode().partition("<svg")
        content = PAGE.format(html.escape(output.stem), begin + svg).encode()
    try:
        output.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"cannot write {output}: {error.strerror}") from error


def subplots(figure: "Figure", titles: Sequence[str], x_label: str, caption: str = "") -> "list[Axes]":
    """Add a subplot for each title, in up to two columns, and return the subplots.

    The size of the figure is set according to the number of subplots.
    """
    columns = min(2, len(titles))
    rows = math.ceil(len(titles) / columns)
    figure.set_size_inches((8.0, 4.8) if columns == 1 else (12.0, 3.6 * rows + 0.6))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused_ax in axes[len(titles) :]:
        unused_ax.remove()
    for ax, title in zip(axes, titles, strict=False):
        ax.set(title=title, xlabel=x_label, axisbelow=True)
        ax.grid(True, color="0.88", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.02)
    if caption:
        figure.supxlabel(caption, fontsize="small", color="0.35")
    return axes[: len(titles)]


def draw(
    figure: "Figure",
    runs: list[RunMetrics],
    variables: list[str],
    x_key: str,
    window: int | None,
    legend: bool,
) -> None:
    """Draw a subplot for each variable, with a line for each run.

    Args:
        figure: An empty figure.
        runs: The runs.
        variables: Keys of the metrics, one for each subplot.
        x_key: Key of the x axis.
        window: Number of steps of a moving average, which is drawn over the faded raw line. None draws no average.
        legend: Draw a legend with the names of the runs above all subplots.
    """
    from matplotlib.lines import Line2D

    colours = colours_for(len(runs))
    for ax, key in zip(subplots(figure, variables, x_key), variables, strict=True):
        for run, colour in zip(runs, colours, strict=True):
            series_2T = run.series(x_key, key)
            x_T, y_T = series_2T
            style: dict[str, Any] = {
                "color": colour,
                "marker": "o",
                "markersize": 4,
                "markevery": _isolated_points(series_2T),
            }
            if window:
                ax.plot(x_T, y_T, linewidth=1.0, alpha=0.3, **style)
                ax.plot(x_T, moving_average(y_T, window), linewidth=2.0, **style)
            else:
                ax.plot(x_T, y_T, linewidth=1.6, **style)
    if legend:
        handles = [Line2D([], [], color=colour, linewidth=2) for colour in colours]
        names = [run.name for run in runs]
        figure.legend(handles, names, loc="outside upper center", ncols=min(4, len(runs)), frameon=False)


def _isolated_points(series_2T: np.ndarray) -> list[int]:
    """Return the indices of points with a gap on both sides. No line reaches these points, so they need a marker."""
    is_drawn = np.pad(np.isfinite(series_2T).all(axis=0), 1)
    is_isolated = is_drawn[1:-1] & ~is_drawn[:-2] & ~is_drawn[2:]
    return np.flatnonzero(is_isolated).tolist()


def draw_lanes(figure: "Figure", spans: Sequence[dict[str, Any]]) -> None:
    """Draw a row for each lane of a timeline, a bar for each span, and a vertical line at the end of each step.

    Args:
        figure: An empty figure.
        spans: Lines of the timeline file, at least one.
    """
    lanes = sorted({span["lane"] for span in spans})
    start_time = min(span["begin"] for span in spans)
    figure.set_size_inches(12.0, 1.6 + 0.4 * len(lanes))
    figure.set_layout_engine("constrained")
    ax = figure.subplots()
    for activity, colour in COLOURS.items():
        activity_spans = [span for span in spans if span["what"] == activity]
        if not activity_spans:
            continue
        ax.barh(
            y=[lanes.index(span["lane"]) for span in activity_spans],
            width=[span["end"] - span["begin"] for span in activity_spans],
            height=0.8,
            left=[span["begin"] - start_time for span in activity_spans],
            color=colour,
            label=activity,
        )
    step_ends: dict[int, float] = {}  # for each step, the end of the trainer's last span
    for span in sorted(spans, key=lambda span: span["end"]):
        if span["lane"].startswith("trainer"):
            step_ends[span["step"]] = span["end"] - start_time
    for step, end in step_ends.items():
        ax.axvline(end, color="0.35", linewidth=0.8)
        if step % math.ceil(len(step_ends) / MAX_STEP_LABELS) == 0:
            ax.annotate(str(step), (end, 1.0), xycoords=("data", "axes fraction"), ha="right", va="bottom")
    start_text = f"{datetime.fromtimestamp(start_time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set(
        ylim=(len(lanes) - 0.5, -0.5), xlabel=f"seconds since {start_text}; above: the steps that end there"
    )
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.0)
    figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False)


def colours_for(count: int) -> list[Any]:
    """Return `count` colors that color-blind readers can distinguish.

    Up to eight colors come from the palette of Okabe and Ito. If more are needed, all come from matplotlib's viridis.
    """
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 1, count)))


def moving_average(values_T: np.ndarray, window: int) -> np.ndarray:
    """Return the centered moving average, shape (T,). Step t averages steps t - window//2 to t + (window-1)//2.

    At both ends, the average covers only the steps that exist. A NaN stays NaN, and is left out of the averages.

    >>> moving_average(np.array([0.0, 2.0, 7.0, np.nan, 4.0]), 3)
    array([1. , 3. , 4.5, nan, 4. ])
    """
    width = min(window, len(values_T))
    averages_T = np.full(len(values_T), np.nan)
    for t in np.flatnonzero(np.isfinite(values_T)):
        averages_T[t] = np.nanmean(values_T[max(0, t - width // 2) : t + (width - 1) // 2 + 1])
    return averages_T


def mean_and_band(runs: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Return the mean of several curves, and a band around it.

    For one or two curves, the band reaches from the lowest to the highest curve. For more, it is the 95 % interval of
    their mean, by Student's t distribution.

    Args:
        runs: Curves, each of shape (2, T_r), with rows x and y and increasing x.
        name: Name of the curves in the error message.

    Returns:
        Shape (4, T), with rows x, mean, and lower and upper end of the band. The x values are those of the shortest
        curve that lie in the range of all curves.

    Raises:
        ConfigurationError: The curves have no x in common.

    >>> mean_and_band([np.array([[0, 2, 4], [0, 2, 4]]), np.array([[1, 2], [3, 4]])], "a").tolist()
    [[1.0, 2.0], [2.0, 3.0], [1.0, 2.0], [3.0, 4.0]]
    """
    shortest = min(runs, key=lambda run: float(run[0, -1]))
    x_T = shortest[0][shortest[0] >= max(run[0, 0] for run in runs)]
    refuse(not x_T.size, f"the runs of {name} have no x in common")
    y_RT = np.stack([np.interp(x_T, *run) for run in runs])
    mean_T = y_RT.mean(0)
    n = len(runs) - 1  # degrees of freedom
    if n < 2:
        return np.stack([x_T, mean_T, y_RT.min(0), y_RT.max(0)])
    # Quantile of Student's t distribution at 97.5 %: the expansion 26.7.5 of Abramowitz and Stegun, with a fitted last
    # term. The error is below 0.1 %
    t = 1.95996 + 2.37227 / n + 2.82250 / n**2 + 2.55585 / n**3 + 2.1 / n**4
    half_width_T = t * y_RT.std(0, ddof=1) / len(runs) ** 0.5
    return np.stack([x_T, mean_T, mean_T - half_width_T, mean_T + half_width_T])
