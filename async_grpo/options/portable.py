"""Take options from another run's folder, except those that could name code, a command or an address.

`async-grpo eval` reads a checkpoint's manifest, and `replay` a run's parameters. Options that the user does not give
are taken from that file. The folder is untrusted, because it may come from anybody. The definition of an option says
whether it is `portable`; by default it is not. Text options that are not portable could name code, a command or an
address, so the user must give them.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from shlex import quote
from typing import Any, get_args

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import choices_of, dashed, is_number, names_in, parse_assignments
from async_grpo.processes.untrusted_files import is_text, printable

MAX_VALUE_CHARACTERS = 10_000
# Maximum of a number that is taken from a folder. It limits tokens, turns and seconds, because many options have no
# maximum of their own
LARGEST_NUMBER = 1e9
SHOWN_CHARACTERS = 200  # number of characters of a refused value that an error message shows


def portable_options(
    config_class: type,
    recorded_options: Mapping[str, Any],
    names: Collection[str],
    folder: Path,
) -> dict[str, Any]:
    """Return the options of a recorded run that the current command may take over.

    Args:
        config_class: Dataclass whose fields are the options.
        recorded_options: Options from the run's folder, by field name.
        names: Names of the options that the user has not set.
        folder: Folder of the run, for messages.

    Raises:
        ConfigurationError: A value does not fit its option, or is a text that only the user may choose.
    """
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.name in names}
    options: dict[str, Any] = {}
    refused: dict[str, Any] = {}
    ignored_assignments: list[str] = []
    for name in sorted(fields.keys() & recorded_options.keys()):
        field = fields[name]
        value = recorded_options[name]
        _refuse_other_kind(field, value, folder)
        if value == field.default or value in (None, "") or _may_travel(field, value):
            options[name] = value
        elif isinstance(value, str):
            refused[name] = value
        else:
            ignored_assignments.append(f"{name}={value}")
    refuse_named(refused, folder)
    if ignored_assignments:
        print(f"not taken over from the run of {folder}: {' '.join(ignored_assignments)}", flush=True)
    return options


def _refuse_other_kind(field: "dataclasses.Field[Any]", value: Any, folder: Path) -> None:
    """Raise ConfigurationError for a value of the wrong type, and for a number above `LARGEST_NUMBER`."""
    kinds = get_args(field.type) or (field.type,)
    may_be_missing = type(None) in kinds or field.default is None
    fits = (value is None and may_be_missing) or any(_is_of(kind, value) for kind in kinds)
    if not fits:
        kind = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise ConfigurationError(
            f"the run of {folder} says {field.name} = {value!r:.80}, which is no {kind}: give "
            f"--{dashed(field.name)} yourself"
        )
    # Infinity means no limit. The check of the option itself says whether it is allowed
    is_finite = isinstance(value, int | float) and not math.isinf(value)
    if is_finite and value != field.default and abs(value) > LARGEST_NUMBER:
        raise ConfigurationError(
            f"the run of {folder} says {field.name} = {value!r:.80}, but at most {LARGEST_NUMBER:g} is taken over: give "
            f"--{dashed(field.name)} yourself"
        )


def _is_of(kind: Any, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if kind is str:
        return is_text(value) and len(value) <= MAX_VALUE_CHARACTERS and "\0" not in value
    return type(value) is kind


def _may_travel(field: "dataclasses.Field[Any]", value: Any) -> bool:
    portable = field.metadata["portable"]
    if not portable:
        return False
    if isinstance(portable, Mapping):
        assignments = parse_assignments(value, dashed(field.name))
        return all(_is_allowed(portable, name, assigned) for name, assigned in assignments.items())
    if portable is not True:
        names = [name.strip() for name in str(value).split(",")]
        return set(names) <= set(names_in(portable))
    choices = choices_of(field)
    return not choices or value in choices


def _is_allowed(largest_values: Mapping[str, float | None], name: str, value: Any) -> bool:
    """Return whether `name=value` may be taken over from the other run.

    Args:
        largest_values: The allowed names, each with its largest allowed value, or None if every value is allowed.
        name: The name.
        value: The value.
    """
    if name not in largest_values:
        return False
    largest = largest_values[name]
    return largest is None or (is_number(value) and 0 < value <= largest)


def refuse_named(refused: Mapping[str, str], folder: Path) -> None:
    """Raise ConfigurationError if `refused` is not empty.

    It contains options of the run in `folder` that only the user may set.
    """
    if not refused:
        return
    flags = []
    for name, value in refused.items():
        value_text = quote(printable(value[:SHOWN_CHARACTERS]))
        flags.append(f"--{dashed(name)} {value_text}")
    names = ", ".join(f"--{dashed(name)}" for name in refused)
    raise ConfigurationError(
        f"the run of {folder} used {' '.join(flags)}. These values are not taken from a folder, which may be somebody "
        f"else's, because they could name code, a command, a file or an address, or loosen a sandbox or a limit: "
        f"give {names} yourself, with this value or another"
    )
