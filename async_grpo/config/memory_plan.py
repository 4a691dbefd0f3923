"""Estimate the memory of each process of a run. The formulas are explained in docs/operations.md.

Real processes need somewhat more than these estimates, because memory allocators leave gaps.
"""

import math
from pathlib import Path
from typing import Any

from async_grpo.config.run import RunConfig
from async_grpo.inference.config import GIB, cpu_kv_cache, kv_cache_bytes
from async_grpo.messages import LoraSettings, SharedRunSettings

# Memory on rank 0 for the tensors that the NCCL transport broadcasts at once, and for their packed copy
NCCL_BYTES = 2 * GIB
CHECKPOINT_PARAMETER_BYTES = 12  # float32 weight and both moments of Adam
FROZEN_PARAMETER_BYTES = 4  # float32 weight of a part that is not trained, such as a frozen vision part


def parameters_of(folder: Path) -> int:
    """Return the number of a model's parameters, read from the headers of its files.

    Raises:
        ConfigurationError: Weights are missing, or are stored as pickles.
    """
    from async_grpo.modeling.model_files import refuse_pickles, weight_shapes

    refuse_pickles(folder)
    return sum(math.prod(shape) for shape in weight_shapes(folder).values())


def adapter_parameters(folder: Path, lora: LoraSettings) -> int:
    """Return the number of parameters of a LoRA adapter: the sum of rank * (inputs + outputs) over its layers."""
    from async_grpo.modeling.model_files import weight_shapes

    shapes = weight_shapes(folder)
    return sum(lora.rank * sum(shapes.get(f"{layer}.weight", ())) for layer in lora.layers)


def trainer_rank_bytes(
    config: RunConfig,
    settings: SharedRunSettings,
    model: Any,
    *,
    num_ranks: int,
    num_parameters: int,
    num_trained: int | None = None,
) -> float:
    """Return the memory of a trainer rank: its shard of the state, and the activations and logits of a micro-batch.

    Args:
        config: The run's options.
        settings: Settings that all workers of the run share.
        model: Hugging Face configuration of the model's text part.
        num_ranks: Number of trainer ranks.
        num_parameters: Number of the model's parameters.
        num_trained: Number of trained parameters: with LoRA, those of the adapter. None if all are trained.
    """
    from async_grpo.modeling.load import torch_dtype

    dtype_bytes = torch_dtype(settings.dtype).itemsize
    num_bytes: float = config.max_tokens_per_gpu * token_activation_bytes(config, model, dtype_bytes)
    num_bytes += logits_bytes(settings, chunk_tokens(config))
    if num_trained is None:
        num_bytes += 4 * settings.vocab_size * model.hidden_size  # the head's gradient in float32
    if not config.cpu_offload:
        num_bytes += trainer_state_bytes(
            config,
            settings,
            num_ranks=num_ranks,
            num_parameters=num_parameters,
            num_trained=num_trained,
        )
    if config.weight_transport == "nccl":
        num_bytes += NCCL_BYTES
    return num_bytes


def critic_rank_bytes(config: RunConfig, num_ranks: int, num_parameters: int) -> float:
    """Return the memory in bytes that a separate critic model adds to a trainer rank; 0 with `cpu_offload`.

    The critic's activations need no memory in addition: the policy's are freed before the critic's forward pass begins.
    """
    return 0.0 if config.cpu_offload else critic_state_bytes(config, num_ranks, num_parameters)


def critic_state_bytes(config: RunConfig, num_ranks: int, num_parameters: int) -> float:
    """Return the size in bytes of a rank's shard of the critic's weights, gradients and moments.

    Args:
        config: The run's options.
        num_ranks: Number of trainer ranks.
        num_parameters: Number of the critic's parameters.
    """
    parameter_bytes = 8  # float32 weight and gradient
    parameter_bytes += 2 if config.optimizer == "adamw_8bit" else 8
    return parameter_bytes * num_parameters / (config.fsdp_size or num_ranks)


