"""`async-grpo plot FILE...`, `plot compare|forecast|staleness|timeline|info RUN`: draw or tabulate the metrics of runs.

Variables whose names end in `_T` are arrays of shape (T,), and in `_2T` arrays of shape (2, T), with rows x and y.
"""

import logging
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from async_grpo.errors import ConfigurationError
from async_grpo.metrics.lines import duration
from async_grpo.metrics.writer import TIMELINE_FILE
from async_grpo.observe import figures
from async_grpo.observe.figures import OKABE_ITO, PICTURE_SUFFIXES, subplots
from async_grpo.observe.forecast import Sigmoid, fits, interval
from async_grpo.observe.reader import DEFAULT_X_KEY, UNITS, RunMetrics, curve, load_runs, read_run
from async_grpo.observe.run_view import RunView
from async_grpo.options.command_line import run_app
from async_grpo.options.fields import refuse

# Keys that are drawn by default, in addition to those of evaluations. REWARD is drawn even if it never changes
REWARD = "avg_reward"
DEFAULT_VARIABLES = (
    REWARD,
    "avg_output_tokens",
    "perc_truncated_samples",
    "mismatch_kl",
    "staleness_mean",
    "avg_kl_div",
)
BANDS = "bands: from the lower to the higher of two runs, or the 95 % t interval of the mean of more runs"
PARAMETERS = ("R0", "A", "C_mid", "B")
SIGMOID = "R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B); band and brackets: 95 % intervals"
# x values to forecast, as multiples of the last x of the run
HORIZONS = (1, 2, 4)
LAST_STEPS = 10  # by default, a timeline shows this number of last steps
LAST_LINES = 5000  # number of lines at the end of the timeline file that are searched for the last steps
MIN_TABLE_WIDTH = 60  # columns of text
TABLE_WIDTH_PER_RUN = 40

log = logging.getLogger(__name__)


class PlotCommands(TyperGroup):
    """The commands of `async-grpo plot`. If the first argument is no command, the arguments are files to plot."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Insert the command `plot` if the first argument is no command."""
        logging.basicConfig(format="note: %(message)s")
        is_named = bool(args) and args[0] in ("--help", *self.commands)
        # While a shell completes the first argument, `plot` is not inserted: the argument may become the name of a command
        is_name_open = not args and ctx.resilient_parsing
        return super().parse_args(ctx, args if is_named or is_name_open else ["plot", *args])


app = typer.Typer(
    cls=PlotCommands,
    help="Draw or tabulate training metrics (JSONL, one object per step). Without a command: plot.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help=f"Picture ({', '.join(PICTURE_SUFFIXES)}). Default: a window."),
]
Unit = Annotated[str, typer.Option("-x", "--x", help=f"Quantity on the x axis: {', '.join(UNITS)}.")]
Gpus = Annotated[
    int | None, typer.Option(min=1, help="Number of GPUs of each run. Default: the recorded number.")
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or metrics files.")]
OneRun = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or its metrics file.")]


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Metrics files, one per run.")],
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "-v",
            "--variable",
            help=f"Metric to draw. Default: eval_avg@N or eval_avg_reward, {', '.join(DEFAULT_VARIABLES)} that change.",
        ),
    ] = None,
    x_key: Annotated[str, typer.Option("-x", "--x_key", help="Key of the x axis.")] = DEFAULT_X_KEY,
    smooth: Annotated[bool, typer.Option("-s", "--smooth", help="Add a centred moving average.")] = False,
    smooth_window: Annotated[int, typer.Option(min=1, help="Steps averaged by --smooth.")] = 10,
    names: Annotated[
        list[str] | None, typer.Option("-n", "--name", help="Name of each run, in the order of the files.")
    ] = None,
    output: Output = None,
    remote: Annotated[
        str | None,
        typer.Option("-r", "--remote", help="Host, or user@host, from which scp fetches the files."),
    ] = None,
) -> None:
    """Draw one or several runs, one subplot per key. `plot info FILE` lists the keys of a run."""
    runs = load_runs(files, names, remote)
    plottable_keys = {key for run in runs for key in run.plottable_keys}
    if not variables:
        variables = _default_variables(runs)
    variables = list(dict.fromkeys(variables))
    for key in variables:
        runs_without_key = [run.name for run in runs if not _has_points(run, x_key, key)]
        if len(runs_without_key) == len(runs):
            key_list = ", ".join(sorted(plottable_keys)) or "none"
            raise ConfigurationError(
                f"no step has numbers for both {key!r} and {x_key!r}; -v and -x may name: {key_list}"
            )
        if runs_without_key:
            log.warning("%s: nothing to draw in %s", key, ", ".join(runs_without_key))
    with figures.picture(output) as figure:
        has_legend = len(runs) > 1 or bool(names)
        figures.draw(figure, runs, variables, x_key, smooth_window if smooth else None, has_legend)


