"""What pictures of runs have in common; what is no finite number is a gap in the line, a step without the key is none."""

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
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#000000", "#f0e442")
COLOURS = dict(  # of the timeline: Okabe and Ito's; they are those of the page as well
    generate="#009e73", score="#e69f00", logprobs="#56b4e9", train="#0072b2",
    sync="#d55e00", save="#cc79a7", evaluate="#f0e442", wait="#c4c9d4",
)  # fmt: skip
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
</head><body>{}</body></html>
"""


@contextmanager
def picture(output: Path | None) -> Iterator["Figure"]:
    """Yield an empty figure; once filled, it is written in the format of the suffix, or shown in a window (None).

    ConfigurationError: of no such format, there is no display, or the file cannot be written.
    """
    suffix = output.suffix.lower() if output else ""
    unknown, known = output is not None and suffix not in PICTURE_SUFFIXES, ", ".join(PICTURE_SUFFIXES)
    refuse(unknown, f"cannot write {output}: the name must end in {known}")
    try:
        import matplotlib
        import matplotlib.pyplot as plt
        from matplotlib.backends.registry import BackendFilter, backend_registry
        from matplotlib.figure import Figure

        backend = plt.get_backend()
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"matplotlib cannot draw ({error}); unset MPLBACKEND") from error
    # A "$" in a key or a file name would be parsed as a formula, and fail if it is not one.
    with matplotlib.rc_context({"text.parse_math": False}):
        if output is None:
            windows = map(str.lower, backend_registry.list_builtin(BackendFilter.INTERACTIVE))
            nothing = backend.lower() not in windows
            refuse(nothing, f"matplotlib's backend {backend!r} has no display; pass -o FILE")
            yield plt.figure()
            plt.show()
            return
        figure, content = Figure(), io.BytesIO()  # without pyplot: no display is looked for
        yield figure
        figure.savefig(content, format="svg" if suffix == ".html" else suffix[1:], dpi=150)
    written = content.getvalue()
    if suffix == ".html":
        _, begin, svg = written.decode().partition("<svg")
        written = PAGE.format(html.escape(output.stem), begin + svg).encode()
    try:
        output.write_bytes(written)
    except OSError as error:
        raise ConfigurationError(f"cannot write {output}: {error.strerror}") from error


def subplots(figure: "Figure", titles: Sequence[str], x_label: str, caption: str = "") -> "list[Axes]":
    """Return a subplot for each title, in up to two columns, and size the figure to their number."""
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


def draw(
    figure: "Figure",
    runs: list[RunMetrics],
    variables: list[str],
    x_key: str,
    window: int | None,
    legend: bool,
) -> None:
    """Draw a subplot for each variable and one legend above all; beside a moving average the raw line is faded."""
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


def draw_lanes(figure: "Figure", spans: Sequence[dict[str, Any]]) -> None:
    """Draw a row for each lane of a timeline, a bar for each span, and a line at the end of each step."""
    lanes = sorted({span["lane"] for span in spans})
    zero = min(span["begin"] for span in spans)
    figure.set_size_inches(12.0, 1.6 + 0.4 * len(lanes))
    figure.set_layout_engine("constrained")
    ax = figure.subplots()
    for what, colour in COLOURS.items():
        if found := [span for span in spans if span["what"] == what]:
            rows = [lanes.index(span["lane"]) for span in found]
            seconds = [span["end"] - span["begin"] for span in found]
            ax.barh(rows, seconds, 0.8, [span["begin"] - zero for span in found], color=colour, label=what)
    in_order = sorted(spans, key=lambda span: span["end"])
    ends = {span["step"]: span["end"] - zero for span in in_order if span["lane"].startswith("trainer")}
    for step, end in ends.items():
        ax.axvline(end, color="0.35", linewidth=0.8)
        if step % math.ceil(len(ends) / 25) == 0:
            ax.annotate(str(step), (end, 1.0), xycoords=("data", "axes fraction"), ha="right", va="bottom")
    begun = f"{datetime.fromtimestamp(zero, UTC):%Y-%m-%d %H:%M:%S} UTC"
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set(ylim=(len(lanes) - 0.5, -0.5), xlabel=f"seconds since {begun}; above: the steps that end there")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.0)
    figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False)


def colours_for(count: int) -> list[Any]:
    """So many colours that the colour-blind, too, can tell apart: of Okabe and Ito, beyond their eight of viridis."""
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 1, count)))


def moving_average(values_T: np.ndarray, window: int) -> np.ndarray:
    """Return the centred moving average, shape (T,), over the steps t - window//2 to t + (window-1)//2 that exist.

    NaN stays NaN and counts in no average.

    >>> moving_average(np.array([0.0, 2.0, 7.0, np.nan, 4.0]), 3)
    array([1. , 3. , 4.5, nan, 4. ])
    """
    steps = range(len(values_T))
    width = min(window, len(steps))
    near = [values_T[max(0, t - width // 2) : t + (width - 1) // 2 + 1] for t in steps]
    return np.array([np.nanmean(near[t]) if np.isfinite(values_T[t]) else np.nan for t in steps])


def mean_and_band(runs: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Of curves (2, T_r): x, mean, lower and upper end, (4, T), at those x of the shortest one that all have reached.

    >>> mean_and_band([np.array([[0, 2, 4], [0, 2, 4]]), np.array([[1, 2], [3, 4]])], "a").tolist()
    [[1.0, 2.0], [2.0, 3.0], [1.0, 2.0], [3.0, 4.0]]
    """
    shortest = min(runs, key=lambda run: float(run[0, -1]))
    x_T = shortest[0][shortest[0] >= max(run[0, 0] for run in runs)]
    refuse(not x_T.size, f"the runs of {name} have no x in common")
    y_RT, freedom = np.stack([np.interp(x_T, *run) for run in runs]), len(runs) - 1
    mean_T, low_T, high_T = y_RT.mean(0), y_RT.min(0), y_RT.max(0)
    if freedom > 1:
        # Student's t at 97.5 % within 0.1 %: the expansion of Abramowitz and Stegun 26.7.5, its last term fitted
        t = 1.95996 + 2.37227 / freedom + 2.82250 / freedom**2 + 2.55585 / freedom**3 + 2.1 / freedom**4
        half_T = t * y_RT.std(0, ddof=1) / len(runs) ** 0.5
        low_T, high_T = mean_T - half_T, mean_T + half_T
    return np.stack([x_T, mean_T, low_T, high_T])
