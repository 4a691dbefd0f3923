"""Advice for an engine or a logprob worker that runs out of memory: names the options that help."""

from async_grpo.inference.config import CPU_CACHE_VARIABLE, EngineConfig
from async_grpo.processes.out_of_memory import message, reason_in_log, reason_of

# The KV cache is reserved when the engine starts. Each step needs further memory, which grows with the number of
# sequences
STEP_CURE = (
    "lower --max-num-seqs, or lower --gpu-memory-utilization, which leaves less to the KV cache and more to the steps; "
    "--enforce-eager does without CUDA graphs"
)
UPDATE_CURE = (
    "lower --gpu-memory-utilization, so that new weights find room beside the KV cache; or use --lora-rank with "
    "--lora-sync adapter, which sends less"
)
SLEEP_CURE = "use --engine-sleep 2, which drops the weights, or a machine with more main memory"


def engine_start_cure(options: EngineConfig, *, has_gpu: bool) -> str:
    """Return advice for an engine that starts and has no room for its weights and KV cache.

    Args:
        options: The worker's options.
        has_gpu: Whether the engine runs on a GPU.
    """
    if not has_gpu:
        return (
            f"lower --max-num-seqs ({options.max_num_seqs} now), --max-generation-tokens or {CPU_CACHE_VARIABLE}, or use "
            "fewer --generation-workers"
        )
    cures = [
        f"change --gpu-memory-utilization ({options.gpu_memory_utilization:g} now): higher if the KV cache has no room, "
        "lower if other programs need the rest",
        "lower --max-num-seqs or --max-generation-tokens",
        "raise --tensor-parallel-size",
        "or use a smaller cache: --engine-options kv_cache_dtype=fp8",
    ]
    return ", ".join(cures)


def lack_in_step(num_requests: int, error: Exception | None = None) -> str:
    """Return the error message if a lack of memory ended an engine; "" if the cause was another one.

    vLLM's engine runs in a separate process. It writes the cause to the log, and its client learns only that it died.

    Args:
        num_requests: Number of unfinished requests.
        error: The error that the client got, if any.
    """
    reason = (reason_of(error) if error is not None else "") or reason_in_log()
    if not reason:
        return ""
    return message(f"in a step of the engine, with {num_requests} unfinished requests", STEP_CURE, reason)


def forward_cure(max_tokens: int) -> str:
    """Return advice for a forward pass of a logprob worker that does not fit into the memory.

    Args:
        max_tokens: Maximum number of tokens in one forward pass.
    """
    return f"lower --max-tokens-per-gpu of the worker ({max_tokens:,} now)"
