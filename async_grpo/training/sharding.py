"""FSDP2 around the policy: every decoder layer a unit, embedding, final norm and head in the root unit.

Master weights, gradients and optimizer state are float32 whatever the compute dtype: at learning rates near 1e-6 an
update is far below bfloat16's resolution and would vanish.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
from async_grpo.modeling.load import model_folder, torch_dtype
from async_grpo.modeling.model_files import weight_shapes
from async_grpo.modeling.packed import compile_around_attention
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import Ranks


def shard_policy(
    policy: PolicyModel,
    ranks: Ranks,
    config: OptimizerConfig = OptimizerConfig(),  # noqa: B008 - it is frozen
    dtype: str | torch.dtype = "float32",
) -> PolicyModel:
    """Shard `policy`, its weights in float32, in place over the ranks and return it, in training mode.

    One rank that computes in float32 has nothing to shard or cast: its policy stays as it is. dtype: the compute dtype,
    float32 or bfloat16; gradients are reduced in float32 all the same. torch_compile: the layers, all but their attention.
    cpu_offload: what is not computed with lies in main memory. fsdp_size: so many ranks share one copy of the weights, the
    others hold more copies (HSDP, Zhao et al. 2023, 3.2.2); 0: all. ConfigurationError: the ranks cannot be divided so, or
    the model does not say what its decoder layers are.
    """
    names = set(policy.model._no_split_modules or ())
    layers = [module for module in policy.model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigurationError(f"{type(policy.model).__name__} does not declare its decoder layers")
    if config.gradient_checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.torch_compile:
        compile_around_attention(layers)
    compute, device = torch_dtype(dtype), ranks.device.type
    if ranks.world_size == 1 and compute is torch.float32 and not config.cpu_offload:
        return policy.train()  # FSDP's hooks and copies would cost a small model a tenth of its step
    offload = CPUOffloadPolicy(pin_memory=device == "cuda")
    options: dict[str, Any] = {
        "mesh": _mesh(ranks, config.fsdp_size or ranks.world_size),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
        "offload_policy": offload if config.cpu_offload else OffloadPolicy(),
    }
    for module in (*layers, policy):
        fully_shard(module, **options)
    # Otherwise the root's weights (embedding, head) would not be gathered for it
    register_fsdp_forward_method(policy, "plain_logprobs")
    return policy.train()


def _mesh(ranks: Ranks, fsdp_size: int) -> DeviceMesh:
    groups, left_over = divmod(ranks.world_size, fsdp_size)
    if left_over:
        raise ConfigurationError(f"--fsdp-size {fsdp_size} does not divide {ranks.world_size} ranks")
    shape = (groups, fsdp_size) if groups > 1 else (fsdp_size,)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("copy", "shard")[-len(shape) :])


def weight_names(path: str | Path) -> Collection[str]:
    """Return the names of the weights in a folder's safetensors files; of weights in another format none."""
    return weight_shapes(model_folder(path))


@torch.no_grad()
def load_shards(policy: PolicyModel, path: str | Path, device: torch.device) -> None:
    """Give a policy made of an empty model the weights in that folder, on `device`; of a sharded one a rank reads its own
    rows of each."""
    loaded: dict[str, Any] = {n: torch.empty_like(w, device=device) for n, w in named_weights(policy)}
    state_dict_loader.load(loaded, storage_reader=HuggingFaceStorageReader(str(model_folder(path))))
    policy.model.load_state_dict(loaded, strict=False, assign=True)
    policy.model.tie_weights()
    if not isinstance(policy, FSDPModule):
        policy.to(device)  # the buffers


def release_gathered(policy: PolicyModel) -> None:
    """Let go of the root weights that a forward without a backward left gathered."""
    if isinstance(policy, FSDPModule):
        policy.reshard()


@torch.no_grad()
def canary_logprobs(policy: PolicyModel, *texts: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """(N,) float32: the log-probs of the N tokens of all `texts` (integers), end to end; the first of each is 0. A
    collective if sharded."""
    ids = torch.tensor(np.concatenate(texts), dtype=torch.int64, device=policy.device)
    everything = torch.ones_like(ids, dtype=torch.bool)
    boundaries = torch.tensor([0, *map(len, texts)]).cumsum(0)
    logprobs, *_ = policy(ids, boundaries, everything, temperature)
    release_gathered(policy)
    return logprobs.float().cpu().numpy()
