"""The user's page of rewards, as text: every process of a run imports this copy, whatever its disk holds."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.abc import ExecutionLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from async_grpo.errors import ConfigurationError


@dataclass(frozen=True)
class RewardSource:
    """One module's source. `sha256` goes into the run's parameters.

    The module may import any installed package, but no file that merely lies beside it: only this text
    travels.
    """

    module_name: str
    text: str
    sha256: str

    @classmethod
    def from_file(cls, path: str | Path) -> "RewardSource":
        """Read a page such as `reward_registry.py`. Raises ConfigurationError if it cannot be read."""
        path = Path(path)
        if not path.stem.isidentifier() or path.stem in sys.stdlib_module_names:
            raise ConfigurationError(f"the page of rewards {str(path)!r} cannot be a module: rename it")
        try:
            return cls.from_text(path.stem, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the page of rewards {str(path)!r}: {error}") from error

    @classmethod
    def from_text(cls, module_name: str, text: str) -> "RewardSource":
        return cls(module_name, text, hashlib.sha256(text.encode()).hexdigest())

    def load(self) -> ModuleType:
        """Import the page under its name; one of the same text that is loaded already is returned as it is.

        Raises:
            ConfigurationError: the page raises on import.

        >>> RewardSource.from_text("tiny_page", "REWARD_ADAPTERS = {}").load().REWARD_ADAPTERS
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
            message = f"{self.module_name} cannot be imported: {type(error).__name__}: {error}"
            raise ConfigurationError(message) from error
        return module


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


def parse_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """The names of a list or a comma separated string, once each, in the order given.

    >>> parse_names("mathd, sympy,mathd")
    ('mathd', 'sympy')
    """
    parts = names.split(",") if isinstance(names, str) else [getattr(name, "value", name) for name in names]
    return tuple(dict.fromkeys(name.strip() for name in parts if name.strip()))


def resolve(source: RewardSource, names: str | Iterable[str]) -> dict[str, Callable[..., Any]]:
    """The page's adapters of these names.

    Raises:
        ConfigurationError: no name, an unknown one, or a page without `REWARD_ADAPTERS`.
    """
    registered = getattr(source.load(), "REWARD_ADAPTERS", None)
    if not isinstance(registered, dict):
        raise ConfigurationError(f"{source.module_name} defines no dict REWARD_ADAPTERS")
    known = {str(getattr(key, "value", key)): adapter for key, adapter in registered.items()}
    asked = parse_names(names)
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        problem = (
            f"unknown reward function {', '.join(unknown)}" if unknown else "no reward function is named"
        )
        raise ConfigurationError(
            f"{problem}: {source.module_name} knows {', '.join(sorted(known)) or 'none'}"
        )
    return {name: known[name] for name in asked}
