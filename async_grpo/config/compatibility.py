"""SharedRunSettings of rewards and estimators that would be accepted, and then do nothing or something else."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from async_grpo.algorithm.advantages import get_estimator
from async_grpo.algorithm.estimator import COMPONENTS
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.traits import traits_of


def refuse_combinations(config: RunConfig, process: Collection[str], adapters: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for the first combination that cannot be meant.

    Args:
        process: those of the `adapters` that reward single steps.
    """
    fills = {n: policy for n, policy in config.failure_policies.items() if policy not in ("mask", "refill")}
    refusals = (
        *_beside_steps(config, process, fills),
        *_by_estimator(config, adapters, fills),
        *_at_a_gate(config, adapters),
    )
    for refused, why in refusals:
        if refused:
            raise ConfigurationError(why)


def _beside_steps(
    config: RunConfig, process: Collection[str], fills: Mapping[str, str]
) -> list[tuple[bool, str]]:
    if not process:
        return []
    steps = ", ".join(process)
    return [
        (
            config.reward_combine != "best",
            f"--reward-combine {config.reward_combine} combines scores, and {steps} gives rewards step by step, which are "
            "added up: weigh them by --reward-weights",
        ),
        (
            bool(fills),
            f"--on-reward-failure {dict(fills)} beside {steps}: a score cannot stand in for steps that are missing; use "
            "mask or refill",
        ),
        (
            bool(config.fallbacks),
            f"--reward-fallback beside {steps}: the one that stands in gives other steps, or none; leave it out",
        ),
    ]


def _by_estimator(
    config: RunConfig, adapters: Mapping[str, Any], fills: Mapping[str, str]
) -> list[tuple[bool, str]]:
    name = config.advantage_estimator
    estimator = get_estimator(name)
    return [
        (
            estimator.rewards == COMPONENTS
            and (
                config.reward_combine != "best"
                or bool(config.reward_column)
                or bool(fills)
                or config.kl_in_reward
            ),
            f"--advantage-estimator {name} normalises every reward by itself: it goes with neither --reward-combine, nor "
            "--reward-column, nor fills for failures, nor --kl-in-reward; weigh by --reward-weights",
        ),
        (
            estimator.compares_with_batch and config.zero_variance != "keep",
            f"--zero-variance {config.zero_variance}: groups of equal rewards teach {name}, which compares with the whole "
            "batch; keep them",
        ),
        (
            estimator.compares_with_greedy
            and any(traits_of(adapter).has_post_process for adapter in adapters.values()),
            f"--advantage-estimator {name} compares with a single greedy completion, which a reward that looks at whole "
            "groups cannot score on the same scale",
        ),
    ]


def _at_a_gate(config: RunConfig, adapters: Mapping[str, Any]) -> list[tuple[bool, str]]:
    # Where a column says who is asked, and in which order, its rows are checked one by one.
    early = [] if config.reward_column else early_at_gate(config, tuple(adapters), adapters)
    return [
        (
            bool(early),
            f"--reward-combine gate decides before the group is known, and {', '.join(early)} scores by the whole group: "
            f"name it last in --reward-fns, which is {','.join(adapters)}, or choose another --reward-combine",
        ),
    ]


def early_at_gate(config: RunConfig, names: Sequence[str], adapters: Mapping[str, Any]) -> list[str]:
    """Those of the names that a gate would ask, and believe, before `post_process_scores` has set their reward."""
    if config.reward_combine != "gate":
        return []
    return [name for name in names[:-1] if traits_of(adapters[name]).has_post_process]