def trainer_state_bytes(
    config: RunConfig,
    settings: SharedRunSettings,
    *,
    num_ranks: int,
    num_parameters: int,
    num_trained: int | None,
) -> float:
    """Return the size in bytes of a rank's shard of weights, gradients and optimizer moments.

    With LoRA, the model's weights are frozen: they have no gradients and no moments. They have the dtype of the
    computation, except for those that are stored in 4 bits.
    """
    from async_grpo.modeling.four_bit import BYTES_PER_WEIGHT
    from async_grpo.modeling.load import torch_dtype

    parameter_bytes = 8  # float32 weight and gradient
    parameter_bytes += 2 if config.optimizer == "adamw_8bit" else 8
    if config.update_stats:
        parameter_bytes += 4
    if config.moves_reference:
        parameter_bytes += 4
    num_bytes: float = parameter_bytes * num_parameters
    if num_trained is not None:
        num_four_bit = settings.lora.num_four_bit_weights if settings.lora else 0
        num_bytes = parameter_bytes * num_trained + BYTES_PER_WEIGHT * num_four_bit
        num_bytes += torch_dtype(settings.dtype).itemsize * (num_parameters - num_four_bit)
    return num_bytes / (config.fsdp_size or num_ranks)


def token_activation_bytes(config: RunConfig, model: Any, dtype_bytes: int) -> int:
    """Return the bytes of activations that a rank keeps for the backward pass of one token."""
    width = model.hidden_size
    layers = model.num_hidden_layers
    num_active_experts = getattr(model, "num_experts_per_tok", None) or 1
    inner_width = mlp_width(model) * num_active_experts
    all_layers_bytes = layers * dtype_bytes * (16 * width + 4 * inner_width)
    all_layers_bytes += 2 * kv_cache_bytes(model, dtype_bytes)
    if config.gradient_checkpointing:
        # The inputs of all layers are kept, and all activations of the one layer that is being recomputed
        return layers * dtype_bytes * width + all_layers_bytes // layers
    return all_layers_bytes


def mlp_width(model: Any) -> int:
    """Return the inner width of a model's MLP; if the model has experts, of one expert.

    Its name in the configuration depends on the architecture. If it is missing, as for GPT-2, it is 4 times the hidden
    size.
    """
    for name in ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"):
        width = getattr(model, name, None)
        if width:
            return int(width)
    return 4 * int(model.hidden_size)


def chunk_tokens(config: RunConfig) -> int:
    """Return the number of tokens for which a trainer rank computes logits at once."""
    return min(config.logprob_chunk_size, config.max_tokens_per_gpu)


def logits_bytes(settings: SharedRunSettings, num_chunk_tokens: int) -> int:
    """Return the bytes that the computation of log-probs needs: three float32 tensors as large as the logits of a chunk."""
    return 3 * 4 * settings.vocab_size * num_chunk_tokens


def logprob_worker_bytes(settings: SharedRunSettings, *, num_parameters: int, num_chunk_tokens: int) -> int:
    """Return the memory of a logprob worker: its weights, and the logits of a chunk of tokens."""
    from async_grpo.modeling.load import torch_dtype

    weight_bytes = torch_dtype(settings.dtype).itemsize * num_parameters
    return weight_bytes + logits_bytes(settings, num_chunk_tokens)


def engine_bytes(
    settings: SharedRunSettings, model: Any, *, num_parameters: int, num_sequences: int, has_gpu: bool
) -> int:
    """Return the memory of an engine over all of its GPUs: weights, and the KV cache of its sequences.

    Args:
        settings: Settings that all workers of the run share.
        model: Hugging Face configuration of the model's text part.
        num_parameters: Number of the model's parameters.
        num_sequences: Number of sequences that the engine generates at once.
        has_gpu: Whether the engine runs on a GPU.
    """
    from async_grpo.modeling.load import torch_dtype

    dtype_bytes = torch_dtype(settings.dtype).itemsize
    token_bytes = kv_cache_bytes(model, dtype_bytes)
    cache_bytes = num_sequences * settings.max_total_tokens * token_bytes
    if not has_gpu:
        cache_bytes = cpu_kv_cache(num_sequences, settings.max_total_tokens, token_bytes)
    return dtype_bytes * num_parameters + cache_bytes
