"""Command lines made from the configuration dataclasses, with one option per field.

Dashes and underscores are equal. A retired option is accepted with a warning; an unknown one is an error.
"""

import argparse
import dataclasses
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.logging import RichHandler

from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.options.fields import choices_of, dashed, nearest, refuse
from async_grpo.options.redaction import redact_logs, redacted
from async_grpo.processes.untrusted_files import parse_json, read_text

CONFIG_HELP = " Options may also stand in a TOML file, --config FILE; the command line beats the file."
TRUTH = {"true": True, "1": True, "false": False, "0": False}
EXIT_BY_SIGINT = 130
STDOUT = 1  # file descriptors
STDERR = 2
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
    """Parse the command line into a configuration, run the program with it, and exit.

    The exit code is 0, the code of an error of the library, which is printed in one line, or 2 for a usage error.

    Args:
        config_class: Dataclass whose fields are the options.
        run: The program.
        help: What the program does, for `--help`.
        retired: What replaced each retired option, by its name with underscores. All of them took a value.
        argv: The arguments; None takes those of this process.
        program: Name of the program in `--help`.
        foreign: Returns keys of other programs that a `--config` file may hold, too; they are ignored.
    """
    fields = fields_in_order(config_class)
    parser = _parser(fields, help + CONFIG_HELP, program)
    try:
        arguments, files = normalized(sys.argv[1:] if argv is None else argv, fields, retired or {})
        arguments_of_files = []
        for file in files:
            arguments_of_files += read_file(Path(file), fields, foreign)
        # The command line beats the files because it comes last
        options = _parse(parser, [*arguments_of_files, *arguments])
        defaults = {field.name: field.default for field in fields}
        if hasattr(config_class, "from_options"):
            config = config_class.from_options({**defaults, **options}, options.keys())
        else:
            config = config_class(**{**defaults, **options})
        run(config)
    except AsyncGrpoError as error:
        print(redacted(f"error: {error}"), file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt as interrupt:
        raise SystemExit(EXIT_BY_SIGINT) from interrupt
    raise SystemExit(0)


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options that the arguments name.

    Raises:
        ConfigurationError: An argument is no option.
    """
    known_options: set[str] = set()
    for action in parser._actions:
        known_options.update(action.option_strings)
    # Before argparse parses, because it would complain about missing options first
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in known_options:
            raise ConfigurationError(f"{name} is no option{nearest(name, sorted(known_options))}")
    options, unknown = parser.parse_known_args(arguments)
    refuse(bool(unknown), f"{' '.join(unknown)} is no option, and no value of one")
    return vars(options)


def fields_in_order(config_class: type) -> Fields:
    """Return the required options, then the everyday ones, and then the others panel by panel."""
    fields = dataclasses.fields(config_class)
    panels = list(dict.fromkeys(field.metadata["panel"] for field in fields))

    def sort_key(field: "dataclasses.Field[Any]") -> tuple[bool, bool, int]:
        is_optional = field.default is not dataclasses.MISSING
        is_everyday = field.metadata["everyday"]
        return is_optional, not is_everyday, panels.index(field.metadata["panel"])

    return sorted(fields, key=sort_key)


def panel_of(field: "dataclasses.Field[Any]") -> str:
    """Return the heading of an option in `--help`."""
    return "Everyday options" if field.metadata["everyday"] else field.metadata["panel"]


def _parser(fields: Fields, help: str, program: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        program,
        "%(prog)s [options]",
        help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    panels: dict[str, Any] = {}
    for field in fields:
        panel = panel_of(field)
        if panel not in panels:
            panels[panel] = parser.add_argument_group(panel)
        _add_option(panels[panel], field)
    return parser


def _add_option(panel: Any, field: "dataclasses.Field[Any]") -> None:
    # `float` of `float | None`
    value_type: Any = next(iter(get_args(field.type)), field.type)
    # argparse replaces a % in a help text
    help_text = help_of(field).replace("%", "%%")
    if field.metadata["argument"]:
        panel.add_argument(field.name, metavar=field.name.upper(), help=help_text)
        return
    settings: dict[str, Any] = {"type": value_type, "metavar": value_type.__name__.upper()}
    if value_type is bool:
        settings = {"action": argparse.BooleanOptionalAction}
    if field.default is dataclasses.MISSING:
        settings["required"] = True
        help_text += " [required]"
    elif field.default not in (None, ""):
        help_text += f" [default: {field.default}]"
    spellings = [f"--{dashed(field.name)}"]
    also = field.metadata["also"]
    if len(also) == 1:
        spellings.insert(0, f"-{also}")
    panel.add_argument(*spellings, help=help_text, **settings)


def help_of(field: "dataclasses.Field[Any]") -> str:
    """Return the help of an option, with the names that it may have."""
    choices = choices_of(field)
    names = f" One of: {', '.join(choices)}." if choices else ""
    return field.metadata["help"] + names


def normalized(
    given: Sequence[str], fields: Fields, retired: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Bring arguments into the spelling that the parser knows.

    A file may also stand first, without `--config`: `async-grpo run run.toml`.

    Args:
        given: The arguments as the user wrote them.
        fields: The options.
        retired: What replaced each retired option.

    Returns:
        The arguments, and the files of `--config`.
    """
    flags = {field.name for field in fields if field.type is bool}
    remaining = list(given)
    arguments = []
    files = []
    if remaining and _is_config_file(remaining[0], fields):
        files.append(remaining.pop(0))
    while remaining:
        argument = remaining.pop(0)
        spelling, equals, value = argument.partition("=")
        if spelling == "--" or not spelling.startswith("--"):
            arguments.append(argument)
            continue
        name = field_name(spelling.removeprefix("--"), fields)
        is_next_value = not equals and bool(remaining) and not remaining[0].startswith("--")
        if is_next_value:
            value = remaining[0]
        if name == "config" and value:
            files.append(value)
        elif name.removeprefix("no_") in retired:
            successor = retired[name.removeprefix("no_")]
            print(f"warning: --{dashed(name)} has no effect any more: {successor}", file=sys.stderr)
        elif name in flags and value.lower() in TRUTH:
            arguments.append(f"--{'' if TRUTH[value.lower()] else 'no-'}{dashed(name)}")
        elif name in flags or not (equals or is_next_value):
            # The next argument does not belong to a flag
            is_next_value = False
            arguments.append(f"--{dashed(name)}{equals}{value if equals else ''}")
        else:
            # In one argument, because argparse would take -1e-3 for an option
            arguments.append(f"--{dashed(name)}={value}")
        if is_next_value:
            remaining.pop(0)
    return arguments, files


def _is_config_file(argument: str, fields: Fields) -> bool:
    """Return whether the first argument is a file of options."""
    # The argument of a program that takes one may be a .json file itself
    takes_argument = any(field.metadata["argument"] for field in fields)
    endings = (".toml",) if takes_argument else (".toml", ".json")
    return argument.endswith(endings) and not argument.startswith("-")


def field_name(spelling: str, fields: Fields) -> str:
    """Return the name of the field that a spelling means; any other name with underscores."""
    name = spelling.replace("-", "_")
    for field in fields:
        if field.metadata["also"] == name:
            return field.name
    return name


def read_file(path: Path, fields: Fields, foreign: Callable[[], Collection[str]]) -> list[str]:
    """Read options from a TOML file or from the `training_params.json` of a run.

    Args:
        path: The file.
        fields: The options.
        foreign: Returns further keys that are ignored.

    Returns:
        The options as arguments; lists and tables in the form that the command line takes.

    Raises:
        ConfigurationError: The file cannot be read, or holds a key that no program knows.
    """
    try:
        text = read_text(path, follow_links=True)
        content = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        # Both parsers raise a ValueError
        raise ConfigurationError(f"--config {path} cannot be read: {error}") from error
    refuse(
        not isinstance(content, dict),
        f"--config {path} holds no table of options, but a {type(content).__name__}",
    )
    field_by_name = {field.name: field for field in fields}
    arguments = []
    for key, value in content.items():
        name = field_name(key, fields)
        if name not in field_by_name:
            if name not in foreign():
                raise ConfigurationError(f"{path}: {key} is no option{nearest(name, sorted(field_by_name))}")
        elif isinstance(value, bool):
            arguments.append(f"--{'' if value else 'no-'}{dashed(name)}")
        elif value is not None:
            is_argument = field_by_name[name].metadata["argument"]
            text = option_text(value)
            arguments.append(text if is_argument else f"--{dashed(name)}={text}")
    return arguments


def option_text(value: Any) -> str:
    """Return a value as the command line takes it: `a,b` for a list, `name=value,...` for a table.

    >>> option_text(["a", "b"]), option_text({"a": 0.5, "b": 2})
    ('a,b', 'a=0.5,b=2')
    """
    if isinstance(value, dict):
        value = [f"{name}={item}" for name, item in value.items()]
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def set_up_logging(level: str, prefix: str = "", *more: logging.Handler) -> None:
    """Log to stderr, one line per event and without secrets. In a file, each line has a date.

    Args:
        level: Lowest level that is logged.
        prefix: Stands before every message.
        more: Further handlers for the same events.

    Raises:
        ConfigurationError: The level is unknown.
    """
    is_unknown = level.upper() not in logging.getLevelNamesMapping()
    refuse(is_unknown, f"--logging-level {level!r}: use DEBUG, INFO, WARNING or ERROR")
    if sys.stderr.isatty():
        handler: logging.Handler = RichHandler(
            console=Console(stderr=True),
            show_path=False,
            markup=False,
            log_time_format="%H:%M:%S",
        )
        handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s"))
    for further_handler in more:
        further_handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    redact_logs()
    logger = logging.getLogger("async_grpo")
    logger.setLevel(level.upper())
    logger.handlers = [handler, *more]
    logger.propagate = False


def log_to_own_file(name: str) -> None:
    """Write the output of an actor's process into the run's folder of logs, and hide secrets in its logs.

    Ray's own files of the output are deleted with a Ray that belongs to the run. Elsewhere the variable ASYNC_GRPO_LOGS is
    not set, and the output goes where Ray puts it.

    Args:
        name: Kind of the actor, for the name of the file.
    """
    redact_logs()
    folder = os.environ.get("ASYNC_GRPO_LOGS")
    if not folder:
        return
    file = os.open(f"{folder}/{name}-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (STDOUT, STDERR):
        os.dup2(file, stream)
    os.close(file)
    set_up_logging("INFO", f"[{name}] ")
