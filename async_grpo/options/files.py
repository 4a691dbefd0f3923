"""Options from a file: `--config run.toml`, or a run's `training_params.json`, as arguments before the command line's."""

import dataclasses
import json
import tomllib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import dashed, nearest

SUFFIXES = (".toml", ".json")


def with_files(
    arguments: Iterable[str], config_class: type, foreign: Callable[[], Collection[str]]
) -> list[str]:
    """The arguments with those of `--config FILE` before them, so that the command line beats the file.

    The file may also stand first, without `--config`: `async-grpo run run.toml`.

    Args:
        foreign: names the keys of other programs, which one file may serve as well; they are passed over here.

    Raises:
        ConfigurationError: the file cannot be read, or holds a key that no program knows.
    """
    kept, files = list(arguments), []
    if kept and kept[0].endswith(SUFFIXES) and not kept[0].startswith("-"):
        files.append(kept.pop(0))
    while (
        place := next((n for n, a in enumerate(kept) if a.partition("=")[0] == "--config"), None)
    ) is not None:
        _, equals, path = kept.pop(place).partition("=")
        if not equals and place == len(kept):
            raise ConfigurationError("--config needs the path of a TOML file")
        files.append(path if equals else kept.pop(place))
    return [argument for path in files for argument in read_file(Path(path), config_class, foreign)] + kept


def read_file(path: Path, config_class: type, foreign: Callable[[], Collection[str]]) -> list[str]:
    """The file's keys as arguments. Raises ConfigurationError if it cannot be read, or for an unknown key."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # ValueError: what both parsers raise
        raise ConfigurationError(f"--config {path} cannot be read: {error}") from error
    names = {
        name
        for field in dataclasses.fields(config_class)
        for name in (field.name, field.metadata["was"], field.metadata["also"])
        if name
    }
    arguments = []
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in names:
            arguments += as_arguments(name, value)
        elif name not in foreign():
            raise ConfigurationError(f"{path}: {key} is no option{nearest(name, sorted(names))}")
    return arguments


def as_arguments(name: str, value: Any) -> list[str]:
    """An option with its value as it stands on a command line: one argument, or none for None.

    >>> as_arguments("mask_truncated", False), as_arguments("reward_weights", {"judge": 0.5, "rule": 2})
    (['--no-mask-truncated'], ['--reward-weights=judge=0.5,rule=2'])
    """
    match value:
        case None:
            return []
        case bool():
            return [f"--{'' if value else 'no-'}{dashed(name)}"]
        case list():
            value = ",".join(map(str, value))
        case dict():
            value = ",".join(f"{key}={one}" for key, one in value.items())
    return [f"--{dashed(name)}={value}"]
