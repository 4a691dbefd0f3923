"""Make the trainer of one rank: the sharded policy, its optimizer, its restored state, and its weight publisher."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_grpo.algorithm.flow.config import FLOW, TEXT
from async_grpo.cluster.make_critic import export_critic_too, load_critic
from async_grpo.cluster.make_flow_objective import make_flow_objective, make_kept_weights
from async_grpo.cluster.make_publisher import make_publisher, make_reference_publisher
from async_grpo.cluster.record_and_passes import with_record_and_passes
from async_grpo.config.drawing_memory import drawing_rank_bytes
from async_grpo.config.memory_plan import (
    CHECKPOINT_PARAMETER_BYTES,
    FROZEN_PARAMETER_BYTES,
    critic_rank_bytes,
    trainer_rank_bytes,
)
from async_grpo.config.resume import as_options
from async_grpo.config.run import RunConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.flow.canary import canary_texts
from async_grpo.modeling.forward_check import check_forward
from async_grpo.modeling.four_bit import put_in_four_bits
from async_grpo.modeling.image_models import ImageReader, freeze_vision
from async_grpo.modeling.load import load_causal_lm, torch_dtype
from async_grpo.modeling.lora import add_lora, fill_lora
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.options.source_file import digests
from async_grpo.processes.memory_use import resident_bytes
from async_grpo.processes.out_of_memory import naming_out_of_memory
from async_grpo.protocols import Engines, ExperienceSource, WeightPublisher
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.best_checkpoint import keep_best
from async_grpo.training.checkpoint import Checkpointer, SaveExperience
from async_grpo.training.checkpoint_folder import read
from async_grpo.training.critic import Critic
from async_grpo.training.distributed import Ranks
from async_grpo.training.drawing.export import FlowExporter
from async_grpo.training.drawing.policy import load_flow_policy, trainer_canary_logprobs
from async_grpo.training.export import ModelExporter, load_value_head
from async_grpo.training.largest_trial import try_largest
from async_grpo.training.memory_cures import start_cure
from async_grpo.training.moving_reference import KeptWeights
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.rank_memory import RankMemory
from async_grpo.training.sharding import (
    canary_logprobs,
    empty_model,
    load_shards,
    release_gathered,
    shard_policy,
)
from async_grpo.training.trainer import AfterStep, Trainer
from async_grpo.weights.canary import Canary

log = logging.getLogger(__name__)


def make_trainer(
    config: RunConfig,
    settings: SharedRunSettings,
    ranks: Ranks,
    source: ExperienceSource,
    engines: Engines | None = None,
    after_step: AfterStep = lambda step: {},
    save_experience: SaveExperience | None = None,
    digests_read: dict[str, str] | None = None,
    publisher: WeightPublisher | None = None,
) -> Trainer:
    """Make the trainer of one rank.

    Args:
        config: The run's options.
        settings: Settings that all workers of the run must agree on.
        ranks: All ranks, and the number of this rank among them.
        source: Provides the experience of this rank.
        engines: Sends weights to the engines; only on rank 0.
        after_step: Called after each step with the number of steps done; returns metrics.
        save_experience: Starts saving the rollout state together with a checkpoint; only on rank 0.
        digests_read: Digests of the run's input files (from `data_digests`), which are recorded in each checkpoint.
        publisher: Used instead of the publisher of the transport that `settings` name.
    """
    # The ranks may read these files from different disks, so check that they read the same contents
    code_digests = digests([config.advantage_estimator, config.policy_loss])
    ranks.must_agree("the code of --advantage-estimator and --policy-loss", str(code_digests))
    kind = POLICY_KINDS[config.policy]
    accumulator = _load(config, settings, ranks)
    policy = accumulator.policy
    reference = make_kept_weights(config, accumulator, publisher)
    checkpointer = _checkpointer(config, settings, ranks, policy, accumulator, save_experience, digests_read)
    checkpointer.reference = reference.named_weights
    step, samples = _restore(checkpointer, settings, accumulator)
    if is_trial_cheap(config, ranks.device):
        try_largest(accumulator, settings.vocab_size, config, settings.max_total_tokens)
    if publisher is None:
        canary = kind.make_canary(settings, ranks)
        publisher = make_publisher(config, settings, ranks.rank, engines, canary)
        with reference.in_place():
            publisher.prepare(policy)  # runs while the workers load their models
        reference.publisher = make_reference_publisher(config, settings, ranks.rank, engines, canary)
    return Trainer(
        policy=policy,
        accumulator=accumulator,
        source=with_record_and_passes(config, ranks, source, accumulator),
        publisher=reference.wrapped(publisher),
        checkpointer=checkpointer,
        version=step,
        samples=samples,
        exporter=_exporter(config, settings, ranks, samples, accumulator.critic, reference),
        ranks=ranks,
        num_steps=config.num_steps,
        after_step=after_step,
        overlaps=partial(_may_overlap, config),
        saves_after=partial(_may_become_best, config),
        plan=config.pass_plan,
        reference=reference,
        release_memory=partial(_release_memory, config, ranks.device),
    )


def _release_memory(config: RunConfig, device: torch.device) -> None:
    """Give unused GPU memory back if an engine on this GPU is about to wake.

    By default, torch keeps the memory of freed tensors for later ones.
    """
    if config.sleep_level and device.type == "cuda":
        torch.cuda.empty_cache()


def _load(config: RunConfig, settings: SharedRunSettings, ranks: Ranks) -> GradientAccumulator:
    """Load the policy, and return its accumulator, which measures the memory of this rank.

    Raises:
        OutOfMemory: The model does not fit into the memory.
    """
    on_gpu = ranks.device.type == "cuda"
    baseline_bytes = 0 if on_gpu else resident_bytes()
    with naming_out_of_memory(
        f"while trainer rank {ranks.rank} loaded the model", start_cure(config, on_gpu=on_gpu)
    ):
        policy = POLICY_KINDS[config.policy].load(config, settings, ranks)
        critic = load_critic(config, settings, ranks)
    accumulator = _accumulator(config, settings, policy, ranks)
    accumulator.critic = critic
    planned_bytes = POLICY_KINDS[config.policy].plan_bytes(config, settings, policy, ranks)
    if critic is not None:
        num_parameters = sum(parameter.numel() for parameter in critic.model.parameters())
        planned_bytes += int(critic_rank_bytes(config, ranks.world_size, num_parameters))
    accumulator.memory = RankMemory(
        device=ranks.device,
        planned_bytes=planned_bytes,
        baseline_bytes=baseline_bytes,
    )
    return accumulator


def is_trial_cheap(config: RunConfig, device: torch.device) -> bool:
    """Return whether to try the largest possible micro-batch before the first step.

    On a GPU the trial takes seconds, in which the engines are still loading. On the CPU it may take minutes, and if the
    memory does not suffice, the machine swaps, which slows down all its processes. With `--engine-sleep`, the engine is
    still awake at this time, and the micro-batch may need its memory.
    """
    is_trial_possible = not config.draws  # the trial computes a text, which a policy that draws cannot
    return is_trial_possible and config.longest_first and device.type == "cuda" and not config.sleep_level


def _planned_bytes(config: RunConfig, settings: SharedRunSettings, policy: PolicyModel, ranks: Ranks) -> int:
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


def _restore(
    checkpointer: Checkpointer, settings: SharedRunSettings, accumulator: GradientAccumulator
) -> tuple[int, int]:
    """Load the checkpoint of a resumed run, and return its numbers of finished steps and samples."""
    if not settings.checkpoint:
        return 0, 0
    folder = Path(settings.checkpoint)
    manifest = read(folder)
    checkpointer.load(folder)
    accumulator.steps = manifest.step
    log.info("resumed after step %d, from %s", manifest.step, settings.checkpoint)
    return manifest.step, manifest.samples


def _may_overlap(config: RunConfig, steps_done: int) -> bool:
    """Return whether the next step may start accumulating gradients while the weights of this step are sent."""
    waits_for_evaluation = config.eval_pinned and _is_evaluated(config, steps_done)
    return config.generates_ahead and steps_done < config.num_steps and not waits_for_evaluation


def _may_become_best(config: RunConfig, steps_done: int) -> bool:
    """Return whether this step's checkpoint may become the best: `--keep-best` is set, and the step is evaluated."""
    return config.keep_best is not None and _is_evaluated(config, steps_done)


