"""The options of the rewards: who judges, how many of them, and what happens when they fail."""

import math
from dataclasses import dataclass
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    Section,
    option,
    parse_assignments,
    parse_numbers,
    refuse,
)
from async_grpo.rewards.adapter.registry_source import display_name, parse_names
from async_grpo.rewards.combine import MODES, Combination
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.isolation.spawn import named_environment
from async_grpo.rewards.judges.remote_judge import JudgeAddresses

FAILURE_POLICIES = ("mask", "group_mean", "refill", "constant:VALUE")
LIMITS = {"concurrency": "concurrency", "rpm": "requests_per_minute", "tpm": "tokens_per_minute"}


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section):
    """What a verifier pool is given. `name=value,...` speaks of rewards by name."""

    reward_fns: str = option(
        "",
        "Comma list of rewards: names of the registry file, or FILE.py:NAME (default: what the workers name).",
        "Rewards",
        everyday=True,
    )
    reward_registry: str | None = option(
        None, "The registry file (default: reward_registry.py here).", "Rewards", everyday=True
    )
    reward_options: str = option(
        "", "Keyword options for the rewards that name them: weight=0.2,...", "Rewards"
    )
    reward_env: str = option(
        "",
        "Comma list of environment variables that the rewards' processes get as well: MY_API_KEY,...",
        "Rewards",
    )
    verifiers_per_reward: int = option(4, "Worker processes for each reward.", "Rewards", range=POSITIVE)
    verifiers: str = option("", "The same by name: math_verify=8,code=16.", "Rewards")
    evaluation_verifiers: int = option(
        2, "Worker processes for each reward in evaluations.", "Rewards", range=POSITIVE
    )
    reward_timeout_s: float = option(
        30.0, "Longest scoring of one sample; then it counts as timed out.", "Rewards", range=POSITIVE
    )
    reward_memory_gb: float = option(
        8.0, "Memory (address space) of one reward process.", "Rewards", range=POSITIVE
    )

    reward_combine: str = option(
        "best",
        "How several rewards become one; gate asks one after the other.",
        "Rewards",
        choices=MODES,
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

    reward_limits: str = option(
        "",
        "Limits over the whole cluster: judge.concurrency=8,judge.rpm=60,judge.tpm=90000.",
        "Rewards",
    )
    verdict_cache: str | None = option(None, "SQLite file that remembers verdicts across runs.", "Rewards")
    verdict_cache_mb: float | None = option(
        None,
        "Keep it to so many megabytes: the longest unused verdicts go first.",
        "Rewards",
        range=POSITIVE,
    )
    judge_budget: float | None = option(
        None, "Most that paid judges may cost, in their currency.", "Rewards", range=NOT_NEGATIVE
    )
    judge_budget_policy: str = option(
        "pause",
        "At its end: pause, or fallback (--reward-fallback).",
        "Rewards",
        choices=("pause", "fallback"),
    )

    judge_urls: str = option(
        "", "Where the judges are asked whose entry says no url: URL,URL,... (equal replicas).", "Judge"
    )
    http_scorer_urls: str = option(
        "", "The same for http_scorer; by default where examples/http_scorer_server.py listens.", "Judge"
    )
    judge_model_id: str | None = option(
        None, "By which the verdict cache knows the model behind --judge-urls, whatever their ports.", "Judge"
    )
    judge_idle_sleep_s: float | None = option(
        None,
        "The servers give their GPU memory back after so many seconds without a call, until the next.",
        "Judge",
        range=POSITIVE,
        was="judge_sleep_s",
    )

    def __post_init__(self) -> None:
        """Raise ConfigurationError for what can never work, whatever the rewards are."""
        super().__post_init__()
        _ = self.weights_by_name, self.limits  # read once, so that what is no assignment is refused now
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

    @property
    def adapters(self) -> tuple[str, ...]:
        """What the run's rewards are known by."""
        return tuple(display_name(name) for name in parse_names(self.reward_fns))

    @property
    def all_names(self) -> tuple[str, ...]:
        """`--reward-fns` and the stand-ins, as they were given."""
        return tuple(dict.fromkeys([*parse_names(self.reward_fns), *self.fallbacks.values()]))

    @property
    def all_adapters(self) -> tuple[str, ...]:
        """The adapters, and who stands in for them."""
        return tuple(dict.fromkeys([*self.adapters, *self.fallbacks.values()]))

    @property
    def combination(self) -> Combination:
        """How the rewards of one sample become one.

        Raises:
            ConfigurationError: a weight or constant that does not fit these rewards.
        """
        weights = self.weights_by_name if self.reward_combine in ("sum", "mean") else {}
        return Combination(
            self.adapters,
            self.reward_combine,
            weights={name: weight for name, weight in weights.items() if name in self.adapters},
            threshold=self.gate_threshold,
            column=self.reward_column,
            constants=self.failure_constants,
        )

    @property
    def options_by_name(self) -> dict[str, Any]:
        """The rewards' keyword options."""
        return parse_assignments(self.reward_options, "reward-options")

    def reward_environment(self) -> dict[str, str]:
        """The variables of `--reward-env`, from this process. Raises ConfigurationError where one is not set."""
        return named_environment(parse_names(self.reward_env))

    @property
    def verifiers_by_name(self) -> dict[str, Any]:
        return parse_numbers(self.verifiers, "verifiers")

    def num_verifiers(self, adapter: str) -> int:
        """Worker processes of a reward that has processes."""
        return int(self.verifiers_by_name.get(adapter, self.verifiers_per_reward))

    @property
    def judge_addresses(self) -> JudgeAddresses:
        """Where the judges without a `url` of their own are asked."""
        known = {"model_id": self.judge_model_id, "idle_sleep_s": self.judge_idle_sleep_s}
        return JudgeAddresses.of(self.judge_urls, self.http_scorer_urls, **known)

    @property
    def memory_limit_bytes(self) -> int:
        return round(self.reward_memory_gb * 2**30)

    @property
    def cache_max_bytes(self) -> int | None:
        return None if self.verdict_cache_mb is None else round(self.verdict_cache_mb * 2**20)

    @property
    def weights_by_name(self) -> dict[str, float]:
        return parse_numbers(self.reward_weights, "reward-weights")

    @property
    def limits(self) -> dict[str, Limits]:
        """`--reward-limits` by reward."""
        found: dict[str, dict[str, Any]] = {}
        for key, value in parse_numbers(self.reward_limits, "reward-limits").items():
            name, _, unit = key.rpartition(".")
            if not name or "." in name or unit not in LIMITS:
                raise ConfigurationError(
                    f"--reward-limits {key}: write NAME.concurrency, NAME.rpm or NAME.tpm"
                )
            found.setdefault(name, {})[LIMITS[unit]] = int(value) if unit == "concurrency" else value
        return {name: Limits(**limits) for name, limits in found.items()}

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
