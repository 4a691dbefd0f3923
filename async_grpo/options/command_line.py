"""Command lines built from the configuration dataclasses: one option per field, nothing typed twice.

Dashes and underscores are one and the same in option names. Options of the prior library that make no sense any more
are accepted with a warning that says what replaced them; an unknown option is an error.
"""

import dataclasses
import inspect
import json
import logging
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.logging import RichHandler

from async_grpo.errors import EXIT_FAILED, EXIT_USAGE, AsyncGrpoError, ConfigurationError
from async_grpo.options.fields import choices_of, dashed, nearest

CONFIG_HELP = " Options may also stand in a TOML file, --config FILE; the command line beats the file."
EVERYDAY = "Everyday options"
TRUTH = {"true": True, "1": True, "false": False, "0": False}
Fields = Sequence["dataclasses.Field[Any]"]


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

    Exit codes: 0, 2 for a `ConfigurationError` (or a usage error), 1 for every other error of the library, in one line.

    Args:
        retired: option name (with underscores) -> what replaced it. All of them took a value.
        program: what the help calls it.
        foreign: keys of other programs that a `--config` file may hold as well; they are passed over.
    """

    def command(context: typer.Context, **values: Any) -> None:
        sources = {name: context.get_parameter_source(name) for name in values}
        given = {name for name, source in sources.items() if source and source.name != "DEFAULT"}
        make = getattr(config_class, "from_options", lambda options, given: config_class(**options))
        run(make(values, given))

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *map(_parameter, fields_in_order(config_class))]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=help + CONFIG_HELP, cls=PanelledCommand)(command)
    fields = dataclasses.fields(config_class)
    try:
        arguments, files = normalized(sys.argv[1:] if argv is None else argv, fields, retired or {})
        options: dict[str, Any] = {}
        for file in files:
            options |= read_file(Path(file), fields, foreign)
        app(args=arguments, prog_name=program, default_map=options)
    except AsyncGrpoError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED) from error


def fields_in_order(config_class: type) -> Fields:
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


def _parameter(field: "dataclasses.Field[Any]") -> inspect.Parameter:
    name = dashed(field.name)
    spelling = f"--{name}/--no-{name}" if field.type is bool else f"--{name}"
    panel = EVERYDAY if field.metadata["everyday"] else field.metadata["panel"]
    said: Any = typer.Option(spelling, help=help_of(field), rich_help_panel=panel)
    if field.metadata["argument"]:
        said = typer.Argument(metavar=name.upper(), help=help_of(field))
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[field.type, said]
    )


def help_of(field: "dataclasses.Field[Any]") -> str:
    """What an option is for, and the names that it may have."""
    known = choices_of(field)
    return field.metadata["help"] + (f" One of: {', '.join(known)}." if known else "")


def normalized(
    given: Sequence[str], fields: Fields, retired: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The arguments in the one spelling that the parser knows, and the files of `--config`.

    A file may also stand first, without `--config`: `async-grpo run run.toml`.
    """
    flags = {field.name for field in fields if field.type is bool}
    arguments, kept, files = list(given), [], []
    if arguments and arguments[0].endswith((".toml", ".json")) and arguments[0][0] != "-":
        files.append(arguments.pop(0))
    while arguments:
        name, equals, value = arguments.pop(0).partition("=")
        if name == "--" or not name.startswith("--"):
            kept.append(name + equals + value)
            continue
        name = field_name(name[2:], fields)
        follower = [] if equals else [one for one in arguments[:1] if not one.startswith("--")]
        value = value or "".join(follower)
        truth = TRUTH.get(value.lower()) if name in flags else None
        if name == "config" and value:
            files.append(value)
        elif (successor := retired.get(name.removeprefix("no_"))) is not None:
            print(f"warning: --{dashed(name)} has no effect any more: {successor}", file=sys.stderr)
        elif truth is not None:
            kept.append(f"--{'' if truth else 'no-'}{dashed(name)}")
        else:
            kept.append(f"--{dashed(name)}{equals}{value if equals else ''}")
            continue
        del arguments[: len(follower)]
    return kept, files


def field_name(spelling: str, fields: Fields) -> str:
    """The field that a spelling stands for, with a warning if it was renamed; any other name with underscores."""
    name = spelling.replace("-", "_")
    for field in fields:
        if name == field.metadata["was"]:
            print(f"warning: --{dashed(name)} is now called --{dashed(field.name)}", file=sys.stderr)
        if name in (field.metadata["was"], field.metadata["also"]):
            return field.name
    return name


def read_file(path: Path, fields: Fields, foreign: Callable[[], Collection[str]]) -> dict[str, Any]:
    """The options in a TOML file or a run's `training_params.json`, by field; lists and tables as the text of options.

    Raises:
        ConfigurationError: the file cannot be read, or holds a key that no program knows.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # ValueError: what both parsers raise
        raise ConfigurationError(f"--config {path} cannot be read: {error}") from error
    options = {}
    for key, value in content.items():
        name, known = field_name(key, fields), {field.name for field in fields}
        if name not in known and name not in foreign():
            raise ConfigurationError(f"{path}: {key} is no option{nearest(name, sorted(known))}")
        if isinstance(value, dict):
            value = [f"{each}={one}" for each, one in value.items()]
        options[name] = ",".join(map(str, value)) if isinstance(value, list) else value
    return options


def set_up_logging(level: str, prefix: str = "", *more: logging.Handler) -> None:
    """One readable line per event on stderr, in a file whole lines with a date; `more` handlers get the same events.

    Raises:
        ConfigurationError: an unknown level.
    """
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigurationError(f"--logging-level {level!r}: use DEBUG, INFO, WARNING or ERROR")
    shown: logging.Handler = logging.StreamHandler()
    form = f"%(asctime)s %(levelname)s {prefix}%(message)s"
    if sys.stderr.isatty():
        console = Console(stderr=True)
        shown = RichHandler(console=console, show_path=False, markup=False, log_time_format="%H:%M:%S")
        form = f"{prefix}%(message)s"
    shown.setFormatter(logging.Formatter(form))
    for one in more:
        one.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    root = logging.getLogger("async_grpo")
    root.setLevel(level.upper())
    root.handlers, root.propagate = [shown, *more], False