def _is_evaluated(config: RunConfig, step: int) -> bool:
    """Return whether an evaluation follows the step."""
    return config.evaluation_is_due(step, num_steps=config.num_steps)


def _checkpointer(
    config: RunConfig,
    settings: SharedRunSettings,
    ranks: Ranks,
    policy: PolicyModel,
    accumulator: GradientAccumulator,
    save_experience: SaveExperience | None,
    digests_read: dict[str, str] | None,
) -> Checkpointer:
    kept_names: Callable[[], Collection[str]] = tuple
    if config.keep_best is not None:
        kept_names = partial(keep_best, config.output_path, config.keep_best, partial(_is_evaluated, config))
    return Checkpointer(
        config.output_path,
        ranks,
        policy,
        accumulator.scheduler,
        keep=config.keep_checkpoints,
        timeout_s=config.checkpoint_timeout_s,
        options=as_options(config),
        inputs=digests_read or {},
        save_experience=save_experience,
        stay=kept_names,
        critic=accumulator.critic,
        lora=settings.lora,
    )


def _exporter(
    config: RunConfig,
    settings: SharedRunSettings,
    ranks: Ranks,
    samples: int,
    critic: Critic | None,
    reference: KeptWeights,
) -> ModelExporter:
    exporter = POLICY_KINDS[config.policy].exporter(
        config.output_path,
        config.model_name_or_path,
        ranks,
        settings.dtype,
        min_samples_between=config.samples_between_models,
        keep_last=config.keep_models or None,
        resumed_at=samples,
        lora=settings.lora,
    )
    exporter.in_place = reference.in_place
    export_critic_too(exporter, critic, config, settings)
    return exporter


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


