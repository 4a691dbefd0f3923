"""Which options to change if a trainer rank runs out of memory, as far as the run does not use them yet."""

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
    """Return what to change if forward or backward pass of a micro-batch do not fit.

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
    """Return what to change if the optimizer step does not fit: its moments, and the copy for the update's norms."""
    cures = []
    if config.update_stats:
        cures.append("use --no-update-stats")
    return _joined([*cures, *_state_cures(config, on_gpu=on_gpu)])


def start_cure(config: OptimizerConfig, *, on_gpu: bool) -> str:
    """Return what to change if the model does not fit when it is loaded."""
    return _joined(_state_cures(config, on_gpu=on_gpu))


def _state_cures(config: OptimizerConfig, *, on_gpu: bool) -> list[str]:
    """Return the options that make the weights, gradients and moments of a rank smaller."""
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
