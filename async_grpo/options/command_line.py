"""Command lines made from the configuration dataclasses by Typer, with one option per field.

Option names may be written with dashes or underscores. A retired option is accepted with a warning. An unknown option
is an error.
"""

import dataclasses
import errno
import inspect
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, get_args

import typer
from rich.markup import escape
from typer.core import TyperCommand

from async_grpo.errors import AsyncGrpoError, ConfigurationError, RunFailed
from async_grpo.options.fields import (
    Fields,
    choices_of,
    dashed,
    field_name,
    fields_in_order,
    help_of,
    is_flag,
    nearest,
    panel_of,
    spellings_of,
)
from async_grpo.options.file_text import YAML_ENDINGS
from async_grpo.options.listed_values import repeated_arguments
from async_grpo.options.option_file import read_options
from async_grpo.options.plain_flags import FlagsWithoutType
from async_grpo.options.redaction import redacted

CONFIG_HELP = (
    "TOML file of options, or the training_params.json of a run. It may be given several times. The command line "
    "overrides the file."
)
TRUTH = {"true": True, "1": True, "false": False, "0": False}
EXIT_BY_SIGINT = 130
# Errors for a full disk, a used-up quota, and a read-only file system
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
MIN_HELP_COLUMNS = 120  # in narrower terminals, `--help` would cut names of options
NARROW_HINT = (
    f"A terminal of {MIN_HELP_COLUMNS} columns shows all names in full; docs/options.md has them, too."
)
# Typer's names of the sources from which a value that the user has set may come: command line, or file of options
SET_BY_USER = ("COMMANDLINE", "DEFAULT_MAP")


class ParsedCommand(NamedTuple):
    """A program that has not started yet, and the configuration from its command line."""

    run: Callable[[Any], None]
    config: Any


class OptionsCommand(FlagsWithoutType, TyperCommand):
    """A command whose options are the fields of a dataclass."""

    fields: Fields = ()
    retired: Mapping[str, str] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Old spellings and retired options are accepted."""
        if "--help" in args and not ctx.resilient_parsing:
            # Typer answers `--help` before it checks options, so the help is also shown if an option is wrong
            self.epilog = _fit_help()
            return super().parse_args(ctx, ["--help"])
        # When a shell asks for completions, the command line may be incomplete, and `normalized` could fail
        arguments = args if ctx.resilient_parsing else normalized(args, self.fields, self.retired)
        try:
            return super().parse_args(ctx, arguments)
        except typer.BadParameter as error:
            name = error.param.name if error.param is not None else None
            source = ctx.get_parameter_source(name) if name is not None else None
            if source is None or source.name != "DEFAULT_MAP":
                raise
            raise ConfigurationError(f"{ctx.obj[name]}: {error.format_message()}") from error


def options_command(
    config_class: type,
    run: Callable[[Any], None],
    *,
    name: str = "program",
    help: str = "",
    retired: Mapping[str, str] | None = None,
    foreign: Callable[[], Mapping[str, Collection[str]]] = dict,
) -> OptionsCommand:
    """Return a command with one option for each field of a dataclass. Calling it returns a `ParsedCommand`.

    Args:
        config_class: Dataclass whose fields are the options.
        run: The program, which takes the configuration.
        name: Name of the command.
        help: What the program does, for `--help`.
        retired: Hint about the replacement of each retired option, by name. Flags cannot be retired in this way.
        foreign: Returns the options of other programs, which a `--config` file may contain, too (see `read_options`).
    """
    fields = fields_in_order(config_class)

    def parsed(context: typer.Context, config: Any, **options: Any) -> ParsedCommand:
        set_by_user = set()
        for field in fields:
            source = context.get_parameter_source(field.name)
            if source is not None and source.name in SET_BY_USER:
                set_by_user.add(field.name)
            elif context.obj.get(field.name) is not None:
                # The file sets this option to null (None). Without this line, Typer would use the default instead
                set_by_user.add(field.name)
                options[field.name] = None
        if hasattr(config_class, "from_options"):
            return ParsedCommand(run, config_class.from_options(options, set_by_user))
        return ParsedCommand(run, config_class(**options))

    def read_files(context: typer.Context, files: list[str] | None) -> list[str] | None:
        if not context.resilient_parsing:
            values: dict[str, Any] = {}
            file_by_name: dict[str, str] = {}
            for file in files or []:
                content = read_options(Path(file), config_class, foreign)
                values.update(content)
                file_by_name.update(dict.fromkeys(content, file))
            context.default_map = values
            context.obj = file_by_name
        return files

    # Typer makes the options from the signature of `parsed`
    signature = _signature(fields, read_files)
    parsed.__signature__ = signature  # type: ignore[attr-defined]
    parsed.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    settings = {"token_normalize_func": dashed}
    app.command(name, help=escape(help), cls=OptionsCommand, context_settings=settings)(parsed)
    command = typer.main.get_command(app)
    assert isinstance(command, OptionsCommand)
    command.fields = fields
    command.retired = retired or {}
    return command


def _signature(fields: Fields, read_files: Callable[..., Any]) -> inspect.Signature:
    """Return a signature with Typer's context, the option `--config`, and one parameter for each field."""
    config_option = typer.Option(
        "--config",
        metavar="FILE",
        help=CONFIG_HELP,
        is_eager=True,
        callback=read_files,
    )
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[list[str] | None, config_option],
    )
    return inspect.Signature([context, config, *(_parameter(field) for field in fields)])