def _has_points(run: RunMetrics, x_key: str, key: str) -> bool:
    return bool(np.isfinite(run.series(x_key, key)).all(axis=0).any())


def _default_variables(runs: Sequence[RunMetrics]) -> list[str]:
    """Return the keys to draw by default. Log a note about keys that are missing or never change."""
    evaluations = set()
    for run in runs:
        evaluation_keys = [key for key in run.plottable_keys if key.startswith("eval_")]
        # eval_avg@4 with 4 samples of each question, or eval_NAME_avg@4 if there are several evaluation files
        passes = [key for key in evaluation_keys if key.rpartition("avg@")[2].isdigit()]
        evaluations.update(passes or [key for key in evaluation_keys if key.endswith("avg_reward")])
    variables: list[str] = []
    constant: list[str] = []
    missing: list[str] = []
    for key in [*sorted(evaluations), *DEFAULT_VARIABLES]:
        values = np.unique(np.concatenate([run.column(key) for run in runs]))
        values = values[np.isfinite(values)]
        if values.size == 0:
            missing.append(key)
        elif values.size == 1 and key != REWARD and key not in evaluations:
            constant.append(key)
        else:
            variables.append(key)
    if missing:
        log.warning("skipped, not in any file: %s", ", ".join(missing))
    if constant:
        log.warning("skipped, as they never change: %s", ", ".join(constant))
    return variables or constant or [REWARD]


@app.command()
def compare(
    runs: Runs,
    x: Unit = "samples",
    y: Annotated[str, typer.Option("-y", "--y", help="Metrics to draw, comma-separated.")] = "avg_reward",
    names: Annotated[
        list[str] | None,
        typer.Option("-n", "--name", help="NAME=GLOB: draw the mean and band of RUNs that match GLOB."),
    ] = None,
    smooth_window: Annotated[int, typer.Option(min=1, help="Steps in a centred moving average.")] = 1,
    gpus: Gpus = None,
    output: Output = None,
) -> None:
    """Draw several runs, or means of several seeds, over steps, samples, tokens, seconds or GPU-hours."""
    groups = _grouped(runs, names or [])
    keys = y.split(",")
    curves_by_key = {}
    for key in keys:  # before the figure is made, because `curve` may refuse a key
        curves_by_key[key] = [[curve(run, x, key, gpus) for run in group] for group in groups.values()]
    with figures.picture(output) as figure:
        axes = subplots(figure, keys, x, BANDS if names else "")
        colours = figures.colours_for(len(groups))
        for ax, key in zip(axes, keys, strict=True):
            # Evaluations are not smoothed, because they are few, and each one is already a mean
            window = 1 if key.startswith("eval_") else smooth_window
            for name, curves, colour in zip(groups, curves_by_key[key], colours, strict=True):
                smooth_curves = [np.stack([x_T, figures.moving_average(y_T, window)]) for x_T, y_T in curves]
                x_T, mean_T, low_T, high_T = figures.mean_and_band(smooth_curves, name)
                label = f"{name} ({len(curves)} runs)" if len(curves) > 1 else name
                ax.plot(x_T, mean_T, color=colour, linewidth=1.8, label=label)
                ax.fill_between(x_T, low_T, high_T, color=colour, alpha=0.2, linewidth=0)
        figure.legend(handles=axes[0].get_lines(), loc="outside upper center", ncols=4, frameon=False)


def _grouped(paths: list[Path], names: Sequence[str]) -> dict[str, list[RunMetrics]]:
    """Read the runs, and group them by the name of the curve that each belongs to.

    Args:
        paths: Folders of runs, or metrics files.
        names: Texts `NAME=GLOB`. A run belongs to the first name whose glob matches its path. If none does, the
            run becomes a separate curve.

    Raises:
        ConfigurationError: A run cannot be read, or a glob matches no run.
    """
    groups: dict[str, list[RunMetrics]] = {}
    globs = {}
    for text in names:
        name, _, glob = text.partition("=")
        globs[name] = glob
        groups[name] = []
    for path, run in zip(paths, load_runs(paths), strict=True):
        fitting_names = [name for name, glob in globs.items() if fnmatch(str(path), glob)]
        name = fitting_names[0] if fitting_names else run.name
        groups.setdefault(name, []).append(run)
    empty_names = ", ".join(name for name, group in groups.items() if not group)
    refuse(
        bool(empty_names),
        f"--name {empty_names}: NAME=GLOB is wanted, with a GLOB that fits some of the runs given",
    )
    return groups


