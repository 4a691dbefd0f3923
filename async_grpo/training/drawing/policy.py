"""Load a policy that draws pictures, and shard it over the ranks."""

import numpy as np
from jaxtyping import Float32, Int
from torch.distributed.fsdp import register_fsdp_forward_method

from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.flow.canary import flow_canary_logprobs
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.modeling.load import torch_dtype
from async_grpo.modeling.lora import add_lora, fill_lora
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import Ranks
from async_grpo.training.sharding import release_gathered, shard_modules


def load_flow_policy(
    path: str, config: OptimizerConfig, settings: SharedRunSettings, ranks: Ranks, *, keeps_reference: bool
) -> FlowPolicy:
    """Load the model of a folder, and shard it.

    Args:
        path: Folder of the model.
        config: Options of the sharding.
        settings: The run's settings; the noise level is the temperature.
        ranks: The ranks of the training.
        keeps_reference: Whether the loss has a KL penalty, for which the initial model is kept.
    """
    assert settings.flow is not None
    flow = settings.flow
    folder = read_flow_folder(path).with_options(flow.picture_size, flow.guidance)
    policy = FlowPolicy.of_folder(
        folder,
        flow.num_steps,
        settings.temperature,
        guidance=flow.guidance,
        dtype=torch_dtype(settings.dtype),
        keeps_reference=keeps_reference and settings.lora is None,
    )
    policy.to(ranks.device)
    if settings.lora is None:
        return shard_flow_policy(policy, ranks, config, settings.dtype)
    # LoRA freezes these weights, so they can have the dtype of the computation: no optimizer updates them in float32
    policy.cast_weights()
    policy.reference_is_base = keeps_reference
    add_lora(policy.model, settings.lora)
    shard_flow_policy(policy, ranks, config, settings.dtype)
    fill_lora(policy.model, settings.lora, settings.seed, ranks.device)
    return policy


def shard_flow_policy(
    policy: FlowPolicy, ranks: Ranks, config: OptimizerConfig, dtype: str = "float32"
) -> FlowPolicy:
    """Shard the policy in place over the ranks (FSDP2), and return it. Each block of the transformer is an FSDP unit."""
    if config.gradient_checkpointing:
        policy.model.enable_gradient_checkpointing()
    layers = policy.family.blocks(policy.model)
    if policy.reference is not None:
        layers += policy.family.blocks(policy.reference)
    # FSDP must not cast the inputs: the noisy pictures must stay in float32. The policy itself casts what the model
    # reads
    if shard_modules(policy, layers, ranks, config, torch_dtype(dtype), casts_inputs=False):
        # Makes FSDP gather the root's weights when DiffusionNFT calls this method in place of `forward`
        register_fsdp_forward_method(policy, "velocity_at")
    return policy.train()


def trainer_canary_logprobs(
    policy: FlowPolicy, *texts: Int[np.ndarray, " _tokens"]
) -> Float32[np.ndarray, " packed"]:
    """Return `flow_canary_logprobs` of the texts, and then shard the weights that the forward pass gathered."""
    logprobs = flow_canary_logprobs(policy, *texts)
    release_gathered(policy)
    return logprobs