def _parameter(field: "dataclasses.Field[Any]") -> inspect.Parameter:
    """Return the function parameter from which Typer makes the option of a field."""
    is_required = field.default is dataclasses.MISSING

    def complete(incomplete: str) -> list[str]:
        return [name for name in choices_of(field) if name.startswith(incomplete)]

    if field.metadata["argument"]:
        info: Any = typer.Argument(metavar=field.name.upper(), help=escape(help_of(field)))
    else:
        info = typer.Option(
            *spellings_of(field),
            parser=_number_parser(field),
            metavar="" if is_flag(field) else _value_type(field).__name__.upper(),
            help=escape(help_of(field)),
            rich_help_panel=panel_of(field),
            show_default=field.default not in (None, ""),
            autocompletion=complete,
        )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if is_required else field.default,
        annotation=Annotated[field.type, info],
    )


def _value_type(field: "dataclasses.Field[Any]") -> Any:
    """Return the type of a field's values without `None`: `float` for `float | None`."""
    types = get_args(field.type)
    return types[0] if types else field.type


def _number_parser(field: "dataclasses.Field[Any]") -> Callable[[str], Any] | None:
    """Return a parser for a field of numbers, else None. Unlike Typer's, its error shows the wrong value."""
    value_type = _value_type(field)
    if value_type not in (int, float):
        return None

    def parse(text: str) -> Any:
        try:
            return value_type(text)
        except ValueError as error:
            kind = "a whole number" if value_type is int else "a number"
            raise typer.BadParameter(f"{text!r} is not {kind}") from error

    return parse


def run_command(
    config_class: type,
    run: Callable[[Any], None],
    *,
    help: str,
    retired: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
    program: str | None = None,
    foreign: Callable[[], Mapping[str, Collection[str]]] = dict,
) -> None:
    """Parse the command line into a configuration, run the program with it, and exit; see `options_command`."""
    command = options_command(config_class, run, help=help, retired=retired, foreign=foreign)
    run_app(command, argv, program)


def group_of(app: typer.Typer, name: str) -> Any:
    """Return the commands of a Typer app as one group of commands with this name."""
    group = typer.main.get_group(app)
    group.name = name
    return group


