"""The names of `--environment` that stand for other people's environments and agents, in one table: `ADAPTERS`."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.environments.agents import AwaitAgent, RunAgent, for_agents
from async_grpo.environments.config import EnvironmentConfig
from async_grpo.environments.endpoint import AgentEndpoint
from async_grpo.environments.played import Needs
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse
from async_grpo.rewards.isolation.adapter_process import child_environment

VERIFIERS_PROGRAM = Path(__file__).parent / "ecosystem" / "verifiers_program" / "verifiers_agent.py"
ROWS_WITHIN_S = 600.0

Variables = Mapping[str, str] | None  # of this process, for the agents' processes


class AgentProgram(NamedTuple):
    """A rollout program in which agents play."""

    program: RunAgent | AwaitAgent
    needs: Needs  # started before the first trajectory, closed after the last


@dataclass(frozen=True)
class Adapter:
    """What a name before the colon stands for. It has either a source, which travels, or agents at the endpoint."""

    argument: str = ""  # what help and messages call the part behind the colon; empty: there is none
    source: str = ""  # FILE.py:NAME in this folder
    package: str = ""  # what is to be installed for the source
    agents: Callable[[EnvironmentConfig, AgentEndpoint, Variables], AgentProgram] | None = None
    rows: Callable[[EnvironmentConfig, str, Variables], list[dict[str, Any]]] | None = (
        None  # without a source
    )
    publishes_endpoint: bool = False  # the run's folder says where agents find the endpoint


def adapter_of(name: str) -> Adapter | None:
    """Return the adapter that `--environment` names; None for a game or a file.

    ConfigurationError: the adapter needs an argument, and none is given.
    """
    prefix, colon, _ = name.partition(":")
    adapter = ADAPTERS.get(prefix)
    if adapter is None or (colon and not adapter.argument):
        return None
    unnamed = bool(adapter.argument) and not argument_of(name).strip()
    refuse(unnamed, f"--environment {name!r}: say which one, {prefix}:{adapter.argument}")
    return adapter


def argument_of(name: str) -> str:
    """Return the part of a name behind its colon."""
    return name.partition(":")[2]


def _started_agents(config: EnvironmentConfig, endpoint: AgentEndpoint, variables: Variables) -> AgentProgram:
    command = argument_of(str(config.environment))
    return AgentProgram(RunAgent(endpoint, command, variables), needs=endpoint)


def _awaited_agents(config: EnvironmentConfig, endpoint: AgentEndpoint, variables: Variables) -> AgentProgram:
    agent = AwaitAgent(endpoint, "", variables)
    return AgentProgram(agent, needs=agent)


def _verifiers_agents(
    config: EnvironmentConfig, endpoint: AgentEndpoint, variables: Variables
) -> AgentProgram:
    agent = AwaitAgent(endpoint, shlex.join(_verifiers_command(config, "play")), variables)
    return AgentProgram(agent, needs=agent)


def _verifiers_command(config: EnvironmentConfig, mode: str, *more: str) -> list[str]:
    options: dict[str, Any] = {}
    for dotted, value in config.environment_settings.items():
        *path, last = dotted.split(".")
        reduce(lambda inside, part: inside.setdefault(part, {}), path, options)[last] = value
    python = str(options.pop("python", sys.executable))
    name = argument_of(str(config.environment))
    return [python, str(VERIFIERS_PROGRAM), mode, name, json.dumps(options), *more]


def _verifiers_rows(config: EnvironmentConfig, split: str, variables: Variables) -> list[dict[str, Any]]:
    command = _verifiers_command(config, "rows", split)
    try:
        # As it plays later: what it finds now, it must find then
        told: Any = {"env": for_agents(child_environment(variables)), "capture_output": True, "text": True}
        ended = subprocess.run(command, timeout=ROWS_WITHIN_S, **told)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"--environment {config.environment}: {error}") from error
    if ended.returncode:
        hint = "; --environment-options python=PATH names the interpreter that verifiers is installed in"
        last = (ended.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigurationError(f"--environment {config.environment}: {last}{hint}")
    return [json.loads(line) for line in ended.stdout.splitlines()]


ADAPTERS: dict[str, Adapter] = {
    "agent": Adapter(argument="COMMAND", agents=_started_agents),
    "verifiers": Adapter(argument="NAME", agents=_verifiers_agents, rows=_verifiers_rows),
    "reasoning_gym": Adapter("NAME", "ecosystem/reasoning_gym.py:ReasoningGym", "reasoning-gym"),
    "textarena": Adapter("NAME", "ecosystem/textarena.py:TextArena", "textarena"),
    "openenv": Adapter("NAME", "ecosystem/openenv.py:OpenEnv", "openenv-core"),
    "endpoint": Adapter(agents=_awaited_agents, publishes_endpoint=True),
}
