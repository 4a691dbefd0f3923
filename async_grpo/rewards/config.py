"""`RewardConfig`: options of the rewards and their workers, and the policies for rewards that fail."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from async_grpo.options.fields import (
    LIST,
    NOT_NEGATIVE,
    POSITIVE,
    TABLE,
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
# Rewards of the shipped registry file that call no server. Options that are read from another run's folder may name
# only these rewards.
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
    "unscored",
)
# Options of the shipped rewards that another run's folder may set. A number is the largest value that the folder may
# set. It is the reward's default, so that the folder can only lower this limit. None means that any value is safe,
# because the option changes only the reward. Options that are not listed here are refused. Never list
# `allow_unsandboxed`.
FOLDER_REWARD_OPTIONS: dict[str, float | None] = {
    "absolute_tolerance": None,
    "all_or_nothing": None,
    "cache_tokens": None,
    "case": None,
    "judge": None,  # option of `length`; only names of shipped rewards are accepted
    "max_tokens": None,
    "memory_mb": 1024.0,
    "pattern": None,  # any pattern is safe, because the search has a time limit
    "relative_tolerance": None,
    "schedule": None,
    "schema": None,  # any schema is safe, because references to the network are not followed
    "search": None,
    "strip": None,
    "test_seconds": 4.0,
    "total_seconds": 20.0,
    "weight": None,
}
VERIFIERS = 4  # default number of worker processes per reward
_reward = partial(option, panel="Rewards")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(JudgeAddresses):
    """The options of a run's rewards.

    Some options take a list of assignments, `NAME=VALUE,NAME=VALUE`, where each NAME is the name of a reward.
    """

    reward_fns: str = _reward(
        "",
        "Comma list of rewards: names of the registry file, or FILE.py:NAME. The default is the reward environment if "
        "--environment is set, and otherwise the rewards that the generation workers were started with.",
        everyday=True,
        portable=SHIPPED_REWARDS,
        form=LIST,
    )
    reward_registry: str | None = _reward(
        None, "File that defines the rewards. The default is reward_registry.py.", everyday=True
    )
    reward_options: str = _reward(
        "",
        "Keyword arguments of the rewards, such as weight=0.2. Each is passed to every reward that has a parameter "
        "of this name.",
        portable=FOLDER_REWARD_OPTIONS,
        form=TABLE,
    )
    reward_env: str = _reward(
        "",
        "Comma list of the names of additional environment variables to pass to the processes of rewards, "
        "environments and agents, such as MY_API_KEY.",
        form=LIST,
    )
    verifiers_per_reward: int = _reward(
        VERIFIERS,
        "Number of worker processes per reward. With the default, countdown, format and environment have none: the "
        "process that manages the rewards computes them itself.",
        range=POSITIVE,
    )
    verifiers: str = _reward(
        "",
        "Number of worker processes of individual rewards, such as math_verify=8,code=16. For these rewards it "
        "replaces --verifiers-per-reward.",
        form=TABLE,
    )
    evaluation_verifiers: int = _reward(
        2, "Number of worker processes per reward for evaluations.", range=POSITIVE
    )
    reward_timeout_s: float = _reward(
        30.0,
        "Maximum time to score one sample, in seconds. A sample that takes longer counts as timed out.",
        range=POSITIVE,
        portable=True,
    )
    reward_memory_gb: float = _reward(
        8.0, "Maximum memory (address space) of one reward process, in GiB.", range=POSITIVE
    )

    reward_combine: str = _reward(
        "best",
        "How several rewards are combined into one. gate calls the rewards one after another and stops at the first "
        "that is below --gate-threshold.",
        choices=MODES,
        portable=True,
    )
    gate_threshold: float = _reward(
        0.5, "Lowest reward with which --reward-combine gate continues to the next reward.", portable=True
    )
    reward_column: str | None = _reward(
        None,
        "Column of the data with a comma list of the rewards that score the row. By default all rewards score every "
        "row.",
        portable=True,
    )
    reward_weights: str = _reward(
        "",
        "Weights of the rewards, such as judge=0.5. They are used by --reward-combine sum and mean, and by advantage "
        "estimators that weight rewards. The default weight is 1.",
        portable=True,
        form=TABLE,
    )

    on_reward_failure: str = _reward(
        "",
        "What happens to a sample when a reward fails, as one policy per reward, such as "
        "judge=constant:0.2,code=refill. The policies are mask (the default), group_mean, refill and constant:VALUE.",
        portable=True,
        form=TABLE,
    )
    reward_fallback: str = _reward(
        "",
        "Reward to call when another one has failed: judge=rule calls rule when judge has failed.",
        form=TABLE,
    )

    reward_limits: str = _reward(
        "",
        "Limits on the calls of a reward over the whole cluster, such as judge.concurrency=8,judge.rpm=60,"
        "judge.tpm=90000. rpm is requests per minute, and tpm is tokens per minute.",
        portable=True,
        form=TABLE,
    )
    verdict_cache: str | None = _reward(
        None, "SQLite file that keeps verdicts across runs. By default no verdicts are kept."
    )
    verdict_cache_mb: float | None = _reward(
        None,
        "Maximum size of the verdict cache, in MiB. The least recently used verdicts are deleted first. By default "
        "there is no limit.",
        range=POSITIVE,
    )
    judge_budget: float | None = _reward(
        None,
        "Maximum total cost of paid judges, in the currency of their prices. By default there is no limit.",
        range=NOT_NEGATIVE,
        portable=True,
    )
    judge_budget_policy: str = _reward(
        "pause",
        "What happens when --judge-budget is spent: pause the judges until the limit is raised, or call the reward "
        "of --reward-fallback instead.",
        choices=("pause", "fallback"),
        portable=True,
    )

    def __post_init__(self) -> None:
        """Raise ConfigurationError for values that cannot work with any rewards."""
        super().__post_init__()
        # These properties raise ConfigurationError if their text cannot be read
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
        """Return the names of the run's rewards, as metrics, weights and results use them."""
        return tuple(display_name(name) for name in parse_names(self.reward_fns))

    @property
    def all_names(self) -> tuple[str, ...]:
        """Return the names of the rewards and of their fallbacks as the options give them, FILE.py:NAME in full."""
        return tuple(dict.fromkeys([*parse_names(self.reward_fns), *self.fallbacks.values()]))

    @property
    def combination(self) -> Combination:
        """Return the rule that combines the rewards of a sample.

        Raises:
            ConfigurationError: A weight or constant does not fit these rewards.
        """
        weights = {}
        if self.reward_combine in ("sum", "mean"):
            # `--reward-weights` may also name rewards that no adapter gives, such as a length penalty. Only advantage
            # estimators use their weights, so these are left out here
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
        """Return the keyword arguments in `--reward-options`, by name."""
        return parse_assignments(self.reward_options, "reward-options")

    def reward_environment(self) -> dict[str, str]:
        """Return the environment variables that `--reward-env` names, with their values in this process."""
        return named_environment(parse_names(self.reward_env))

    @property
    def verifiers_by_name(self) -> dict[str, float]:
        """Return the numbers of worker processes in `--verifiers`, by reward."""
        return parse_numbers(self.verifiers, "verifiers")

    def num_verifiers(self, adapter: str) -> int:
        """Return the number of worker processes of a reward that runs in processes."""
        return int(self.verifiers_by_name.get(adapter, self.verifiers_per_reward))

    def has_verifiers(self, adapter: str) -> bool:
        """Return whether the options ask for worker processes for a reward that can run without them (see `inline`)."""
        return adapter in self.verifiers_by_name or self.verifiers_per_reward != VERIFIERS

    @property
    def weights_by_name(self) -> dict[str, float]:
        """Return the weights in `--reward-weights`, by reward."""
        return parse_numbers(self.reward_weights, "reward-weights")

    @property
    def limits(self) -> dict[str, Limits]:
        """Return the limits in `--reward-limits`, by reward."""
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
        """Return the fallback of each reward in `--reward-fallback`."""
        return parse_assignments(self.reward_fallback, "reward-fallback")

    @property
    def failure_policies(self) -> dict[str, str]:
        """Return the policies in `--on-reward-failure` (mask, group_mean, refill or constant:VALUE), by reward."""
        policies = parse_assignments(self.on_reward_failure, "on-reward-failure")
        return {name: str(policy) for name, policy in policies.items()}

    @property
    def failure_constants(self) -> dict[str, float]:
        """Return the constants that replace failed rewards (policy `constant:VALUE`), by reward."""
        constants: dict[str, float] = {}
        for name, policy in self.failure_policies.items():
            if policy.startswith("constant:"):
                # `__post_init__` refuses constant:VALUE if VALUE is not a finite number
                with suppress(ValueError):
                    constants[name] = finite(policy.removeprefix("constant:"))
        return constants
