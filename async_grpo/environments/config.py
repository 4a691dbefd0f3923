"""The options of environments: which one plays with the policy, and for how long."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Section, option, parse_assignments

ROWS = "environment"  # as --data-path: rows that the environment itself makes

_environment = partial(option, panel="Environment")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Section):
    """What plays with the policy, turn by turn. Without one, a rollout is one completion."""

    environment: str | None = _environment(
        None,
        "What plays with the policy: guess; countdown_tools; FILE.py:NAME of an Environment, of tools, or of a program; "
        "agent:COMMAND; endpoint (agents that are started elsewhere); {reasoning_gym,textarena,openenv,verifiers}:NAME.",
        everyday=True,
        portable="async_grpo.environments.make:ENVIRONMENTS",
    )
    environment_options: str = _environment(
        "", "Keyword options of the environment: low=1,high=32,...", portable=True
    )
    environment_processes: int | None = _environment(
        None,
        "Processes that environments run in, each for many trajectories (default: 4); of agents, how many at once (64).",
        range=POSITIVE,
    )
    environment_timeout_s: float = _environment(
        30.0,
        "Longest step of an environment, or call of a tool; then its process is ended.",
        range=POSITIVE,
        portable=True,
    )
    max_turns: int = _environment(
        16, "Longest trajectory, in turns of the policy.", range=POSITIVE, portable=True
    )
    max_turn_tokens: int | None = _environment(
        None,
        "Longest turn of the policy (default: what --max-generation-tokens leaves, which counts all turns and all that the "
        "environment says between them, in each sequence).",
        range=POSITIVE,
        portable=True,
    )
    endpoint_host: str = _environment("127.0.0.1", "Address of the endpoint that agents talk to.")
    endpoint_port: int = _environment(0, "Its port (0: any that is free).", range=NOT_NEGATIVE)
    max_trajectory_s: float = _environment(
        600.0, "Longest trajectory, in seconds; then it counts as truncated.", range=POSITIVE, portable=True
    )

    split_control_tokens: bool = _environment(
        True,
        "Keep control tokens (<|im_end|>, ...) that an environment, a tool or an agent's message spells as plain text; "
        "without it they become control tokens, and such a text can forge a turn of the policy.",
    )

    @property
    def environment_settings(self) -> dict[str, Any]:
        return parse_assignments(self.environment_options, "environment-options")


@dataclass(frozen=True)
class TrajectoryLimits:
    """`tokens`: of one sequence, prompt included; `new_tokens`: of all that follows its prompt."""

    turns: int
    tokens: int
    turn_tokens: int | None
    seconds: float
    vocabulary: int = 1 << 31
    new_tokens: int = 1 << 31
