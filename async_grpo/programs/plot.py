"""`async-grpo plot FILE...`, `plot compare|forecast|staleness|timeline|info RUN`: draw or tabulate what runs wrote."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from async_grpo.errors import AsyncGrpoError, RunFailed
from async_grpo.metrics.compare import UNITS, compare_runs
from async_grpo.metrics.figures import DEFAULT_VARIABLES, PICTURE_SUFFIXES, draw_staleness, plot_runs
from async_grpo.metrics.forecast import forecast_run
from async_grpo.metrics.reader import DEFAULT_X_KEY, compared, load_runs, print_info
from async_grpo.metrics.timeline import draw_timeline

app = typer.Typer(
    help="Draw or tabulate training metrics (JSONL, one object per step). Without a command: plot.",
    add_completion=False,
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
        typer.Option("-v", "--variable", help=f"Key of a subplot. Default: {', '.join(DEFAULT_VARIABLES)}."),
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
    plot_runs(files, variables, x_key, output, names, smooth_window if smooth else None, remote)


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
    compare_runs(runs, x, y.split(","), names or [], output, smooth_window, gpus)


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
    print("\n".join(forecast_run(run, x, y, output, begin, gpus)))


@app.command()
def staleness(run: OneRun, output: Output = None) -> None:
    """Draw how old the tokens were that a run trained on, over the steps and by share, beside the bound."""
    draw_staleness(run, output)


@app.command()
def timeline(
    run: OneRun,
    steps: Annotated[str, typer.Option(help="A:B, the first and the last; default: the last ten.")] = "",
    output: Output = None,
) -> None:
    """Draw what engines, rewards and trainer of a run did when."""
    draw_timeline(run, steps, output)


@app.command()
def info(files: Runs) -> None:
    """List the keys of a run with their first, last, smallest and largest value; of several, how they differ."""
    if len(files) == 1:
        print_info(files[0])
        return
    # Into a pipe, nothing is cut to the 80 columns of a terminal that is not there
    wide = None if sys.stdout.isatty() else 60 + 40 * len(files)
    Console(width=wide).print(compared(load_runs(files)))


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Run the command line; exit code 2 for the user's mistakes, 1 if a remote file could not be fetched.

    `argv`: default the program's own. `plot` may be left out: a file's name alone asks for a picture.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = [command.callback.__name__ for command in app.registered_commands if command.callback]
    if not arguments or arguments[0] not in ("--help", *commands):
        arguments.insert(0, "plot")
    logging.basicConfig(format="note: %(message)s")
    try:
        sys.exit(app(args=arguments, prog_name=program, standalone_mode=False))
    except (typer.TyperException, AsyncGrpoError) as error:
        usage = isinstance(error, typer.TyperException) and f"{error.format_message()} (see --help)"
        print(f"error: {usage or error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RunFailed) else 2)


if __name__ == "__main__":
    main()
