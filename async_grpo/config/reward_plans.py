"""The command line's settings for rewards -> who scores, how results are combined, and what becomes of failures."""

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.experience.failure_policy import FailurePolicy
from async_grpo.experience.token_rewards import OUTCOME
from async_grpo.options.fields import parse_assignments
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, resolve
from async_grpo.rewards.adapter.traits import check_options, is_judge, traits_of
from async_grpo.rewards.budget import FALLBACK
from async_grpo.rewards.combine import Combination
from async_grpo.rewards.http.limits import Limits
from async_grpo.rewards.middleware import PRICE
from async_grpo.rewards.pool_plan import PoolConfig


def combination(config: RunConfig, adapters: Collection[str]) -> Combination:
    """How the rewards of one sample become one.

    Raises:
        ConfigurationError: a weight, constant or mode that does not fit these rewards.
    """
    weights = config.weights_by_name if config.reward_combine in ("sum", "mean") else {}
    return Combination(
        tuple(adapters),
        config.reward_combine,
        weights={name: weight for name, weight in weights.items() if name != OUTCOME},
        threshold=config.gate_threshold,
        column=config.reward_column,
        constants=config.failure_constants,
    )


def failure_policy(config: RunConfig, adapters: Collection[str]) -> FailurePolicy:
    """What becomes of samples without a reward.

    Raises:
        ConfigurationError: it speaks of a reward that the run does not have.
    """
    policies = config.failure_policies
    if unknown := sorted(set(policies) - set(adapters)):
        raise ConfigurationError(
            f"--on-reward-failure names {', '.join(unknown)}; the rewards are {', '.join(adapters)}"
        )
    return FailurePolicy(
        group_mean=frozenset(name for name, policy in policies.items() if policy == "group_mean"),
        refill=frozenset(name for name, policy in policies.items() if policy == "refill"),
        min_valid=config.min_valid_samples,
    )


def pool_plan(config: RunConfig, source: RewardRegistrySource, names: Collection[str]) -> PoolConfig:
    """The verifier pool's part of the configuration; `names`: the run's rewards.

    Raises:
        ConfigurationError: it speaks of a reward or an option that there is not, or asks for what could never happen.
    """
    combined = combination(config, resolve(source, names))
    plan = PoolConfig(
        combination=combined,
        options=parse_assignments(config.reward_options, "reward-options"),
        evaluation_workers=config.evaluation_verifiers,
        timeout_s=config.reward_timeout_s,
        memory_limit_bytes=round(config.reward_memory_gb * 2**30),
        fallbacks=config.fallbacks,
        limits=reward_limits(config),
        cache_path=config.verdict_cache,
        cache_max_bytes=None if config.verdict_cache_mb is None else round(config.verdict_cache_mb * 2**20),
        budget=config.judge_budget,
        budget_policy=config.judge_budget_policy,
        budget_path=str(config.output_path / "judge_budget.jsonl")
        if config.judge_budget is not None
        else None,
    )
    adapters = resolve(source, plan.all_adapters)
    check_options(adapters, plan.options)
    for flag, named in (
        ("verifiers", config.verifiers_by_name),
        ("reward-limits", plan.limits),
        ("reward-fallback", plan.fallbacks),
    ):
        if unknown := sorted(set(named) - set(plan.all_adapters)):
            raise ConfigurationError(
                f"--{flag} names {', '.join(unknown)}; the rewards are {', '.join(plan.all_adapters)}"
            )
    for name, limits in plan.limits.items():
        if limits.tokens_per_minute is not None and not is_judge(adapters[name]):
            raise ConfigurationError(
                f"--reward-limits {name}.tpm: {name} is no judge, and takes no tokens; limit its concurrency or rpm"
            )
    for name, adapter in adapters.items():
        if is_judge(adapter) and hasattr(adapter, "post_process_scores"):
            raise ConfigurationError(
                f"the judge {name} has post_process_scores, which nobody would call: put it on a function"
            )
    for name, fallback in plan.fallbacks.items():
        if traits_of(adapters[fallback]).has_post_process:
            raise ConfigurationError(
                f"--reward-fallback {name}={fallback}: {fallback} scores by the whole group, and cannot stand in on "
                "single samples; name another"
            )
    _refuse_idle_budget(plan, adapters)
    counts = {
        name: 1 if is_judge(adapter) else int(config.verifiers_by_name.get(name, config.verifiers_per_reward))
        for name, adapter in adapters.items()
    }
    return replace(plan, workers=counts)


def _refuse_idle_budget(plan: PoolConfig, adapters: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a budget that stops nobody, or whose end leaves a judge without a stand-in."""
    if plan.budget is None:
        return
    paid = [name for name, judge in adapters.items() if is_judge(judge) and getattr(judge, PRICE, None)]
    if not paid:
        raise ConfigurationError(
            f"--judge-budget {plan.budget:g}, but none of {', '.join(adapters)} has a price: give the judge its "
            "price_per_million_tokens, or leave the budget out"
        )
    alone = [name for name in paid if name in plan.adapters and name not in plan.fallbacks]
    if plan.budget_policy == FALLBACK and alone:
        raise ConfigurationError(
            f"--judge-budget-policy fallback, but nobody stands in for {', '.join(alone)}: name somebody by "
            f"--reward-fallback {alone[0]}=..., or choose the policy pause"
        )


def with_secrets(plan: PoolConfig, source: RewardRegistrySource) -> PoolConfig:
    """The plan with the keys that its judges name, from this process's environment.

    They go to the pool's actor as an argument and nowhere else: Ray's job table and the workers' environments can be
    read by others.

    Raises:
        ConfigurationError: a key is not in the environment.
    """
    judges = [adapter for adapter in resolve(source, plan.all_adapters).values() if is_judge(adapter)]
    names = {name for judge in judges if (name := judge.endpoint().api_key_env)}
    if missing := sorted(names - set(os.environ)):
        raise ConfigurationError(
            f"a judge's key is missing: set the environment variable {', '.join(missing)}"
        )
    return replace(plan, secrets={name: os.environ[name] for name in names})


def reward_limits(config: RunConfig) -> dict[str, Limits]:
    """`--reward-limits` by reward."""
    fields = {"concurrency": "concurrency", "rpm": "requests_per_minute", "tpm": "tokens_per_minute"}
    found: dict[str, dict[str, Any]] = {}
    for key, value in config.limits_by_name.items():
        name, unit = key.rsplit(".", 1)
        found.setdefault(name, {})[fields[unit]] = int(value) if unit == "concurrency" else value
    return {name: Limits(**limits) for name, limits in found.items()}
