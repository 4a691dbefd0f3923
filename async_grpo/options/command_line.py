"""Command lines built from the configuration dataclasses: one option per field, nothing typed twice.

Dashes and underscores are one and the same in option names. Options of the prior library that make no sense any more
are accepted with a warning that says what replaced them; an unknown option is an error.
"""

import dataclasses
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from async_grpo.errors import EXIT_FAILED, EXIT_USAGE, AsyncGrpoError, ConfigurationError

TRUTH = {"true": True, "1": True, "false": False, "0": False}


def run_command(
    config_class: type,
    run: Callable[[Any], None],
    *,
    help: str,
    retired: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
    program: str | None = None,
) -> None:
    """Parse the command line into `config_class`, call `run` with it, and exit.

    Exit codes: 0, 2 for a `ConfigurationError` (or a usage error), 1 for every other error.

    Args:
        retired: option name (with underscores) -> what replaced it. All of them took a value.
        program: what the help calls it.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=help)(as_function(config_class, run))
    arguments = normalized(list(sys.argv[1:] if argv is None else argv), config_class, retired or {})
    app(args=arguments, prog_name=program)


def reporting_errors(run: Callable[[], None]) -> None:
    """Call `run`; turn the library's own errors into one line on stderr and an exit code."""
    try:
        run()
    except AsyncGrpoError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED) from error


def as_function(config_class: type, run: Callable[[Any], None]) -> Callable[..., None]:
    """A function with one typer option per field of the dataclass."""

    def command(context: typer.Context, **values: Any) -> None:
        given = {name for name in values if context.get_parameter_source(name).name != "DEFAULT"}
        make = getattr(config_class, "from_options", lambda options, given: config_class(**options))
        reporting_errors(lambda: run(make(values, given)))

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

    # The required ones first, and with them the panel that they stand in
    fields = sorted(
        dataclasses.fields(config_class), key=lambda field: field.default is not dataclasses.MISSING
    )
    command.__signature__ = inspect.Signature([context, *(_parameter(field) for field in fields)])
    return command


def _parameter(field: dataclasses.Field) -> inspect.Parameter:
    name = field.name.replace("_", "-")
    spelling = f"--{name}/--no-{name}" if field.type is bool else f"--{name}"
    option = typer.Option(spelling, help=field.metadata["help"], rich_help_panel=field.metadata["panel"])
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[field.type, option]
    )


def normalized(arguments: list[str], config_class: type, retired: Mapping[str, str]) -> list[str]:
    """The arguments in the one spelling that the parser knows.

    >>> from async_grpo.config.run import WorkerConfig
    >>> normalized(["--max_num_seqs=8", "--enable_prefix_caching", "false"], WorkerConfig, {})
    ['--max-num-seqs=8', '--no-enable-prefix-caching']
    """
    flags = {field.name.replace("_", "-") for field in dataclasses.fields(config_class) if field.type is bool}
    retired = {name.replace("_", "-"): successor for name, successor in retired.items()}
    result: list[str] = []
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--"):
            result.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("_", "-")
        follower = (
            value if equals else (arguments[0] if arguments and not arguments[0].startswith("--") else None)
        )
        if name.removeprefix("no-") in retired:
            print(
                f"warning: --{name} has no effect any more: {retired[name.removeprefix('no-')]}",
                file=sys.stderr,
            )
            if follower is not None and not equals:
                arguments.pop(0)
        elif name in flags and follower is not None and follower.lower() in TRUTH:
            result.append(f"--{'' if TRUTH[follower.lower()] else 'no-'}{name}")
            if not equals:
                arguments.pop(0)
        else:
            result.append(f"--{name}{equals}{value}")
    return result


def set_up_logging(level: str, prefix: str = "", *more: logging.Handler) -> None:
    """One readable line per event on stderr; in a file, whole lines with a date.

    Args:
        more: further handlers, which get the same events.

    Raises:
        ConfigurationError: an unknown level.
    """
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigurationError(f"--logging-level {level!r}: use DEBUG, INFO, WARNING or ERROR")
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s"))
    if sys.stderr.isatty():
        console = Console(stderr=True)
        handler = RichHandler(console=console, show_path=False, markup=False, log_time_format="%H:%M:%S")
        handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    for one in more:
        one.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    root = logging.getLogger("async_grpo")
    root.setLevel(level.upper())
    root.handlers, root.propagate = [handler, *more], False
