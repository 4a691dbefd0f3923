"""A reward function of a running program as text, so that the processes of rewards can load it: closures and lambdas, too.

cloudpickle pickles what the program's main module and its notebook define by value. A text is loaded only from the file
of rewards that the same call of `async_grpo.train` has written; nothing of a checkpoint or a network comes here.
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
INSTALLED = ("site-packages", "dist-packages")  # folders of modules that every process of the run can import
MAX_PICKLE_BYTES = 64 << 20  # the text travels to every process of every reward


def pickled(reward: Any, name: str) -> str:
    """Return the reward as base64 text.

    Args:
        reward: What `REWARD_ADAPTERS` may hold: a function, a class, an object that can be called.
        name: What messages call it.

    Raises:
        ConfigurationError: it cannot be pickled, is too large, or holds a secret of this process's environment.
    """
    import cloudpickle

    with _modules_beside_the_program_by_value():
        try:
            content = cloudpickle.dumps(reward)
        except Exception as error:  # `__reduce__` of whatever the function refers to may raise anything
            raise ConfigurationError(
                f"the reward {name} cannot be sent to its processes: {type(error).__name__}: {error}. It refers to "
                "something that cannot be pickled: make that inside of the function, or give the reward as FILE.py:NAME"
            ) from error
    if len(content) > MAX_PICKLE_BYTES:
        raise ConfigurationError(
            f"the reward {name} takes {len(content) >> 20} MB with all that it refers to, and {MAX_PICKLE_BYTES >> 20} MB "
            "can be sent to its processes: load large objects inside of the function"
        )
    for variable, secret in secrets().items():
        if secret.encode() in content:
            raise ConfigurationError(
                f"the reward {name} holds the value of the environment variable {variable}, which would be written down: "
                f'read os.environ["{variable}"] inside of the function, and give reward_env="{variable}"'
            )
    return base64.b64encode(content).decode()


def unpickled(text: str, sha256: str) -> Any:
    """Return the reward that `pickled` has made a text of.

    Args:
        text: What `pickled` has returned.
        sha256: The digest of that text (`pickle_digest`).

    Raises:
        ConfigurationError: the text has another digest; it is not loaded then.
    """
    import cloudpickle

    if pickle_digest(text) != sha256:
        raise ConfigurationError(
            "a pickled reward is not the one that async_grpo.train has written: call async_grpo.train again"
        )
    return cloudpickle.loads(base64.b64decode(text))


def pickle_digest(text: str) -> str:
    """Return the SHA-256 of a text of `pickled`, in hex."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@contextmanager
def _modules_beside_the_program_by_value() -> Iterator[None]:
    """Have cloudpickle pickle by value, too, what modules beside the program define: the rewards' processes lack them.

    Their path has no entry for the folder of the user's program, and other nodes may not have that folder.
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
    # An entry of `sys.modules` may have another name than the module itself, by which cloudpickle would look it up
    if not isinstance(module, ModuleType) or module.__name__ != name or not isinstance(file, str):
        return False
    folders = [Path.cwd()]
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    if main_file is not None:
        folders.append(Path(main_file).resolve().parent)
    path = Path(file).resolve()
    is_installed = any(part in INSTALLED for part in path.parts)
    return not is_installed and any(path.is_relative_to(folder) for folder in folders)
