"""What `--environment` names, and the `Generation` that has it play."""

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
PROCESSES, AGENTS = 4, 64  # by default
CONNECTIONS_PER_AGENT = 8  # to the endpoint, at once
ENVIRONMENTS: dict[str, str] = {  # games of ours; the folder of another run may name them
    "guess": "games/guess.py:Guess",
    "countdown_tools": "games/countdown_tools.py:TOOLS",
}


def source_of(name: str) -> SourceFile | None:
    """The text that `--environment` names; it travels. None for agents.

    ConfigurationError: it cannot be read, or nothing in it can play.
    """
    adapter = adapter_of(name)
    if adapter is not None and adapter.agents is not None:
        return None
    shipped = adapter.source if adapter is not None else ENVIRONMENTS.get(name)
    if shipped is None and not is_file(name):
        known = _known_names()
        names = f"{', '.join(known)}{nearest(name, known)}"
        raise ConfigurationError(f"--environment {name!r} is unknown; known: {names}")
    source = read_once(name if shipped is None else str(HERE / shipped))
    try:
        kind_of(source.object())
    except ConfigurationError as error:
        if adapter is not None:
            cure = f"is it installed? pip install {adapter.package}"
            raise ConfigurationError(f"--environment {name}: {error}; {cure}") from error
        raise
    return source


def _known_names() -> list[str]:
    """Return what `--environment` may be, for a message: what has an argument before FILE.py:NAME."""
    with_argument = [f"{name}:{adapter.argument}" for name, adapter in ADAPTERS.items() if adapter.argument]
    without = [name for name, adapter in ADAPTERS.items() if not adapter.argument]
    return [*ENVIRONMENTS, *with_argument, "FILE.py:NAME", *without]


def settings_of(config: EnvironmentConfig) -> dict[str, Any]:
    """What the environment's constructor is given."""
    name = config.environment or ""
    adapter = adapter_of(name)
    if adapter is None or not adapter.source:
        return config.environment_settings
    return config.environment_settings | {"environment": argument_of(name)}


def rows_of(
    config: EnvironmentConfig, split: str, variables: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The rows that an environment makes itself. split: "train" or "eval"; variables: for a program that makes them.

    ConfigurationError: it makes none.
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
        return _played_by_agents(config, chat, limits, generation, folder, variables)
    kind = kind_of(source.object())
    if kind == "program":
        return Played(generation, source.object(), chat, limits)
    count = config.environment_processes or PROCESSES
    make = partial(EnvironmentProcess, source, source.name, settings_of(config), environment=variables)
    processes = EnvironmentProcesses(make, count, config.environment_timeout_s)
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
    connections = max(MAX_CONNECTIONS, CONNECTIONS_PER_AGENT * at_once)
    endpoint = AgentEndpoint(config.endpoint_host, config.endpoint_port, address_file, connections)
    program, needs = adapter.agents(config, endpoint, variables)
    return Played(generation, program, chat, limits, at_once=at_once, needs=needs)
