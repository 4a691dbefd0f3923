"""Shard the policy with FSDP2: every decoder layer is a unit; embedding, final norm and head belong to the root unit.

Master weights, gradients and optimizer state are always float32. In bfloat16, updates at learning rates near 1e-6 would
be rounded away.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.four_bit import FourBitLinear, four_bit_modules
from async_grpo.modeling.load import empty_causal_lm, model_folder, torch_dtype
from async_grpo.modeling.lora import name_without_adapter
from async_grpo.modeling.model_files import weight_shapes
from async_grpo.modeling.packed import compile_around_attention
from async_grpo.modeling.policy import PolicyModel, stored_weights
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import Ranks
from async_grpo.types import ImageReference

# Weights that are to be stored in 4 bits are read in groups of this size in float32, over all ranks
READ_BYTES = 1 << 30


def shard_policy(
    policy: PolicyModel,
    ranks: Ranks,
    config: OptimizerConfig = OptimizerConfig(),  # noqa: B008 - it is frozen
    dtype: str | torch.dtype = "float32",
) -> PolicyModel:
    """Shard the policy in place over the ranks, and return it in training mode.

    The policy of a single rank that computes in float32 is not sharded, unless its weights are offloaded.

    Args:
        policy: The policy, with float32 weights.
        ranks: The ranks of the training.
        config: `torch_compile` compiles the layers, except their attention. `cpu_offload` keeps weights in main memory
            while they are not needed. Every `fsdp_size` ranks share one copy of the weights, so that there are several
            copies if there are more ranks (HSDP, Zhao et al. 2023, 3.2.2). 0 shares one copy among all ranks.
        dtype: The compute dtype, float32 or bfloat16. Gradients are always reduced in float32.

    Raises:
        ConfigurationError: `fsdp_size` does not divide the number of ranks, or the model does not declare its decoder
            layers.
    """
    layers = _decoder_layers(policy)
    if config.gradient_checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.torch_compile:
        compile_around_attention(_language_layers(policy, layers))
    compute = torch_dtype(dtype)
    if shard_modules(policy, layers, ranks, config, compute):
        # `plain_logprobs` is called instead of `forward`. Registering it makes FSDP gather the root's weights
        # (embedding, head)
        register_fsdp_forward_method(policy, "plain_logprobs")
    return policy.train()


def shard_modules(
    policy: nn.Module,
    layers: Sequence[nn.Module],
    ranks: Ranks,
    config: OptimizerConfig,
    compute: torch.dtype,
    *,
    casts_inputs: bool = True,
) -> bool:
    """Shard a policy in place over the ranks: each layer is a unit, and everything else belongs to the root unit.

    Args:
        policy: The policy, with float32 weights.
        layers: Its layers.
        ranks: The ranks of the training.
        config: Its options `cpu_offload` and `fsdp_size` are used.
        compute: The compute dtype.
        casts_inputs: Whether each unit casts its inputs to the compute dtype.

    Returns:
        Whether the policy was sharded.
    """
    if ranks.world_size == 1 and compute is torch.float32 and not config.cpu_offload:
        # A single rank that computes in float32 does not need FSDP. Its hooks and copies slow a small model's steps
        # down by 10 %
        return False
    offload_policy = OffloadPolicy()
    if config.cpu_offload:
        offload_policy = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    options: dict[str, Any] = {
        "mesh": _mesh(ranks, config.fsdp_size or ranks.world_size),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=casts_inputs
        ),
        "offload_policy": offload_policy,
    }
    for module in (*layers, policy):
        fully_shard(module, **options)
    return True


def _decoder_layers(policy: PolicyModel) -> list[Any]:
    """Return the modules that the model declares as its decoder layers (`_no_split_modules`).

    Raises:
        ConfigurationError: The model declares none.
    """
    class_names = set(policy.model._no_split_modules or ())
    layers = [module for module in policy.model.modules() if type(module).__name__ in class_names]
    if not layers:
        raise ConfigurationError(f"{type(policy.model).__name__} does not declare its decoder layers")
    return layers


def _language_layers(policy: PolicyModel, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers that are not part of a vision tower, whose attention is not packed."""
    tower = getattr(policy.model.base_model, "visual", None)
    modules_of_tower = set() if tower is None else set(tower.modules())
    return [layer for layer in layers if layer not in modules_of_tower]


def _mesh(ranks: Ranks, fsdp_size: int) -> DeviceMesh:
    """Return the mesh of the ranks: (copies, shards), or (shards,) if there is a single copy of the weights.

    Raises:
        ConfigurationError: `fsdp_size` does not divide the number of ranks.
    """
    num_copies, remainder = divmod(ranks.world_size, fsdp_size)
    if remainder:
        raise ConfigurationError(f"--fsdp-size {fsdp_size} does not divide {ranks.world_size} ranks")
    if num_copies > 1:
        shape: tuple[int, ...] = (num_copies, fsdp_size)
        dim_names: tuple[str, ...] = ("copy", "shard")
    else:
        shape = (fsdp_size,)
        dim_names = ("shard",)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=dim_names)


