"""The options of the weight sync, and the registry of transports.

A new transport is a file of its own and one entry here. This module imports quickly: a publisher's own module is imported
when the publisher is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

from async_grpo.options.fields import POSITIVE, Section, option
from async_grpo.options.source_file import find_entry
from async_grpo.protocols import WeightPublisher

MakePublisher = Callable[..., WeightPublisher]  # takes the arguments of `publisher.Publisher`


@dataclass(frozen=True)
class Transport:
    """One way for weights to travel, and what the rest of the library must know about it."""

    make_publisher: MakePublisher
    # Name of the weight transfer engine in vLLM; see `inference.vllm_edges.receive_weights`
    engine_backend: str = "async_grpo_object_store"
    needs_gpu: bool = False
    sends_packages: bool = True  # False: proximal workers cannot receive the weights
    fills_object_store: bool = True


def _imported(name: str) -> MakePublisher:
    """Return a function that imports a publisher of this package by name, and makes one."""
    return lambda *args: resolve_name(f"async_grpo.weights.{name}")(*args)


TRANSPORTS = {
    "object_store": Transport(_imported("publisher:Publisher")),
    "nccl": Transport(
        _imported("nccl:NCCLPublisher"),
        "async_grpo_nccl",
        needs_gpu=True,
        sends_packages=False,
        fills_object_store=False,
    ),
    "shared_files": Transport(_imported("shared_files:SharedFilesPublisher"), fills_object_store=False),
}


def get_transport(name: str) -> Transport:
    """Return the transport that `--weight-transport` names.

    Raises:
        ConfigurationError: There is no such transport.

    >>> get_transport("carrier_pigeon")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    async_grpo.errors.ConfigurationError: --weight-transport 'carrier_pigeon' is unknown; known: object_store, nccl, ...
    """
    return find_entry(name, TRANSPORTS, Transport, "weight-transport")


@dataclass(frozen=True, kw_only=True)
class WeightConfig(Section):
    """Options of the way on which new weights reach the engines, and of the proof that they landed."""

    weight_transport: str = option(
        "object_store",
        "How weights travel to the engines: a name, or FILE.py:NAME of a `Transport` of your own. nccl needs GPUs.",
        "Cluster",
        choices="async_grpo.weights.config:TRANSPORTS",
        takes_file=True,
    )
    weight_folder: str = option(
        "",
        "Folder for --weight-transport shared_files that all nodes share, with room for the weights.",
        "Cluster",
    )
    sync_timeout_s: float = option(
        600.0,
        "Seconds that an engine may take to load new weights before it is ended.",
        "Cluster",
        range=POSITIVE,
    )
    canary_tolerance: float | None = option(
        None,
        "Allowed difference of engine and trainer log-probs, in nats: the root mean square without the largest "
        "tenth. By default it is measured.",
        "Cluster",
        range=POSITIVE,
    )
