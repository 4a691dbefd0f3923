"""What one engine is started with; what must be equal everywhere comes from `SharedRunSettings` instead."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """Options of one vLLM engine."""

    model_path: str
    max_num_seqs: int = 64
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
