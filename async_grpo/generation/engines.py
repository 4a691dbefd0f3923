"""Which inference engines there are: an engine is a class that satisfies `protocols.Engine`, and one entry here."""

from importlib import import_module
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.source_file import find_entry
from async_grpo.protocols import Engine

# name -> module:class, imported only where the engine runs
ENGINES = {
    "vllm": "async_grpo.generation.generation_worker:GenerationWorker",
    "fake": "async_grpo.testing.engine:FakeEngine",  # draws tokens at random: to try everything but an engine
}
METHODS = ("start", "complete", "update", "canary", "progress", "until_failure", "close")


def engine_class(name: str) -> type[Engine]:
    """The engine that `--engine` names: an entry, or FILE.py:NAME of a class of the user's own.

    Raises:
        ConfigurationError: there is no such engine, or what the file defines is none.

    >>> engine_class("tgi")
    Traceback (most recent call last):
    async_grpo.errors.ConfigurationError: --engine 'tgi' is unknown; known: vllm, fake; or FILE.py:NAME
    >>> engine_class("fake").__name__
    'FakeEngine'
    """
    found: Any = find_entry(name, ENGINES, lambda own: own, "engine")
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(import_module(module), attribute)
    if missing := [method for method in METHODS if not callable(getattr(found, method, None))]:
        raise ConfigurationError(
            f"--engine {name}: {found!r} lacks {', '.join(missing)} (see async_grpo.protocols.Engine)"
        )
    return found
