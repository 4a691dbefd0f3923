"""A dataclass field as an option of command line, TOML file, help and `docs/options.md`; and `name=value,...`."""

import ast
import dataclasses
import difflib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.errors import ConfigurationError
from async_grpo.options.source_file import is_file

CONSTANTS = {"true": True, "false": False, "none": None}


class Range(NamedTuple):
    """What a number may be, beside being finite."""

    says: str
    holds: Callable[[float], bool]


POSITIVE = Range("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = Range("cannot be negative", lambda value: value >= 0)
SHARE = Range("is a share between 0 and 1", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("is a share above 0 and at most 1", lambda value: 0 < value <= 1)


def option(
    default: Any,
    help: str,
    panel: str = "Run",
    *,
    range: Range | None = None,
    unbounded: bool = False,
    choices: str | tuple[str, ...] = (),
    own: bool = False,
    everyday: bool = False,
    also: str = "",
    argument: bool = False,
    portable: bool | str | tuple[str, ...] | Mapping[str, float | None] = False,
) -> Any:
    """A dataclass field that is also an option of a command.

    Args:
        panel: the heading in `--help`; `everyday` options stand before all panels.
        unbounded: `inf` is a value: a bound that bounds nothing.
        choices: the names that it may have, or `module:DICT` for a registry's keys.
        own: one of the user's own may be named as well, by `FILE.py:NAME`.
        also: another spelling.
        argument: on the command line it is given without a dash.
        portable: whether `eval` and `replay` may take the value from the folder of another run, which may be somebody
            else's: it describes the run, and names no code, address, file or command. Of `choices` only the shipped ones
            are taken; a `module:DICT` or a tuple says which names of a comma list are. A table says which names of
            `name=value,...` are, and the largest value of those that are a limit.
    """
    metadata = {"help": help, "panel": panel, "range": range, "unbounded": unbounded, "choices": choices, "own": own,
                "everyday": everyday, "also": also, "argument": argument, "portable": portable}  # fmt: skip
    return field(default=default, metadata=metadata)


def required(help: str, panel: str = "Run", **more: Any) -> Any:
    """An option without a default."""
    return option(dataclasses.MISSING, help, panel, **more)


@dataclass(frozen=True, kw_only=True)
class Section:
    """The options of one room. Its own single values are checked here; rules between two stand in `config`."""

    def __post_init__(self) -> None:
        """Raise ConfigurationError for a value that is out of its range or is none of its choices."""
        for one in dataclasses.fields(self):
            flag, value, told = f"--{dashed(one.name)}", getattr(self, one.name), one.metadata
            if value is None:
                continue
            if isinstance(value, float) and not math.isfinite(value):
                bounds_nothing = told["unbounded"] and math.isinf(value)
                refuse(not bounds_nothing, f"{flag} {value}: it must be a finite number")
            if (range := told["range"]) is not None:
                refuse(not range.holds(value), f"{flag} {range.says}, not {value}")
            if (known := choices_of(one)) and value not in known and not (told["own"] and is_file(value)):
                names = f"{', '.join(known)}{nearest(value, known)}"
                raise ConfigurationError(f"{flag} {value!r} is unknown; known: {names}")


def choices_of(one: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """The names that an option may have; () where it is free.

    Of a registry, `module:DICT`, its keys. A module that is not imported yet is read, not run: it may need torch.
    """
    return names_in(one.metadata["choices"])


def names_in(choices: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a tuple, or the keys of the table `module:DICT`."""
    if not isinstance(choices, str):
        return choices
    module, _, name = choices.partition(":")
    if module in sys.modules and hasattr(sys.modules[module], name):
        return tuple(getattr(sys.modules[module], name))
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"there is no module {module}"
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    tables = {ast.unparse(node.target): node.value for node in body if isinstance(node, ast.AnnAssign)}
    table = tables[name]
    assert isinstance(table, ast.Dict), f"{choices} is no table of names"
    return tuple(str(key.value) for key in table.keys if isinstance(key, ast.Constant))


def nearest(name: Any, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing."""
    close = difflib.get_close_matches(str(name), list(known))
    return f"; did you mean {', '.join(close)}?" if close else ""


def parse_assignments(text: str, flag: str) -> dict[str, Any]:
    """`name=value,name=value` -> a dict; numbers and true/false/none become what they say.

    >>> parse_assignments("cap=5, cap_mode=clamp, normalize=false", "loss-options")
    {'cap': 5, 'cap_mode': 'clamp', 'normalize': False}
    """
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        refuse(not (name and equals and value), f"--{flag} {text!r}: {part!r} is not name=value")
        refuse(name in found, f"--{flag} {text!r}: {name} is given twice")
        found[name] = _value(value)
    return found


def parse_numbers(text: str, flag: str) -> dict[str, float]:
    """`name=number,...` -> a dict."""
    found = parse_assignments(text, flag)
    for name, value in found.items():
        refuse(not is_number(value), f"--{flag} {text!r}: {name}={value} is no finite number")
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _value(text: str) -> Any:
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def dashed(name: str) -> str:
    return name.replace("_", "-")


def refuse(condition: bool, message: str) -> None:
    """Raise ConfigurationError with the message if the condition holds."""
    if condition:
        raise ConfigurationError(message)
