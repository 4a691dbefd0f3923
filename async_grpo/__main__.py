"""The console script `async-grpo`: a whole run, the demo, its parts, and tools, each from one command."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any

import typer

from async_grpo import __version__
from async_grpo.options.command_line import (
    PanelledCommand,
    as_function,
    normalized,
    reporting_errors,
    set_up_logging,
)
from async_grpo.programs.options_page import foreign_keys


@dataclass(frozen=True)
class Command:
    """Where a command lives: only the one that is called is imported, for some bring in torch.

    `config`: the dataclass of its options; a command without one parses its arguments itself.
    `argument`: the field of it that is given without a dash.
    """

    help: str
    module: str
    config: str | None = None
    run: str = "main"
    argument: str | None = None


COMMANDS = {
    "run": Command(
        "Start Ray, workers and trainer on this machine, and wait for the end of the run.",
        *("async_grpo.launch.local_run", "LocalConfig", "run_locally"),
    ),
    "demo": Command(
        "Train the tiny model on countdown tasks and show what it learned. Needs no GPU.",
        *("async_grpo.launch.demo", "DemoConfig", "demo"),
    ),
    "train": Command(
        "Train on a Ray cluster that runs already, as one rank; several: torchrun -m async_grpo.programs.trainer.",
        "async_grpo.programs.trainer",
    ),
    "worker": Command(
        "Run one generation or logprob worker on a Ray cluster that runs already.",
        "async_grpo.programs.worker",
    ),
    "verify": Command(
        "Try rewards on a file of completions: scores, latencies, failures, disagreements. Exit code 1 if a reward "
        "failed on any row, 2 if the file or an option is wrong.",
        *("async_grpo.programs.verify", "VerifyConfig", "verify", "file"),
    ),
    "cache": Command(
        "Show what a verdict cache holds, and prune it.",
        *("async_grpo.programs.cache", "CacheConfig", "inspect_cache", "path"),
    ),
    "plot": Command(
        "Draw the metrics of runs, or list them: plot FILE..., plot info FILE.", "async_grpo.programs.plot"
    ),
    "data": Command(
        "Make training data for a tokenizer: data countdown, data gsm8k.", "async_grpo.programs.data"
    ),
}


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: the program's own), and exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    called = COMMANDS.get(arguments[0]) if arguments else None
    if called and called.config is None:
        getattr(_imported(called.module), called.run)(arguments[1:], f"async-grpo {arguments[0]}")
        return
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True
    )
    app.callback()(_options_of_no_command)
    for name, command in COMMANDS.items():
        app.command(name, help=command.help, cls=PanelledCommand)(
            _loaded(command, arguments) if command is called else _not_called
        )
    app(args=arguments, prog_name="async-grpo")


def _loaded(command: Command, arguments: list[str]) -> Callable[..., None]:
    """The command as a function for typer; `arguments`, of which it is the first, are put in the one known spelling."""
    module = _imported(command.module)
    config_class, run = getattr(module, str(command.config)), getattr(module, command.run)

    def put_in_order() -> None:
        arguments[1:] = normalized(arguments[1:], config_class, {}, foreign_keys)

    reporting_errors(put_in_order)

    def run_with_logging(config: Any) -> None:
        set_up_logging(getattr(config, "logging_level", "INFO"))
        run(config)

    function = as_function(config_class, run_with_logging)
    if command.argument:
        _give_without_dash(function, command.argument)
    return function


def _imported(name: str) -> ModuleType:
    """The module; exits with the cause in one line where a library below it is missing or broken."""
    try:
        return import_module(name)
    except ImportError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        broken = "torchvision" in str(cause)  # built for another torch, and nothing here needs it
        way_out = (
            "pip uninstall torchvision torchaudio torchcodec" if broken else "see README.md on installing"
        )
        raise SystemExit(f"error: {name} cannot be imported: {cause}: {way_out}") from error


def _give_without_dash(function: Callable[..., None], name: str) -> None:
    signature = inspect.signature(function)
    parameters = dict(signature.parameters)
    kind, (given,) = parameters[name].annotation.__origin__, parameters[name].annotation.__metadata__
    argument = typer.Argument(metavar=name.upper(), help=given.help)
    parameters[name] = parameters[name].replace(annotation=Annotated[kind, argument])
    function.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"async-grpo {__version__}")
        raise typer.Exit


def _options_of_no_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Asynchronous GRPO on one machine or many."""


def _not_called() -> None:
    """Stands in the list of commands."""


if __name__ == "__main__":
    main()
