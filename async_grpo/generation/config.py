"""The options of one engine; what must be equal everywhere comes from `SharedRunSettings` instead."""

from dataclasses import dataclass
from typing import Any

from async_grpo.options.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    Section,
    option,
    parse_assignments,
    required,
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Section):
    """How each engine runs, whatever model it serves."""

    engine: str = option(
        "vllm",
        "Which inference engine, or FILE.py:NAME of a class of your own.",
        "Engine",
        choices="async_grpo.generation.engines:ENGINES",
        own=True,
    )

    max_num_seqs: int = option(
        64, "Sequences each engine decodes at once.", "Engine", range=POSITIVE, everyday=True
    )
    overhead_seqs: int = option(
        16, "Further sequences admitted, so that the engine never runs dry.", "Engine", range=NOT_NEGATIVE
    )
    tensor_parallel_size: int = option(
        1, "GPUs of each generation worker.", "Engine", range=POSITIVE, everyday=True
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of each GPU's memory that the engine may take.", "Engine", range=POSITIVE_SHARE
    )
    enable_prefix_caching: bool = option(True, "Share the prompt's KV cache within a group.", "Engine")
    enforce_eager: bool = option(
        False, "Do not compile the engine's model: starts faster, runs slower.", "Engine"
    )
    engine_options: str = option(
        "", "Further arguments of vLLM's engine: kv_cache_dtype=fp8,block_size=32.", "Engine"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.further_options  # read once, so that what is no assignment is refused now

    @property
    def further_options(self) -> dict[str, Any]:
        """`--engine-options` by name; whole numbers are ints, as the engine's arguments are."""
        found = parse_assignments(self.engine_options, "engine-options")
        return {
            name.replace("-", "_"): int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in found.items()
        }

    @property
    def max_sequences(self) -> int:
        """Sequences that a worker takes at once."""
        return self.max_num_seqs + self.overhead_seqs


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    """What one engine is started with."""

    model_path: str = required(
        "Hugging Face folder of the model; must be the trainer's.",
        everyday=True,
        also="model_name_or_path",
    )
