"""The rewards of a run, and the rules that they and the options must follow; see `config.compatibility`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.config.rules import BrokenRules, idle, refuse_broken
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import OUTCOME, OVERLONG, RunFacts
from async_grpo.rewards.adapter.decorators import best_reward_of, check_options, traits_of
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, registry_file, resolve
from async_grpo.rewards.config import RewardConfig
from async_grpo.rewards.middleware import PRICE


@dataclass(frozen=True)
class ResolvedRewards:
    """The rewards of a run, as they are defined in the registry file and in the files of `--reward-fns`."""

    source: RewardRegistrySource
    adapters: Mapping[str, Any]  # the run's rewards, by name, without fallbacks
    everyone: Mapping[str, Any]  # the run's rewards and the fallbacks that replace them on failure, by name

    @classmethod
    def of(cls, config: RewardConfig) -> "ResolvedRewards":
        """Read the registry file and the files that `--reward-fns` names, and find the rewards in them.

        Raises:
            ConfigurationError: A file cannot be read, or a reward is unknown. The message lists the known names.
        """
        registry = RewardRegistrySource.from_file(registry_file(config.reward_registry))
        source = registry.with_files(config.reward_fns)
        rewards = resolve(source, config.all_names)
        all_rewards = {name: config.with_address(reward) for name, reward in rewards.items()}
        adapters = {name: all_rewards[name] for name in config.adapters}
        return cls(source, adapters, all_rewards)

    def _with(self, trait: str) -> list[str]:
        return [name for name, adapter in self.everyone.items() if getattr(traits_of(adapter), trait)]

    @property
    def process(self) -> list[str]:
        """Return the names of the run's process rewards, which reward single steps of a completion."""
        return [name for name in self._with("is_process_reward") if name in self.adapters]

    @property
    def whole_groups(self) -> list[str]:
        """Return the names of rewards that process a whole group before its rewards are final."""
        return self._with("has_post_process")

    @property
    def judges(self) -> list[str]:
        """Return the names of the judges."""
        return self._with("is_judge")

    @property
    def paid(self) -> list[str]:
        """Return the names of the judges whose calls have a price."""
        return [name for name in self.judges if getattr(self.everyone[name], PRICE, None)]

    def facts(self, config: RewardConfig, max_completion_tokens: int) -> RunFacts:
        """Return the facts about the rewards that the batcher needs.

        Args:
            config: The options of the rewards.
            max_completion_tokens: Number of completion tokens that fit into the context even after the longest prompt.
        """
        options = config.options_by_name
        return RunFacts(
            max_completion_tokens,
            process_rewards=tuple(self.process),
            whole_groups=any(name in self.adapters for name in self.whole_groups),
            weights=config.weights_by_name,
            failure_policies=config.failure_policies,
            best_rewards={name: best_reward_of(adapter, options) for name, adapter in self.adapters.items()},
        )

    def secrets(self) -> dict[str, str]:
        """Return the environment variables with the judges' keys.

        The caller passes them to the pool as an argument. They must not be set for Ray, because other users can read
        Ray's job table and the environments of its workers.

        Raises:
            ConfigurationError: An environment variable that a judge needs is not set.
        """
        variables = {self.everyone[name].endpoint().api_key_env for name in self.judges} - {None}
        missing = sorted(variables - set(os.environ))
        if missing:
            raise ConfigurationError(
                f"a judge's key is missing: set the environment variable {', '.join(missing)}"
            )
        return {name: os.environ[name] for name in variables}


def weighable(config: RunConfig, rewards: ResolvedRewards) -> list[str]:
    """Return the names to which `--reward-weights` may give weights."""
    takes_components = config.estimator.rewards == "components"
    takes_sources = config.estimator.rewards == "sources"
    names = set(rewards.process)
    has_outcome_rewards = bool(set(rewards.adapters) - names)
    if takes_components or config.reward_combine in ("sum", "mean"):
        names.update(rewards.adapters)
    if takes_components and config.overlong_buffer:
        names.add(OVERLONG)
    if takes_sources and has_outcome_rewards:
        names.add(OUTCOME)
    return sorted(names)


def early_at_gate(config: RunConfig, names: Sequence[str], rewards: ResolvedRewards) -> list[str]:
    """Return the rewards that a gate would read too early: their scores are final only after `post_process_scores`.

    Args:
        config: The run's options.
        names: The rewards in the order in which the gate calls them.
        rewards: The rewards of the run.
    """
    if config.reward_combine != "gate":
        return []
    return [name for name in names[:-1] if name in rewards.whole_groups]


def check_rewards(config: RunConfig, rewards: ResolvedRewards) -> None:
    """Raise ConfigurationError for options that do not fit the rewards."""
    check_options(rewards.everyone, config.options_by_name)
    for rules in (_broken_methods, _broken_names, _broken_roles):
        refuse_broken(config, rules(config, rewards))
    # Reading this property raises an error if the weights add up to 0
    _ = config.combination


