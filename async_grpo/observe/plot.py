"""`async-grpo plot FILE...`, `plot compare|forecast|staleness|timeline|info RUN`: draw or tabulate what runs wrote."""

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
from async_grpo.observe.forecast import fits, interval
from async_grpo.observe.reader import DEFAULT_X_KEY, UNITS, RunMetrics, curve, load_runs, read_run
from async_grpo.observe.run_view import RunView
from async_grpo.options.command_line import run_app
from async_grpo.options.fields import refuse

# Drawn by default: the evaluations, one curve for each file, the reward, and what changes during a run of the others
REWARD = "avg_reward"
DEFAULT_VARIABLES = (
    REWARD,
    "avg_output_tokens",
    "perc_truncated_samples",
    "mismatch_kl",
    "staleness_mean",
    "avg_kl_div",
)
BANDS = "bands: of two runs from one to the other, of more the 95 % t interval of their mean"
SIGMOID = "R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B); band and brackets: 95 % intervals"
TIMES = (1, 2, 4)  # how far a forecast looks, in multiples of what was seen
LAST_STEPS, LAST_LINES = 10, 5000  # of a timeline, where no steps are named

log = logging.getLogger(__name__)


class PlotCommands(TyperGroup):
    """The commands. Without the name of one, the arguments are files to plot."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, of which the first may be the name of a command."""
        logging.basicConfig(format="note: %(message)s")
        is_named = bool(args) and args[0] in ("--help", *self.commands)
        # A shell completes the name of a command
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
Unit = Annotated[str, typer.Option("-x", "--x", help=f"How far a run has come, in {', '.join(UNITS)}.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="Of each run, where it does not say so itself.")]
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
            help=f"Key of a subplot. By default eval_pass@1, {', '.join(DEFAULT_VARIABLES)}, where they change.",
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
    plottable = {key for run in runs for key in run.plottable_keys}
    if not variables:
        variables = _default_variables(runs)
    variables, known = list(dict.fromkeys(variables)), ", ".join(sorted(plottable)) or "none"
    for key in variables:
        without = [run.name for run in runs if not np.isfinite(run.series(x_key, key)).all(axis=0).any()]
        nowhere = len(without) == len(runs)
        refuse(nowhere, f"no step has numbers for both {key!r} and {x_key!r}; -v and -x may name: {known}")
        if without:
            log.warning("%s: nothing to draw in %s", key, ", ".join(without))
    with figures.picture(output) as figure:
        legend = len(runs) > 1 or bool(names)
        figures.draw(figure, runs, variables, x_key, smooth_window if smooth else None, legend)


def _default_variables(runs: Sequence[RunMetrics]) -> list[str]:
    """Return the keys that say most about the runs, and log which others are left out."""
    evaluations = set()
    for run in runs:
        for key in run.plottable_keys:
            # eval_pass@1, or eval_NAME_pass@1 of one of several files
            if key.startswith("eval_") and key.endswith("pass@1"):
                evaluations.add(key)
    variables, constant, missing = [], [], []
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
    y: Annotated[str, typer.Option("-y", "--y", help="Keys, a comma list; a subplot each.")] = "avg_reward",
    names: Annotated[
        list[str] | None,
        typer.Option("-n", "--name", help="NAME=GLOB: the RUNs that GLOB fits are one curve, mean and band."),
    ] = None,
    smooth_window: Annotated[int, typer.Option(min=1, help="Steps of a centred moving average.")] = 1,
    gpus: Gpus = None,
    output: Output = None,
) -> None:
    """Draw several runs, or means of several seeds, over steps, samples, tokens, seconds or GPU-hours."""
    globs, keys = [name.partition("=")[::2] for name in names or ()], y.split(",")
    groups: dict[str, list[RunMetrics]] = {name: [] for name, _ in globs}
    for path, run in zip(runs, load_runs(runs), strict=True):
        fitting = [name for name, glob in globs if fnmatch(str(path), glob)]
        groups.setdefault((fitting or [run.name])[0], []).append(run)
    empty = ", ".join(name for name, of in groups.items() if not of)
    refuse(bool(empty), f"--name {empty}: NAME=GLOB is wanted, with a GLOB that fits some of the runs given")
    curves = {key: [[curve(run, x, key, gpus) for run in of] for of in groups.values()] for key in keys}
    with figures.picture(output) as figure:
        axes = subplots(figure, keys, x, BANDS if names else "")
        for ax, key in zip(axes, keys, strict=True):
            width = 1 if key.startswith("eval_") else smooth_window  # evaluations are few, and means already
            for name, of, colour in zip(groups, curves[key], figures.colours_for(len(groups)), strict=True):
                smooth = [np.stack([x_T, figures.moving_average(y_T, width)]) for x_T, y_T in of]
                x_T, mean_T, low_T, high_T = figures.mean_and_band(smooth, name)
                label = f"{name} ({len(of)} runs)" if len(of) > 1 else name
                ax.plot(x_T, mean_T, color=colour, linewidth=1.8, label=label)
                ax.fill_between(x_T, low_T, high_T, color=colour, alpha=0.2, linewidth=0)
        figure.legend(handles=axes[0].get_lines(), loc="outside upper center", ncols=4, frameon=False)


@app.command()
def forecast(
    run: OneRun,
    x: Unit = "samples",
    y: Annotated[str, typer.Option("-y", "--y", help="Key, such as eval_avg@8.")] = "avg_reward",
    begin: Annotated[float, typer.Option("--from", help="Leave out what lies before this x.")] = 0.0,
    gpus: Gpus = None,
    output: Output = None,
) -> None:
    """Tell where a run is heading, with intervals, or why its data do not say; without -o in words alone."""
    seen_2T = curve(read_run(run), x, y, gpus)
    seen_2T = seen_2T[:, seen_2T[0] >= begin]
    best, resampled = fits(seen_2T, f"{y} over {x}")
    ahead_T = seen_2T[0, -1] * np.array(TIMES)
    told = ["R0", "A", "C_mid", "B", *(f"after {far:.6g} {x}" for far in ahead_T)]
    values = np.array([[*one[:2], *np.exp(one[2:]), *one.at(ahead_T)] for one in (best, *resampled)])
    found = zip(told, values[0], *interval(values[1:]), strict=True)
    words = [f"{name} = {value:.4g} ({low:.4g} to {high:.4g})" for name, value, low, high in found]
    if output is not None:
        with figures.picture(output) as figure:
            (ax,) = subplots(figure, [y], x, f"{SIGMOID}\n{'; '.join(words[:4])}")
            far_T = np.linspace(seen_2T[0, 0], ahead_T[-1], 300)
            ax.plot(*seen_2T, color="0.6", linewidth=0.8, label="measured")
            ax.plot(far_T, best.at(far_T), color=OKABE_ITO[0], linewidth=2, label="forecast")
            band_2T = interval([one.at(far_T) for one in resampled])
            ax.fill_between(far_T, *band_2T, color=OKABE_ITO[0], alpha=0.2, linewidth=0)
            ax.axhline(best.asymptote, color=OKABE_ITO[1], linestyle="--", label="A, its asymptote")
            ax.axvline(ahead_T[0], color="0.4", linestyle=":", label="end of the data")
            ax.legend(frameon=False, loc="lower right")
    print("\n".join(words))


@app.command()
def staleness(run: OneRun, output: Output = None) -> None:
    """Draw how old the tokens were that a run trained on, over the steps and by share, beside the bound."""
    told = read_run(run)
    step_T, mean_T, most_T = map(told.column, ("step", "staleness_mean", "staleness_max"))
    refuse(not np.isfinite(mean_T).any(), f"{told.source} does not say how old its tokens were")
    ages = [key for key in told.keys if key.startswith("staleness_tokens.")]
    words = f"mean of the steps {np.nanmean(mean_T):.3g}, largest {np.nanmax(most_T):g}"
    with figures.picture(output) as figure:
        titles = ["staleness", *(["share of tokens"] if ages else [])]  # an old run did not count them
        over_steps, *shares = subplots(figure, titles, "step", words)
        over_steps.plot(step_T, mean_T, color=OKABE_ITO[0], label="mean over tokens")
        over_steps.plot(step_T, most_T, color=OKABE_ITO[3], label="largest")
        if (bound := told.options.get("max_staleness")) is not None:
            over_steps.axhline(bound, color=OKABE_ITO[1], linestyle="--", label=f"bound: {bound}")
        over_steps.legend(frameon=False)
        for ax in shares:
            tokens = np.array([np.nansum(told.column(key)) for key in ages])
            ax.bar([int(key.partition(".")[2]) for key in ages], tokens / tokens.sum(), color=OKABE_ITO[0])
            ax.set_xlabel("steps between the policy that wrote a token and the trained one")


@app.command()
def timeline(
    run: OneRun,
    steps: Annotated[str, typer.Option(help="A:B, the first and the last; default: the last ten.")] = "",
    output: Output = None,
) -> None:
    """Draw what engines, rewards and trainer of a run did when."""
    folder = run.parent if run.is_file() else run
    of_run = RunView(folder)
    if steps:
        if not (words := re.fullmatch(r"(\d*):(\d*)", steps)):
            raise ConfigurationError(f"--steps {steps!r} is not A:B, as 5:20, 5: or :20")
        first, last = int(words[1] or 0), int(words[2] or sys.maxsize)
        spans = of_run.spans_of_steps(first, last)
    else:
        spans = of_run.spans(LAST_LINES)
        spans = [span for span in spans if span["step"] > spans[-1]["step"] - LAST_STEPS]
    refuse(not spans, f"{folder / TIMELINE_FILE} holds no spans{' of these steps' if steps else ''}")
    with figures.picture(output) as figure:
        figures.draw_lanes(figure, spans)


@app.command()
def info(files: Runs) -> None:
    """List the keys of a run with their first, last, smallest and largest value; of several, how they differ."""
    run, *others = runs = load_runs(files)
    if others:
        # Into a pipe, nothing is cut to the 80 columns of a terminal that is not there
        wide = None if sys.stdout.isatty() else 60 + 40 * len(files)
        Console(width=wide).print(compared(runs))
        return
    print(f"{run.source}: {len(run.steps)} steps")
    finite = {key: run.series(key)[0] for key in run.plottable_keys}
    if (x_T := finite.get(DEFAULT_X_KEY)) is not None:
        print(f"{DEFAULT_X_KEY}: {_shown(np.nanmin(x_T))} to {_shown(np.nanmax(x_T))}")
    if (moments_T := finite.get("timestamp")) is not None:
        lasted = duration(float(np.nanmax(moments_T) - np.nanmin(moments_T)))
        print(f"wall time from the first to the last step: {lasted}")
    widest = max(map(len, ["key", *finite]))
    print(f"{'key':<{widest}}", *(f"{title:>12}" for title in ("first", "last", "min", "max", "non-numbers")))
    for key, of_T in finite.items():
        cells = *map(_shown, (of_T[0], of_T[-1], np.nanmin(of_T), np.nanmax(of_T))), np.isnan(of_T).sum()
        print(f"{key:<{widest}}", *(f"{cell:>12}" for cell in cells))
    if unknown := [key for key in run.keys if key not in finite]:
        print(f"not plottable (no numbers): {', '.join(unknown)}")


def compared(runs: list[RunMetrics]) -> Table:
    """Show a column per run: the options that differ, marked by a star, and the last number of every key."""
    told = [run.options for run in runs if run.options]
    options = dict.fromkeys(key for of in told for key in of if not key.startswith("settings."))
    differing = [key for key in options if any(of.get(key) != told[0].get(key) for of in told)]
    table = Table(caption=f"* options that differ; {len(options) - len(differing)} more are the same")
    for name in ("", *(run.name for run in runs)):
        table.add_column(Text(name), justify="right" if name else "left", overflow="fold")
    table.add_row("steps", *(str(len(run.steps)) for run in runs), end_section=True)
    for key in differing:
        cells = [Text(str(run.options.get(key, "-"))) for run in runs]
        table.add_row(Text(f"* {key}"), *cells, style="bold", end_section=key == differing[-1])
    for key in dict.fromkeys(key for run in runs for key in run.plottable_keys):
        numbers = [values_T[np.isfinite(values_T)] for values_T in (run.column(key) for run in runs)]
        table.add_row(Text(key), *(_shown(float(of_T[-1])) if of_T.size else "-" for of_T in numbers))
    return table


def _shown(number: float) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else f"{number:.5g}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: the program's own), and exit."""
    run_app(typer.main.get_command(app), argv, None)


if __name__ == "__main__":
    main()
