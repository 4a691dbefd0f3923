"""The user's rewards, as text: every process of a run imports this copy, whatever its disk holds.

A reward is named by its key on the page of rewards, or by its file:

    mathd                       REWARD_ADAPTERS["mathd"] of the page
    rewards/shout.py:shout      the object `shout` of that file, which is then known as `shout`
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.abc import ExecutionLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.traits import traits_of


@dataclass(frozen=True)
class ShippedModule:
    """One module's source.

    It may import any installed package, but no file that merely lies beside it: only this text travels.
    """

    module_name: str
    text: str
    sha256: str

    @property
    def title(self) -> str:
        """What a message calls it."""
        return self.module_name

    def load(self) -> ModuleType:
        """Import the page under its name; one of the same text that is loaded already is returned as it is.

        Raises:
            ConfigurationError: the page raises on import.

        >>> RewardRegistrySource.from_text("tiny_page", "REWARD_ADAPTERS = {}").load().REWARD_ADAPTERS
        {}
        """
        loaded = sys.modules.get(self.module_name)
        if getattr(loaded, "__sha256__", None) == self.sha256:
            return loaded  # type: ignore[return-value]
        loader = _TextLoader(self.text)
        spec = ModuleSpec(self.module_name, loader, origin=f"{self.module_name}.py")
        module = importlib.util.module_from_spec(spec)
        module.__sha256__ = self.sha256  # type: ignore[attr-defined]
        sys.modules[self.module_name] = module  # before it runs: data classes look themselves up here
        try:
            loader.exec_module(module)
        except Exception as error:
            _restore(self.module_name, loaded)
            message = f"{self.title} cannot be imported: {type(error).__name__}: {error}"
            raise ConfigurationError(message) from error
        return module


@dataclass(frozen=True)
class RewardFile(ShippedModule):
    """A reward that is named by its file."""

    path: str  # as it was given
    name: str  # of the object in the file, and of the reward

    @property
    def title(self) -> str:
        return self.path

    @classmethod
    def read(cls, reward: str) -> "RewardFile":
        """Read `path/to/file.py:name`. Raises ConfigurationError if it cannot be read."""
        path, _, name = reward.rpartition(":")
        text = _read(Path(path))
        sha256 = _digest(text)
        # A name of its own: `sympy.py:score` must not take the place of a package.
        return cls(f"{Path(path).stem}_{sha256[:8]}", text, sha256, path, name)

    def adapter(self) -> Any:
        """The object. Raises ConfigurationError if the file does not define it."""
        module = self.load()
        if not hasattr(module, self.name):
            known = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
            raise ConfigurationError(f"{self.path} defines no {self.name!r}, only {', '.join(known)}")
        return getattr(module, self.name)


@dataclass(frozen=True)
class RewardRegistrySource(ShippedModule):
    """The page of rewards, and those that are named by their files. `digests` goes into the run's parameters."""

    files: tuple[RewardFile, ...] = ()

    @classmethod
    def from_file(cls, path: str | Path) -> "RewardRegistrySource":
        """Read a page such as `reward_registry.py`. Raises ConfigurationError if it cannot be read."""
        path = Path(path)
        if not path.stem.isidentifier() or path.stem in sys.stdlib_module_names:
            raise ConfigurationError(f"the page of rewards {str(path)!r} cannot be a module: rename it")
        return cls.from_text(path.stem, _read(path))

    @classmethod
    def from_text(cls, module_name: str, text: str) -> "RewardRegistrySource":
        return cls(module_name, text, _digest(text))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "RewardRegistrySource":
        """What `dataclasses.asdict` has made of one."""
        return cls(**{**fields, "files": tuple(RewardFile(**file) for file in fields["files"])})

    def with_files(self, names: str | Iterable[str]) -> "RewardRegistrySource":
        """The same with the files that are among the names, read now and here.

        Raises:
            ConfigurationError: one cannot be read, or two rewards would be known by the same name.
        """
        asked = parse_names(names)
        _display_names(asked)
        return replace(self, files=tuple(RewardFile.read(name) for name in asked if is_file(name)))

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each text, by its module's or its reward's name."""
        return {self.module_name: self.sha256} | {file.name: file.sha256 for file in self.files}

    def digest_of(self, name: str) -> str:
        """The SHA-256 of the text that holds this reward: another text may be another reward."""
        return self.digests.get(display_name(name), self.sha256)


class _TextLoader(ExecutionLoader):
    """Serves the text as the module's source, to the import system and to tracebacks alike."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_filename(self, fullname: str) -> str:
        return f"{fullname}.py"


def _restore(module_name: str, module: ModuleType | None) -> None:
    if module is None:
        del sys.modules[module_name]
    else:
        sys.modules[module_name] = module


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the page of rewards {str(path)!r}: {error}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_file(name: str) -> bool:
    """Whether a reward is named by its file.

    >>> is_file("rewards/shout.py:shout"), is_file("mathd")
    (True, False)
    """
    return name.rpartition(":")[0].endswith(".py")


def display_name(name: str) -> str:
    """What a reward is known by in metrics, weights and results.

    >>> display_name("rewards/shout.py:shout"), display_name("mathd")
    ('shout', 'mathd')
    """
    return name.rpartition(":")[2] if is_file(name) else name


def parse_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """The names of a list or a comma separated string, once each, in the order given.

    >>> parse_names("mathd, sympy,mathd")
    ('mathd', 'sympy')
    """
    parts = names.split(",") if isinstance(names, str) else [getattr(name, "value", name) for name in names]
    return tuple(dict.fromkeys(name.strip() for name in parts if name.strip()))


def resolve(source: RewardRegistrySource, names: str | Iterable[str]) -> dict[str, Callable[..., Any]]:
    """The rewards of these names, by what they are known by.

    Raises:
        ConfigurationError: no name, an unknown one, or two that would be known by the same; a page without
            `REWARD_ADAPTERS`; a file that the source does not carry (see `with_files`); an object that is no reward.
    """
    asked = parse_names(names)
    shown = _display_names(asked)
    files = {file.name: file for file in source.files}
    if missing := [name for name in asked if is_file(name) and display_name(name) not in files]:
        raise ConfigurationError(
            f"{', '.join(missing)} is not among the files of this run: the trainer reads those of its --reward-fns"
        )
    adapters = {name: files[name].adapter() for name in shown if name in files}
    on_page = [name for name in shown if name not in files]
    if on_page or not asked:
        adapters |= _from_page(source, on_page)
    for adapter in adapters.values():
        traits_of(adapter)  # raises for what cannot be called
    return {name: adapters[name] for name in shown}


def _from_page(source: RewardRegistrySource, names: Sequence[str]) -> dict[str, Any]:
    registered = getattr(source.load(), "REWARD_ADAPTERS", None)
    if not isinstance(registered, dict):
        raise ConfigurationError(f"{source.module_name} defines no dict REWARD_ADAPTERS")
    known = {str(getattr(key, "value", key)): adapter for key, adapter in registered.items()}
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(f"unknown reward function {', '.join(unknown)}: {_known(source, known)}")
    if not names:
        raise ConfigurationError(f"no reward function is named: {_known(source, known)}")
    return {name: known[name] for name in names}


def _known(source: RewardRegistrySource, known: Iterable[str]) -> str:
    return f"{source.module_name} knows {', '.join(sorted(known)) or 'none'}"


def _display_names(names: Sequence[str]) -> list[str]:
    shown = [display_name(name) for name in names]
    if twice := sorted({name for name in shown if shown.count(name) > 1}):
        raise ConfigurationError(
            f"several rewards would be known as {', '.join(twice)}: give the functions different names"
        )
    return shown
