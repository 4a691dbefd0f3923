"""Dotted paths into a row of a data file, such as `reward_model.ground_truth`."""

import math
from collections.abc import Mapping
from typing import Any

from async_grpo.options.fields import refuse
from async_grpo.processes.untrusted_files import parse_json

MISSING = object()  # what `value_at` returns for a path that the value does not have


def parse_paths(text: str | None, flag: str) -> tuple[str, ...]:
    """Return the dotted paths of a comma-separated option.

    Raises:
        ConfigurationError: A path, or a part of a path, is empty.

    >>> parse_paths("reward_model.ground_truth, answer", "--answer-column")
    ('reward_model.ground_truth', 'answer')
    """
    if text is None:
        return ()
    paths = tuple(path.strip() for path in text.split(","))
    is_complete = all(all(path.split(".")) for path in paths)
    refuse(
        not is_complete,
        f"{flag} {text!r}: give the name of a column, such as question, or a path such as reward_model.ground_truth",
    )
    return paths


def value_at(value: Any, path: str) -> Any:
    """Return the value at a dotted path, or MISSING if there is none.

    A column whose name contains dots is found, too. A number is the index of an item in a list, and a negative number
    counts from the end. If a value on the way is a JSON text of an object or a list, the path continues in this object.

    >>> row = {"reward_model": {"ground_truth": ["34"]}, "a.b": 1, "info": '{"x": 2}'}
    >>> value_at(row, "reward_model.ground_truth.0"), value_at(row, "a.b"), value_at(row, "info.x")
    ('34', 1, 2)
    >>> value_at({"turns": ["a", "b"]}, "turns.-1")
    'b'
    """
    if isinstance(value, str):
        value = parsed_text(value)
    if isinstance(value, Mapping) and path in value:
        return value[path]
    name, _, rest = path.partition(".")
    if isinstance(value, Mapping) and name in value:
        item = value[name]
    elif isinstance(value, list) and _is_place(name, value):
        item = value[int(name)]
    else:
        return MISSING
    return value_at(item, rest) if rest else item


def _is_place(name: str, values: list[Any]) -> bool:
    """Return whether a part of a path is the index of one of the values."""
    if not name.removeprefix("-").isdecimal():
        return False
    return -len(values) <= int(name) < len(values)


def is_missing(value: Any) -> bool:
    """Return whether a value stands for a missing value: null, or NaN, which pandas writes for missing values."""
    return value is MISSING or value is None or (isinstance(value, float) and math.isnan(value))


def parsed_text(text: str) -> Any:
    """If the text is the JSON of an object or a list, return that object or list. Otherwise, return the text."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return parse_json(text)
    except ValueError:
        return text
