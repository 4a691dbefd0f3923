"""One trainer rank, assembled: the run on the cluster, the sharded policy, and the loop that joins them."""

import dataclasses
import logging
from contextlib import closing
from functools import partial

import ray

from async_grpo.cluster.ray_session import answer, connect, find_controller
from async_grpo.cluster.reward_actors import RunVerification
from async_grpo.cluster.run_setup import RemoteExperience, await_workers, close_run, open_run
from async_grpo.cluster.weight_sync import RayEngines
from async_grpo.config.preflight import Prepared
from async_grpo.config.rewards import ResolvedRewards
from async_grpo.config.run import RunConfig, write_params
from async_grpo.metrics.writer import PARAMS_FILE, MetricsWriter
from async_grpo.modeling.load import load_causal_lm, torch_dtype
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.options.source_file import digests
from async_grpo.protocols import Engines, ExperienceSource, MetricsSink, StepHook
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.checkpoint import CheckpointWriter, load_value_head
from async_grpo.training.distributed import Ranks, distributed_run
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import canary_logprobs, shard_policy
from async_grpo.training.trainer import Trainer
from async_grpo.types import SharedRunSettings
from async_grpo.weights.publisher import Canary
from async_grpo.weights.transports import get_transport

log = logging.getLogger(__name__)
CANARY_TOKENS = 128
BUDGET_FILE = "judge_budget.jsonl"


def train(config: RunConfig, prepared: Prepared | None) -> None:
    """Run this rank to the end of the run.

    Args:
        prepared: the run's inputs, on rank 0; the other ranks read no data and get the settings from it.

    Raises:
        AsyncGrpoError: whatever ended the run before its time.
    """
    connect(config.run_name, config.logging_level)
    with distributed_run(timeout_s=config.experience_timeout_s + config.start_timeout_s) as ranks:
        if prepared is not None:
            _train_as_head(prepared, ranks)
        else:
            controller = find_controller(config.run_name, config.start_timeout_s)
            settings = answer(controller.settings.remote())
            experience = RemoteExperience(config, controller, ranks.rank, [])
            make_trainer(config, settings, ranks, experience, hook=experience).run()
    ray.shutdown()


def _train_as_head(prepared: Prepared, ranks: Ranks) -> None:
    """Rank 0: it also opens the run, feeds the engines and writes the files."""
    controller = open_run(prepared.config, prepared.settings)
    if prepared.rewards is None:
        prepared = prepared.with_rewards(await_workers(controller, prepared.config))
    config, rewards = prepared.config, prepared.rewards
    assert rewards is not None
    _write_params(prepared, rewards, ranks)
    budget_path = None if config.judge_budget is None else str(config.output_path / BUDGET_FILE)
    secrets, environment = rewards.secrets(), config.reward_environment()
    verification = partial(RunVerification, rewards.source, config, budget_path, secrets, environment)
    questions = ray.put(prepared.questions)
    started = controller.start_batcher.remote(
        config, prepared.facts, ranks.world_size, questions, verification
    )
    answer(started, config.start_timeout_s)
    experience = RemoteExperience(config, controller, ranks.rank, prepared.eval_questions)
    samples_file = config.output_path / config.dump_samples_filename if config.dump_samples_filename else None
    await_workers(controller, config)
    with closing(MetricsWriter(config.output_path, config.num_steps, samples_file)) as metrics:
        engines = RayEngines(controller, config.sync_timeout_s)
        make_trainer(config, prepared.settings, ranks, experience, engines, metrics, experience).run()
    close_run(controller, f"{config.num_steps} steps are done")


def make_trainer(
    config: RunConfig,
    settings: SharedRunSettings,
    ranks: Ranks,
    source: ExperienceSource,
    engines: Engines | None = None,
    metrics: MetricsSink | None = None,
    hook: StepHook | None = None,
) -> Trainer:
    """The trainer of one rank. Rank 0 alone reaches engines and writes metrics: the others take part in the gathering."""
    ranks.must_agree("the code of --advantage-estimator and --policy-loss", str(_own_code(config)))
    policy = _policy(config, settings, ranks)
    length = min(CANARY_TOKENS, settings.max_total_tokens - 1)
    canary = Canary(Canary.text(settings.vocab_size, length, settings.seed), canary_logprobs)
    make_publisher, dtype = get_transport(settings.transport).make_publisher, torch_dtype(settings.dtype)
    return Trainer(
        policy=policy,
        accumulator=_accumulator(config, settings, policy, ranks),
        source=source,
        publisher=make_publisher(engines, named_weights, canary, dtype, ranks.rank, config),
        metrics=metrics,
        checkpoints=CheckpointWriter(
            config.output_path,
            config.model_name_or_path,
            ranks,
            dtype=settings.dtype,
            min_samples_between=config.min_samples_per_checkpoint,
            keep_last=config.keep_checkpoints or None,
        ),
        ranks=ranks,
        num_steps=config.num_steps,
        hook=hook,
    )


def _policy(config: RunConfig, settings: SharedRunSettings, ranks: Ranks) -> PolicyModel:
    policy = PolicyModel(
        load_causal_lm(config.model_name_or_path, "float32"),
        chunk_tokens=config.logprob_chunk_size,
        value_head=config.estimator.needs_critic,
        value_trunk_gradient=config.critic_trunk_gradient,
    )
    if policy.value_head is not None:
        load_value_head(policy, config.model_name_or_path)  # of an earlier run; a new one starts at zero
    return shard_policy(
        policy.to(ranks.device),
        ranks,
        dtype=settings.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
    )


def _accumulator(
    config: RunConfig, settings: SharedRunSettings, policy: PolicyModel, ranks: Ranks
) -> GradientAccumulator:
    optimizer, scheduler = build_policy_optimizer(policy, config, config.num_steps)
    return GradientAccumulator(
        policy,
        optimizer,
        scheduler,
        Objective(config, settings.guaranteed_completion_tokens),
        ranks,
        max_grad_norm=config.max_grad_norm,
        update_stats=config.update_stats,
    )


def _own_code(config: RunConfig) -> dict[str, str]:
    """The digests of the user's own estimator and loss. Every rank reads them from its own disk, by their path."""
    return digests([config.advantage_estimator, config.policy_loss])


def _write_params(prepared: Prepared, rewards: ResolvedRewards, ranks: Ranks) -> None:
    """Every setting of the run, beside its metrics; `async-grpo run THIS_FILE --output-dir NEW` starts it again."""
    config = prepared.config
    facts = {
        "WORLD_SIZE": ranks.world_size,
        "reward_registry_sha256": rewards.source.sha256,
        "reward_sources_sha256": rewards.source.digests,
        "algorithm_sources_sha256": _own_code(config),
        "settings": dataclasses.asdict(prepared.settings),
        "num_questions": len(prepared.questions),
        "ray_version": ray.__version__,
    }
    write_params(config.output_path / PARAMS_FILE, config, facts)
