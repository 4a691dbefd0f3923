"""The command line's settings -> the plans that the rooms work by: objective, advantages, batcher, optimizer."""

from collections.abc import Mapping
from typing import Any

from async_grpo.algorithm.advantages import estimators_for, get_estimator
from async_grpo.algorithm.estimator import COMPONENTS, SOURCES
from async_grpo.algorithm.losses import get_policy_loss
from async_grpo.config.compatibility import refuse_combinations
from async_grpo.config.reward_plans import failure_policy
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.experience.alarms import AlarmLimits
from async_grpo.experience.batcher import BatcherConfig
from async_grpo.experience.group_advantages import AdvantageConfig
from async_grpo.experience.token_rewards import OUTCOME, OVERLONG, TokenRewardConfig
from async_grpo.options.fields import parse_assignments, typed_options
from async_grpo.rewards.adapter.traits import is_process_reward, traits_of
from async_grpo.training.correction import OffPolicyCorrection
from async_grpo.training.objective import Critic, Objective
from async_grpo.training.optimizer import OptimizerConfig

NOT_NEGATIVE = ("clip_low", "clip_high", "eps_low", "eps_high", "coef")  # of loss options


def objective(config: RunConfig) -> Objective:
    """The loss of the run.

    Raises:
        ConfigurationError: an unknown name, or options that contradict each other.
    """
    length = float(config.max_generation_tokens)
    return Objective(
        policy_loss=config.policy_loss,
        policy_loss_options=_loss_options(config),
        aggregation=config.loss_aggregation,
        aggregation_scale=length if config.loss_aggregation == "constant_length" else None,
        kl_coef=0.0 if config.kl_in_reward else config.kl_coef,
        kl_kind=config.kl_kind,
        kl_clamp=config.kl_clamp,
        entropy_coef=config.entropy_coef,
        temperature=config.temperature,
        old_policy=config.old_policy,
        correction=OffPolicyCorrection(
            level=config.importance_level,
            mode=config.importance_mode,
            low=config.importance_low,
            high=config.importance_high,
            normalize=config.importance_normalize,
            statistic=config.rejection_statistic,
            rejection_low=config.rejection_low,
            rejection_high=config.rejection_high,
        ),
        critic=_critic(config),
    )


def _loss_options(config: RunConfig) -> dict[str, Any]:
    """`--loss-options`, and the clip that has flags of its own."""
    name = config.policy_loss
    known = get_policy_loss(name).options
    options = typed_options(
        parse_assignments(config.loss_options, "loss-options"), known, f"the loss {name} (--loss-options)"
    )
    for bound, value in options.items():
        if bound in NOT_NEGATIVE and value is not None and value < 0:
            raise ConfigurationError(f"--loss-options {bound}={value} cannot be negative")
    for clip in ("clip_low", "clip_high"):
        value = getattr(config, clip)
        if value is None:
            continue
        if clip not in known:
            raise ConfigurationError(f"the loss {name} does not clip: leave --{clip.replace('_', '-')} out")
        if clip in options:
            raise ConfigurationError(f"{clip} is given twice: as a flag, and in --loss-options")
        options[clip] = value
    return options


def _critic(config: RunConfig) -> Critic | None:
    estimator = get_estimator(config.advantage_estimator)
    if not estimator.needs_critic:
        return None
    return Critic(estimator, estimator_options(config), config.critic_coef, config.critic_clip)


