"""The options of the rewards: who judges, how many of them, and what happens when they fail."""

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
# The rewards of the shipped registry file that ask nobody: a folder may name them
SHIPPED_REWARDS = (
    *(
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
    ),
    *("majority", "json_schema", "environment", "environment_turns"),
)
# Options of the shipped rewards that a folder may say, and the largest value of those that are a limit: the default of the
# reward, so that a folder may only lower it. None: the option decides what is paid, and nothing else. A new option of a
# reward is not taken over before it stands here; `allow_unsandboxed` never may.
FOLDER_REWARD_OPTIONS: dict[str, float | None] = {
    "all_or_nothing": None,
    "cache_tokens": None,
    "case": None,
    "judge": None,  # a name of three shipped rewards
    "max_tokens": None,
    "memory_mb": 1024.0,
    "pattern": None,  # as the rows' own: the search has a time limit
    "schedule": None,
    "schema": None,  # as the rows' own: a reference into the network is not followed
    "search": None,
    "strip": None,
    "test_seconds": 4.0,
    "total_seconds": 20.0,
    "weight": None,
}
VERIFIERS = 4  # by default, for each reward that needs processes
_reward = partial(option, panel="Rewards")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(JudgeAddresses):
    """What a verifier pool is given. `name=value,...` speaks of rewards by name."""

    reward_fns: str = _reward(
        "",
        "Comma list of rewards: names of the registry file, or FILE.py:NAME (default: what the workers name).",
        everyday=True,
        portable=SHIPPED_REWARDS,
    )
    reward_registry: str | None = _reward(None, "Registry file (default: reward_registry.py).", everyday=True)
    reward_options: str = _reward(
        "",
        "Keyword options for the rewards that name them: weight=0.2,...",
        portable=FOLDER_REWARD_OPTIONS,
    )
    reward_env: str = _reward(
        "",
        "Comma list of environment variables that the processes of rewards, of --environment and of agents get as well: "
        "MY_API_KEY,...",
    )
    verifiers_per_reward: int = _reward(
        VERIFIERS,
        "Worker processes for each reward; countdown and format get some if it is not the default.",
        range=POSITIVE,
    )
    verifiers: str = _reward("", "The same by name: math_verify=8,code=16.")
    evaluation_verifiers: int = _reward(2, "Worker processes for each reward in evaluations.", range=POSITIVE)
    reward_timeout_s: float = _reward(
        30.0, "Longest scoring of a sample; then it timed out.", range=POSITIVE, portable=True
    )
    reward_memory_gb: float = _reward(8.0, "Memory (address space) of one reward process.", range=POSITIVE)

    reward_combine: str = _reward(
        "best", "How several rewards become one; gate asks one after the other.", choices=MODES, portable=True
    )
    gate_threshold: float = _reward(
        0.5, "The reward from which a gate lets the next one be asked.", portable=True
    )
    reward_column: str | None = _reward(None, "Column of the row that names who judges it.", portable=True)
    reward_weights: str = _reward(
        "",
        "Weights by name, in sum and mean, and in the estimators that weigh rewards: judge=0.5,...",
        portable=True,
    )

    on_reward_failure: str = _reward(
        "",
        "By name, mask (default), group_mean, refill or constant:VALUE: judge=constant:0.2,code=refill",
        portable=True,
    )
    reward_fallback: str = _reward("", "Who is asked when one has failed: judge=rule.")

    reward_limits: str = _reward(
        "", "Cluster-wide limits: judge.concurrency=8,judge.rpm=60,judge.tpm=90000.", portable=True
    )
    verdict_cache: str | None = _reward(None, "SQLite file that remembers verdicts across runs.")
    verdict_cache_mb: float | None = _reward(
        None, "Keep it to so many megabytes: the longest unused verdicts go first.", range=POSITIVE
    )
    judge_budget: float | None = _reward(
        None, "Cap on paid judges, in their currency.", range=NOT_NEGATIVE, portable=True
    )
    judge_budget_policy: str = _reward(
        "pause",
        "At its end: pause, or fallback (--reward-fallback).",
        choices=("pause", "fallback"),
        portable=True,
    )

    def __post_init__(self) -> None:
        """Raise ConfigurationError for what can never work, whatever the rewards are."""
        super().__post_init__()
        _ = self.weights_by_name, self.limits  # read once, so that what is no assignment is refused now
        for name, fallback in self.fallbacks.items():
            said = f"--reward-fallback {name}={fallback}"
            refuse(name == fallback, f"{said}: it would be asked again; name another")
        for name, count in self.verifiers_by_name.items():
            said = f"--verifiers {name}={count}"
            refuse(count < 1 or count != int(count), f"{said}: a whole number of 1 or more is needed")
        constants = self.failure_constants
        for name, policy in self.failure_policies.items():
            known = policy in FAILURE_POLICIES[:3] or name in constants
            refuse(not known, f"--on-reward-failure {name}={policy}: known are {', '.join(FAILURE_POLICIES)}")

    @property
    def adapters(self) -> tuple[str, ...]:
        """What the run's rewards are known by."""
        return tuple(map(display_name, parse_names(self.reward_fns)))

    @property
    def all_names(self) -> tuple[str, ...]:
        """`--reward-fns` and the stand-ins, as they were given."""
        return tuple(dict.fromkeys([*parse_names(self.reward_fns), *self.fallbacks.values()]))

    @property
    def combination(self) -> Combination:
        """How the rewards of one sample become one. ConfigurationError: a weight or constant does not fit these rewards."""
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
        """The variables of `--reward-env`, from this process."""
        return named_environment(parse_names(self.reward_env))

    @property
    def verifiers_by_name(self) -> dict[str, float]:
        return parse_numbers(self.verifiers, "verifiers")

    def num_verifiers(self, adapter: str) -> int:
        """Worker processes of a reward that has processes."""
        return int(self.verifiers_by_name.get(adapter, self.verifiers_per_reward))

    def has_verifiers(self, adapter: str) -> bool:
        """Whether the run asks for processes also where the reward needs none (see `inline`)."""
        return adapter in self.verifiers_by_name or self.verifiers_per_reward != VERIFIERS

    @property
    def weights_by_name(self) -> dict[str, float]:
        return parse_numbers(self.reward_weights, "reward-weights")

    @property
    def limits(self) -> dict[str, Limits]:
        """`--reward-limits` by reward."""
        found: dict[str, dict[str, Any]] = {}
        for key, value in parse_numbers(self.reward_limits, "reward-limits").items():
            name, _, unit = key.rpartition(".")
            bad = not name or "." in name or unit not in LIMITS
            refuse(bad, f"--reward-limits {key}: write NAME.concurrency, NAME.rpm or NAME.tpm")
            found.setdefault(name, {})[LIMITS[unit]] = int(value) if unit == "concurrency" else value
        return {name: Limits(**limits) for name, limits in found.items()}

    @property
    def fallbacks(self) -> dict[str, str]:
        return parse_assignments(self.reward_fallback, "reward-fallback")

    @property
    def failure_policies(self) -> dict[str, str]:
        """By name: mask, group_mean, refill or constant:VALUE."""
        found = parse_assignments(self.on_reward_failure, "on-reward-failure")
        return {name: str(policy) for name, policy in found.items()}

    @property
    def failure_constants(self) -> dict[str, float]:
        """By name: the reward that stands in for a failure."""
        constants: dict[str, float] = {}
        for name, policy in self.failure_policies.items():
            if policy.startswith("constant:"):
                with suppress(ValueError):  # what is no number is refused with the unknown policies
                    constants[name] = finite(policy.removeprefix("constant:"))
        return constants
