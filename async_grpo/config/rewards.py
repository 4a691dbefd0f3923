"""The rewards of a run, looked up once, and the rules between them and the settings: see `config.compatibility`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.config.compatibility import Broken, idle, refuse_broken
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import OUTCOME, OVERLONG, RunFacts
from async_grpo.rewards.adapter.decorators import best_reward_of, check_options, traits_of
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, registry_file, resolve
from async_grpo.rewards.config import RewardConfig
from async_grpo.rewards.middleware import PRICE


@dataclass(frozen=True)
class ResolvedRewards:
    """`adapters`: the run's rewards by name. `everyone`: they, and those that stand in for them."""

    source: RewardRegistrySource
    adapters: Mapping[str, Any]
    everyone: Mapping[str, Any]

    @classmethod
    def of(cls, config: RewardConfig) -> "ResolvedRewards":
        """Read the registry file and the files that are named, and find the rewards.

        ConfigurationError: a file cannot be read, or a name is unknown; says which are known.
        """
        registry = RewardRegistrySource.from_file(registry_file(config.reward_registry))
        source = registry.with_files(config.reward_fns)
        everyone = {name: config.with_address(one) for name, one in resolve(source, config.all_names).items()}
        return cls(source, {name: everyone[name] for name in config.adapters}, everyone)

    def _with(self, trait: str) -> list[str]:
        return [name for name, adapter in self.everyone.items() if getattr(traits_of(adapter), trait)]

    @property
    def process(self) -> list[str]:
        """The run's rewards that come step by step."""
        return [name for name in self._with("is_process_reward") if name in self.adapters]

    @property
    def whole_groups(self) -> list[str]:
        """Those that look at a whole group before its rewards are final."""
        return self._with("has_post_process")

    @property
    def judges(self) -> list[str]:
        return self._with("is_judge")

    @property
    def paid(self) -> list[str]:
        """The judges that have a price."""
        return [name for name in self.judges if getattr(self.everyone[name], PRICE, None)]

    def facts(self, config: RewardConfig, max_completion_tokens: int) -> RunFacts:
        """What the batcher must know of them."""
        options = config.options_by_name
        return RunFacts(
            max_completion_tokens,
            process=tuple(self.process),
            whole_groups=any(name in self.adapters for name in self.whole_groups),
            weights=config.weights_by_name,
            failure_policies=config.failure_policies,
            best_rewards={name: best_reward_of(one, options) for name, one in self.adapters.items()},
        )

    def secrets(self) -> dict[str, str]:
        """The keys that the judges name. ConfigurationError: one is not in this process's environment.

        They go to the pool as an argument: others can read Ray's job table and the workers' environments.
        """
        named = {self.everyone[name].endpoint().api_key_env for name in self.judges} - {None}
        if missing := sorted(named - set(os.environ)):
            names = ", ".join(missing)
            raise ConfigurationError(f"a judge's key is missing: set the environment variable {names}")
        return {name: os.environ[name] for name in named}


def weighable(config: RunConfig, rewards: ResolvedRewards) -> list[str]:
    """What `--reward-weights` may name."""
    entry, names = config.estimator, set(rewards.process)
    if config.reward_combine in ("sum", "mean") or entry.rewards == "components":
        names |= set(rewards.adapters)
    if entry.rewards == "components" and config.overlong_buffer:
        names |= {OVERLONG}
    if entry.rewards == "sources" and set(rewards.adapters) - set(rewards.process):
        names |= {OUTCOME}
    return sorted(names)


def early_at_gate(config: RunConfig, names: Sequence[str], rewards: ResolvedRewards) -> list[str]:
    """Those of the names that a gate would ask, and believe, before `post_process_scores` has set their reward."""
    return [name for name in names[:-1] if name in rewards.whole_groups and config.reward_combine == "gate"]


def check_rewards(config: RunConfig, rewards: ResolvedRewards) -> None:
    """Raise ConfigurationError for settings that cannot be meant with these rewards."""
    check_options(rewards.everyone, config.options_by_name)
    for rules in (_broken_methods, _broken_names, _broken_roles):
        refuse_broken(config, rules(config, rewards))
    _ = config.combination  # raises for weights that come to nothing