@app.command()
def forecast(
    run: OneRun,
    x: Unit = "samples",
    y: Annotated[str, typer.Option("-y", "--y", help="Metric, such as eval_avg@8.")] = "avg_reward",
    begin: Annotated[float, typer.Option("--from", help="Ignore the data before this x.")] = 0.0,
    gpus: Gpus = None,
    output: Output = None,
) -> None:
    """Print a forecast of a run with 95 % intervals, or why its data allow no forecast. With -o, also draw it."""
    curve_2T = curve(read_run(run), x, y, gpus)
    curve_2T = curve_2T[:, curve_2T[0] >= begin]
    best, resampled = fits(curve_2T, f"{y} over {x}")
    horizons_T = curve_2T[0, -1] * np.array(HORIZONS)
    lines = _forecast_lines(best, resampled, horizons_T, x)
    if output is not None:
        with figures.picture(output) as figure:
            parameter_lines = "; ".join(lines[: len(PARAMETERS)])
            (ax,) = subplots(figure, [y], x, f"{SIGMOID}\n{parameter_lines}")
            x_T = np.linspace(curve_2T[0, 0], horizons_T[-1], 300)
            ax.plot(*curve_2T, color="0.6", linewidth=0.8, label="measured")
            ax.plot(x_T, best.at(x_T), color=OKABE_ITO[0], linewidth=2, label="forecast")
            low_T, high_T = interval([sigmoid.at(x_T) for sigmoid in resampled])
            ax.fill_between(x_T, low_T, high_T, color=OKABE_ITO[0], alpha=0.2, linewidth=0)
            ax.axhline(best.asymptote, color=OKABE_ITO[1], linestyle="--", label="A, its asymptote")
            ax.axvline(horizons_T[0], color="0.4", linestyle=":", label="end of the data")
            ax.legend(frameon=False, loc="lower right")
    print("\n".join(lines))


def _forecast_lines(
    best: Sigmoid, resampled: Sequence[Sigmoid], horizons_T: np.ndarray, unit: str
) -> list[str]:
    """Return a line of text for each parameter of the curve and each horizon, with its 95 % interval."""
    names = [*PARAMETERS, *(f"after {horizon:.6g} {unit}" for horizon in horizons_T)]
    rows = []
    for sigmoid in (best, *resampled):
        parameters = [sigmoid.start, sigmoid.asymptote, *np.exp([sigmoid.log_middle, sigmoid.log_exponent])]
        rows.append([*parameters, *sigmoid.at(horizons_T)])
    lows, highs = interval(rows[1:])
    return [
        f"{name} = {value:.4g} ({low:.4g} to {high:.4g})"
        for name, value, low, high in zip(names, rows[0], lows, highs, strict=True)
    ]


@app.command()
def staleness(run: OneRun, output: Output = None) -> None:
    """Draw how stale a run's training tokens were: mean and maximum per step, and the share of tokens of each age."""
    metrics = read_run(run)
    step_T = metrics.column("step")
    mean_T = metrics.column("staleness_mean")
    max_T = metrics.column("staleness_max")
    refuse(not np.isfinite(mean_T).any(), f"{metrics.source} does not say how old its tokens were")
    age_keys = [key for key in metrics.keys if key.startswith("staleness_tokens.")]
    titles = ["staleness"]
    if age_keys:  # older versions of the library did not count the tokens of each age
        titles.append("share of tokens")
    caption = f"mean of the steps {np.nanmean(mean_T):.3g}, largest {np.nanmax(max_T):g}"
    with figures.picture(output) as figure:
        axes = subplots(figure, titles, "step", caption)
        axes[0].plot(step_T, mean_T, color=OKABE_ITO[0], label="mean over tokens")
        axes[0].plot(step_T, max_T, color=OKABE_ITO[3], label="largest")
        bound = metrics.options.get("max_staleness")
        if bound is not None:
            axes[0].axhline(bound, color=OKABE_ITO[1], linestyle="--", label=f"bound: {bound}")
        axes[0].legend(frameon=False)
        if age_keys:
            ages = [int(key.partition(".")[2]) for key in age_keys]
            tokens = np.array([np.nansum(metrics.column(key)) for key in age_keys])
            axes[1].bar(ages, tokens / tokens.sum(), color=OKABE_ITO[0])
            axes[1].set_xlabel("steps between the policy that wrote a token and the trained one")


