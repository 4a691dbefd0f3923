"""Read options from a file: TOML, flat or with one table per package, or the `training_params.json` of a run.

The packages are the folders of `async_grpo`, such as `training`. Each defines its own options.
"""

import dataclasses
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import field_name, is_flag, nearest, refuse
from async_grpo.processes.untrusted_files import parse_json, read_text

PACKAGES = {path.parent.name for path in Path(__file__).resolve().parents[1].glob("*/__init__.py")}


def read_options(
    path: Path, config_class: type, foreign: Callable[[], Collection[str]]
) -> dict[str, bool | str | None]:
    """Read options from a file.

    Args:
        path: The file.
        config_class: Dataclass whose fields are the options.
        foreign: Returns the option names of other programs, which are ignored.

    Returns:
        The values by field name: booleans for flags, None for null, and for all other options the text that a command
        line would have.

    Raises:
        ConfigurationError: The file cannot be read, contains a key that no program knows, gives an option two values,
            or has an option in the table of another package.
    """
    fields = dataclasses.fields(config_class)
    package_by_field = packages_of_fields(config_class)
    type_by_field = {field.name: field.type for field in fields}
    flags = {field.name for field in fields if is_flag(field)}
    values: dict[str, bool | str | None] = {}
    for table, key, value in _entries(path, {*package_by_field, *foreign()}):
        name = field_name(key, fields)
        if name not in package_by_field:
            if name not in foreign():
                known_keys = sorted({*package_by_field, *PACKAGES})
                raise ConfigurationError(f"{path}: {key} is no option{nearest(name, known_keys)}")
            continue
        package = package_by_field[name]
        is_misplaced = table not in ("", package)
        refuse(is_misplaced, f"{path}: {key} belongs in the table [{package}], not in [{table}]")
        if value is None:
            # null is a value of an option that may be None. For other options, null is ignored
            if type(None) in get_args(type_by_field[name]):
                values[name] = None
            continue
        # Only flags stay booleans: for a numeric option, Python would accept True as 1
        is_flag_value = isinstance(value, bool) and name in flags
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


def _content(path: Path) -> dict[str, Any]:
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
    return content


def option_text(value: Any) -> str:
    """Return a value as text for the command line: `a,b` for a list, `name=value,...` for a dictionary.

    >>> option_text(["a", "b"]), option_text({"a": 0.5, "b": 2})
    ('a,b', 'a=0.5,b=2')
    """
    if isinstance(value, dict):
        value = [f"{name}={item}" for name, item in value.items()]
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
