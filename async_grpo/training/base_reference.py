"""Log-probs of the base model, which is the KL reference of a LoRA run: the trainer computes them without the adapter."""

import torch

from async_grpo.modeling.lora import lora_switched_off
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.objective import Objective
from async_grpo.training.sharding import release_gathered


@torch.no_grad()
def add_base_logprobs(policy: PolicyModel, objective: Objective, batch: BatchTensors) -> None:
    """Set `ref_logprobs` of a micro-batch by a forward pass without the adapter. A collective if the policy is sharded."""
    with lora_switched_off(policy.model):
        batch.ref_logprobs, *_ = objective.forward(policy, batch)
        release_gathered(policy)
