"""Read options from a file: TOML, flat or with one table per package, or the `training_params.json` of a run.

The packages are the folders of `async_grpo`, such as `training`. Each defines its own options.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import LIST, TABLE, field_name, is_flag, nearest, refuse
from async_grpo.options.file_text import parse_options_file
from async_grpo.options.listed_values import list_text, table_text

PACKAGES = {path.parent.name for path in Path(__file__).resolve().parents[1].glob("*/__init__.py")}


def read_options(
    path: Path, config_class: type, foreign: Callable[[], Mapping[str, Collection[str]]]
) -> dict[str, bool | str | None]:
    """Read options from a file.

    Args:
        path: The file.
        config_class: Dataclass whose fields are the options.
        foreign: Returns the options of other programs, which are ignored: the name of an option -> the packages of this
            library that define it, whose names are the tables of the file.

    Returns:
        The values by field name: booleans for flags, None for null, and for all other options the text that a command
        line would have.

    Raises:
        ConfigurationError: The file cannot be read, contains a key that no program knows, gives an option two values,
            has an option in the table of another package, or a list or a table for an option that takes neither.
    """
    fields = dataclasses.fields(config_class)
    package_by_field = packages_of_fields(config_class)
    field_by_name = {field.name: field for field in fields}
    values: dict[str, bool | str | None] = {}
    packages_by_foreign_name = foreign()
    for table, key, value in _entries(path, {*package_by_field, *packages_by_foreign_name}):
        name = field_name(key, fields)
        is_foreign = name not in package_by_field
        if is_foreign and name not in packages_by_foreign_name:
            known_keys = sorted({*package_by_field, *PACKAGES})
            raise ConfigurationError(f"{path}: {key} is no option{nearest(name, known_keys)}")
        # Several programs may read this file, and may have options of the same name in different packages
        packages = {*packages_by_foreign_name.get(name, ())}
        if not is_foreign:
            packages.add(package_by_field[name])
        is_misplaced = table not in ("", *packages)
        tables = " or ".join(f"[{package}]" for package in sorted(packages))
        right_place = f"the table {tables}" if tables else "no table"
        refuse(is_misplaced, f"{path}: {key} belongs in {right_place}, not in [{table}]")
        if is_foreign:
            continue
        if value is None:
            # null sets an option to None if the option allows None. Otherwise null is ignored
            if type(None) in get_args(field_by_name[name].type):
                values[name] = None
            continue
        # Only flags may be booleans. For an option that is a number, Python would accept True as 1
        is_flag_value = isinstance(value, bool) and is_flag(field_by_name[name])
        _check_form(path, key, value, field_by_name[name].metadata["form"])
        setting = value if is_flag_value else option_text(value)
        is_set_twice = values.get(name, setting) != setting
        refuse(is_set_twice, f"{path}: {name} has two values, {values.get(name)} and {setting} (as {key})")
        values[name] = setting
    return values


def packages_of_fields(config_class: type) -> dict[str, str]:
    """Return for each field name the package that defines the field."""
    package_by_field = {}
    for base in reversed(config_class.__mro__):
        package = base.__module__.removeprefix("async_grpo.").partition(".")[0]
        for name in vars(base).get("__annotations__", {}):
            package_by_field[name] = package
    return {field.name: package_by_field[field.name] for field in dataclasses.fields(config_class)}


def _entries(path: Path, option_names: Collection[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield table, key and value of each option in the file; the table is "" for keys outside of all tables."""
    for key, value in _content(path).items():
        is_table = key in PACKAGES and key not in option_names and isinstance(value, Mapping)
        if not is_table:
            yield "", key, value
            continue
        for key_in_table, value_in_table in value.items():
            yield key, key_in_table, value_in_table


def _check_form(path: Path, key: str, value: Any, form: str) -> None:
    """Raise ConfigurationError if the value is a list or a table that the option does not accept."""
    if isinstance(value, list):
        refuse(
            form != LIST,
            f"{path}: {key} is a list, and {form or 'a single value'} is needed, not {value!r:.80}",
        )
        items = value
    elif isinstance(value, dict):
        refuse(
            form != TABLE,
            f"{path}: {key} is a table, and {form or 'a single value'} is needed, not {value!r:.80}",
        )
        items = list(_leaves(value))
    else:
        return
    for item in items:
        is_single = isinstance(item, str | int | float)
        refuse(not is_single, f"{path}: {key} holds {item!r:.80}, and texts or numbers are needed")


def _leaves(table: Mapping[str, Any]) -> Iterator[Any]:
    for value in table.values():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield value


def _content(path: Path) -> dict[str, Any]:
    content = parse_options_file(path)
    refuse(
        not isinstance(content, dict),
        f"--config {path} holds no table of options, but a {type(content).__name__}",
    )
    return content


def option_text(value: Any) -> str:
    """Return a value as text for the command line: `a,b` for a list, `name=value,...` for a dictionary, else JSON.

    >>> option_text(["a", "b"]), option_text({"a": 0.5, "b": 2})
    ('a,b', 'a=0.5,b=2')
    """
    if isinstance(value, dict):
        return table_text(value)
    if isinstance(value, list | tuple):
        return list_text(value)
    return str(value)
