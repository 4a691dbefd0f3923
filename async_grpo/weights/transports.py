"""How weights travel: a registry. A new way is a file of its own, and one entry here (or FILE.py:NAME).

Light to import: the publishers themselves are imported where they are made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from async_grpo.options.source_file import find_entry
from async_grpo.protocols import WeightPublisher

MakePublisher = Callable[..., WeightPublisher]  # of what `publisher.Publisher` takes


@dataclass(frozen=True)
class Transport:
    """All that the rest of the library knows of one way for weights to travel."""

    make_publisher: MakePublisher
    engine_backend: str = "async_grpo_object_store"  # of vLLM's weight transfer; see `vllm_engine`
    needs_gpu: bool = False
    # Workers that join late, and proximal ones, can be given the weights at any time
    sends_packages: bool = True


def _imported(module: str, name: str) -> MakePublisher:
    return lambda *args: getattr(import_module(f"async_grpo.weights.{module}"), name)(*args)


TRANSPORTS = {
    "object_store": Transport(_imported("publisher", "Publisher")),
    "nccl": Transport(
        _imported("nccl", "NCCLPublisher"), "async_grpo_nccl", needs_gpu=True, sends_packages=False
    ),
}


def get_transport(name: str) -> Transport:
    """The transport that `--weight-transport` names.

    Raises:
        ConfigurationError: there is no such transport.

    >>> get_transport("carrier_pigeon")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    async_grpo.errors.ConfigurationError: --weight-transport 'carrier_pigeon' is unknown; known: object_store, nccl; ...
    """
    return find_entry(name, TRANSPORTS, Transport, "weight-transport")
