"""Python source of the user's own, `FILE.py:NAME`: read once, where the run was started; its text travels."""

import hashlib
import linecache
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from async_grpo.errors import ConfigurationError
from async_grpo.options.version import VERSION

PACKAGE_ROOT = Path(__file__).parents[2]  # the folder that a process needs on its path to import `async_grpo`
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class ShippedModule:
    """One module's source; it may import any installed package, but no file beside it: only this text travels."""

    module_name: str
    text: str

    @cached_property
    def sha256(self) -> str:
        """Of the text, in hex."""
        return text_digest(self.text)

    @property
    def title(self) -> str:
        """What a message calls it."""
        return self.module_name

    def load(self) -> ModuleType:
        """Import the text under its name; a module of the same text that is loaded already is returned as it is.

        ConfigurationError: the text raises on import.
        """
        loaded = sys.modules.get(self.module_name)
        if loaded is not None and getattr(loaded, "__sha256__", None) == self.sha256:
            return loaded
        module, file = ModuleType(self.module_name), f"{self.module_name}.py"
        vars(module)["__sha256__"] = self.sha256
        lines = self.text.splitlines(keepends=True)
        linecache.cache[file] = len(self.text), None, lines, file  # for tracebacks
        sys.modules[self.module_name] = module  # before it runs: data classes look themselves up here
        try:
            exec(compile(self.text, file, "exec"), vars(module))
        except (Exception, SystemExit) as error:
            del sys.modules[self.module_name]
            message = f"{self.title} cannot be imported: {type(error).__name__}: {error}"
            raise ConfigurationError(message) from error
        return module


@dataclass(frozen=True)
class SourceFile(ShippedModule):
    """An object that is named by its file."""

    path: str  # as it was given
    name: str  # of the object in the file

    @property
    def title(self) -> str:
        return self.path

    @classmethod
    def read(cls, reference: str) -> "SourceFile":
        """Read `path/to/file.py:name`. Raises ConfigurationError if the file cannot be read."""
        path, _, name = reference.rpartition(":")
        text = read_source(Path(path))
        # A name of its own: `sympy.py:score` must not take the place of a package.
        return cls(f"{Path(path).stem}_{text_digest(text)[:8]}", text, path, name)

    def object(self) -> Any:
        """The object. Raises ConfigurationError if the file does not define it."""
        module = self.load()
        if not hasattr(module, self.name):
            known = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
            raise ConfigurationError(f"{self.path} defines no {self.name!r}, only {', '.join(known)}")
        return getattr(module, self.name)


def read_source(path: Path) -> str:
    """The file's text. Raises ConfigurationError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error}") from error


def text_digest(text: str) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def library_version() -> str:
    """The version, and a digest of the sources that this process found: a checkout changes under one version."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return f"{VERSION} ({text_digest(''.join(map(read_source, sources)))[:8]})"


def is_file(name: str) -> bool:
    """Whether a name is that of an object in a file.

    >>> is_file("rewards/shout.py:shout"), is_file("mathd")
    (True, False)
    """
    return name.rpartition(":")[0].endswith(".py")


read_once = cache(SourceFile.read)  # once per process: a file that is edited later changes no run


def find_entry(name: str, registry: Mapping[str, Entry], entry: Callable[..., Entry], flag: str) -> Entry:
    """The entry of that name in a registry, or the user's own that `FILE.py:NAME` names.

    `entry`: the class of the registry's entries; a function in a file becomes `entry(function)`. `flag`: the option that
    the name was given by. ConfigurationError: there is no such entry, or the file's object cannot be one.

    >>> find_entry("grop", {"grpo": 1, "rloo": 2}, int, "advantage-estimator")
    Traceback (most recent call last):
    async_grpo.errors.ConfigurationError: --advantage-estimator 'grop' is unknown; known: grpo, rloo; or FILE.py:NAME
    """
    if name in registry:
        return registry[name]
    if not is_file(name):
        known = f"{', '.join(registry)}; or FILE.py:NAME"
        raise ConfigurationError(f"--{flag} {name!r} is unknown; known: {known}")
    found = read_once(name).object()
    if isinstance(entry, type) and isinstance(found, entry):
        return cast(Entry, found)
    if callable(found):
        return entry(found)
    raise ConfigurationError(f"--{flag} {name}: {type(found).__name__} is neither an entry nor a function")


def digests(names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of the files among the names, by name; for a run's parameters."""
    return {name: read_once(name).sha256 for name in names if is_file(name)}


def absolute(name: str) -> str:
    """The name with its file's path made absolute: other processes of a run have other working folders."""
    path, _, attribute = name.rpartition(":")
    return f"{Path(path).resolve()}:{attribute}" if is_file(name) else name
