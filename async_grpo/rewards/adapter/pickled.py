"""Converts a reward function of the running program, even a lambda, to text that the rewards' processes can load.

Objects that the program's main module or notebook defines are pickled by value with cloudpickle. Only text from a file
that the same call of `async_grpo.train` has written is unpickled, never data from a checkpoint or the network.
"""

import base64
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.redaction import secrets

PACKAGE = "async_grpo"
# Names of folders whose modules every process of the run can import
INSTALLED = ("site-packages", "dist-packages")
MAX_PICKLE_BYTES = 64 << 20  # limited, because the text is sent to every process of every reward


def pickled(reward: Any, name: str) -> str:
    """Return the reward as base64 text.

    Args:
        reward: A function, a class or a callable object, as in `REWARD_ADAPTERS`.
        name: Name of the reward in error messages.

    Raises:
        ConfigurationError: The reward cannot be pickled, is too large, or contains a secret of this process's
            environment.
    """
    import cloudpickle

    with _modules_beside_the_program_by_value():
        try:
            content = cloudpickle.dumps(reward)
        except Exception as error:
            # `__reduce__` of any object that the function refers to may raise anything
            raise ConfigurationError(
                f"the reward {name} cannot be sent to its processes: {type(error).__name__}: {error}. It refers to "
                "something that cannot be pickled: create it inside the function, or give the reward as FILE.py:NAME"
            ) from error
    if len(content) > MAX_PICKLE_BYTES:
        raise ConfigurationError(
            f"the reward {name} takes {len(content) >> 20} MB with all that it refers to, but at most "
            f"{MAX_PICKLE_BYTES >> 20} MB can be sent to its processes: load large objects inside of the function"
        )
    for variable, secret in secrets().items():
        if secret.encode() in content:
            raise ConfigurationError(
                f"the reward {name} holds the value of the environment variable {variable}, which would be written to "
                f'a file: read os.environ["{variable}"] inside of the function, and give reward_env="{variable}"'
            )
    return base64.b64encode(content).decode()


def unpickled(text: str, sha256: str) -> Any:
    """Return the reward from the text that `pickled` returned for it.

    Args:
        text: The text that `pickled` returned.
        sha256: The expected digest of that text (see `pickle_digest`).

    Raises:
        ConfigurationError: The text has another digest. It is not unpickled.
    """
    import cloudpickle

    if pickle_digest(text) != sha256:
        raise ConfigurationError(
            "a pickled reward is not the one that async_grpo.train has written: call async_grpo.train again"
        )
    return cloudpickle.loads(base64.b64decode(text))


def pickle_digest(text: str) -> str:
    """Return the SHA-256 of a text that `pickled` returned, in hexadecimal."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@contextmanager
def _modules_beside_the_program_by_value() -> Iterator[None]:
    """Make cloudpickle pickle objects from modules in the program's folder by value, not only as names to import.

    The rewards' processes cannot import these modules: the folder is not in their path, and may not exist on other
    nodes.
    """
    import cloudpickle

    registered_before = cloudpickle.list_registry_pickle_by_value()
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        if name not in registered_before and _lies_beside_the_program(name, module)
    ]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _lies_beside_the_program(name: str, module: Any) -> bool:
    top_level = name.partition(".")[0]
    if top_level in (PACKAGE, "__main__") or top_level in sys.stdlib_module_names:
        return False
    file = getattr(module, "__file__", None)
    # cloudpickle looks modules up by `__name__`, which may differ from the key in `sys.modules`
    if not isinstance(module, ModuleType) or module.__name__ != name or not isinstance(file, str):
        return False
    folders = [Path.cwd()]
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    if main_file is not None:
        folders.append(Path(main_file).resolve().parent)
    path = Path(file).resolve()
    is_installed = any(part in INSTALLED for part in path.parts)
    return not is_installed and any(path.is_relative_to(folder) for folder in folders)
