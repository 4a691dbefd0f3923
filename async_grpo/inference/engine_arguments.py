"""The arguments with which vLLM's engine starts."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from async_grpo.errors import ConfigurationError
from async_grpo.inference.config import (
    CPU_BLOCK_SIZE,
    MAX_CPU_SEQUENCES,
    NO_SLEEP_ON_CPU,
    REFUSED_ENGINE_OPTIONS,
    EngineConfig,
    colocated_kv_cache_bytes,
    cpu_kv_cache,
    is_eager,
    kv_cache_bytes,
)
from async_grpo.inference.image_requests import image_arguments
from async_grpo.inference.served_lora import lora_arguments, served_lora
from async_grpo.inference.vllm_edges.continued_draws import model_runner
from async_grpo.inference.vllm_edges.cpu_drafts import DRAFT_ARGUMENTS, problem_with_drafts
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import load_config, torch_dtype
from async_grpo.modeling.model_files import weight_shapes
from async_grpo.options.fields import nearest, refuse
from async_grpo.weights.config import get_transport

# Arguments in `--engine-options` with which the user sets the size of the KV cache
SETS_CACHE = frozenset({"kv_cache_memory_bytes", "num_gpu_blocks_override"})


def engine_arguments(options: EngineConfig, settings: SharedRunSettings, extension: str) -> AsyncEngineArgs:
    """Return the engine's arguments from the run's settings, the worker's options and `--engine-options`.

    Args:
        options: The worker's options.
        settings: Settings that all workers of the run share.
        extension: Name of the class whose methods vLLM adds to its worker class.

    Raises:
        ConfigurationError: An argument in `--engine-options` is unknown to the engine, or is set by the run itself.
    """
    arguments: dict[str, Any] = {
        "model": options.model_path,
        # The engine reads and returns token ids, and the worker decodes completions. So the engine needs a tokenizer
        # only for grammars. It then uses the one of transformers, like the worker
        "skip_tokenizer_init": not settings.has_grammars,
        "tokenizer_mode": "hf",
        # Allow no other backend: the worker recomputes the allowed tokens with xgrammar
        "structured_outputs_config": {"backend": "xgrammar"},
        "dtype": settings.dtype,
        "max_model_len": settings.max_total_tokens,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": is_eager(options, has_gpu=torch.cuda.is_available()),
        # Return log-probs at the sampling temperature, which the trainer also computes
        "logprobs_mode": "processed_logprobs",
        "seed": settings.seed,
        "weight_transfer_config": WeightTransferConfig(get_transport(settings.transport).engine_backend),
        "worker_extension_cls": extension,
        "hf_overrides": {"head_dtype": "float32"} if settings.float32_head else {},
        "enable_log_requests": False,
        # Set a value explicitly: without one, transformers may ask on the terminal whether to run a model's code
        "trust_remote_code": False,
    }
    if settings.unsampled_token_ids:
        arguments.update(image_arguments(settings))
    adapter = served_lora(settings)
    if adapter is not None:
        arguments.update(lora_arguments(options, adapter))
    if settings.sleep_level:
        refuse(not torch.cuda.is_available(), f"--engine-sleep {settings.sleep_level}: {NO_SLEEP_ON_CPU}")
        arguments["enable_sleep_mode"] = True
    has_cache_size = bool(SETS_CACHE & options.further_options.keys())
    if torch.cuda.is_available():
        if options.colocate and not has_cache_size:
            arguments["kv_cache_memory_bytes"] = _colocated_cache_bytes(options, settings)
    else:
        if "block_size" not in options.further_options:
            arguments["block_size"] = CPU_BLOCK_SIZE
        if not has_cache_size:
            arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(options, settings)
    for name, value in options.further_options.items():
        problem = _problem_with(name, arguments, settings)
        if problem:
            raise ConfigurationError(f"--engine-options {name}={value}: {problem}")
    # By default load only safetensors files, because loading a pickle can run code
    further_options = {"load_format": "safetensors", **options.further_options}
    return AsyncEngineArgs(**arguments, **further_options)


def describe_engine(config: VllmConfig) -> str:
    """Return the versions of vLLM and torch, the model runner and the kind of device of an engine, for the log."""
    device_type = config.device_config.device_type
    return f"vLLM {vllm.__version__}, torch {torch.__version__}, model runner {model_runner(config)}, {device_type}"


def _colocated_cache_bytes(options: EngineConfig, settings: SharedRunSettings) -> int:
    """Return the size of the KV cache of an engine that shares its GPU with the trainer, in bytes."""
    num_parameters = sum(math.prod(shape) for shape in weight_shapes(Path(options.model_path)).values())
    weight_bytes = num_parameters * torch_dtype(settings.dtype).itemsize // options.tensor_parallel_size
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    return colocated_kv_cache_bytes(weight_bytes, int(options.gpu_memory_utilization * gpu_bytes))


def _cpu_cache_bytes(options: EngineConfig, settings: SharedRunSettings) -> int:
    """Return the size of the KV cache of an engine on the CPU, in bytes."""
    model = load_config(options.model_path).get_text_config()
    token_bytes = kv_cache_bytes(model, torch_dtype(settings.dtype).itemsize)
    return cpu_kv_cache(options.max_num_seqs or MAX_CPU_SEQUENCES, settings.max_total_tokens, token_bytes)


def _problem_with(name: str, arguments: Mapping[str, Any], settings: SharedRunSettings) -> str:
    """Return the reason why `--engine-options` must not contain this argument, or "" if it may."""
    engine_names = sorted(field.name for field in dataclasses.fields(AsyncEngineArgs))
    if name in REFUSED_ENGINE_OPTIONS:
        # `EngineOptions` has already checked these arguments, and has accepted only their default values
        return ""
    if name in arguments:
        return f"the run sets {name} itself, from its other options; leave it out"
    if name not in engine_names:
        return f"vLLM's engine has no such argument{nearest(name, engine_names)}"
    if name in DRAFT_ARGUMENTS and settings.truncation is not None:
        return (
            "log-probs of drafted tokens over the tokens that --top-p, --top-k and --min-p keep have not been proven; "
            "leave one of them out"
        )
    return problem_with_drafts(name, settings.temperature)
