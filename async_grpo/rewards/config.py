"""`RewardConfig`: the options of rewards, of their workers, and of what happens when a reward fails."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from async_grpo.options.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    option,
    parse_assignments,
    parse_numbers,
    refuse,
)
from async_grpo.rewards.adapter.registry_source import display_name, parse_names
from async_grpo.rewards.adapter.result import finite
from async_grpo.rewards.combine import MODES, Combination
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.isolation.adapter_process import named_environment
from async_grpo.rewards.judges.remote_judge import JudgeAddresses

FAILURE_POLICIES = ("mask", "group_mean", "refill", "constant:VALUE")
LIMITS = {"concurrency": "concurrency", "rpm": "requests_per_minute", "tpm": "tokens_per_minute"}
# Rewards of the shipped registry file that call no server, so that the options of another run's folder may name them
SHIPPED_REWARDS = (
    "math_verify",
    "mathd",
    "sympy",
    "countdown",
    "countdown_steps",
    "format",
    "code",
    "regex",
    "exact",
    "length",
    "majority",
    "json_schema",
    "environment",
    "environment_turns",
)
# Options of the shipped rewards that a folder may set. A number is the largest value of an option that is a limit: the
# reward's default, so that a folder can only lower it. None means that the option changes the reward and nothing else.
# A new option must be added here before a folder may set it; `allow_unsandboxed` must never be.
FOLDER_REWARD_OPTIONS: dict[str, float | None] = {
    "all_or_nothing": None,
    "cache_tokens": None,
    "case": None,
    "judge": None,  # the name of one of three shipped rewards
    "max_tokens": None,
    "memory_mb": 1024.0,
    "pattern": None,  # a row may hold one as well: the search has a time limit
    "schedule": None,
    "schema": None,  # a row may hold one as well: a reference into the network is not followed
    "search": None,
    "strip": None,
    "test_seconds": 4.0,
    "total_seconds": 20.0,
    "weight": None,
}
VERIFIERS = 4  # default number of worker processes of each reward that needs processes
_reward = partial(option, panel="Rewards")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(JudgeAddresses):
    """The options of a run's rewards. Options of the form `name=value,...` take the names of rewards."""

    reward_fns: str = _reward(
        "",
        "Comma list of rewards: names of the registry file, or FILE.py:NAME (default: the rewards that the workers name).",
        everyday=True,
        portable=SHIPPED_REWARDS,
    )
    reward_registry: str | None = _reward(None, "Registry file (default: reward_registry.py).", everyday=True)
    reward_options: str = _reward(
        "",
        "Keyword options; each reward receives those that it names: weight=0.2,...",
        portable=FOLDER_REWARD_OPTIONS,
    )
    reward_env: str = _reward(
        "",
        "Comma list of environment variables to pass on to the processes of rewards, of --environment and of agents: "
        "MY_API_KEY,...",
    )
    verifiers_per_reward: int = _reward(
        VERIFIERS,
        "Worker processes per reward. countdown and format need none, and get them only if this is not the default.",
        range=POSITIVE,
    )
    verifiers: str = _reward("", "Worker processes of single rewards, by name: math_verify=8,code=16.")
    evaluation_verifiers: int = _reward(2, "Worker processes per reward in evaluations.", range=POSITIVE)
    reward_timeout_s: float = _reward(
        30.0,
        "Seconds that scoring one sample may take, before it counts as timed out.",
        range=POSITIVE,
        portable=True,
    )
    reward_memory_gb: float = _reward(
        8.0, "Memory limit (address space) of one reward process, in GB.", range=POSITIVE
    )

    reward_combine: str = _reward(
        "best",
        "How the rewards of a sample are combined; gate calls one after the other, as long as each passes.",
        choices=MODES,
        portable=True,
    )
    gate_threshold: float = _reward(
        0.5, "Lowest reward with which a gate goes on to the next reward function.", portable=True
    )
    reward_column: str | None = _reward(
        None, "Column with the names of the rewards that judge the row (default: all of them).", portable=True
    )
    reward_weights: str = _reward(
        "",
        "Weights by name, for sum and mean and for estimators that weigh rewards: judge=0.5,...",
        portable=True,
    )

    on_reward_failure: str = _reward(
        "",
        "What replaces a failed reward, by name: mask (default), group_mean, refill or constant:VALUE. "
        "Example: judge=constant:0.2,code=refill",
        portable=True,
    )
    reward_fallback: str = _reward(
        "", "Reward that scores a sample when another one has failed, by name: judge=rule."
    )

    reward_limits: str = _reward(
        "",
        "Limits of the whole cluster on concurrent calls, requests and tokens per minute: "
        "judge.concurrency=8,judge.rpm=60,judge.tpm=90000.",
        portable=True,
    )
    verdict_cache: str | None = _reward(None, "SQLite file that keeps verdicts across runs.")
    verdict_cache_mb: float | None = _reward(
        None,
        "Largest size of the verdict cache in MB; the longest unused verdicts are deleted first.",
        range=POSITIVE,
    )
    judge_budget: float | None = _reward(
        None,
        "Most that the run may spend on paid judges, in their currency.",
        range=NOT_NEGATIVE,
        portable=True,
    )
    judge_budget_policy: str = _reward(
        "pause",
        "What happens when the budget is used up: pause waits for a higher one, fallback uses --reward-fallback.",
        choices=("pause", "fallback"),
        portable=True,
    )

    def __post_init__(self) -> None:
        """Raise ConfigurationError for values that can never work, whatever the rewards are."""
        super().__post_init__()
        # Reading the properties raises for text that is no assignment
        _ = self.weights_by_name
        _ = self.limits
        for name, fallback in self.fallbacks.items():
            option_text = f"--reward-fallback {name}={fallback}"
            refuse(name == fallback, f"{option_text}: it would be asked again; name another")
        for name, count in self.verifiers_by_name.items():
            option_text = f"--verifiers {name}={count}"
            refuse(count < 1 or count != int(count), f"{option_text}: a whole number of 1 or more is needed")
        constants = self.failure_constants
        for name, policy in self.failure_policies.items():
            is_known = policy in FAILURE_POLICIES[:3] or name in constants
            policies = ", ".join(FAILURE_POLICIES)
            refuse(not is_known, f"--on-reward-failure {name}={policy}: known are {policies}")

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the run's rewards in metrics, weights and results."""
        return tuple(display_name(name) for name in parse_names(self.reward_fns))

    @property
    def all_names(self) -> tuple[str, ...]:
        """Return the names of the rewards and of their fallbacks, with their files."""
        return tuple(dict.fromkeys([*parse_names(self.reward_fns), *self.fallbacks.values()]))

    @property
    def combination(self) -> Combination:
        """Return the rule by which the rewards of a sample are combined.

        Raises:
            ConfigurationError: A weight or constant does not fit these rewards.
        """
        weights = {}
        if self.reward_combine in ("sum", "mean"):
            # Estimators may weigh further rewards, such as a length penalty
            weights = {name: weight for name, weight in self.weights_by_name.items() if name in self.adapters}
        return Combination(
            self.adapters,
            self.reward_combine,
            weights=weights,
            threshold=self.gate_threshold,
            column=self.reward_column,
            constants=self.failure_constants,
        )

    @property
    def options_by_name(self) -> dict[str, Any]:
        """Return the rewards' keyword options by name."""
        return parse_assignments(self.reward_options, "reward-options")

    def reward_environment(self) -> dict[str, str]:
        """Return the variables of `--reward-env` with their values in this process."""
        return named_environment(parse_names(self.reward_env))

    @property
    def verifiers_by_name(self) -> dict[str, float]:
        """Return the numbers of `--verifiers` by reward."""
        return parse_numbers(self.verifiers, "verifiers")

    def num_verifiers(self, adapter: str) -> int:
        """Return the number of worker processes of a reward that needs processes."""
        return int(self.verifiers_by_name.get(adapter, self.verifiers_per_reward))

    def has_verifiers(self, adapter: str) -> bool:
        """Return whether the run asks for processes even if the reward needs none (see `inline`)."""
        return adapter in self.verifiers_by_name or self.verifiers_per_reward != VERIFIERS

    @property
    def weights_by_name(self) -> dict[str, float]:
        """Return the numbers of `--reward-weights` by reward."""
        return parse_numbers(self.reward_weights, "reward-weights")

    @property
    def limits(self) -> dict[str, Limits]:
        """Return the limits of `--reward-limits` by reward."""
        fields_by_name: dict[str, dict[str, Any]] = {}
        for key, value in parse_numbers(self.reward_limits, "reward-limits").items():
            name, _, unit = key.rpartition(".")
            is_readable = name != "" and "." not in name and unit in LIMITS
            refuse(not is_readable, f"--reward-limits {key}: write NAME.concurrency, NAME.rpm or NAME.tpm")
            fields = fields_by_name.setdefault(name, {})
            fields[LIMITS[unit]] = int(value) if unit == "concurrency" else value
        return {name: Limits(**fields) for name, fields in fields_by_name.items()}

    @property
    def fallbacks(self) -> dict[str, str]:
        """Return the fallback of each reward that has one."""
        return parse_assignments(self.reward_fallback, "reward-fallback")

    @property
    def failure_policies(self) -> dict[str, str]:
        """Return the policy by reward: mask, group_mean, refill or constant:VALUE."""
        policies = parse_assignments(self.on_reward_failure, "on-reward-failure")
        return {name: str(policy) for name, policy in policies.items()}

    @property
    def failure_constants(self) -> dict[str, float]:
        """Return the constant that replaces a failed reward, by the reward's name."""
        constants: dict[str, float] = {}
        for name, policy in self.failure_policies.items():
            if policy.startswith("constant:"):
                with suppress(ValueError):  # `__post_init__` refuses a policy without a number
                    constants[name] = finite(policy.removeprefix("constant:"))
        return constants
