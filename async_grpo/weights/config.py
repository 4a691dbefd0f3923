"""The options of the weight sync."""

from dataclasses import dataclass

from async_grpo.options.fields import POSITIVE, Section, option


@dataclass(frozen=True, kw_only=True)
class WeightConfig(Section):
    """How new weights reach the engines, and what proves that they landed."""

    weight_transport: str = option(
        "object_store",
        "How weights travel; nccl needs GPUs. Or FILE.py:NAME of a `Transport` of your own.",
        "Cluster",
        choices="async_grpo.weights.transports:TRANSPORTS",
        own=True,
    )
    sync_timeout_s: float = option(600.0, "Longest weight update of an engine.", "Cluster", range=POSITIVE)
    canary_tolerance: float | None = option(
        None,
        "Allowed difference of engine and trainer log-probs, root mean square (default: by what they differ by at start).",
        "Cluster",
        range=POSITIVE,
    )
