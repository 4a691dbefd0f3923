"""Adapters (LoRA) by peft: the reference of engines and trainers."""

from collections.abc import Sequence

import numpy as np
import torch
from engine_thread import hf_logprobs

from async_grpo.messages import LoraSettings
from async_grpo.types import Completion


def new_adapter(
    model: torch.nn.Module, rank: int, scaling: float, targets: Sequence[str], size: float = 0.1
) -> torch.nn.Module:
    """The model with a random adapter whose both matrices are noise, so that it changes every log-prob."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=rank, lora_alpha=scaling * rank, target_modules=list(targets))
    policy = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, matrix in policy.named_parameters():
            if "lora_" in name:
                matrix.normal_(0, size)
    return policy


def peft_tensors(policy: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Copies of the adapter's tensors, by the names of peft's files."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(policy)
    return {name: tensor.to(dtype, copy=True).contiguous() for name, tensor in state.items()}


def lora_settings(policy: torch.nn.Module, rank: int, scaling: float) -> LoraSettings:
    """The settings of a run that trains this adapter, and sends it alone."""
    names = [name for name in peft_tensors(policy) if ".lora_A." in name]
    layers = [name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for name in names]
    return LoraSettings(rank, scaling, tuple(sorted(layers)), "adapter")


@torch.no_grad()
def move(policy: torch.nn.Module, size: float, seed: int = 0) -> None:
    """Add noise to both matrices of every module."""
    generator = torch.Generator().manual_seed(seed)
    for name, matrix in policy.named_parameters():
        if "lora_" in name:
            matrix.add_(torch.randn(matrix.shape, generator=generator) * size)


def base_logprobs(policy: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """Log-probs of a sequence without the adapter."""
    with policy.disable_adapter():
        return hf_logprobs(policy, ids)


def error_of(completion: Completion, policy: torch.nn.Module, prompt: np.ndarray) -> float:
    """Largest difference to peft's log-probs at the sampling temperature."""
    ids = np.concatenate([prompt, completion.token_ids])
    return np.abs(completion.logprobs - hf_logprobs(policy, ids, temperature=0.7)[len(prompt) :]).max()
