"""The options of the weight sync, and the registry of transports.

To add a transport, write a module for it and add one entry to TRANSPORTS. The module of a publisher is imported only
when the publisher is made, so this module imports quickly.
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
    """A way to send weights to the engines, and what the rest of the library must know about it."""

    make_publisher: MakePublisher
    # Name of the class with which vLLM's side receives the weights; see `inference.vllm_edges.receive_weights`
    engine_backend: str = "async_grpo_object_store"
    needs_gpu: bool = False
    # Whether weights travel in packages; if not, proximal logprob workers cannot receive them
    sends_packages: bool = True
    fills_object_store: bool = True  # whether the weights take space in Ray's object store


def _imported(name: str) -> MakePublisher:
    """Return a function that makes a publisher of this package, and imports its module only when it is called."""
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
    """Options for sending new weights to the engines, and for the proof that the engines compute with them."""

    weight_transport: str = option(
        "object_store",
        "How weights travel to the engines: a name, or FILE.py:NAME of a `Transport` of your own. nccl needs GPUs.",
        "Cluster",
        choices="async_grpo.weights.config:TRANSPORTS",
        takes_file=True,
    )
    weight_folder: str = option(
        "",
        "Folder that all nodes share, with room for the weights. Only for --weight-transport shared_files.",
        "Cluster",
    )
    weight_sync_deltas: bool = option(
        False,
        "Send only the weights that changed since the last version, in the engines' dtype, wherever that is smaller. The "
        "trainer and each worker keep one more copy of the weights in main memory.",
        "Cluster",
    )
    sync_timeout_s: float = option(
        600.0,
        "Maximum seconds that an engine may take to load new weights. A slower engine is ended.",
        "Cluster",
        range=POSITIVE,
    )
    canary_tolerance: float | None = option(
        None,
        "Allowed difference between log-probs of engine and trainer, in nats. It limits the root mean square over tokens "
        "without the largest tenth, and the median of any 32 consecutive tokens. By default the trainer measures it.",
        "Cluster",
        range=POSITIVE,
    )
