"""The arguments with which vLLM serves the policy's adapter (LoRA), and checks of adapters that it cannot serve."""

import logging
from typing import Any

import torch
from vllm.lora.request import LoRARequest

from async_grpo.errors import ConfigurationError
from async_grpo.inference.config import LORA_RANKS, EngineConfig
from async_grpo.inference.vllm_edges.lora_weights import LORA_ID
from async_grpo.messages import LoraSettings, SharedRunSettings
from async_grpo.modeling.load import load_config

log = logging.getLogger(__name__)
# Modules that vLLM 0.32 can adapt only in some models, and the head only if it is not tied to the embedding
EMBEDDINGS = ("embed_tokens", "lm_head")
# Fields of a model's configuration with its number of experts (MoE). If such a model serves adapters, vLLM 0.32 uses
# kernels written in Triton even on a CPU, where the first request then ends the engine
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
MERGE_INSTEAD = "; with --lora-sync merged, engines receive whole weights and serve every adapter"
# Every request of the policy names this adapter. The path is never read, because the adapter's tensors arrive by weight
# updates. If the adapter were missing, vLLM would look for the path, and the request would fail
POLICY_LORA = LoRARequest("policy", LORA_ID, "/the adapter arrives by weight updates only")


def served_lora(settings: SharedRunSettings) -> LoraSettings | None:
    """Return the adapter that engines apply to each request; None if they receive whole (merged) weights."""
    adapter = settings.lora
    return adapter if adapter is not None and adapter.sync == "adapter" else None


def lora_arguments(options: EngineConfig, adapter: LoraSettings) -> dict[str, Any]:
    """Return the arguments with which vLLM's engine can serve an adapter.

    Raises:
        ConfigurationError: No engine can serve this adapter with these options.
    """
    if adapter.rank > LORA_RANKS[-1]:
        raise ConfigurationError(
            f"--lora-rank {adapter.rank}: vLLM serves adapters up to rank {LORA_RANKS[-1]}{MERGE_INSTEAD}"
        )
    names = sorted({layer.rpartition(".")[2] for layer in adapter.layers})
    embeddings = [name for name in names if name in EMBEDDINGS]
    if embeddings:
        raise ConfigurationError(
            f"--lora-targets: engines cannot apply an adapter to {', '.join(embeddings)}{MERGE_INSTEAD}"
        )
    model_config = load_config(options.model_path)
    has_experts = any(getattr(model_config.get_text_config(), name, None) for name in NUMBERS_OF_EXPERTS)
    if has_experts and not torch.cuda.is_available():
        raise ConfigurationError(
            f"--lora-sync adapter: on a CPU, vLLM cannot compute experts in an engine that applies adapters{MERGE_INSTEAD}"
        )
    is_quantized = getattr(model_config, "quantization_config", None) is not None
    if is_quantized or options.further_options.get("quantization"):
        raise ConfigurationError(
            "an engine with quantized weights cannot show that it applies an adapter to the right base: leave out "
            "quantization, and give the engines the model without it"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in LORA_RANKS if rank >= adapter.rank),
        # vLLM prepares only layers with these names for an adapter. Preparing more would cost time at each step
        "lora_target_modules": names,
    }
