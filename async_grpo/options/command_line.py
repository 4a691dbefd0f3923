"""Command lines built from the configuration dataclasses: one option per field, nothing typed twice.

Dashes and underscores are one and the same in option names. Options of the prior library that make no sense any more
are accepted with a warning that says what replaced them; an unknown option is an error.
"""

import dataclasses
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.logging import RichHandler

from async_grpo.errors import EXIT_FAILED, EXIT_USAGE, AsyncGrpoError, ConfigurationError
from async_grpo.options.fields import choices_of, dashed
from async_grpo.options.files import with_files

CONFIG_HELP = " Options may also stand in a TOML file, --config FILE; the command line beats the file."
EVERYDAY = "Everyday options"
TRUTH = {"true": True, "1": True, "false": False, "0": False}


def run_command(
    config_class: type,
    run: Callable[[Any], None],
    *,
    help: str,
    retired: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
    program: str | None = None,
    foreign: Callable[[], Collection[str]] = tuple,
) -> None:
    """Parse the command line into `config_class`, call `run` with it, and exit.

    Exit codes: 0, 2 for a `ConfigurationError` (or a usage error), 1 for every other error.

    Args:
        retired: option name (with underscores) -> what replaced it. All of them took a value.
        program: what the help calls it.
        foreign: keys of other programs that a `--config` file may hold as well.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=help + CONFIG_HELP, cls=PanelledCommand)(as_function(config_class, run))
    given = sys.argv[1:] if argv is None else argv
    reporting_errors(
        lambda: app(args=normalized(given, config_class, retired or {}, foreign), prog_name=program)
    )


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
        given = {name for name in values if _is_given(context, name)}
        make = getattr(config_class, "from_options", lambda options, given: config_class(**options))
        reporting_errors(lambda: run(make(values, given)))

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

    parameters = [context, *map(_parameter, fields_in_order(config_class))]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def fields_in_order(config_class: type) -> list["dataclasses.Field[Any]"]:
    """Those that must be given, the everyday ones, and the others panel by panel."""
    fields = dataclasses.fields(config_class)
    panels = list(dict.fromkeys(field.metadata["panel"] for field in fields))

    def place(field: "dataclasses.Field[Any]") -> tuple[bool, bool, int]:
        optional = field.default is not dataclasses.MISSING
        return optional, not field.metadata["everyday"], panels.index(field.metadata["panel"])

    return sorted(fields, key=place)


class PanelledCommand(typer.core.TyperCommand):
    """A command whose help begins with the options of every day and has a heading for each room's others."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                panel = getattr(parameter, "rich_help_panel", None)
                heading = "Arguments" if parameter.param_type_name == "argument" else panel or "Help"
                panels.setdefault(heading, []).append(record)
        for heading, records in panels.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _parameter(field: dataclasses.Field) -> inspect.Parameter:
    name = dashed(field.name)
    spelling = f"--{name}/--no-{name}" if field.type is bool else f"--{name}"
    panel = EVERYDAY if field.metadata["everyday"] else field.metadata["panel"]
    option = typer.Option(spelling, help=help_of(field), rich_help_panel=panel)
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[field.type, option]
    )


def help_of(field: "dataclasses.Field[Any]") -> str:
    """What an option is for, and the names that it may have."""
    known = choices_of(field)
    return field.metadata["help"] + (f" One of: {', '.join(known)}." if known else "")


def normalized(
    given: Sequence[str],
    config_class: type,
    retired: Mapping[str, str],
    foreign: Callable[[], Collection[str]] = tuple,
) -> list[str]:
    """The arguments, and before them those of configuration files, in the one spelling that the parser knows.

    Raises:
        ConfigurationError: a file that cannot be read, or a key in it that no program knows.

    >>> from async_grpo.config.run import WorkerConfig
    >>> normalized(["--max_num_seqs=8", "--enable_prefix_caching", "false"], WorkerConfig, {})
    ['--max-num-seqs=8', '--no-enable-prefix-caching']
    """
    arguments = with_files(given, config_class, foreign)
    fields = dataclasses.fields(config_class)
    flags = {dashed(field.name) for field in fields if field.type is bool}
    renamed = {dashed(field.metadata["was"]): dashed(field.name) for field in fields if field.metadata["was"]}
    aliases = {
        dashed(field.metadata["also"]): dashed(field.name) for field in fields if field.metadata["also"]
    }
    retired = {dashed(name): successor for name, successor in retired.items()}
    result: list[str] = []
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--"):
            result.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = dashed(name)
        if name in renamed:
            print(f"warning: --{name} is now called --{renamed[name]}", file=sys.stderr)
        name = renamed.get(name) or aliases.get(name) or name
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