@app.command()
def timeline(
    run: OneRun,
    steps: Annotated[str, typer.Option(help="Steps A:B, both included. Default: the last ten.")] = "",
    output: Output = None,
) -> None:
    """Draw a timeline of a run: when engines, rewards and trainer worked, and on what."""
    folder = run.parent if run.is_file() else run
    view = RunView(folder)
    if steps:
        match = re.fullmatch(r"(\d*):(\d*)", steps)
        if not match:
            raise ConfigurationError(f"--steps {steps!r} is not A:B: write, for example, 5:20, 5: or :20")
        first_step = int(match[1] or 0)
        last_step = int(match[2] or sys.maxsize)
        spans = view.spans_of_steps(first_step, last_step)
    else:
        spans = view.spans(LAST_LINES)
        spans = [span for span in spans if span["step"] > spans[-1]["step"] - LAST_STEPS]
    refuse(not spans, f"{folder / TIMELINE_FILE} holds no spans{' of these steps' if steps else ''}")
    with figures.picture(output) as figure:
        figures.draw_lanes(figure, spans)


@app.command()
def info(files: Runs) -> None:
    """List the keys of a run with their first, last, smallest and largest values. Compare several runs in a table."""
    runs = load_runs(files)
    if len(runs) > 1:
        # If the output is no terminal, rich would cut the table to 80 columns
        width = None if sys.stdout.isatty() else MIN_TABLE_WIDTH + TABLE_WIDTH_PER_RUN * len(files)
        Console(width=width).print(compared(runs))
        return
    run = runs[0]
    print(f"{run.source}: {len(run.steps)} steps")
    columns = {key: run.series(key)[0] for key in run.plottable_keys}
    if DEFAULT_X_KEY in columns:
        x_T = columns[DEFAULT_X_KEY]
        print(f"{DEFAULT_X_KEY}: {_number_text(np.nanmin(x_T))} to {_number_text(np.nanmax(x_T))}")
    if "timestamp" in columns:
        seconds = np.nanmax(columns["timestamp"]) - np.nanmin(columns["timestamp"])
        print(f"wall time from the first to the last step: {duration(float(seconds))}")
    key_width = max(map(len, ["key", *columns]))
    titles = ("first", "last", "min", "max", "non-numbers")
    print(f"{'key':<{key_width}}", *(f"{title:>12}" for title in titles))
    for key, values_T in columns.items():
        cells = [
            _number_text(values_T[0]),
            _number_text(values_T[-1]),
            _number_text(np.nanmin(values_T)),
            _number_text(np.nanmax(values_T)),
            str(np.isnan(values_T).sum()),
        ]
        print(f"{key:<{key_width}}", *(f"{cell:>12}" for cell in cells))
    other_keys = [key for key in run.keys if key not in columns]
    if other_keys:
        print(f"not plottable (no numbers): {', '.join(other_keys)}")


def compared(runs: list[RunMetrics]) -> Table:
    """Return a table with a column per run: options that differ, marked by a star, and the last value of each key."""
    options_of_runs = [run.options for run in runs if run.options]
    option_keys = dict.fromkeys(
        key for options in options_of_runs for key in options if not key.startswith("settings.")
    )
    differing_keys = []
    for key in option_keys:
        first_value = options_of_runs[0].get(key)
        if any(options.get(key) != first_value for options in options_of_runs):
            differing_keys.append(key)
    num_equal = len(option_keys) - len(differing_keys)
    table = Table(caption=f"* options that differ; {num_equal} more are the same")
    for name in ("", *(run.name for run in runs)):
        table.add_column(Text(name), justify="right" if name else "left", overflow="fold")
    table.add_row("steps", *(str(len(run.steps)) for run in runs), end_section=True)
    for key in differing_keys:
        cells = [Text(str(run.options.get(key, "-"))) for run in runs]
        table.add_row(Text(f"* {key}"), *cells, style="bold", end_section=key == differing_keys[-1])
    for key in dict.fromkeys(key for run in runs for key in run.plottable_keys):
        table.add_row(Text(key), *(_last_number(run, key) for run in runs))
    return table


def _last_number(run: RunMetrics, key: str) -> str:
    values_T = run.column(key)
    finite_values_T = values_T[np.isfinite(values_T)]
    return _number_text(float(finite_values_T[-1])) if finite_values_T.size else "-"


def _number_text(number: float) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else f"{number:.5g}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv`, and exit. The default command is `plot`.

    Args:
        argv: The arguments. None takes the arguments of this process.
    """
    run_app(typer.main.get_command(app), argv, None)


if __name__ == "__main__":
    main()
