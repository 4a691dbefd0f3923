"""`make_played`: a `Generation` of trajectories for the environment that `--environment` names."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.environments.adapters import ADAPTERS, adapter_of, argument_of
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
from async_grpo.options.fields import nearest
from async_grpo.options.source_file import SourceFile, is_file, read_once
from async_grpo.processes.http_server import MAX_CONNECTIONS
from async_grpo.protocols import Generation

HERE = Path(__file__).parent
# Defaults of --environment-processes
PROCESSES = 4
AGENTS = 64

CONNECTIONS_PER_AGENT = 8  # to the endpoint, at once
# Games of this package. The options of an earlier run may contain their names
ENVIRONMENTS: dict[str, str] = {
    "guess": "games/guess.py:Guess",
    "countdown_tools": "games/countdown_tools.py:TOOLS",
}


def source_of(name: str) -> SourceFile | None:
    """Return the source file that `--environment` names, whose text is sent to the processes; None for agents.

    Raises:
        ConfigurationError: The name is unknown, or the file cannot be read, or nothing in it can play.
    """
    adapter = adapter_of(name)
    if adapter is not None and adapter.agents is not None:
        return None
    package_source = adapter.source if adapter is not None else ENVIRONMENTS.get(name)
    if package_source is None and not is_file(name):
        known_names = _known_names()
        names = f"{', '.join(known_names)}{nearest(name, known_names)}"
        raise ConfigurationError(f"--environment {name!r} is unknown; known: {names}")
    source = read_once(name if package_source is None else str(HERE / package_source))
    try:
        kind_of(source.object())
    except ConfigurationError as error:
        if adapter is not None:
            hint = f"is it installed? pip install {adapter.package}"
            raise ConfigurationError(f"--environment {name}: {error}; {hint}") from error
        raise
    return source


def _known_names() -> list[str]:
    """Return the values that `--environment` may have, for a message."""
    names_with_argument = []
    names_without = []
    for name, adapter in ADAPTERS.items():
        if adapter.argument:
            names_with_argument.append(f"{name}:{adapter.argument}")
        else:
            names_without.append(name)
    return [*ENVIRONMENTS, *names_with_argument, "FILE.py:NAME", *names_without]


def settings_of(config: EnvironmentConfig) -> dict[str, Any]:
    """Return the keyword arguments of the environment's constructor."""
    name = config.environment or ""
    adapter = adapter_of(name)
    if adapter is None or not adapter.source:
        return config.environment_settings
    return config.environment_settings | {"environment": argument_of(name)}


def rows_of(
    config: EnvironmentConfig, split: str, variables: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the rows that an environment makes itself.

    Args:
        config: Names the environment and its options.
        split: "train" or "eval".
        variables: Environment variables for a program that makes the rows.

    Raises:
        ConfigurationError: The environment makes no rows.
    """
    name = config.environment or ""
    adapter = adapter_of(name)
    if adapter is not None and adapter.rows is not None:
        return adapter.rows(config, split, variables)
    source = source_of(name) if name else None
    make = getattr(source.object(), "rows", None) if source else None
    if make is None:
        raise ConfigurationError(f"--environment {name} makes no rows (--data-path {ROWS}): give a file")
    return make(split, **settings_of(config))


def make_played(
    config: EnvironmentConfig,
    model_path: str,
    settings: SharedRunSettings,
    source: SourceFile | None,
    generation: Generation,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Played:
    """Return a `Generation` of trajectories of the environment.

    Args:
        config: Names the environment, its options and the limits of a trajectory.
        model_path: Folder of the model, whose tokenizer and chat template are used.
        settings: What every worker of the run shares.
        source: The environment's source file, of `source_of`; None for agents.
        generation: Completes the turns.
        folder: Output folder of the run, where agents that run elsewhere find the endpoint's address.
        variables: Environment variables for the environment's or agents' processes, beside the allow-list.
    """
    limits = TrajectoryLimits(
        turns=config.max_turns,
        tokens=settings.max_total_tokens,
        turn_tokens=config.max_turn_tokens,
        seconds=config.max_trajectory_s,
        vocabulary=settings.vocab_size,
        new_tokens=settings.max_completion_tokens,
    )
    chat = Chat(load_tokenizer(model_path), limits.tokens, config.split_control_tokens)
    if source is None:
        return _played_by_agents(config, chat, limits, generation, folder, variables)
    kind = kind_of(source.object())
    if kind == "program":
        return Played(generation, source.object(), chat, limits)
    processes = EnvironmentProcesses(
        partial(EnvironmentProcess, source, source.name, settings_of(config), environment=variables),
        count=config.environment_processes or PROCESSES,
        timeout_s=config.environment_timeout_s,
    )
    program = Play(processes, settings.seed) if kind == "environment" else UseTools(processes)
    return Played(generation, program, chat, limits, needs=processes)


def _played_by_agents(
    config: EnvironmentConfig,
    chat: Chat,
    limits: TrajectoryLimits,
    generation: Generation,
    folder: Path | None,
    variables: Mapping[str, str] | None,
) -> Played:
    adapter = adapter_of(str(config.environment))
    assert adapter is not None and adapter.agents is not None, f"{config.environment} has a source"
    address_file = folder / "endpoint.json" if folder and adapter.publishes_endpoint else None
    at_once = config.environment_processes or AGENTS
    endpoint = AgentEndpoint(
        host=config.endpoint_host,
        port=config.endpoint_port,
        address_file=address_file,
        max_connections=max(MAX_CONNECTIONS, CONNECTIONS_PER_AGENT * at_once),
    )
    program, needs = adapter.agents(config, endpoint, variables)
    return Played(generation, program, chat, limits, at_once=at_once, needs=needs)
