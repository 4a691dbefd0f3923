"""Load the user's own Python source, `FILE.py:NAME`.

The sources of rewards and environments are sent to other processes as text. Other files are read once in each process.
"""

import difflib
import hashlib
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from async_grpo.errors import ConfigurationError
from async_grpo.options.version import VERSION

PACKAGE_ROOT = Path(__file__).parents[2]  # to import `async_grpo`, a process needs this folder on its path
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class ShippedModule:
    """A Python module whose source text is sent to other processes.

    The text may import installed packages, but no other files of its folder.
    """

    module_name: str
    text: str

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of the text, in hexadecimal."""
        return text_digest(self.text)

    @property
    def title(self) -> str:
        """Return the name that messages use for the module."""
        return self.module_name

    @property
    def file_name(self) -> str:
        """Return the name of the module's file in tracebacks."""
        return f"{self.module_name}.py"

    def load(self) -> ModuleType:
        """Return the module, importing the text unless a module with the same name and text is already loaded.

        Raises:
            ConfigurationError: The text raises an error when it is imported.
        """
        loaded = sys.modules.get(self.module_name)
        if loaded is not None and getattr(loaded, "__sha256__", None) == self.sha256:
            return loaded
        module = ModuleType(self.module_name)
        vars(module)["__sha256__"] = self.sha256
        # The module has no file on this machine. Tracebacks find its lines in this cache
        file = self.file_name
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        # Register the module before its text runs, because dataclasses in it look up their own module
        sys.modules[self.module_name] = module
        try:
            exec(compile(self.text, file, "exec"), vars(module))
        except (Exception, SystemExit) as error:
            del sys.modules[self.module_name]
            raise ConfigurationError(
                f"{self.title} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        return module


@dataclass(frozen=True)
class SourceFile(ShippedModule):
    """A named object in a user's source file."""

    path: str  # path of the file as the user wrote it
    name: str  # name of the object in the file

    @property
    def title(self) -> str:
        """Return the file's path."""
        return self.path

    @property
    def file_name(self) -> str:
        """Return the file's path. It replaces the module's name, which contains a digest that means nothing to the user."""
        return self.path

    @classmethod
    def read(cls, reference: str) -> "SourceFile":
        """Read the file that `path/to/file.py:name` refers to.

        Raises:
            ConfigurationError: The file cannot be read.
        """
        path, _, name = reference.rpartition(":")
        text = read_source(Path(path))
        # The digest makes the module's name unique. Otherwise a user's `sympy.py` would replace the package sympy
        return cls(f"{Path(path).stem}_{text_digest(text)[:8]}", text, path, name)

    def object(self) -> Any:
        """Import the file, and return the object.

        Raises:
            ConfigurationError: The file does not define the object, or cannot be imported.
        """
        module = self.load()
        if not hasattr(module, self.name):
            names = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
            similar = difflib.get_close_matches(self.name, names, n=1)
            advice = f"; did you mean {similar[0]!r}?" if similar else ""
            defined = ", ".join(names) or "nothing that can be called"
            raise ConfigurationError(f"{self.path} defines no {self.name!r}, only {defined}{advice}")
        return getattr(module, self.name)


def read_source(path: Path) -> str:
    """Return the file's text.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error}") from error


def text_digest(text: str) -> str:
    """Return the SHA-256 of the text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def library_version() -> str:
    """Return the library's version and a digest of its sources.

    The digest distinguishes edited checkouts of the same version.
    """
    return f"{VERSION} ({sources_digest(Path(__file__).parents[1])[:8]})"


def sources_digest(package: Path) -> str:
    """Return the SHA-256 (hex) of the sources in a copy of this library.

    The folder `data` is left out, because users edit the rewards in it, and because it is only a link in a checkout.
    """
    paths = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "data"]
    return text_digest("".join(read_source(path) for path in sorted(paths)))


def checkout_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variable with which another process imports the library from this process's checkout.

    The result is {} if the library was installed as a package. Its parent folder then also contains all other installed
    packages, which a process in another Python environment must not import.
    """
    if not (PACKAGE_ROOT / "pyproject.toml").exists():
        return {}
    paths = [str(PACKAGE_ROOT.resolve()), environment.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def is_file(name: str) -> bool:
    """Return whether a name has the form `FILE.py:NAME`.

    >>> is_file("rewards/shout.py:shout"), is_file("mathd")
    (True, False)
    """
    return name.rpartition(":")[0].endswith(".py")


# Reads each file only once per process, so that later edits do not change the run
read_once = cache(SourceFile.read)


def find_entry(name: str, registry: Mapping[str, Entry], entry: Callable[..., Entry], flag: str) -> Entry:
    """Return an entry of a registry, or the user's own entry if the name has the form `FILE.py:NAME`.

    Args:
        name: Name of the entry, or `FILE.py:NAME`.
        registry: The shipped entries, by name.
        entry: Makes an entry from the user's object, usually the class of the entries.
        flag: Name of the option that has this value, for error messages.

    Raises:
        ConfigurationError: There is no such entry, or the user's object is neither an entry nor callable.

    >>> find_entry("grop", {"grpo": 1, "rloo": 2}, int, "advantage-estimator")
    Traceback (most recent call last):
    async_grpo.errors.ConfigurationError: --advantage-estimator 'grop' is unknown; known: grpo, rloo; or FILE.py:NAME
    """
    if name in registry:
        return registry[name]
    if not is_file(name):
        raise ConfigurationError(
            f"--{flag} {name!r} is unknown; known: {', '.join(registry)}; or FILE.py:NAME"
        )
    user_object = read_once(name).object()
    if isinstance(entry, type) and isinstance(user_object, entry):
        return cast(Entry, user_object)
    if callable(user_object):
        return entry(user_object)
    raise ConfigurationError(
        f"--{flag} {name}: the object is a {type(user_object).__name__}: name a function, a class, or an object of the "
        "same type as the built-in choices"
    )


def digests(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each file among the names, by name. Names without a file are skipped."""
    return {name: read_once(name).sha256 for name in names if is_file(name)}


def absolute(name: str) -> str:
    """Return the name with an absolute path, because other processes of a run have other working directories."""
    if not is_file(name):
        return name
    path, _, attribute = name.rpartition(":")
    return f"{Path(path).resolve()}:{attribute}"
