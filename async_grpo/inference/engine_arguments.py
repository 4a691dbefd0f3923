"""What vLLM's engine is started with."""

import dataclasses
from typing import Any

from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from async_grpo.errors import ConfigurationError
from async_grpo.inference.config import REFUSED_ENGINE_OPTIONS, EngineConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.options.fields import nearest
from async_grpo.weights.config import get_transport

# Arguments that have the engine draft tokens. Its `_expand_kernel_impl` of the CPU fills a copy of its output, and its
# generators lack the offset that seeded drafts are taken back by
SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


def engine_arguments(options: EngineConfig, settings: SharedRunSettings, extension: str) -> AsyncEngineArgs:
    """The run's settings, the worker's options, and `--engine-options`.

    ConfigurationError: the engine has no further argument of that name, or the run says its value.
    """
    own: dict[str, Any] = {
        "model": options.model_path,
        "skip_tokenizer_init": True,  # token ids in, token ids out: text is ours, made once at the end
        "dtype": settings.dtype,
        "max_model_len": settings.max_total_tokens,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": options.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer computes them
        "seed": settings.seed,
        "weight_transfer_config": WeightTransferConfig(get_transport(settings.transport).engine_backend),
        "worker_extension_cls": extension,
        "hf_overrides": {"head_dtype": "float32"} if settings.float32_head else {},
        "enable_log_requests": False,
        "trust_remote_code": False,  # said, or something may ask on the terminal
    }
    known = sorted(field.name for field in dataclasses.fields(AsyncEngineArgs))
    for name, value in options.further_options.items():
        if name in REFUSED_ENGINE_OPTIONS:
            continue  # it was accepted because it says what is so without it
        if name in own:
            what = f"the run sets {name} itself, from its other options; leave it out"
        elif name not in known:
            what = f"vLLM's engine has no such argument{nearest(name, known)}"
        elif name in SPECULATION and current_platform.is_cpu():
            what = (
                f"vLLM 0.32 on the CPU divides by uninitialized memory where tokens are drafted at a temperature above 0 "
                f"(the run's: {settings.temperature}), and ends at the first seeded request; leave it out"
            )
        else:
            continue
        raise ConfigurationError(f"--engine-options {name}={value}: {what}")
    # A folder's pickles are not read, unless the user names another format
    formats = {"load_format": "safetensors"} | options.further_options
    return AsyncEngineArgs(**own, **formats)
