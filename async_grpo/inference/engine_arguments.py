"""The arguments that vLLM's engine is started with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from async_grpo.errors import ConfigurationError
from async_grpo.inference.config import REFUSED_ENGINE_OPTIONS, EngineConfig
from async_grpo.inference.vllm_edges.cpu_drafts import problem_with_drafts
from async_grpo.messages import SharedRunSettings
from async_grpo.options.fields import nearest
from async_grpo.weights.config import get_transport


def engine_arguments(options: EngineConfig, settings: SharedRunSettings, extension: str) -> AsyncEngineArgs:
    """Combine the run's settings, the worker's options, and `--engine-options`.

    Args:
        options: The worker's options.
        settings: What every worker of the run must share.
        extension: The class that vLLM's worker processes add to theirs.

    Raises:
        ConfigurationError: `--engine-options` name an argument that the engine does not have, or that the run sets itself.
    """
    arguments: dict[str, Any] = {
        "model": options.model_path,
        # The engine reads and returns token ids; the worker decodes each completion once, at its end
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "max_model_len": settings.max_total_tokens,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": options.enforce_eager,
        # At the sampling temperature, as the trainer computes log-probs
        "logprobs_mode": "processed_logprobs",
        "seed": settings.seed,
        "weight_transfer_config": WeightTransferConfig(get_transport(settings.transport).engine_backend),
        "worker_extension_cls": extension,
        "hf_overrides": {"head_dtype": "float32"} if settings.float32_head else {},
        "enable_log_requests": False,
        # Without a value, a library may ask on the terminal
        "trust_remote_code": False,
    }
    for name, value in options.further_options.items():
        problem = _problem_with(name, arguments, settings)
        if problem:
            raise ConfigurationError(f"--engine-options {name}={value}: {problem}")
    # Pickles in the model's folder are not read, unless the user names another format
    further_options = {"load_format": "safetensors", **options.further_options}
    return AsyncEngineArgs(**arguments, **further_options)


def _problem_with(name: str, arguments: Mapping[str, Any], settings: SharedRunSettings) -> str:
    """Return why `--engine-options` must not name this argument; "" if it may."""
    engine_names = sorted(field.name for field in dataclasses.fields(AsyncEngineArgs))
    if name in REFUSED_ENGINE_OPTIONS:
        # `EngineOptions` accepts these only with their default value
        return ""
    if name in arguments:
        return f"the run sets {name} itself, from its other options; leave it out"
    if name not in engine_names:
        return f"vLLM's engine has no such argument{nearest(name, engine_names)}"
    return problem_with_drafts(name, settings.temperature)
