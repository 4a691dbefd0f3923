"""The user's rewards, as text: every process of a run imports this copy, whatever its disk holds.

A reward is named by its key in the registry file, or by a file of its own:

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
from async_grpo.options.source_file import ShippedModule, SourceFile, is_file, read_source
from async_grpo.rewards.adapter.decorators import traits_of

REGISTRY_FILE = "reward_registry.py"
SHIPPED_REGISTRY = Path(__file__).parents[2] / "data" / REGISTRY_FILE


def registry_file(given: str | Path | None = None) -> Path:
    """The registry file of a command: the one given, or `reward_registry.py` of the working folder, or the shipped one.

    >>> registry_file("rewards/mine.py")
    PosixPath('rewards/mine.py')
    """
    if given:
        return Path(given)
    here = Path(REGISTRY_FILE)
    return here if here.is_file() else SHIPPED_REGISTRY


@dataclass(frozen=True)
class RewardRegistrySource(ShippedModule):
    """The registry file, and the files of rewards that are named by theirs."""

    files: tuple[SourceFile, ...] = ()

    @classmethod
    def from_file(cls, path: str | Path) -> "RewardRegistrySource":
        """Read a registry file such as `reward_registry.py`. Raises ConfigurationError if it cannot be read."""
        path = Path(path)
        if not path.stem.isidentifier() or path.stem in sys.stdlib_module_names:
            raise ConfigurationError(f"the registry file {str(path)!r} cannot be a module: rename it")
        return cls(path.stem, read_source(path))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "RewardRegistrySource":
        """What `dataclasses.asdict` has made of one."""
        return cls(**{**fields, "files": tuple(SourceFile(**file) for file in fields["files"])})

    def with_files(self, names: str | Iterable[str]) -> "RewardRegistrySource":
        """The same with the files among the names, read here. Raises ConfigurationError: one cannot be read, or two rewards
        would be known by the same name."""
        asked = parse_names(names)
        _display_names(asked)
        return replace(self, files=tuple(SourceFile.read(name) for name in asked if is_file(name)))

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each text, by its module's or its reward's name; for the run's parameters."""
        return {self.module_name: self.sha256} | {file.name: file.sha256 for file in self.files}


def display_name(name: str) -> str:
    """What a reward is known by in metrics, weights and results."""
    return name.rpartition(":")[2] if is_file(name) else name


def parse_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """The names of a list or a comma separated string, once each, in the order given."""
    parts = names.split(",") if isinstance(names, str) else [getattr(name, "value", name) for name in names]
    return tuple(dict.fromkeys(name.strip() for name in parts if name.strip()))


def resolve(source: RewardRegistrySource, names: str | Iterable[str]) -> dict[str, Any]:
    """The rewards of these names, by what they are known by.

    ConfigurationError: no name, an unknown one, or two that would be known by the same; a registry file without
    `REWARD_ADAPTERS`; a file that the source does not carry (see `with_files`); an object that is no reward.
    """
    asked = parse_names(names)
    shown = _display_names(asked)
    files = {file.name: file for file in source.files}
    if missing := [name for name in asked if is_file(name) and display_name(name) not in files]:
        raise ConfigurationError(
            f"{', '.join(missing)} is not among the files of this run: the trainer reads those of its --reward-fns"
        )
    known = _registered(source) if not asked or set(shown) - files.keys() else {}
    unknown = ", ".join(name for name in shown if name not in known.keys() | files.keys())
    if unknown or not asked:
        problem = f"unknown reward function {unknown}" if unknown else "no reward function is named"
        known_names = f"{source.module_name} knows {', '.join(sorted(known)) or 'none'}; or FILE.py:NAME"
        raise ConfigurationError(f"{problem}: {known_names}{nearest(unknown, known)}")
    adapters = {name: files[name].object() if name in files else known[name] for name in shown}
    for adapter in adapters.values():
        traits_of(adapter)  # raises for what cannot be called
    return adapters


def _registered(source: RewardRegistrySource) -> dict[str, Any]:
    registered = getattr(source.load(), "REWARD_ADAPTERS", None)
    if not isinstance(registered, dict):
        raise ConfigurationError(f"{source.module_name} defines no dict REWARD_ADAPTERS")
    return {str(getattr(key, "value", key)): adapter for key, adapter in registered.items()}


def _display_names(names: Sequence[str]) -> list[str]:
    shown = [display_name(name) for name in names]
    if twice := sorted({name for name in shown if shown.count(name) > 1}):
        raise ConfigurationError(
            f"several rewards would be known as {', '.join(twice)}: give the functions different names"
        )
    return shown
