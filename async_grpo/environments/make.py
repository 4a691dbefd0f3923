"""What `--environment` names, and the `Generation` that has it play."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

from async_grpo.environments.agents import AwaitAgent, RunAgent, for_agents
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import ROWS, EnvironmentConfig, TrajectoryLimits
from async_grpo.environments.endpoint import AgentEndpoint
from async_grpo.environments.host import kind_of
from async_grpo.environments.played import Played
from async_grpo.environments.processes import EnvironmentProcess, EnvironmentProcesses
from async_grpo.environments.programs import Play, UseTools
from async_grpo.errors import ConfigurationError
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import load_tokenizer
from async_grpo.options.fields import nearest, refuse
from async_grpo.options.source_file import SourceFile, is_file, read_once
from async_grpo.processes.http_server import MAX_CONNECTIONS
from async_grpo.protocols import Generation
from async_grpo.rewards.isolation.adapter_process import child_environment

HERE, ELSEWHERE = Path(__file__).parent, "endpoint"
PROCESSES, AGENTS, ROWS_WITHIN_S = 4, 64, 600.0  # the first two by default
CONNECTIONS_PER_AGENT = 8  # to the endpoint, at once
ENVIRONMENTS: dict[str, str] = {
    "guess": "games/guess.py:Guess",
    "countdown_tools": "games/countdown_tools.py:TOOLS",
}
ECOSYSTEM = {  # and what is to be installed
    "reasoning_gym": ("ecosystem/reasoning_gym.py:ReasoningGym", "reasoning-gym"),
    "textarena": ("ecosystem/textarena.py:TextArena", "textarena"),
    "openenv": ("ecosystem/openenv.py:OpenEnv", "openenv-core"),
}
PREFIXES = {"agent": "COMMAND", "verifiers": "NAME"} | dict.fromkeys(ECOSYSTEM, "NAME")


def source_of(name: str) -> SourceFile | None:
    """The text that `--environment` names; it travels. None for agents.

    ConfigurationError: it cannot be read, or nothing in it can play.
    """
    prefix, _, inside = name.partition(":")
    unnamed = prefix in PREFIXES and not inside.strip()
    refuse(unnamed, f"--environment {name!r}: say which one, {prefix}:{PREFIXES.get(prefix)}")
    if name == ELSEWHERE or prefix in ("agent", "verifiers"):
        return None
    own, package = ECOSYSTEM.get(prefix, (ENVIRONMENTS.get(name), ""))
    if own is None and not is_file(name):
        prefixed = [f"{one}:{behind}" for one, behind in PREFIXES.items()]
        known = [*ENVIRONMENTS, *prefixed, "FILE.py:NAME", ELSEWHERE]
        names = f"{', '.join(known)}{nearest(name, known)}"
        raise ConfigurationError(f"--environment {name!r} is unknown; known: {names}")
    source = read_once(name if own is None else str(HERE / own))
    try:
        kind_of(source.object())
    except ConfigurationError as error:
        refuse(bool(package), f"--environment {name}: {error}; is it installed? pip install {package}")
        raise
    return source


def settings_of(config: EnvironmentConfig) -> dict[str, Any]:
    """What the environment's constructor is given."""
    prefix, _, inside = (config.environment or "").partition(":")
    named = {"environment": inside} if prefix in ECOSYSTEM else {}
    return config.environment_settings | named


def rows_of(
    config: EnvironmentConfig, split: str, variables: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The rows that an environment makes itself. split: "train" or "eval"; variables: for a program that makes them.

    ConfigurationError: it makes none.
    """
    name = config.environment or ""
    if name.startswith("verifiers:"):
        return _verifiers_rows(config, split, variables)
    source = source_of(name) if name else None
    make = getattr(source.object(), "rows", None) if source else None
    if make is None:
        raise ConfigurationError(f"--environment {name} makes no rows (--data-path {ROWS}): give a file")
    return make(split, **settings_of(config))


def _verifiers_command(config: EnvironmentConfig, mode: str, *more: str) -> list[str]:
    options: dict[str, Any] = {}
    for dotted, value in config.environment_settings.items():
        *path, last = dotted.split(".")
        reduce(lambda inside, part: inside.setdefault(part, {}), path, options)[last] = value
    program = str(HERE / "ecosystem" / "verifiers_program" / "verifiers_agent.py")
    python, name = str(options.pop("python", sys.executable)), str(config.environment).partition(":")[2]
    return [python, program, mode, name, json.dumps(options), *more]


def _verifiers_rows(
    config: EnvironmentConfig, split: str, variables: Mapping[str, str] | None
) -> list[dict[str, Any]]:
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


def make_played(
    config: EnvironmentConfig,
    model_path: str,
    settings: SharedRunSettings,
    source: SourceFile | None,
    generation: Generation,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Played:
    """Trajectories of the environment, whose turns `generation` completes.

    folder: of the run, for agents elsewhere. variables: for the environment's processes, or agents, beside the allow-list.
    """
    limits = TrajectoryLimits(
        *(config.max_turns, settings.max_total_tokens, config.max_turn_tokens, config.max_trajectory_s),
        settings.vocab_size,
        settings.max_completion_tokens,
    )
    chat = Chat(load_tokenizer(model_path), limits.tokens, config.split_control_tokens)
    if source is None:
        prefix, _, command = str(config.environment).partition(":")
        told = folder / "endpoint.json" if folder and prefix == ELSEWHERE else None
        at_once = config.environment_processes or AGENTS
        connections = max(MAX_CONNECTIONS, CONNECTIONS_PER_AGENT * at_once)
        endpoint = AgentEndpoint(config.endpoint_host, config.endpoint_port, told, connections)
        if prefix == "agent":
            one = RunAgent(endpoint, command, variables)
            return Played(generation, one, chat, limits, at_once=at_once, needs=endpoint)
        command = shlex.join(_verifiers_command(config, "play")) if command else ""
        agent = AwaitAgent(endpoint, command, variables)
        return Played(generation, agent, chat, limits, at_once=at_once, needs=agent)
    kind = kind_of(source.object())
    if kind == "program":
        return Played(generation, source.object(), chat, limits)
    count = config.environment_processes or PROCESSES
    make = partial(EnvironmentProcess, source, source.name, settings_of(config), environment=variables)
    processes = EnvironmentProcesses(make, count, config.environment_timeout_s)
    program = Play(processes, settings.seed) if kind == "environment" else UseTools(processes)
    return Played(generation, program, chat, limits, needs=processes)
