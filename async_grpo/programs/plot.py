"""`async-grpo plot FILE...` and `async-grpo plot info FILE`: draw or tabulate training metrics."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from async_grpo.errors import AsyncGrpoError, RunFailed
from async_grpo.metrics.figures import DEFAULT_VARIABLES, plot_runs
from async_grpo.metrics.reader import DEFAULT_X_KEY, print_info

app = typer.Typer(
    help="Draw or tabulate training metrics (JSONL, one object per step).",
    add_completion=False,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)


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
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Picture (.svg, .png, .pdf). Default: a window.")
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option("-r", "--remote", help="Host, or user@host, from which scp fetches the files."),
    ] = None,
) -> None:
    """Draw one or several runs, one subplot per key. `plot info FILE` lists the keys of a run."""
    plot_runs(files, variables, x_key, output, names, smooth_window if smooth else None, remote)


@app.command()
def info(file: Annotated[Path, typer.Argument(metavar="FILE", help="Metrics file.")]) -> None:
    """List the keys of a run with their first, last, smallest and largest value."""
    print_info(file)


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Run the command line; exit code 2 for the user's mistakes, 1 if a remote file could not be fetched.

    `argv`: default the program's own. `plot` may be left out: a file's name alone asks for a picture.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in ("plot", "info"):
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
