"""What vLLM's engine is started with: the run's settings, the worker's options, and what the user adds."""

import dataclasses
from typing import Any

from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from async_grpo.errors import ConfigurationError
from async_grpo.generation.config import EngineConfig
from async_grpo.options.fields import nearest
from async_grpo.types import SharedRunSettings
from async_grpo.weights.transports import get_transport
from async_grpo.weights.vllm_engine import WORKER_EXTENSION

SET_BY_THE_RUN = {
    *("model", "skip_tokenizer_init", "dtype", "max_model_len", "max_num_seqs", "tensor_parallel_size"),
    *("gpu_memory_utilization", "enable_prefix_caching", "enforce_eager", "logprobs_mode", "seed"),
    *("weight_transfer_config", "worker_extension_cls", "hf_overrides", "enable_log_requests"),
}


def further_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """`--engine-options`, if vLLM's engine has such arguments and the run does not set them itself.

    Raises:
        ConfigurationError: it has none of that name, or the run says its value.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(
                f"--engine-options {name}={value}: vLLM's engine has no such argument{nearest(name, sorted(known))}"
            )
        if name in SET_BY_THE_RUN:
            raise ConfigurationError(
                f"--engine-options {name}={value}: the run sets {name} itself, from its other options; leave it out"
            )
    return given


def engine_arguments(
    options: EngineConfig, settings: SharedRunSettings, worker_extension: str = WORKER_EXTENSION
) -> AsyncEngineArgs:
    """What vLLM's engine is started with."""
    return AsyncEngineArgs(
        model=options.model_path,
        skip_tokenizer_init=True,  # token ids in, token ids out: text is ours, made once at the end
        dtype=settings.dtype,
        max_model_len=settings.max_total_tokens,
        max_num_seqs=options.max_num_seqs,
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enable_prefix_caching=options.enable_prefix_caching,
        enforce_eager=options.enforce_eager,
        logprobs_mode="processed_logprobs",  # at the sampling temperature, as the trainer computes them
        seed=settings.seed,
        weight_transfer_config=WeightTransferConfig(backend=get_transport(settings.transport).engine_backend),
        worker_extension_cls=worker_extension,
        hf_overrides={"head_dtype": "float32"} if settings.float32_head else {},
        enable_log_requests=False,
        **further_arguments(options.further_options),
    )
