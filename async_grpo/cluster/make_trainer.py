"""The trainer of one rank, put together: the sharded policy, its optimizer, its state, and the way to the engines."""

import logging
from functools import partial
from pathlib import Path

import torch

from async_grpo.config.resume import as_options
from async_grpo.config.run import RunConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.forward_check import check_forward
from async_grpo.modeling.load import empty_causal_lm, load_causal_lm, torch_dtype
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.options.source_file import digests
from async_grpo.protocols import Engines, ExperienceSource, WeightPublisher
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.best_checkpoint import keep_best
from async_grpo.training.checkpoint import Checkpointer, SaveExperience
from async_grpo.training.checkpoint_folder import read
from async_grpo.training.distributed import Ranks
from async_grpo.training.export import ModelExporter, load_value_head
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.record import Recorder
from async_grpo.training.sharding import (
    canary_logprobs,
    load_shards,
    release_gathered,
    shard_policy,
    weight_names,
)
from async_grpo.training.trainer import AfterStep, Trainer
from async_grpo.weights.config import get_transport
from async_grpo.weights.publisher import Canary

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
    """The trainer of one rank. Rank 0 alone reaches engines, and the experience to save; `digests_read`: `data_digests`."""
    own_code = digests([config.advantage_estimator, config.policy_loss])  # of this rank's own disk
    ranks.must_agree("the code of --advantage-estimator and --policy-loss", str(own_code))
    policy = _policy(config, settings, ranks)
    canary = _canary(settings, ranks)
    make_publisher, dtype = get_transport(settings.transport).make_publisher, torch_dtype(settings.dtype)
    accumulator = _accumulator(config, settings, policy, ranks)
    options, best, folder = as_options(config), config.keep_best, config.output_path
    is_evaluated = partial(config.evaluation_is_due, num_steps=config.num_steps)
    checkpointer = Checkpointer(
        *(folder, ranks, policy, accumulator.scheduler),
        keep=config.keep_checkpoints,
        timeout_s=config.checkpoint_timeout_s,
        options=options,
        inputs=digests_read or {},
        save_experience=save_experience,
        stay=tuple if best is None else partial(keep_best, folder, best, is_evaluated),
    )
    step = samples = 0
    if settings.checkpoint:
        manifest = read(Path(settings.checkpoint))
        checkpointer.load(Path(settings.checkpoint))
        step, samples = manifest.step, manifest.samples
        log.info("resumed after step %d, from %s", step, settings.checkpoint)
    accumulator.steps = step
    if config.record:
        source = recorder = Recorder(source, folder, ranks.world_size, options)
        accumulator.on_logprobs = recorder.keep_logprobs

    def overlaps(done: int) -> bool:
        pinned = config.eval_pinned and is_evaluated(done)
        return config.max_staleness > 0 and done < config.num_steps and not pinned

    return Trainer(
        policy=policy,
        accumulator=accumulator,
        source=source,
        publisher=publisher or make_publisher(engines, named_weights, canary, dtype, ranks.rank, config),
        checkpointer=checkpointer,
        version=step,
        samples=samples,
        exporter=_exporter(config, settings, ranks, samples),
        ranks=ranks,
        num_steps=config.num_steps,
        after_step=after_step,
        overlaps=overlaps,
        saves_after=lambda done: best is not None and is_evaluated(done),  # it may turn out to be the best
    )


def _canary(settings: SharedRunSettings, ranks: Ranks) -> Canary:
    return Canary.random(
        canary_logprobs,
        settings.vocab_size,
        longest=settings.max_total_tokens - 1,
        seed=settings.seed,
        max_over_ranks=ranks.max,
    )


def _exporter(config: RunConfig, settings: SharedRunSettings, ranks: Ranks, samples: int) -> ModelExporter:
    return ModelExporter(
        *(config.output_path, config.model_name_or_path, ranks, settings.dtype),
        min_samples_between=config.min_samples_per_checkpoint,
        keep_last=config.keep_models or None,
        resumed_at=samples,
    )


def _policy(config: RunConfig, settings: SharedRunSettings, ranks: Ranks) -> PolicyModel:
    path, model = config.model_name_or_path, None
    if saved := weight_names(path):
        model = empty_causal_lm(path)
        # Each rank reads its shard alone, if the weights have the names there that they have in the model
        if not all(name in saved for name, _ in model.named_parameters()):
            model = None
    policy = PolicyModel(
        model or load_causal_lm(path, "float32").to(ranks.device),
        chunk_tokens=config.logprob_chunk_size,
        value_head=config.estimator.needs_critic,
        value_trunk_gradient=config.critic_trunk_gradient,
    )
    load_value_head(policy, path)  # of an earlier run; a new one starts at zero
    shard_policy(policy, ranks, config, settings.dtype)
    if model is not None:
        load_shards(policy, path, torch.device("cpu") if config.cpu_offload else ranks.device)
    check_forward(policy, torch_dtype(settings.dtype), ranks.max)
    release_gathered(policy)
    return policy


def _accumulator(
    config: RunConfig, settings: SharedRunSettings, policy: PolicyModel, ranks: Ranks
) -> GradientAccumulator:
    optimizer, scheduler = build_policy_optimizer(policy, config, config.num_steps)
    objective = Objective(config, settings.guaranteed_completion_tokens)
    return GradientAccumulator(policy, optimizer, scheduler, objective, ranks, config)
