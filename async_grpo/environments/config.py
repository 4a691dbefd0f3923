"""Options of environments: which one plays with the policy, and for how long."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Section, option, parse_assignments

ROWS = "environment"  # value of --data-path that stands for rows made by the environment itself

_environment = partial(option, panel="Environment")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Section):
    """Options of the environment that plays with the policy. Without one, a rollout is one completion."""

    environment: str | None = _environment(
        None,
        "Environment that the policy acts in: guess; countdown_tools; FILE.py:NAME of an Environment, of tools, or "
        "of a program; agent:COMMAND; endpoint (for agents started elsewhere); "
        "{reasoning_gym,textarena,openenv,verifiers}:NAME. By default a rollout is one completion.",
        everyday=True,
        portable="async_grpo.environments.make:ENVIRONMENTS",
    )
    environment_options: str = _environment(
        "", "Keyword options of the environment, such as low=1,high=32.", portable=True
    )
    environment_processes: int | None = _environment(
        None,
        "Processes that run environments, each for many trajectories (default: 4), or agents that run at once "
        "(default: 64).",
        range=POSITIVE,
    )
    environment_timeout_s: float = _environment(
        30.0,
        "Seconds that one step of an environment, or one call of a tool, may take before its process is ended.",
        range=POSITIVE,
        portable=True,
    )
    max_turns: int = _environment(
        16, "Maximum length of a trajectory, in turns of the policy.", range=POSITIVE, portable=True
    )
    max_turn_tokens: int | None = _environment(
        None,
        "Maximum tokens of one turn of the policy. The default is what --max-generation-tokens leaves, which limits "
        "all that follows the prompt of a sequence, the environment's tokens included.",
        range=POSITIVE,
        portable=True,
    )
    endpoint_host: str = _environment(
        "127.0.0.1", "Address of the endpoint that agents send their requests to."
    )
    endpoint_port: int = _environment(0, "Port of the endpoint; 0 takes any free port.", range=NOT_NEGATIVE)
    max_trajectory_s: float = _environment(
        600.0,
        "Seconds that a trajectory may take before it counts as truncated.",
        range=POSITIVE,
        portable=True,
    )

    split_control_tokens: bool = _environment(
        True,
        "Keep text in messages of environments, tools and agents plain text, even if it spells a control token such "
        "as <|im_end|>. Otherwise such a text can forge a turn of the policy.",
    )

    @property
    def environment_settings(self) -> dict[str, Any]:
        """Return `environment_options` as keyword arguments."""
        return parse_assignments(self.environment_options, "environment-options")


@dataclass(frozen=True)
class TrajectoryLimits:
    """Limits of one trajectory, and of each of its sequences."""

    turns: int
    tokens: int  # of one sequence, prompt included
    turn_tokens: int | None  # sampled in one turn; None: no limit of its own
    seconds: float
    vocabulary: int = 1 << 31  # number of token ids that the model knows
    new_tokens: int = 1 << 31  # of one sequence, without its prompt
