"""What `--environment` names, and the `Generation` that has it play."""

import json
import os
import shlex
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

from async_grpo.environments.agents import AwaitAgent, RunAgent, for_agents
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import ROWS, EnvironmentConfig, TrajectoryLimits
from async_grpo.environments.endpoint import Endpoint
from async_grpo.environments.host import kind_of
from async_grpo.environments.played import Played
from async_grpo.environments.processes import EnvironmentProcesses
from async_grpo.environments.programs import Play, UseTools
from async_grpo.errors import ConfigurationError
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import load_tokenizer
from async_grpo.options.fields import nearest, refuse
from async_grpo.options.source_file import SourceFile, is_file, read_once
from async_grpo.protocols import Generation

AGENT, ELSEWHERE = "agent:", "endpoint"
PROCESSES, AGENTS = 4, 64  # by default
ROWS_WITHIN_S = 600.0
ENVIRONMENTS: dict[str, str] = {
    "guess": "games/guess.py:Guess",
    "countdown_tools": "games/countdown_tools.py:TOOLS",
}
VERIFIERS = Path(__file__).parent / "ecosystem" / "verifiers_program" / "verifiers_agent.py"
ECOSYSTEM = {  # PREFIX:NAME; and what is to be installed
    "reasoning_gym": ("ecosystem/reasoning_gym.py:ReasoningGym", "reasoning-gym"),
    "textarena": ("ecosystem/textarena.py:TextArena", "textarena"),
    "openenv": ("ecosystem/openenv.py:OpenEnv", "openenv-core"),
}


def source_of(name: str) -> SourceFile | None:
    """The text that `--environment` names; it travels. None for agents.

    ConfigurationError: it cannot be read, or nothing in it can play.
    """
    if name.startswith(AGENT):
        refuse(
            not name.removeprefix(AGENT).strip(),
            f"--environment {name!r}: name its command, agent:python my_agent.py",
        )
        return None
    prefix, _, inside = name.partition(":")
    if name == ELSEWHERE or (prefix == "verifiers" and inside):
        return None
    own, package = ENVIRONMENTS.get(name), ""
    if prefix in ECOSYSTEM:
        own, package = ECOSYSTEM[prefix]
        refuse(not inside, f"--environment {name}: name one of its environments, {prefix}:NAME")
    if own is None and not is_file(name):
        named = [f"{other}:NAME" for other in (*ECOSYSTEM, "verifiers")]
        known = [*ENVIRONMENTS, *named, "FILE.py:NAME", "agent:COMMAND", ELSEWHERE]
        raise ConfigurationError(
            f"--environment {name!r} is unknown; known: {', '.join(known)}{nearest(name, known)}"
        )
    source = read_once(name if own is None else str(Path(__file__).parent / own))
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


def rows_of(config: EnvironmentConfig, split: str) -> list[dict[str, Any]]:
    """The rows that an environment makes itself. split: "train" or "eval". ConfigurationError: it makes none."""
    name = config.environment or ""
    if name.startswith("verifiers:"):
        return _verifiers_rows(config, split)
    source = source_of(name) if name else None
    make = getattr(source.object(), "rows", None) if source else None
    if make is None:
        raise ConfigurationError(
            f"--environment {name} makes no rows of its own ({ROWS!r} for data): give a JSONL file"
        )
    return make(split, **settings_of(config))


def _verifiers_command(config: EnvironmentConfig, mode: str, *more: str) -> list[str]:
    options: dict[str, Any] = {}
    for dotted, value in config.environment_settings.items():
        *path, last = dotted.split(".")
        reduce(lambda inside, part: inside.setdefault(part, {}), path, options)[last] = value
    python = str(options.pop("python", sys.executable))
    assert config.environment is not None
    name = config.environment.removeprefix("verifiers:")
    return [python, str(VERIFIERS), mode, name, json.dumps(options), *more]


def _verifiers_rows(config: EnvironmentConfig, split: str) -> list[dict[str, Any]]:
    command = _verifiers_command(config, "rows", split)
    try:
        ended = subprocess.run(
            command, env=for_agents(os.environ), capture_output=True, text=True, timeout=ROWS_WITHIN_S
        )
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
) -> Played:
    """Trajectories of the environment, whose turns `generation` completes. folder: of the run, for agents elsewhere."""
    limits = TrajectoryLimits(
        *(config.max_turns, settings.max_total_tokens, config.max_turn_tokens, config.max_trajectory_s),
        settings.vocab_size,
    )
    chat = Chat(load_tokenizer(model_path))
    if source is None:
        assert config.environment is not None
        told = folder / "endpoint.json" if folder and config.environment == ELSEWHERE else None
        endpoint = Endpoint(config.endpoint_host, config.endpoint_port, told)
        at_once = config.environment_processes or AGENTS
        if config.environment.startswith(AGENT):
            one = RunAgent(config.environment.removeprefix(AGENT), endpoint)
            return Played(generation, one, chat, limits, at_once=at_once, needs=endpoint)
        command = "" if config.environment == ELSEWHERE else shlex.join(_verifiers_command(config, "play"))
        agent = AwaitAgent(endpoint, command)
        return Played(generation, agent, chat, limits, at_once=at_once, needs=agent)
    kind = kind_of(source.object())
    if kind == "program":
        return Played(generation, source.object(), chat, limits)
    processes = EnvironmentProcesses(
        *(source, settings_of(config), config.environment_processes or PROCESSES),
        config.environment_timeout_s,
    )
    program = Play(processes, settings.seed) if kind == "environment" else UseTools(processes)
    return Played(generation, program, chat, limits, needs=processes)
