"""Adapters (LoRA) by peft: the reference of engines and trainers."""

from collections.abc import Sequence

import torch

from async_grpo.messages import LoraSettings


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