def _policy(config: RunConfig, settings: SharedRunSettings, ranks: Ranks) -> PolicyModel:
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


def _accumulator(
    config: RunConfig, settings: SharedRunSettings, policy: PolicyModel, ranks: Ranks
) -> GradientAccumulator:
    optimizer, scheduler = build_policy_optimizer(
        policy, config, total_steps=config.num_steps - config.critic_warmup_steps
    )
    objective = POLICY_KINDS[config.policy].make_objective(config, settings, policy)
    return GradientAccumulator(policy, optimizer, scheduler, objective, ranks, config)


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


def _flow_policy(config: RunConfig, settings: SharedRunSettings, ranks: Ranks) -> Any:
    """Load a flow-matching model, and shard it over the ranks."""
    keeps_reference = config.loss_kl_coef > 0
    path = config.model_name_or_path
    return load_flow_policy(path, config, settings, ranks, keeps_reference=keeps_reference)


def _flow_canary(settings: SharedRunSettings, ranks: Ranks) -> Canary:
    assert settings.flow is not None
    texts = canary_texts(settings.vocab_size, settings.flow.num_steps)
    return Canary(texts, trainer_canary_logprobs, ranks.max)


def _planned_flow_bytes(config: RunConfig, settings: SharedRunSettings, policy: Any, ranks: Ranks) -> int:
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
    TEXT: PolicyKind(_policy, _language_objective, _language_canary, ModelExporter, _planned_bytes),
    FLOW: PolicyKind(_flow_policy, make_flow_objective, _flow_canary, FlowExporter, _planned_flow_bytes),
}
