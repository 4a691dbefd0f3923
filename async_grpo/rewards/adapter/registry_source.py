"""The source text of the user's rewards. Every process of a run imports this copy instead of files on its disk.

A reward is named by its key in the registry file, or by its file and the name of an object in the file:

    mathd                       REWARD_ADAPTERS["mathd"] of the registry file
    rewards/shout.py:shout      the object `shout` of that file, which is then known as `shout`
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import nearest
from async_grpo.options.listed_values import split_list
from async_grpo.options.source_file import ShippedModule, SourceFile, is_file, read_source
from async_grpo.rewards.adapter.decorators import traits_of

REGISTRY_FILE = "reward_registry.py"
SHIPPED_REGISTRY = Path(__file__).parents[2] / "data" / REGISTRY_FILE


def registry_file(path: str | Path | None = None) -> Path:
    """Return `path`. If it is empty, return the registry file in the working folder, or else the shipped file.

    >>> registry_file("rewards/mine.py")
    PosixPath('rewards/mine.py')
    """
    if path:
        return Path(path)
    local_file = Path(REGISTRY_FILE)
    return local_file if local_file.is_file() else SHIPPED_REGISTRY


@dataclass(frozen=True)
class RewardRegistrySource(ShippedModule):
    """The registry file, and the files of the rewards that are named as FILE.py:NAME."""

    files: tuple[SourceFile, ...] = ()

    @classmethod
    def from_file(cls, path: str | Path) -> "RewardRegistrySource":
        """Read a registry file such as `reward_registry.py`.

        Raises:
            ConfigurationError: The file cannot be read, or its name cannot be the name of a module.
        """
        path = Path(path)
        if not path.stem.isidentifier() or path.stem in sys.stdlib_module_names:
            raise ConfigurationError(f"the registry file {str(path)!r} cannot be a module: rename it")
        return cls(path.stem, read_source(path))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "RewardRegistrySource":
        """Make a source from the dict that `dataclasses.asdict` returned for it."""
        return cls(**{**fields, "files": tuple(SourceFile(**file) for file in fields["files"])})

    def with_files(self, names: str | Iterable[str]) -> "RewardRegistrySource":
        """Read the files of these rewards, and return the source with the files.

        Raises:
            ConfigurationError: A file cannot be read, or two rewards have the same display name.
        """
        full_names = parse_names(names)
        _display_names(full_names)
        return replace(self, files=tuple(SourceFile.read(name) for name in full_names if is_file(name)))

    @property
    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each source text, by module or reward name, for the run's parameters."""
        digests = {self.module_name: self.sha256}
        for file in self.files:
            digests[file.name] = file.sha256
        return digests


def display_name(name: str) -> str:
    """Return the name of a reward in metrics, weights and results."""
    return name.rpartition(":")[2] if is_file(name) else name


def parse_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names in a list or a comma-separated string, in their order."""
    # Names may be members of an enumeration, whose values are the names as text
    parts = split_list(names) if isinstance(names, str) else [getattr(name, "value", name) for name in names]
    return tuple(dict.fromkeys(name.strip() for name in parts if name.strip()))


def resolve(source: RewardRegistrySource, names: str | Iterable[str]) -> dict[str, Any]:
    """Return the rewards with these names, by display name.

    Raises:
        ConfigurationError: There is no name, a name is unknown, two names have the same display name, the registry file
            has no `REWARD_ADAPTERS`, the source lacks a file (see `with_files`), or an object is not a reward.
    """
    full_names = parse_names(names)
    names_shown = _display_names(full_names)
    files = {file.name: file for file in source.files}
    missing = [name for name in full_names if is_file(name) and display_name(name) not in files]
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} is not among the files of this run: the trainer reads only those in its --reward-fns"
        )
    # The registry file is loaded only if a name refers to it, or to list its names in an error message
    needs_registry = not full_names or bool(set(names_shown) - files.keys())
    registered = _registered(source) if needs_registry else {}
    unknown = ", ".join(name for name in names_shown if name not in registered and name not in files)
    if unknown or not full_names:
        problem = f"unknown reward function {unknown}" if unknown else "no reward function is named"
        known_names = f"{source.module_name} knows {', '.join(sorted(registered)) or 'none'}; or FILE.py:NAME"
        raise ConfigurationError(f"{problem}: {known_names}{nearest(unknown, registered)}")
    adapters = {}
    for name in names_shown:
        adapters[name] = files[name].object() if name in files else registered[name]
    for adapter in adapters.values():
        # Raises an error for an object that cannot be called
        traits_of(adapter)
    return adapters


def _registered(source: RewardRegistrySource) -> dict[str, Any]:
    """Return the rewards of the registry file by name."""
    registered = getattr(source.load(), "REWARD_ADAPTERS", None)
    if not isinstance(registered, dict):
        raise ConfigurationError(f"{source.module_name} defines no dict REWARD_ADAPTERS")
    return {str(getattr(key, "value", key)): adapter for key, adapter in registered.items()}


def _display_names(names: Sequence[str]) -> list[str]:
    """Return the display names. Raise ConfigurationError if two of them are the same."""
    names_shown = [display_name(name) for name in names]
    duplicates = sorted({name for name in names_shown if names_shown.count(name) > 1})
    if duplicates:
        raise ConfigurationError(
            f"several rewards would be known as {', '.join(duplicates)}: give the functions different names"
        )
    return names_shown