def _broken_methods(c: RunConfig, r: ResolvedRewards) -> Broken:
    estimator, process = c.estimator, ", ".join(r.process)
    fills = any(policy not in ("mask", "refill") for policy in c.failure_policies.values())
    if not (estimator.process if process else estimator.outcome):
        reads, given = "rewards step by step", f"{', '.join(r.adapters)} gives one score per sample"
        if process:
            reads, given = "one score per sample", f"{process} gives rewards step by step"
        fitting = f"estimators that fit: {', '.join(c.estimators_for(process=bool(process)))}"
        yield "advantage_estimator", f"reads {reads}, but {given}; {fitting}"
    if process and c.reward_combine != "best":
        why = f"combines scores, and {process} gives rewards step by step, which are added up: weigh them by "
        yield "reward_combine", f"{why}--reward-weights"
    if process and (fills or c.fallbacks):
        why = f"beside {process}: nothing can stand in for its steps; use mask or refill, and no fallback"
        yield "on_reward_failure reward_fallback", why
    mixes = c.reward_combine != "best" or c.reward_column or fills or c.kl_in_reward
    if estimator.rewards == "components" and mixes:
        why = "normalises every reward by itself: no --reward-combine, no --reward-column, no fills for failures"
        yield "advantage_estimator", f"{why}, no --kl-in-reward; weigh by --reward-weights"
    if estimator.compares_with_greedy and (groups := ", ".join(r.whole_groups)):
        why = f"compares with a single greedy completion, which {groups} cannot score alike"
        yield "advantage_estimator", f"{why}: it looks at whole groups"
    # Where a column says who is asked, and in which order, its rows are checked one by one
    if not c.reward_column and (early := ", ".join(early_at_gate(c, tuple(r.adapters), r))):
        why = f"decides before the group is known, and {early} scores by the whole group: name it last in"
        yield "reward_fns reward_combine", f"{why} --reward-fns, or choose another --reward-combine"


def _broken_names(c: RunConfig, r: ResolvedRewards) -> Broken:
    if unknown := _unknown(c.weights_by_name, weighable(c, r)):
        why = f"names {unknown}, which has no weight with these rewards"
        yield "reward_weights advantage_estimator reward_combine", why
    for flag, named, known in (
        ("on_reward_failure", c.failure_policies, r.adapters),
        ("verifiers", c.verifiers_by_name, r.everyone),
        ("reward_limits", c.limits, r.everyone),
        ("reward_fallback", c.fallbacks, r.everyone),
    ):
        if unknown := _unknown(named, known):
            yield flag, f"names {unknown}; the rewards are {tuple(known)}"


def _unknown(named: Iterable[str], known: Iterable[str]) -> str:
    return ", ".join(sorted(set(named) - set(known)))


def _broken_roles(c: RunConfig, r: ResolvedRewards) -> Broken:
    with_tpm = [name for name, limits in c.limits.items() if limits.tokens_per_minute is not None]
    if unpaid := _unknown(with_tpm, r.judges):
        yield "reward_limits", f"gives {unpaid} a tpm, but it is no judge: limit its concurrency or rpm"
    if judges := ", ".join(name for name in r.judges if name in r.whole_groups):
        why = "whose post_process_scores is never called: use a function"
        yield "reward_fns", f"names the judge {judges}, {why}"
    if not r.judges:
        flags = "judge_urls judge_model_id judge_idle_sleep_s http_scorer_urls"
        yield from idle(c, flags, f"with {', '.join(r.everyone)}, which ask no server")
    if late := ", ".join(name for name in c.fallbacks.values() if name in r.whole_groups):
        yield "reward_fallback", f"names {late}, which scores by the whole group: name another"
    if c.judge_budget is None:
        return
    if r.everyone and not r.paid:
        why = f"limits nothing: none of {', '.join(r.everyone)} has a price"
        yield "judge_budget", f"{why}; give the judge its price_per_million_tokens"
    alone = ", ".join(name for name in r.paid if name in r.adapters and name not in c.fallbacks)
    if alone and c.judge_budget_policy == "fallback":
        way_out = f"name a stand-in by --reward-fallback {alone}=..., or choose the policy pause"
        yield "judge_budget_policy", f"has nothing to fall back on for {alone}: {way_out}"