def _broken_methods(c: RunConfig, r: ResolvedRewards) -> BrokenRules:
    """Find rewards that do not fit the estimator or `--reward-combine`."""
    fills = any(policy not in ("mask", "refill") for policy in c.failure_policies.values())
    yield from _broken_process_rewards(c, r, fills)
    estimator = c.estimator
    mixes = c.reward_combine != "best" or c.reward_column or fills or c.kl_in_reward
    if estimator.rewards == "components" and mixes:
        yield (
            "advantage_estimator",
            "normalises every reward by itself: no --reward-combine, no --reward-column, no fills for failures, no "
            "--kl-in-reward; weigh by --reward-weights",
        )
    if estimator.compares_with_greedy and r.whole_groups:
        yield (
            "advantage_estimator",
            f"compares with a single greedy completion, which {', '.join(r.whole_groups)} cannot score alike: it looks at "
            "whole groups",
        )
    if c.samples_per_question == 1 and r.whole_groups:
        yield (
            "samples_per_question reward_fns",
            f"do not fit: {', '.join(r.whole_groups)} scores by the whole group, and a group of one has nothing to compare "
            "with; give at least 2 samples per question",
        )
    # If a column names the rewards of each row, `preflight` checks this for every row
    early_names = [] if c.reward_column else early_at_gate(c, tuple(r.adapters), r)
    if early_names:
        yield (
            "reward_fns reward_combine",
            f"decides before the group is known, and {', '.join(early_names)} scores by the whole group: name it last in "
            "--reward-fns, or choose another --reward-combine",
        )


def _broken_process_rewards(c: RunConfig, r: ResolvedRewards, fills: bool) -> BrokenRules:
    """Find process rewards that do not fit the options, and outcome rewards where only process rewards fit.

    Args:
        c: The run's options.
        r: The rewards of the run.
        fills: Whether the options replace failed rewards by numbers.
    """
    process = ", ".join(r.process)
    is_readable = c.estimator.process if process else c.estimator.outcome
    if not is_readable:
        if process:
            conflict = f"reads one score per sample, but {process} gives rewards step by step"
        else:
            conflict = f"reads rewards step by step, but {', '.join(r.adapters)} gives one score per sample"
        fitting = ", ".join(c.estimators_for(process=bool(process)))
        yield "advantage_estimator", f"{conflict}; estimators that fit: {fitting}"
    if process and c.reward_combine != "best":
        yield (
            "reward_combine",
            f"combines scores, and {process} gives rewards step by step, which are added up: weigh them by "
            "--reward-weights",
        )
    if process and (fills or c.fallbacks):
        yield (
            "on_reward_failure reward_fallback",
            f"do not fit {process}: nothing can replace its step rewards; use mask or refill, and no fallback",
        )


def _broken_names(c: RunConfig, r: ResolvedRewards) -> BrokenRules:
    """Find options that name unknown rewards."""
    unknown = _unknown(c.weights_by_name, weighable(c, r))
    if unknown:
        yield (
            "reward_weights advantage_estimator reward_combine",
            f"names {unknown}, which has no weight with these rewards",
        )
    for flag, names, known_names in (
        ("on_reward_failure", c.failure_policies, r.adapters),
        ("verifiers", c.verifiers_by_name, r.everyone),
        ("reward_limits", c.limits, r.everyone),
        ("reward_fallback", c.fallbacks, r.everyone),
    ):
        unknown = _unknown(names, known_names)
        if unknown:
            yield flag, f"names {unknown}; the rewards are {tuple(known_names)}"


def _unknown(names: Iterable[str], known_names: Iterable[str]) -> str:
    """Return the names that are not in `known_names`, separated by commas."""
    return ", ".join(sorted(set(names) - set(known_names)))


def _broken_roles(c: RunConfig, r: ResolvedRewards) -> BrokenRules:
    """Find judge options in a run without judges, and rewards that cannot have the role that an option gives them."""
    names_with_tpm = [name for name, limits in c.limits.items() if limits.tokens_per_minute is not None]
    not_judges = _unknown(names_with_tpm, r.judges)
    if not_judges:
        yield "reward_limits", f"gives {not_judges} a tpm, but it is no judge: limit its concurrency or rpm"
    judges_of_groups = ", ".join(name for name in r.judges if name in r.whole_groups)
    if judges_of_groups:
        yield (
            "reward_fns",
            f"names the judge {judges_of_groups}, whose post_process_scores is never called: use a function",
        )
    if not r.judges:
        yield from idle(
            c,
            "judge_urls judge_model_id judge_idle_sleep_s http_scorer_urls",
            f"with {', '.join(r.everyone)}, which ask no server",
        )
    fallbacks_of_groups = ", ".join(name for name in c.fallbacks.values() if name in r.whole_groups)
    if fallbacks_of_groups:
        yield (
            "reward_fallback",
            f"names {fallbacks_of_groups}, which scores by the whole group: name another",
        )
    if c.judge_budget is not None:
        yield from _broken_budget(c, r)


def _broken_budget(c: RunConfig, r: ResolvedRewards) -> BrokenRules:
    """Find a judge budget without paid judges, or without the fallbacks that `--judge-budget-policy fallback` needs."""
    if r.everyone and not r.paid:
        yield (
            "judge_budget",
            f"limits nothing: none of {', '.join(r.everyone)} has a price; give the judge its price_per_million_tokens",
        )
    without_fallback = ", ".join(name for name in r.paid if name in r.adapters and name not in c.fallbacks)
    if without_fallback and c.judge_budget_policy == "fallback":
        yield (
            "judge_budget_policy",
            f"has nothing to fall back on for {without_fallback}: name a stand-in by --reward-fallback "
            f"{without_fallback}=..., or choose the policy pause",
        )
