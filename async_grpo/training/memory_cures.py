"""Advice for a trainer rank that runs out of memory: names the options that help and that the run does not use yet."""

import os

from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import GPU_SHARE

SENDING = (
    "use --weight-transport shared_files, which needs no object store; or --lora-rank with --lora-sync adapter, which "
    "sends less; or a machine with more memory"
)
CHECKPOINT = (
    "the main memory of the node must hold a copy of weights and moments: use more nodes, or --lora-rank"
)
EXPORT = "use more ranks (--nproc-per-node), or a machine with more memory"


def micro_batch_cure(config: OptimizerConfig, *, on_gpu: bool) -> str:
    """Return advice for a forward or backward pass of a micro-batch that does not fit into the memory.

    Args:
        config: The options of the trainer's memory.
        on_gpu: Whether the rank computes on a GPU.
    """
    cures = ["lower --max-tokens-per-gpu"]
    if not config.gradient_checkpointing:
        cures.append("use --gradient-checkpointing")
    cures.append(f"lower --logprob-chunk-size ({config.logprob_chunk_size:,} now)")
    return _joined([*cures, *_state_cures(config, on_gpu=on_gpu)])


def update_cure(config: OptimizerConfig, *, on_gpu: bool) -> str:
    """Return advice for an optimizer step whose moments, or copy of the weights for the update's norms, do not fit."""
    cures = []
    if config.update_stats:
        cures.append("use --no-update-stats")
    return _joined([*cures, *_state_cures(config, on_gpu=on_gpu)])


def start_cure(config: OptimizerConfig, *, on_gpu: bool) -> str:
    """Return advice for a model that does not fit when it is loaded."""
    return _joined(_state_cures(config, on_gpu=on_gpu))


def _state_cures(config: OptimizerConfig, *, on_gpu: bool) -> list[str]:
    """Return the options that reduce the memory for a rank's weights, gradients and moments."""
    cures = []
    if config.optimizer != "adamw_8bit":
        cures.append("use --optimizer adamw_8bit")
    if on_gpu and not config.cpu_offload:
        cures.append("use --cpu-offload")
    if GPU_SHARE in os.environ:
        cures.append("lower --gpu-memory-utilization, which is the engine's share of this GPU")
    cures.append("train an adapter (--lora-rank)")
    cures.append(
        "use more ranks (--nproc-per-node) on further GPUs" if on_gpu else "use a machine with more memory"
    )
    return cures


def _joined(cures: list[str]) -> str:
    return f"{', '.join(cures[:-1])}, or {cures[-1]}"