def run_app(command: Any, argv: Sequence[str] | None, program: str | None) -> None:
    """Run a command of Typer, and exit.

    The exit code is 0 on success, 2 for a usage error, and 130 after Ctrl-C. An `AsyncGrpoError` has its own exit code,
    and its message is printed on one line.

    Args:
        command: The command, or group of commands.
        argv: The arguments. None takes the arguments of this process.
        program: Name of the program in `--help`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        result = command.main(args=arguments, prog_name=program, standalone_mode=False)
        if isinstance(result, ParsedCommand):
            # Run the program outside of Typer's `main`. Inside, Typer would think that a broken pipe of the program is
            # its own
            result.run(result.config)
    except AsyncGrpoError as error:
        _end_with_error(str(error), error.exit_code, error)
    except typer.TyperException as error:
        message = error.format_message()
        context = getattr(error, "ctx", None)
        if not message:
            # If the error has no message, Typer has already shown the help
            raise SystemExit(error.exit_code) from error
        if context is not None:
            message = f"{message.rstrip('.')}; see {context.command_path} --help"
        _end_with_error(message, error.exit_code, error)
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        raise SystemExit(EXIT_BY_SIGINT) from interrupt
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        place = error.filename or "the output"
        message = f"{place} cannot be written: {error.strerror}; free some space, or choose another place"
        _end_with_error(message, RunFailed.exit_code, error)
    raise SystemExit(result if isinstance(result, int) else 0)


def _end_with_error(message: str, exit_code: int, error: Exception) -> NoReturn:
    print(redacted(f"error: {message}"), file=sys.stderr, flush=True)
    raise SystemExit(exit_code) from error


def normalized(arguments: Sequence[str], fields: Fields, retired: Mapping[str, str]) -> list[str]:
    """Return the arguments in the spelling that Typer knows.

    The first argument may be a file of options without `--config`: `async-grpo run run.toml`.

    Args:
        arguments: The arguments as the user wrote them.
        fields: The options.
        retired: Hint about the replacement of each retired option, by name.

    Raises:
        ConfigurationError: An option is unknown, or its value is missing.
    """
    flags = {field.name for field in fields if is_flag(field)}
    repeatable = [field.name for field in fields if field.metadata["repeatable"]]
    texts_by_name: dict[str, list[str]] = {name: [] for name in repeatable}
    remaining = list(arguments)
    result = []
    if remaining and _is_config_file(remaining[0], fields):
        result.append(f"--config={remaining.pop(0)}")
    while remaining:
        argument = remaining.pop(0)
        if argument == "--":
            return [*result, *repeated_arguments(texts_by_name), argument, *remaining]
        spelling, equals, value = argument.partition("=")
        if not spelling.startswith("--"):
            result.append(_positional_or_short(argument, remaining, fields))
            continue
        name = field_name(spelling.removeprefix("--"), fields)
        flag = name.removeprefix("no_")
        has_next_value = not equals and bool(remaining) and not remaining[0].startswith("--")
        if flag in retired:
            successor = retired[flag]
            print(f"warning: --{dashed(name)} has no effect any more: {successor}", file=sys.stderr)
            if has_next_value:
                remaining.pop(0)
            continue
        _refuse_unknown(spelling, name, fields)
        if name in ("help", *flags) or flag in flags:
            if name in flags and has_next_value and remaining[0].lower() in TRUTH:
                value = remaining.pop(0)
            if equals or value:
                if name not in flags or value.lower() not in TRUTH:
                    raise ConfigurationError(
                        f"{argument}: a flag is given as --x, --no-x, --x=true or --x=false"
                    )
                name = name if TRUTH[value.lower()] else f"no_{name}"
            result.append(f"--{dashed(name)}")
            continue
        if has_next_value:
            value = remaining.pop(0)
        elif not equals:
            raise ConfigurationError(f"{spelling} needs a value")
        if name in texts_by_name:
            texts_by_name[name].append(value)
            continue
        # Name and value are one argument, so that the value may begin with a dash
        result.append(f"--{dashed(name)}={value}")
    return [*result, *repeated_arguments(texts_by_name)]


def _positional_or_short(argument: str, remaining: list[str], fields: Fields) -> str:
    """Return a positional argument unchanged, and a one-letter option in the form `--name=value`.

    The value of the option is removed from `remaining`, the arguments that follow.

    Raises:
        ConfigurationError: The option is unknown, or its value is missing.
    """
    if not argument.startswith("-") or argument == "-":
        return argument
    letters = {alias for field in fields for alias in field.metadata["aliases"] if len(alias) == 1}
    if argument.removeprefix("-") not in letters:
        raise ConfigurationError(
            f"{argument} is no option: write --name VALUE, or -x VALUE with a space between"
        )
    if not remaining or remaining[0].startswith("-"):
        raise ConfigurationError(f"{argument} needs a value")
    name = field_name(argument.removeprefix("-"), fields)
    return f"--{dashed(name)}={remaining.pop(0)}"


def _fit_help() -> str | None:
    """Choose the width of the help text, and return a hint if option names are cut.

    If the output goes to a pipe, it has no width, and Typer would assume 80 columns. It would cut long option names,
    and a search in the output would not find them.
    """
    columns = shutil.get_terminal_size().columns
    if sys.stdout.isatty():
        return NARROW_HINT if columns < MIN_HELP_COLUMNS else None
    from typer import rich_utils  # Import this here, because only the help needs these parts of rich

    rich_utils.MAX_WIDTH = max(MIN_HELP_COLUMNS, columns)
    return None


def _refuse_unknown(spelling: str, name: str, fields: Fields) -> None:
    """Raise ConfigurationError if there is no such option."""
    names = {"help", "config"}
    for field in fields:
        if field.metadata["argument"]:
            continue
        names.add(field.name)
        if is_flag(field):
            names.add(f"no_{field.name}")
    if name not in names:
        known_spellings = {f"--{dashed(known_name)}" for known_name in names}
        raise ConfigurationError(f"{spelling} is no option{nearest(spelling, sorted(known_spellings))}")


def _is_config_file(argument: str, fields: Fields) -> bool:
    """Return whether the first argument is a file of options."""
    # If the program takes a positional argument, a .json file in first place may be this argument
    takes_argument = any(field.metadata["argument"] for field in fields)
    # YAML files are in the list so that they are read as files of options. This fails with a message that helps
    endings = (".toml",) if takes_argument else (".toml", ".json", *YAML_ENDINGS)
    return argument.endswith(endings) and not argument.startswith("-")
