"""The rules between settings and the run's rewards: the third part of the table of `compatibility`."""

from collections.abc import Iterable, Sequence

from async_grpo.config.resolved import ResolvedRewards
from async_grpo.config.rules import Rule, refuse_broken
from async_grpo.config.run import RunConfig
from async_grpo.experience.config import OUTCOME, OVERLONG
from async_grpo.rewards.adapter.decorators import check_options


def _fills(config: RunConfig) -> list[str]:
    """The rewards whose failures are answered by a number."""
    return [name for name, policy in config.failure_policies.items() if policy not in ("mask", "refill")]


def _unknown(named: Iterable[str], known: Iterable[str]) -> list[str]:
    return sorted(set(named) - set(known))


def weighable(config: RunConfig, rewards: ResolvedRewards) -> list[str]:
    """What `--reward-weights` may name."""
    entry, names = config.estimator, set(rewards.process)
    if config.reward_combine in ("sum", "mean"):
        names |= set(rewards.adapters)
    if entry.takes_components:
        names |= {*rewards.adapters, *([OVERLONG] if config.overlong_buffer else [])}
    if entry.takes_sources and set(rewards.adapters) - set(rewards.process):
        names |= {OUTCOME}
    return sorted(names)


def early_at_gate(config: RunConfig, names: Sequence[str], rewards: ResolvedRewards) -> list[str]:
    """Those of the names that a gate would ask, and believe, before `post_process_scores` has set their reward."""
    return [name for name in names[:-1] if name in rewards.whole_groups and config.reward_combine == "gate"]


REWARDS = (
    Rule(
        "advantage_estimator",
        lambda c, r: not c.estimator.process and r.process,
        lambda c, r: (
            f"reads one score per sample, but {', '.join(r.process)} gives rewards step by step; estimators that fit: "
            f"{', '.join(c.estimators_for(process=True))}"
        ),
    ),
    Rule(
        "advantage_estimator",
        lambda c, r: not c.estimator.outcome and not r.process,
        lambda c, r: (
            f"reads rewards step by step, but {', '.join(r.adapters)} gives one score per sample; estimators that fit: "
            f"{', '.join(c.estimators_for(process=False))}"
        ),
    ),
    Rule(
        "reward_combine",
        lambda c, r: c.reward_combine != "best" and r.process,
        "combines scores, and {found} gives rewards step by step, which are added up: weigh them by --reward-weights",
    ),
    Rule(
        "on_reward_failure",
        lambda c, r: _fills(c) and r.process,
        "beside {found}: a score cannot stand in for steps that are missing; use mask or refill",
    ),
    Rule(
        "reward_fallback",
        lambda c, r: c.fallbacks and r.process,
        "beside {found}: the one that stands in gives other steps, or none; leave it out",
    ),
    Rule(
        "advantage_estimator",
        lambda c, r: (
            c.estimator.takes_components
            and (c.reward_combine != "best" or c.reward_column or _fills(c) or c.kl_in_reward)
        ),
        "normalises every reward by itself: it goes with neither --reward-combine, nor --reward-column, nor fills for "
        "failures, nor --kl-in-reward; weigh by --reward-weights",
    ),
    Rule(
        "advantage_estimator",
        lambda c, r: c.estimator.compares_with_greedy and r.whole_groups,
        "compares with a single greedy completion, which {found}, looking at whole groups, cannot score on the same "
        "scale",
    ),
    # Where a column says who is asked, and in which order, its rows are checked one by one.
    Rule(
        "reward_fns reward_combine",
        lambda c, r: not c.reward_column and early_at_gate(c, tuple(r.adapters), r),
        "decides before the group is known, and {found} scores by the whole group: name it last in --reward-fns, or "
        "choose another --reward-combine",
    ),
    Rule(
        "reward_weights",
        lambda c, r: _unknown(c.weights_by_name, weighable(c, r)),
        "names {found}; with --advantage-estimator {c.advantage_estimator}, --reward-combine {c.reward_combine} and these "
        "rewards that has no weight",
    ),
    Rule(
        "on_reward_failure",
        lambda c, r: _unknown(c.failure_policies, r.adapters),
        "names {found}, which is no reward of the run: {c.adapters}",
    ),
    Rule(
        "verifiers",
        lambda c, r: _unknown(c.verifiers_by_name, r.everyone),
        "names {found}; the rewards are {c.all_adapters}",
    ),
    Rule(
        "reward_limits",
        lambda c, r: _unknown(c.limits, r.everyone),
        "names {found}; the rewards are {c.all_adapters}",
    ),
    Rule(
        "reward_fallback",
        lambda c, r: _unknown(c.fallbacks, r.everyone),
        "names {found}; the rewards are {c.all_adapters}",
    ),
    Rule(
        "reward_limits",
        lambda c, r: [
            name
            for name, limits in c.limits.items()
            if limits.tokens_per_minute is not None and name not in r.judges
        ],
        "gives {found} a tpm, but it is no judge, and takes no tokens; limit its concurrency or rpm",
    ),
    Rule(
        "reward_fns",
        lambda c, r: [name for name in r.judges if name in r.whole_groups],
        "names the judge {found}, which has post_process_scores: it would never be called; put it on a function",
    ),
    Rule(
        "reward_fallback",
        lambda c, r: [name for name in c.fallbacks.values() if name in r.whole_groups],
        "names {found}, which scores by the whole group, and cannot stand in on single samples; name another",
    ),
    Rule(
        "judge_budget",
        lambda c, r: c.judge_budget is not None and not r.paid and list(r.everyone),
        "limits nothing: none of {found} has a price; give the judge its price_per_million_tokens, or leave the budget out",
    ),
    Rule(
        "judge_budget_policy",
        lambda c, r: (
            c.judge_budget is not None
            and c.judge_budget_policy == "fallback"
            and [name for name in r.paid if name in r.adapters and name not in c.fallbacks]
        ),
        "has nothing to fall back on for {found}: name a stand-in by --reward-fallback {found}=..., or choose the policy "
        "pause",
    ),
)


def check_rewards(config: RunConfig, rewards: ResolvedRewards) -> None:
    """Raise ConfigurationError for settings that cannot be meant with these rewards."""
    check_options(rewards.everyone, config.options_by_name)
    refuse_broken(REWARDS, config, rewards)
    _ = config.combination  # raises for weights that come to nothing
