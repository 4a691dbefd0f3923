"""Command lines built from the configuration dataclasses: one option per field, nothing typed twice.

Dashes and underscores are alike; a retired option is accepted with a warning, an unknown one is an error.
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

    Exit codes: 0, that of an error of the library, which is told in one line, and 2 for a usage error.

    Args:
        retired: option name (with underscores) -> what replaced it. All of them took a value.
        foreign: keys of other programs that a `--config` file may hold as well; they are passed over.
    """
    fields = fields_in_order(config_class)
    parser = _parser(fields, help + CONFIG_HELP, program)
    make = getattr(config_class, "from_options", lambda options, given: config_class(**options))
    try:
        arguments, files = normalized(sys.argv[1:] if argv is None else argv, fields, retired or {})
        stored = [one for file in files for one in read_file(Path(file), fields, foreign)]
        known = {option for group in parser._actions for option in group.option_strings}
        for word in [*stored, *arguments]:  # before argparse, which first asks for what is missing
            name = word.partition("=")[0]
            if name[:2] == "--" and name not in known:
                raise ConfigurationError(f"{name} is no option{nearest(name, sorted(known))}")
        found, unknown = parser.parse_known_args([*stored, *arguments])
        refuse(bool(unknown), f"{' '.join(unknown)} is no option, and no value of one")
        run(make({field.name: field.default for field in fields} | vars(found), vars(found).keys()))
    except AsyncGrpoError as error:
        print(redacted(f"error: {error}"), file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt as interrupt:
        raise SystemExit(130) from interrupt
    raise SystemExit(0)


def fields_in_order(config_class: type) -> Fields:
    """Those that must be given, the everyday ones, and the others panel by panel."""
    fields = dataclasses.fields(config_class)
    panels = list(dict.fromkeys(field.metadata["panel"] for field in fields))

    def place(field: "dataclasses.Field[Any]") -> tuple[bool, bool, int]:
        optional = field.default is not dataclasses.MISSING
        return optional, not field.metadata["everyday"], panels.index(field.metadata["panel"])

    return sorted(fields, key=place)


def panel_of(field: "dataclasses.Field[Any]") -> str:
    """The heading below which an option stands."""
    return "Everyday options" if field.metadata["everyday"] else field.metadata["panel"]


def _parser(fields: Fields, help: str, program: str | None) -> argparse.ArgumentParser:
    how: Any = {"argument_default": argparse.SUPPRESS, "allow_abbrev": False}
    parser = argparse.ArgumentParser(program, "%(prog)s [options]", help, **how)
    panels = {panel: parser.add_argument_group(panel) for panel in map(panel_of, fields)}
    for field in fields:
        kind: Any = next(iter(get_args(field.type)), field.type)  # `float` of `float | None`
        form: dict[str, Any] = {"type": kind, "metavar": kind.__name__.upper()}
        if kind is bool:
            form = {"action": argparse.BooleanOptionalAction}
        name, said = f"--{dashed(field.name)}", help_of(field).replace("%", "%%")
        if field.metadata["argument"]:
            name, form = field.name, {"metavar": field.name.upper()}
        elif field.default is dataclasses.MISSING:
            form["required"], said = True, f"{said} [required]"
        elif field.default not in (None, ""):
            said += f" [default: {field.default}]"
        short = [f"-{also}"] if len(also := field.metadata["also"]) == 1 else []
        panels[panel_of(field)].add_argument(*short, name, help=said, **form)
    return parser


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
    has_argument = any(field.metadata["argument"] for field in fields)  # which may be a .json itself
    endings = (".toml",) if has_argument else (".toml", ".json")
    if arguments and arguments[0].endswith(endings) and arguments[0][0] != "-":
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
        elif name in flags or not (equals or follower):
            kept.append(f"--{dashed(name)}{equals}{value if equals else ''}")
            continue
        else:  # joined, or argparse would take -1e-3 for an option
            kept.append(f"--{dashed(name)}={value}")
        del arguments[: len(follower)]
    return kept, files


def field_name(spelling: str, fields: Fields) -> str:
    """The field that a spelling stands for; any other name with underscores."""
    name = spelling.replace("-", "_")
    return next((field.name for field in fields if field.metadata["also"] == name), name)


def read_file(path: Path, fields: Fields, foreign: Callable[[], Collection[str]]) -> list[str]:
    """What a TOML file or a run's `training_params.json` says, as arguments; lists and tables as the text of options.

    ConfigurationError: the file cannot be read, or holds a key that no program knows.
    """
    try:
        text = read_text(path, follow_links=True)
        content = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: what both parsers raise
        raise ConfigurationError(f"--config {path} cannot be read: {error}") from error
    kind = type(content).__name__
    refuse(not isinstance(content, dict), f"--config {path} holds no table of options, but a {kind}")
    known, arguments = {field.name: field for field in fields}, []
    for key, value in content.items():
        if (name := field_name(key, fields)) not in known:
            if name not in foreign():
                raise ConfigurationError(f"{path}: {key} is no option{nearest(name, sorted(known))}")
        elif isinstance(value, bool):
            arguments.append(f"--{'' if value else 'no-'}{dashed(name)}")
        elif value is not None:
            text = option_text(value)
            arguments.append(text if known[name].metadata["argument"] else f"--{dashed(name)}={text}")
    return arguments


def option_text(value: Any) -> str:
    """Return a list or a table as the text of an option.

    >>> option_text(["a", "b"]), option_text({"a": 0.5, "b": 2})
    ('a,b', 'a=0.5,b=2')
    """
    if isinstance(value, dict):
        value = [f"{name}={item}" for name, item in value.items()]
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def set_up_logging(level: str, prefix: str = "", *more: logging.Handler) -> None:
    """One readable line per event on stderr, without secrets, with a date in a file; `more` handlers get the same events.

    ConfigurationError: an unknown level.
    """
    unknown = level.upper() not in logging.getLevelNamesMapping()
    refuse(unknown, f"--logging-level {level!r}: use DEBUG, INFO, WARNING or ERROR")
    shown: logging.Handler = logging.StreamHandler()
    form = f"%(asctime)s %(levelname)s {prefix}%(message)s"
    if sys.stderr.isatty():
        console = Console(stderr=True)
        shown = RichHandler(console=console, show_path=False, markup=False, log_time_format="%H:%M:%S")
        form = f"{prefix}%(message)s"
    shown.setFormatter(logging.Formatter(form))
    for one in more:
        one.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    redact_logs()
    root = logging.getLogger("async_grpo")
    root.setLevel(level.upper())
    root.handlers, root.propagate = [shown, *more], False


def log_to_own_file(name: str) -> None:
    """Of an actor of a run's private Ray: what its process says, and what it starts, goes beside the run's other logs.

    Ray's own files of it end with that Ray. Elsewhere, without the variable, it goes where Ray puts it; secrets go nowhere.
    """
    redact_logs()
    if folder := os.environ.get("ASYNC_GRPO_LOGS"):
        file = os.open(f"{folder}/{name}-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)
        set_up_logging("INFO", f"[{name}] ")
