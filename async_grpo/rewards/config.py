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
        "Comma list of rewards: names of the registry file, or FILE.py:NAME. The default is what the workers name.",
        everyday=True,
        portable=SHIPPED_REWARDS,
    )
    reward_registry: str | None = _reward(
        None, "File that defines the rewards. The default is reward_registry.py.", everyday=True
    )
    reward_options: str = _reward(
        "",
        "Keyword options of the rewards, each passed to every reward that has it, such as weight=0.2.",
        portable=FOLDER_REWARD_OPTIONS,
    )
    reward_env: str = _reward(
        "",
        "Comma list of further environment variables for the processes of rewards, environments and agents, such as "
        "MY_API_KEY.",
    )
    verifiers_per_reward: int = _reward(
        VERIFIERS,
        "Worker processes of each reward. Unless this is set, countdown and format run without processes.",
        range=POSITIVE,
    )
    verifiers: str = _reward(
        "", "Worker processes by reward, such as math_verify=8,code=16, instead of --verifiers-per-reward."
    )
    evaluation_verifiers: int = _reward(2, "Worker processes of each reward for evaluations.", range=POSITIVE)
    reward_timeout_s: float = _reward(
        30.0,
        "Seconds that scoring one sample may take before it counts as timed out.",
        range=POSITIVE,
        portable=True,
    )
    reward_memory_gb: float = _reward(
        8.0, "Maximum memory (address space) of one reward process, in GiB.", range=POSITIVE
    )

    reward_combine: str = _reward(
        "best",
        "How several rewards become one. gate asks one reward after the other.",
        choices=MODES,
        portable=True,
    )
    gate_threshold: float = _reward(
        0.5, "Lowest reward with which a gate asks the next reward.", portable=True
    )
    reward_column: str | None = _reward(
        None,
        "Column of the rows that names the rewards of a row. By default all rewards score every row.",
        portable=True,
    )
    reward_weights: str = _reward(
        "",
        "Weights of the rewards in sum and mean, and in estimators that weigh rewards, such as judge=0.5. The "
        "default is 1 each.",
        portable=True,
    )

    on_reward_failure: str = _reward(
        "",
        "What happens if a reward fails: mask (the default), group_mean, refill or constant:VALUE, by reward, such "
        "as judge=constant:0.2,code=refill.",
        portable=True,
    )
    reward_fallback: str = _reward(
        "", "Reward that is asked when another one has failed, such as judge=rule."
    )

    reward_limits: str = _reward(
        "",
        "Limits of a reward's calls over the whole cluster, such as judge.concurrency=8,judge.rpm=60,judge.tpm=90000.",
        portable=True,
    )
    verdict_cache: str | None = _reward(
        None, "SQLite file that keeps verdicts across runs. By default no verdicts are kept."
    )
    verdict_cache_mb: float | None = _reward(
        None,
        "Maximum size of the verdict cache in MiB; verdicts that were unused for longest are deleted first. By "
        "default there is no limit.",
        range=POSITIVE,
    )
    judge_budget: float | None = _reward(
        None,
        "Maximum cost of paid judges, in their currency. By default there is no limit.",
        range=NOT_NEGATIVE,
        portable=True,
    )
    judge_budget_policy: str = _reward(
        "pause",
        "What happens when --judge-budget is spent: pause the run, or ask the fallback of --reward-fallback.",
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
