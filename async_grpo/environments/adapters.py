"""`ADAPTERS`: the values of `--environment` that stand for environments of other packages, or for agents."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.environments.agents import AwaitAgent, RunAgent, for_agents
from async_grpo.environments.config import EnvironmentConfig
from async_grpo.environments.openai_server.endpoint import AgentEndpoint
from async_grpo.environments.played import Needs
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse
from async_grpo.processes.output_log import OutputLog
from async_grpo.rewards.isolation.adapter_process import child_environment

VERIFIERS_PROGRAM = Path(__file__).parent / "ecosystem" / "verifiers_program" / "verifiers_agent.py"
ROWS_TIMEOUT_S = 600.0  # time limit of an external program that makes the rows of an environment

Variables = Mapping[str, str] | None  # environment variables for the agents' processes


class AgentProgram(NamedTuple):
    """A rollout program in which agents play."""

    program: RunAgent | AwaitAgent
    needs: Needs  # resource that is started before the first trajectory, and closed after the last


MakeAgents = Callable[[EnvironmentConfig, AgentEndpoint, Variables, OutputLog | None], AgentProgram]


@dataclass(frozen=True)
class Adapter:
    """The meaning of PREFIX in `--environment PREFIX:ARGUMENT`: an environment class in a source file, or agents."""

    argument: str = ""  # what the part after the colon is, for error messages; "" if there is no such part
    source: str = ""  # FILE.py:NAME in this folder; the file's text is sent to the processes. "" for agents
    package: str = ""  # the package that the source file needs
    agents: MakeAgents | None = None  # makes the rollout program of agents; None for a source file
    # Whether agents take --environment-options. The class in a source file takes the options that its constructor has
    takes_options: bool = False
    # Makes the rows of a split. None if the class in the source file has a method `rows`, or if there are no rows
    rows: Callable[[EnvironmentConfig, str, Variables], list[dict[str, Any]]] | None = None
    publishes_endpoint: bool = False  # whether a file in the run's folder tells agents the endpoint's address


def adapter_of(name: str) -> Adapter | None:
    """Return the adapter that `--environment` names, or None if it names a game or a file.

    Raises:
        ConfigurationError: The adapter needs an argument after the colon, and there is none.
    """
    prefix, colon, _ = name.partition(":")
    adapter = ADAPTERS.get(prefix)
    if adapter is None or (colon and not adapter.argument):
        return None
    lacks_argument = bool(adapter.argument) and not argument_of(name).strip()
    refuse(lacks_argument, f"--environment {name!r}: say which one, {prefix}:{adapter.argument}")
    return adapter


def argument_of(name: str) -> str:
    """Return the part of a name after its first colon."""
    return name.partition(":")[2]


def _started_agents(
    config: EnvironmentConfig,
    endpoint: AgentEndpoint,
    variables: Variables,
    output_log: OutputLog | None,
) -> AgentProgram:
    command = argument_of(str(config.environment))
    return AgentProgram(RunAgent(endpoint, command, variables, output_log), needs=endpoint)


def _awaited_agents(
    config: EnvironmentConfig,
    endpoint: AgentEndpoint,
    variables: Variables,
    output_log: OutputLog | None,
) -> AgentProgram:
    agent = AwaitAgent(endpoint, "", variables, output_log)
    return AgentProgram(agent, needs=agent)


def _verifiers_agents(
    config: EnvironmentConfig,
    endpoint: AgentEndpoint,
    variables: Variables,
    output_log: OutputLog | None,
) -> AgentProgram:
    command = shlex.join(_verifiers_command(config, "play"))
    agent = AwaitAgent(endpoint, command, variables, output_log)
    return AgentProgram(agent, needs=agent)


def _verifiers_command(config: EnvironmentConfig, mode: str, *arguments: str) -> list[str]:
    """Return the command that runs `verifiers_agent.py`, whose docstring describes its modes and arguments.

    The environment's options are passed as one JSON object.
    """
    options: dict[str, Any] = {}
    for dotted_name, value in config.environment_settings.items():
        *path, last = dotted_name.split(".")
        section = options
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    python = str(options.pop("python", sys.executable))
    name = argument_of(str(config.environment))
    return [python, str(VERIFIERS_PROGRAM), mode, name, json.dumps(options), *arguments]


def _verifiers_rows(config: EnvironmentConfig, split: str, variables: Variables) -> list[dict[str, Any]]:
    command = _verifiers_command(config, "rows", split)
    try:
        process = subprocess.run(
            command,
            timeout=ROWS_TIMEOUT_S,
            # The program that plays the trajectories gets the same variables, so both find the same tasks
            env=for_agents(child_environment(variables)),
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"--environment {config.environment}: {error}") from error
    if process.returncode:
        hint = "; --environment-options python=PATH names the interpreter that verifiers is installed in"
        lines = process.stderr.strip().splitlines()
        reason = lines[-1] if lines else "it ended without an error message"
        raise ConfigurationError(f"--environment {config.environment}: {reason}{hint}")
    return [json.loads(line) for line in process.stdout.splitlines()]


ADAPTERS: dict[str, Adapter] = {
    "agent": Adapter(argument="COMMAND", agents=_started_agents),
    "verifiers": Adapter(
        argument="NAME",
        agents=_verifiers_agents,
        takes_options=True,
        rows=_verifiers_rows,
    ),
    "reasoning_gym": Adapter("NAME", "ecosystem/reasoning_gym.py:ReasoningGym", "reasoning-gym"),
    "textarena": Adapter("NAME", "ecosystem/textarena.py:TextArena", "textarena"),
    "openenv": Adapter("NAME", "ecosystem/openenv.py:OpenEnv", "openenv-core"),
    "endpoint": Adapter(agents=_awaited_agents, publishes_endpoint=True),
}