def advantage_plan(config: RunConfig, adapters: Mapping[str, Any]) -> AdvantageConfig:
    """How verdicts become advantages.

    Args:
        adapters: the run's rewards by name.

    Raises:
        ConfigurationError: these rewards and this estimator, or these weights, do not go together.
    """
    estimator = get_estimator(config.advantage_estimator)
    process = tuple(name for name, adapter in adapters.items() if is_process_reward(adapter))
    if process and not estimator.process:
        raise ConfigurationError(
            f"--advantage-estimator {config.advantage_estimator} reads one score per sample, but {', '.join(process)} "
            f"gives rewards step by step; estimators that fit: {', '.join(estimators_for(process=True))}"
        )
    if not process and not estimator.outcome:
        raise ConfigurationError(
            f"--advantage-estimator {config.advantage_estimator} reads rewards step by step, but {', '.join(adapters)} "
            f"gives one score per sample; estimators that fit: {', '.join(estimators_for(process=False))}"
        )
    weights = config.weights_by_name
    refuse_combinations(config, process, adapters)
    weighable = {*process}
    if config.reward_combine in ("sum", "mean"):
        weighable |= {*adapters}
    if estimator.rewards == COMPONENTS:
        weighable |= {*adapters, OVERLONG}
    if estimator.rewards == SOURCES and set(adapters) - set(process):
        weighable |= {OUTCOME}
    if unknown := sorted(set(weights) - weighable):
        raise ConfigurationError(
            f"--reward-weights names {', '.join(unknown)}; with --advantage-estimator {config.advantage_estimator}, "
            f"--reward-combine {config.reward_combine} and these rewards there is weight for "
            f"{', '.join(sorted(weighable)) or 'none'}"
        )
    return AdvantageConfig(
        estimator=config.advantage_estimator,
        options=estimator_options(config),
        payment=TokenRewardConfig(
            process_adapters=process,
            reward_weights=weights,
            overlong_buffer=round(config.overlong_buffer * config.max_generation_tokens),
            overlong_penalty=config.overlong_penalty,
            max_completion_tokens=config.max_generation_tokens,
            kl_coef=config.kl_coef if config.kl_in_reward else 0.0,
            kl_kind=config.kl_kind,
            kl_clamp=config.kl_clamp,
        ),
        mask_truncated=config.mask_truncated,
        min_valid=config.min_valid_samples,
        filter_groups=config.zero_variance == "filter",
        max_token_staleness=config.max_token_staleness,
    )


def estimator_options(config: RunConfig) -> dict[str, Any]:
    """The further options of the run's estimator.

    Raises:
        ConfigurationError: it has no such option, or a value cannot be one.
    """
    name = config.advantage_estimator
    given = parse_assignments(config.estimator_options, "estimator-options")
    options = typed_options(given, get_estimator(name).options, f"--advantage-estimator {name}")
    if options.get("eps", 0.0) < 0:
        raise ConfigurationError(f"--estimator-options eps={options['eps']} cannot be negative")
    for discount in options.keys() & {"gamma", "lam"}:
        if not 0 <= options[discount] <= 1:
            raise ConfigurationError(
                f"--estimator-options {discount}={options[discount]} must lie between 0 and 1"
            )
    return options


def optimizer_settings(config: RunConfig) -> OptimizerConfig:
    """The optimizer of the run.

    Raises:
        ConfigurationError: a schedule that cannot work.
    """
    return OptimizerConfig(
        learning_rate=config.learning_rate,
        lr_scheduler=config.lr_scheduler,
        warmup_steps=config.num_warmup_steps,
        total_steps=config.num_steps,
        weight_decay=config.weight_decay,
        critic_learning_rate=config.critic_learning_rate,
    )


def batcher_plan(config: RunConfig, num_ranks: int, adapters: Mapping[str, Any]) -> BatcherConfig:
    """The batcher's part of the configuration; `adapters`: the run's rewards by name."""
    return BatcherConfig(
        num_ranks=num_ranks,
        num_steps=config.num_steps,
        groups_per_step=config.groups_per_step,
        steps_per_batch=config.steps_per_batch,
        samples_per_question=config.samples_per_question,
        max_staleness=config.max_staleness,
        max_tokens_per_gpu=config.max_tokens_per_gpu,
        experience_timeout_s=config.experience_timeout_s,
        seed=config.infinite_sampler_seed,
        advantages=advantage_plan(config, adapters),
        failures=failure_policy(config, adapters),
        resample=config.zero_variance == "resample",
        max_resamples=config.max_resamples,
        retire_above=config.no_positive_resampling,
        alarms=AlarmLimits(truncated=config.truncation_alarm, failed=config.failure_alarm),
        post_process=any(traits_of(adapter).has_post_process for adapter in adapters.values()),
        with_baseline=get_estimator(config.advantage_estimator).compares_with_greedy,
        with_samples=config.dump_samples_filename is not None,
    )
