"""Define the parts of a trainer that differ between language models and models that draw."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from async_grpo.algorithm.flow.config import FLOW, TEXT
from async_grpo.cluster.make_flow_objective import make_flow_objective
from async_grpo.config.drawing_memory import drawing_rank_bytes
from async_grpo.config.memory_plan import (
    CHECKPOINT_PARAMETER_BYTES,
    FROZEN_PARAMETER_BYTES,
    trainer_rank_bytes,
)
from async_grpo.config.run import RunConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.flow.canary import canary_texts
from async_grpo.modeling.forward_check import check_forward
from async_grpo.modeling.four_bit import put_in_four_bits
from async_grpo.modeling.image_models import ImageReader, freeze_vision
from async_grpo.modeling.load import load_causal_lm, torch_dtype
from async_grpo.modeling.lora import add_lora, fill_lora
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.distributed import Ranks
from async_grpo.training.drawing.export import FlowExporter
from async_grpo.training.drawing.policy import load_flow_policy, trainer_canary_logprobs
from async_grpo.training.export import ModelExporter, load_value_head
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import (
    canary_logprobs,
    empty_model,
    load_shards,
    release_gathered,
    shard_policy,
)
from async_grpo.weights.canary import Canary


def _model(path: str, settings: SharedRunSettings, device: torch.device) -> tuple[Any, bool]:
    """Return a language model, with empty adapters if the run trains one, and whether its weights are empty, too."""
    model = empty_model(path)
    is_empty = model is not None
    # Weights that are trained must be float32. With LoRA they are frozen, so they can have the dtype of the computation
    dtype = torch_dtype(settings.dtype) if settings.lora else torch.float32
    four_bit_layers = settings.lora.four_bit_layers if settings.lora else ()
    if model is None:
        model = load_causal_lm(path, torch.float32 if four_bit_layers else dtype)
    if settings.lora:
        add_lora(model, settings.lora)
        put_in_four_bits(model, four_bit_layers, dtype)
        model.to(dtype)
    if not is_empty:
        # `to` would fail, because the adapters are empty ("meta") and cannot be moved
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return model, is_empty


def load_language_policy(config: RunConfig, settings: SharedRunSettings, ranks: Ranks) -> PolicyModel:
    """Load a language model, shard it over the ranks, and check its forward pass."""
    path = config.model_name_or_path
    model, is_empty = _model(path, settings, ranks.device)
    policy = PolicyModel(
        model,
        chunk_tokens=config.logprob_chunk_size,
        value_head=config.estimator.needs_critic and config.critic_model is None,
        value_trunk_gradient=config.critic_trunk_gradient,
    )
    # Load the value head from the folder, if an earlier run has written one there; otherwise it starts at zero. A value
    # head that was trained together with an adapter is in the adapter's folder
    initial_folder = settings.lora.initial_folder if settings.lora else ""
    if not (initial_folder and load_value_head(policy, initial_folder)):
        load_value_head(policy, path)
    if policy.reads_images:
        policy.image_reader = ImageReader.load(path, model.config)
    if config.freeze_vision:
        freeze_vision(policy.model)
    shard_policy(policy, ranks, config, settings.dtype)
    device = torch.device("cpu") if config.cpu_offload else ranks.device
    if settings.lora:
        fill_lora(policy.model, settings.lora, settings.seed, device)
    if is_empty:
        load_shards(policy, path, device)
    check_forward(policy, torch_dtype(settings.dtype), ranks.max)
    release_gathered(policy)
    return policy


def _language_objective(config: RunConfig, settings: SharedRunSettings, policy: PolicyModel) -> Objective:
    return Objective(
        config, settings.guaranteed_completion_tokens, reference_is_base=settings.lora is not None
    )


def _language_canary(settings: SharedRunSettings, ranks: Ranks) -> Canary:
    image = settings.image_canary
    return Canary.random(
        partial(canary_logprobs, images_of=None if image is None else image.images_of),
        settings.vocab_size,
        longest=settings.max_total_tokens - 1,
        seed=settings.seed,
        max_over_ranks=ranks.max,
        excluded_token_ids=settings.unsampled_token_ids,
        more_texts=[] if image is None else [np.array(image.token_ids, np.int32)],
    )


def language_rank_bytes(
    config: RunConfig, settings: SharedRunSettings, policy: PolicyModel, ranks: Ranks
) -> int:
    """Return the estimated memory of this rank in bytes, by the formulas of `--dry-run`.

    On the CPU the estimate includes the copies for checkpoints and for the engines, because they are in the same memory
    as the weights.
    """
    num_weights = sum(weight.numel() for _, weight in named_weights(policy))  # without adapters
    num_trained = sum(parameter.numel() for parameter in policy.model.parameters() if parameter.requires_grad)
    num_shards = config.fsdp_size or ranks.world_size
    num_bytes = trainer_rank_bytes(
        config,
        settings,
        policy.model.config.get_text_config(),
        num_ranks=ranks.world_size,
        num_parameters=num_weights if settings.lora else num_trained,
        num_trained=num_trained if settings.lora else None,
    )
    if not settings.lora and not config.cpu_offload:
        # Without LoRA, frozen weights are those of a vision part, which have no gradients and no moments
        num_bytes += FROZEN_PARAMETER_BYTES * (num_weights - num_trained) / num_shards
    if ranks.device.type == "cpu":
        num_bytes += CHECKPOINT_PARAMETER_BYTES * num_trained / num_shards
        if ranks.is_main:
            num_bytes += 2 * torch_dtype(settings.dtype).itemsize * num_weights
    return int(num_bytes)


def _flow_policy(config: RunConfig, settings: SharedRunSettings, ranks: Ranks) -> Any:
    """Load a flow-matching model, and shard it over the ranks."""
    keeps_reference = config.loss_kl_coef > 0
    path = config.model_name_or_path
    return load_flow_policy(path, config, settings, ranks, keeps_reference=keeps_reference)


def _flow_canary(settings: SharedRunSettings, ranks: Ranks) -> Canary:
    assert settings.flow is not None
    texts = canary_texts(settings.vocab_size, settings.flow.num_steps)
    return Canary(texts, trainer_canary_logprobs, ranks.max)


def _flow_rank_bytes(config: RunConfig, settings: SharedRunSettings, policy: Any, ranks: Ranks) -> int:
    """Return the estimated memory of this rank in bytes, by the formulas of `--dry-run`."""
    return int(drawing_rank_bytes(config, ranks.world_size))


@dataclass(frozen=True)
class PolicyKind:
    """The parts of a trainer that differ between kinds of policy: language models, and models that draw.

    The policy of each kind is a torch module with the attributes `model` (its weights are trained and sent to the
    engines), `device` and `value_head`.
    """

    load: Callable[[RunConfig, SharedRunSettings, Ranks], Any]  # returns the policy, sharded over the ranks
    # (config, settings, policy) -> objective. The policy still has its first weights
    make_objective: Callable[[RunConfig, SharedRunSettings, Any], Objective]
    make_canary: Callable[[SharedRunSettings, Ranks], Canary]
    exporter: type[ModelExporter]
    # (config, settings, policy, ranks) -> estimated memory of this rank in bytes
    plan_bytes: Callable[[RunConfig, SharedRunSettings, Any, Ranks], int]


POLICY_KINDS = {
    TEXT: PolicyKind(
        load_language_policy, _language_objective, _language_canary, ModelExporter, language_rank_bytes
    ),
    FLOW: PolicyKind(_flow_policy, make_flow_objective, _flow_canary, FlowExporter, _flow_rank_bytes),
}


def make_accumulator(
    config: RunConfig, settings: SharedRunSettings, policy: PolicyModel, ranks: Ranks
) -> GradientAccumulator:
    """Make the accumulator of a sharded policy, with its optimizer, learning rate schedule and loss."""
    optimizer, scheduler = build_policy_optimizer(
        policy, config, total_steps=config.num_steps - config.critic_warmup_steps
    )
    objective = POLICY_KINDS[config.policy].make_objective(config, settings, policy)
    return GradientAccumulator(policy, optimizer, scheduler, objective, ranks, config)
