"""Load the policy of a run that draws, and shard it over the ranks."""

from typing import Any

import numpy as np
from jaxtyping import Float32, Int

from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.flow.canary import flow_canary_logprobs
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.modeling.load import torch_dtype
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
    folder = read_flow_folder(path)
    policy = FlowPolicy.of_folder(
        folder, settings.flow.num_steps, settings.temperature, keeps_reference=keeps_reference
    )
    policy.to(ranks.device)
    return shard_flow_policy(policy, ranks, config, settings.dtype)


def shard_flow_policy(
    policy: FlowPolicy, ranks: Ranks, config: OptimizerConfig, dtype: str = "float32"
) -> FlowPolicy:
    """Shard the policy in place over the ranks (FSDP2), and return it. Each block of a transformer is a unit.

    The first block belongs to the root unit: after all blocks, the model calls the embedding of times and labels inside its
    first block again, whose weights would then be sharded.
    """
    layers: list[Any] = list(policy.model.transformer_blocks)[1:]
    if policy.reference is not None:
        reference: Any = policy.reference
        layers += list(reference.transformer_blocks)[1:]
    shard_modules(policy, layers, ranks, config, torch_dtype(dtype))
    return policy.train()


def trainer_canary_logprobs(
    policy: FlowPolicy, *texts: Int[np.ndarray, " _tokens"]
) -> Float32[np.ndarray, " packed"]:
    """Return the log-probs of the canary, as `flow_canary_logprobs`, and shard the policy's weights again."""
    logprobs = flow_canary_logprobs(policy, *texts)
    release_gathered(policy)
    return logprobs