def weight_names(path: str | Path) -> Collection[str]:
    """Return the names of the weights in a folder's safetensors files; an empty collection if there are no such files."""
    return weight_shapes(model_folder(path))


def empty_model(path: str) -> Any | None:
    """Return the model without weights if each rank can load its own shard from the files, else None.

    This is possible if the safetensors files in the folder use the model's names for all weights.
    """
    names_in_files = weight_names(path)
    if not names_in_files:
        return None
    model = empty_causal_lm(path)
    are_all_in_files = all(name in names_in_files for name, _ in model.named_parameters())
    return model if are_all_in_files else None


@torch.no_grad()
def load_shards(policy: PolicyModel, path: str | Path, device: torch.device) -> None:
    """Load the weights from a model folder into a policy whose model is empty ("meta"), and place them on `device`.

    If the policy is sharded, each rank reads only its own rows of each weight. LoRA adapters stay empty.
    """
    loaded = _four_bit_shards(policy, path, device)
    weights: dict[str, Any] = {}
    names_in_module = {}
    for name, weight in stored_weights(policy):
        if ".lora_" not in name and name not in loaded:
            weights[name_without_adapter(name)] = torch.empty_like(weight, device=device)
            names_in_module[name_without_adapter(name)] = name
    _read_weights(weights, path)
    loaded |= {names_in_module[name]: weight for name, weight in weights.items()}
    policy.model.load_state_dict(loaded, strict=False, assign=True)
    policy.model.tie_weights()
    if not isinstance(policy, FSDPModule):
        policy.to(device)  # moves the buffers; the weights are on the device already


def _read_weights(weights: dict[str, Any], path: str | Path) -> None:
    """Read tensors, or this rank's shards of them, from a model folder. A collective if they are sharded."""
    state_dict_loader.load(weights, storage_reader=HuggingFaceStorageReader(str(model_folder(path))))


def _four_bit_shards(policy: PolicyModel, path: str | Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Return codes and scales, by their names in the module, of all layers whose weights are stored in 4 bits.

    The layers are read one after the other, in groups that need little memory, because their weights are read in float32.
    """
    shards: dict[str, torch.Tensor] = {}
    group: dict[str, FourBitLinear] = {}
    group_bytes = 0
    for name, layer in four_bit_modules(policy.model):
        group[name] = layer
        group_bytes += 4 * layer.in_features * layer.out_features
        if group_bytes >= READ_BYTES:
            shards |= _quantised_group(group, path, device)
            group = {}
            group_bytes = 0
    return shards | _quantised_group(group, path, device) if group else shards


def _quantised_group(
    layers: dict[str, FourBitLinear], path: str | Path, device: torch.device
) -> dict[str, torch.Tensor]:
    """Read the weights of some layers, and return their codes and scales by their names in the module."""
    weights: dict[str, Any] = {}
    for name, layer in layers.items():
        weights[name_without_adapter(f"{name}.weight")] = layer.empty_weight(device)
    _read_weights(weights, path)
    shards = {}
    for name, layer in layers.items():
        weight = weights.pop(name_without_adapter(f"{name}.weight"))
        for part, shard in layer.stored(weight).items():
            shards[f"{name}.{part}"] = shard
    return shards


def release_gathered(policy: nn.Module) -> None:
    """Shard the root unit's weights again after a forward pass without a backward pass.

    FSDP leaves these weights gathered after a forward pass, because the backward pass needs them first.
    """
    if isinstance(policy, FSDPModule):
        policy.reshard()


@torch.no_grad()
def canary_logprobs(
    policy: PolicyModel,
    *texts: Int[np.ndarray, " _tokens"],
    temperature: float = 1.0,
    images_of: Callable[[np.ndarray], tuple[ImageReference, ...]] | None = None,
) -> Float32[np.ndarray, " packed"]:
    """Return the log-probs of the tokens of the canary texts, end to end. The first token of each text has 0.

    The trainer and an engine compute these log-probs with the same weights, so a difference shows weights that were not
    transferred correctly. A collective if the policy is sharded.

    Args:
        policy: The policy.
        texts: The token ids of each text.
        temperature: Divisor of the logits.
        images_of: Returns the images of a text; None if no text has an image.
    """
    ids = torch.tensor(np.concatenate(texts), dtype=torch.int64, device=policy.device)
    full_mask = torch.ones_like(ids, dtype=torch.bool)
    boundaries = torch.tensor([0, *map(len, texts)]).cumsum(0)
    images = [] if images_of is None else [images_of(text) for text in texts]
    image_inputs = policy.image_inputs(images, np.concatenate(texts), boundaries.numpy())
    masks_and_images = () if image_inputs is None else (None, image_inputs)
    logprobs, *_ = policy(ids, boundaries, full_mask, temperature, *masks_and_images)
    release_gathered(policy)
    return logprobs.float().cpu().numpy()
