"""Options: dataclass fields that define the command line, TOML files, help and `docs/options.md`.

This module also parses option values of the form `name=value,...`.
"""

import ast
import dataclasses
import difflib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.errors import ConfigurationError
from async_grpo.options.listed_values import split_table
from async_grpo.options.source_file import is_file

Fields = Sequence["dataclasses.Field[Any]"]
# Values for the argument `form` of `option`. Error messages contain them
LIST = "a list"
TABLE = "a table"
COMMAS = "names and values with a comma are written as a table or a list in a TOML file, or as JSON on the command line"
CONSTANTS = {"true": True, "false": False, "none": None}


class Range(NamedTuple):
    """A condition on a number. All numbers must be finite in addition, unless the option is `unbounded`."""

    says: str  # the condition, as an error message says it after the option's name
    holds: Callable[[float], bool]


POSITIVE = Range("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = Range("cannot be negative", lambda value: value >= 0)
SHARE = Range("is a share between 0 and 1", lambda value: 0 <= value <= 1)
BELOW_ONE = Range("must lie between 0 and 1 (without 1)", lambda value: 0 <= value < 1)
POSITIVE_SHARE = Range("is a share above 0 and at most 1", lambda value: 0 < value <= 1)


def option(
    default: Any,
    help: str,
    panel: str = "Run",
    *,
    range: Range | None = None,
    unbounded: bool = False,
    choices: str | tuple[str, ...] = (),
    takes_file: bool = False,
    everyday: bool = False,
    aliases: tuple[str, ...] = (),
    argument: bool = False,
    repeatable: bool = False,
    form: str = "",
    portable: bool | str | tuple[str, ...] | Mapping[str, float | None] = False,
) -> Any:
    """Make a dataclass field that is also an option of a command.

    Args:
        default: Value if the user does not set the option.
        help: Text for `--help` and `docs/options.md`.
        panel: Heading of the option's group in `--help`.
        range: Condition on the value.
        unbounded: Whether `inf` is allowed, meaning no limit.
        choices: Allowed names, or `module:DICT` for the keys of a registry.
        takes_file: Whether the value may also name an object in the user's own file, as `FILE.py:NAME`.
        everyday: Whether `--help` lists the option first, among the everyday options.
        aliases: Other names of the option, such as ("seed",). A name of one letter is written with one dash, as in
            `-o`.
        argument: Whether the value is a positional argument on the command line.
        repeatable: Whether the command line may repeat the option. The value is then a JSON list of all texts, which
            `listed_values.split_list` reads. The form must be LIST.
        form: LIST or TABLE for a text of comma-separated names or of assignments, `name=value,...`. Only these may be a
            list or a table in a TOML file.
        portable: Which values `eval` and `replay` may take from another run's folder, which is untrusted. False: only
            the default. True: any value, or one of the `choices` if there are any. `module:DICT` or a tuple:
            comma-separated lists of these names. A mapping: texts `name=value,...` with these names, each with its
            maximum (None: no maximum).
    """
    metadata = {
        "help": help,
        "panel": panel,
        "range": range,
        "unbounded": unbounded,
        "choices": choices,
        "takes_file": takes_file,
        "everyday": everyday,
        "aliases": aliases,
        "argument": argument,
        "repeatable": repeatable,
        "form": form,
        "portable": portable,
    }
    return field(default=default, metadata=metadata)


def required(help: str, panel: str = "Run", **settings: Any) -> Any:
    """Make an option without a default; see `option`."""
    return option(dataclasses.MISSING, help, panel, **settings)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base class for the options of one package (`training`, for example).

    It checks single values. The package `config` checks the rules between options.
    """

    def __post_init__(self) -> None:
        """Check the value of every option.

        Raises:
            ConfigurationError: A value is out of its range, or is not one of its choices.
        """
        for option_field in dataclasses.fields(self):
            value = getattr(self, option_field.name)
            if value is not None:
                _check_value(option_field, value)


def _check_value(option_field: "dataclasses.Field[Any]", value: Any) -> None:
    flag = f"--{dashed(option_field.name)}"
    has_nul = isinstance(value, str) and "\0" in value
    refuse(has_nul, f"{flag} {value!r:.80} holds a NUL character: remove it")
    metadata = option_field.metadata
    if isinstance(value, float) and not math.isfinite(value):
        is_allowed = metadata["unbounded"] and math.isinf(value)
        refuse(not is_allowed, f"{flag} {value}: it must be a finite number")
    allowed_range = metadata["range"]
    if allowed_range is not None:
        refuse(not allowed_range.holds(value), f"{flag} {allowed_range.says}, not {value}")
    choices = choices_of(option_field)
    is_own = metadata["takes_file"] and is_file(value)
    if choices and value not in choices and not is_own:
        raise ConfigurationError(
            f"{flag} {value!r} is unknown; known: {', '.join(choices)}{nearest(value, choices)}"
        )


def choices_of(option_field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """Return the allowed values of an option; () if any text is allowed.

    If `choices` names a registry (`module:DICT`), the allowed values are its keys. A module that is not imported yet is
    only parsed, because importing it may import torch.
    """
    return names_in(option_field.metadata["choices"])


def names_in(choices: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in a tuple, or the keys of the dictionary `module:DICT`."""
    if not isinstance(choices, str):
        return choices
    module, _, name = choices.partition(":")
    if module in sys.modules and hasattr(sys.modules[module], name):
        return tuple(getattr(sys.modules[module], name))
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"there is no module {module}"
    table = None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            table = node.value
    assert isinstance(table, ast.Dict), f"{choices} is no table of names"
    return tuple(str(key.value) for key in table.keys if isinstance(key, ast.Constant))


def fields_in_order(config_class: type) -> Fields:
    """Return all options: first the required ones, then the everyday ones, then the others, grouped by panel."""
    fields = dataclasses.fields(config_class)
    panels = list(dict.fromkeys(field.metadata["panel"] for field in fields))

    def sort_key(field: "dataclasses.Field[Any]") -> tuple[bool, bool, int]:
        is_optional = field.default is not dataclasses.MISSING
        is_everyday = field.metadata["everyday"]
        return is_optional, not is_everyday, panels.index(field.metadata["panel"])

    return sorted(fields, key=sort_key)


def field_name(spelling: str, fields: Fields) -> str:
    """Return the field's name for a spelling or alias; unknown names are returned with underscores."""
    name = spelling.replace("-", "_")
    for option_field in fields:
        if name in option_field.metadata["aliases"]:
            return option_field.name
    return name


def panel_of(option_field: "dataclasses.Field[Any]") -> str:
    """Return the heading of the group in which `--help` lists an option."""
    return "Everyday options" if option_field.metadata["everyday"] else option_field.metadata["panel"]


def help_of(option_field: "dataclasses.Field[Any]") -> str:
    """Return the help of an option, followed by its allowed values."""
    choices = choices_of(option_field)
    names = f" One of: {', '.join(choices)}." if choices else ""
    return option_field.metadata["help"] + names


def is_flag(option_field: "dataclasses.Field[Any]") -> bool:
    """Return whether an option is given as --x or --no-x, without a value."""
    return option_field.type in (bool, bool | None)


def spellings_of(option_field: "dataclasses.Field[Any]") -> list[str]:
    """Return the option's names as written on a command line: the field's name first, then the aliases."""
    spellings = []
    for name in (option_field.name, *option_field.metadata["aliases"]):
        if len(name) == 1:
            spellings.append(f"-{name}")
        elif is_flag(option_field):
            spellings.append(f"--{dashed(name)}/--no-{dashed(name)}")
        else:
            spellings.append(f"--{dashed(name)}")
    return spellings


def nearest(name: Any, names: Iterable[str]) -> str:
    """Return "; did you mean ...?" with those of the names that resemble `name`; "" if none does."""
    close = difflib.get_close_matches(str(name), list(names))
    return f"; did you mean {', '.join(close)}?" if close else ""


def parse_assignments(text: str, flag: str) -> dict[str, Any]:
    """Parse `name=value,name=value` into a dictionary; numbers, true, false and none become Python values.

    Args:
        text: The value of the option.
        flag: Name of the option, for messages.

    Raises:
        ConfigurationError: The text has another form, or a name occurs twice.

    >>> parse_assignments("cap=5, cap_mode=clamp, normalize=false", "loss-options")
    {'cap': 5, 'cap_mode': 'clamp', 'normalize': False}
    """
    assignments: dict[str, Any] = {}
    for name, value in split_table(text, flag):
        is_incomplete = not name or value == ""
        refuse(
            is_incomplete, f"--{flag} {text!r}: {name or f'={value}'!r} is not name=value{_comma_hint(text)}"
        )
        refuse(name in assignments, f"--{flag} {text!r}: {name} is given twice")
        assignments[name] = _value(value) if isinstance(value, str) else value
    return assignments


def _comma_hint(text: str) -> str:
    """Return a hint on how to write a value with a comma; "" if the text probably contains no such value."""
    return f"; {COMMAS}" if "=" in text and "," in text else ""


def parse_numbers(text: str, flag: str) -> dict[str, float]:
    """Parse `name=number,...` into a dictionary; see `parse_assignments`."""
    numbers = parse_assignments(text, flag)
    for name, value in numbers.items():
        refuse(not is_number(value), f"--{flag} {text!r}: {name}={value} is no finite number")
    return numbers


def is_number(value: Any) -> bool:
    """Return whether the value is a finite number, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _value(text: str) -> Any:
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def dashed(name: str) -> str:
    """Return the name with dashes instead of underscores."""
    return name.replace("_", "-")


def refuse(condition: bool, message: str) -> None:
    """Raise ConfigurationError with the message if the condition is true."""
    if condition:
        raise ConfigurationError(message)
