"""The options of the rewards: `RunConfig` inherits them."""

import math
from dataclasses import dataclass
from typing import Any

from async_grpo.options.fields import dashed, option, parse_assignments, parse_numbers, refuse

FAILURE_POLICIES = ("mask", "group_mean", "refill", "constant:VALUE")
BUDGET_POLICIES = ("pause", "fallback")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Who judges, how many of them, and what happens when they fail. `name=value,...` speaks of rewards by name."""

    reward_fns: str = option(
        "",
        "Comma list of rewards: names of the page, or FILE.py:NAME (default: what the workers name).",
        "Rewards",
    )
    reward_registry: str | None = option(
        None, "The page of rewards (default: reward_registry.py here).", "Rewards"
    )
    reward_options: str = option(
        "", "Keyword options for the rewards that name them: weight=0.2,...", "Rewards"
    )
    verifiers_per_reward: int = option(4, "Worker processes for each reward.", "Rewards")
    verifiers: str = option("", "The same by name: math_verify=8,code=16.", "Rewards")
    evaluation_verifiers: int = option(2, "Worker processes for each reward in evaluations.", "Rewards")
    reward_timeout_s: float = option(
        30.0, "Longest scoring of one sample; then it counts as timed out.", "Rewards"
    )
    reward_memory_gb: float = option(8.0, "Memory (address space) of one reward process.", "Rewards")

    reward_combine: str = option(
        "best", "Several rewards: best, sum, mean, product, or gate (one after the other).", "Rewards"
    )
    gate_threshold: float = option(0.5, "The reward from which a gate lets the next one be asked.", "Rewards")
    reward_column: str | None = option(None, "Column of the row that names who judges it.", "Rewards")
    reward_weights: str = option(
        "",
        "Weights by name, in sum and mean, and in the estimators that weigh rewards: judge=0.5,...",
        "Rewards",
    )

    on_reward_failure: str = option(
        "",
        "By name, mask (default), group_mean, refill or constant:VALUE: judge=constant:0.2,code=refill",
        "Rewards",
    )
    reward_fallback: str = option("", "Who is asked when one has failed: judge=rule.", "Rewards")
    min_valid_samples: int = option(2, "Rewards that a group needs, or it is left out.", "Rewards")
    failure_alarm: float = option(0.1, "Warn when more than this share of a reward's calls fails.", "Rewards")

    reward_limits: str = option(
        "",
        "Limits over the whole cluster: judge.concurrency=8,judge.rpm=60,judge.tpm=90000.",
        "Rewards",
    )
    verdict_cache: str | None = option(None, "SQLite file that remembers verdicts across runs.", "Rewards")
    verdict_cache_mb: float | None = option(
        None, "Keep it to so many megabytes: the longest unused verdicts go first.", "Rewards"
    )
    judge_budget: float | None = option(None, "Most that paid judges may cost, in their currency.", "Rewards")
    judge_budget_policy: str = option(
        "pause", "At its end: pause, or fallback (--reward-fallback).", "Rewards"
    )

    def check_rewards(self) -> None:
        """Raise ConfigurationError for what can never work."""
        for name in ("verifiers_per_reward", "evaluation_verifiers", "reward_timeout_s", "reward_memory_gb",
                     "min_valid_samples"):  # fmt: skip
            refuse(
                not getattr(self, name) > 0, f"--{dashed(name)} must be above 0, not {getattr(self, name)}"
            )
        refuse(not 0 <= self.failure_alarm <= 1, f"--failure-alarm is a share, not {self.failure_alarm}")
        size = self.verdict_cache_mb
        refuse(
            size is not None and not 0 < size < math.inf,
            f"--verdict-cache-mb must be a finite number above 0, not {size}",
        )
        refuse(
            size is not None and not self.verdict_cache,
            f"--verdict-cache-mb {size} does nothing without --verdict-cache",
        )
        refuse(
            self.judge_budget is not None and not 0 <= self.judge_budget < math.inf,
            f"--judge-budget must be a finite number of 0 or more, not {self.judge_budget}",
        )
        refuse(
            self.judge_budget_policy not in BUDGET_POLICIES,
            f"--judge-budget-policy {self.judge_budget_policy!r}: known are {', '.join(BUDGET_POLICIES)}",
        )
        refuse(
            self.judge_budget_policy == "fallback" and self.judge_budget is None,
            "--judge-budget-policy fallback does nothing without --judge-budget",
        )
        _ = self.weights_by_name  # read once, so that what is no assignment is refused now
        for name, fallback in self.fallbacks.items():
            refuse(
                name == fallback,
                f"--reward-fallback {name}={fallback}: it would be asked again; name another",
            )
        for name, count in self.verifiers_by_name.items():
            refuse(
                not isinstance(count, float) or count < 1 or count != int(count),
                f"--verifiers {name}={count}: a whole number of 1 or more is needed",
            )
        for name, policy in self.failure_policies.items():
            known = policy in FAILURE_POLICIES[:3] or policy.startswith("constant:")
            refuse(not known, f"--on-reward-failure {name}={policy}: known are {', '.join(FAILURE_POLICIES)}")
        for name, value in self.failure_constants.items():
            refuse(
                not (isinstance(value, float) and math.isfinite(value)),
                f"--on-reward-failure {name}=constant:{value}: it must be a finite number",
            )
        for name in self.limits_by_name:
            refuse(
                name.count(".") != 1 or name.rsplit(".", 1)[1] not in ("concurrency", "rpm", "tpm"),
                f"--reward-limits {name}: write NAME.concurrency, NAME.rpm or NAME.tpm",
            )

    @property
    def verifiers_by_name(self) -> dict[str, Any]:
        return parse_numbers(self.verifiers, "verifiers")

    @property
    def weights_by_name(self) -> dict[str, Any]:
        return parse_numbers(self.reward_weights, "reward-weights")

    @property
    def limits_by_name(self) -> dict[str, Any]:
        return parse_numbers(self.reward_limits, "reward-limits")

    @property
    def fallbacks(self) -> dict[str, str]:
        return parse_assignments(self.reward_fallback, "reward-fallback")

    @property
    def failure_policies(self) -> dict[str, str]:
        """By name: mask, group_mean, refill or constant:VALUE."""
        return {
            name: str(policy)
            for name, policy in parse_assignments(self.on_reward_failure, "on-reward-failure").items()
        }

    @property
    def failure_constants(self) -> dict[str, Any]:
        """By name: the reward that stands in for a failure."""
        return {
            name: parse_assignments(f"value={policy.removeprefix('constant:') or '?'}", "on-reward-failure")[
                "value"
            ]
            for name, policy in self.failure_policies.items()
            if policy.startswith("constant:")
        }
