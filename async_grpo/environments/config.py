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
        "The environment that plays with the policy: guess; countdown_tools; FILE.py:NAME of an Environment, of tools, or "
        "of a program; agent:COMMAND; endpoint (for agents that you start elsewhere); "
        "{reasoning_gym,textarena,openenv,verifiers}:NAME.",
        everyday=True,
        portable="async_grpo.environments.make:ENVIRONMENTS",
    )
    environment_options: str = _environment(
        "", "Keyword arguments of the environment: low=1,high=32,...", portable=True
    )
    environment_processes: int | None = _environment(
        None,
        "Number of processes in which environments run, each for many trajectories (default: 4). With agents, the number "
        "of trajectories that are played at once (default: 64).",
        range=POSITIVE,
    )
    environment_timeout_s: float = _environment(
        30.0,
        "Time limit in seconds of an environment's step or a tool's call; a process that exceeds it is ended.",
        range=POSITIVE,
        portable=True,
    )
    max_turns: int = _environment(
        16, "Limit of a trajectory, in turns of the policy.", range=POSITIVE, portable=True
    )
    max_turn_tokens: int | None = _environment(
        None,
        "Limit of one turn of the policy, in tokens (default: what is left of --max-generation-tokens, which in each "
        "sequence counts all turns and the environment's texts between them).",
        range=POSITIVE,
        portable=True,
    )
    endpoint_host: str = _environment("127.0.0.1", "Address of the endpoint that agents talk to.")
    endpoint_port: int = _environment(0, "Port of the endpoint (0: any free port).", range=NOT_NEGATIVE)
    max_trajectory_s: float = _environment(
        600.0,
        "Time limit of a trajectory in seconds; a trajectory that exceeds it counts as truncated.",
        range=POSITIVE,
        portable=True,
    )

    split_control_tokens: bool = _environment(
        True,
        "Keep control tokens (<|im_end|>, ...) as plain text where an environment, a tool or an agent's message spells "
        "them. Without this option they become control tokens, and such a text can forge a turn of the policy.",
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
