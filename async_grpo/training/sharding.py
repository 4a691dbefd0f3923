"""FSDP2 around the policy: every decoder layer a unit, embedding, final norm and head in the root unit.

The same path for NCCL and gloo, and for a world of one. Master weights, gradients and optimizer state are
float32 whatever the compute dtype: at learning rates near 1e-6 an update is far below bfloat16's resolution
and would vanish.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.load import torch_dtype
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.distributed import Ranks


def shard_policy(
    policy: PolicyModel,
    ranks: Ranks,
    *,
    dtype: str | torch.dtype = "float32",
    gradient_checkpointing: bool = False,
) -> PolicyModel:
    """Shard `policy` in place over all ranks and return it, in training mode on the rank's device.

    dtype: the compute dtype, float32 or bfloat16; the latter casts weights and activations and still reduces
    gradients in float32. gradient_checkpointing: keep one activation per layer and compute the rest again in
    the backward. ConfigurationError: another dtype, weights that are not float32, or no decoder layers to be
    found.
    """
    compute = torch_dtype(dtype)
    if compute not in (torch.float32, torch.bfloat16):
        raise ConfigurationError(
            f"cannot train in {dtype}: float16 gradients would underflow; use bfloat16 or float32"
        )
    wrong = {name: p.dtype for name, p in policy.named_parameters() if p.dtype is not torch.float32}
    if wrong:
        raise ConfigurationError(
            f"master weights must be loaded in float32, but {next(iter(wrong.items()))} is not"
        )
    if gradient_checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    precision = (
        MixedPrecisionPolicy()
        if compute is torch.float32
        else MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    )
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy.train()


def decoder_layers(policy: PolicyModel) -> list[nn.Module]:
    """The modules that transformers declares must not be split: the decoder layers, in order."""
    names = set(policy.model._no_split_modules or ())
    layers = [module for module in policy.model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigurationError(f"{type(policy.model).__name__} does not declare its decoder layers")
    return layers


def release_gathered(policy: PolicyModel) -> None:
    """Let go of the root weights that a forward without a backward left gathered; nothing if not sharded."""
    if isinstance(policy, FSDPModule):
        policy.reshard()
