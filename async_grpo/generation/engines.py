"""Which inference engines there are: an engine is a class that satisfies `protocols.Engine`, and one entry here."""

from importlib import import_module
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.source_file import SourceFile, is_file
from async_grpo.protocols import Engine

# name -> module:class, imported only where the engine runs
ENGINES = {
    "vllm": "async_grpo.generation.generation_worker:GenerationWorker",
    "fake": "async_grpo.testing.engine:FakeEngine",  # draws tokens at random: to try everything but an engine
}


def find_engine(name: str) -> str | SourceFile:
    """What `--engine` names, in a form that travels to the process that runs it: a name, or the source of a file.

    Raises:
        ConfigurationError: there is no such engine.

    >>> find_engine("vllm")
    'vllm'
    >>> find_engine("tgi")
    Traceback (most recent call last):
    ...
    async_grpo.errors.ConfigurationError: --engine 'tgi': known are vllm, fake, and FILE.py:NAME of a class of your own
    """
    if is_file(name):
        return SourceFile.read(name)
    if name not in ENGINES:
        known = ", ".join(ENGINES)
        raise ConfigurationError(
            f"--engine {name!r}: known are {known}, and FILE.py:NAME of a class of your own"
        )
    return name


def engine_class(engine: str | SourceFile) -> type[Engine]:
    """The class itself; importing it may take seconds.

    Raises:
        ConfigurationError: the file does not define it, or what it names is not an engine.
    """
    if isinstance(engine, SourceFile):
        found: Any = engine.object()
    else:
        module, _, name = ENGINES[engine].partition(":")
        found = getattr(import_module(module), name)
    methods = ("start", "complete", "update", "canary", "progress", "until_failure", "close")
    if missing := [method for method in methods if not callable(getattr(found, method, None))]:
        raise ConfigurationError(
            f"the engine {engine} lacks {', '.join(missing)} (see async_grpo.protocols.Engine)"
        )
    return found
