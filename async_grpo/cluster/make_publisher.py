"""Make the publisher that sends weights: those of the policy to engines, or those of a moving reference to its workers."""

from typing import Any

from async_grpo.config.run import RunConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import torch_dtype
from async_grpo.modeling.policy import named_adapters, named_weights, named_weights_and_adapters
from async_grpo.protocols import Engines
from async_grpo.weights.canary import Canary
from async_grpo.weights.config import get_transport
from async_grpo.weights.publisher import Publisher


def make_publisher(
    config: RunConfig, settings: SharedRunSettings, rank: int, engines: Engines | None, canary: Canary
) -> Publisher:
    """Return a publisher of the run's transport.

    Args:
        config: The run's options.
        settings: Settings that all workers of the run must agree on.
        rank: Number of this rank.
        engines: The connection to the workers; None except on rank 0.
        canary: The texts whose log-probs prove that the weights arrived.
    """
    make: Any = get_transport(settings.transport).make_publisher
    dtype = torch_dtype(settings.dtype)
    if settings.lora is None or settings.lora.sync == "merged":
        publisher: Publisher = make(engines, named_weights, canary, dtype, rank, config)
        return publisher
    publisher = make(engines, named_weights_and_adapters, canary, dtype, rank, config, named_adapters)
    return publisher


def make_reference_publisher(
    config: RunConfig, settings: SharedRunSettings, rank: int, engines: Engines | None, canary: Canary
) -> Publisher | None:
    """Return the publisher for the workers of a moving reference, or None if the reference does not move."""
    if not config.moves_reference:
        return None
    workers = None if engines is None else engines.reference_workers()
    return make_publisher(config, settings, rank, workers, canary)
