"""What `--environment` names, and the `Generation` that has it play."""

from pathlib import Path

from async_grpo.environments.agents import RunAgent
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import EnvironmentConfig, TrajectoryLimits
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

AGENT = "agent:"
PROCESSES, AGENTS = 4, 64  # by default
ENVIRONMENTS: dict[str, str] = {
    "guess": "games/guess.py:Guess",
    "countdown_tools": "games/countdown_tools.py:TOOLS",
}


def source_of(name: str) -> SourceFile | None:
    """The text that `--environment` names; it travels. None for an agent, which is a command.

    ConfigurationError: it cannot be read, or nothing in it can play.
    """
    if name.startswith(AGENT):
        refuse(
            not name.removeprefix(AGENT).strip(),
            f"--environment {name!r}: name its command, agent:python my_agent.py",
        )
        return None
    known = {own: f"{Path(__file__).parent / path}" for own, path in ENVIRONMENTS.items()}
    if not is_file(name) and name not in known:
        names = f"{', '.join(known)}; or FILE.py:NAME, agent:COMMAND{nearest(name, known)}"
        raise ConfigurationError(f"--environment {name!r} is unknown; known: {names}")
    source = read_once(known.get(name, name))
    kind_of(source.object())
    return source


def make_played(
    config: EnvironmentConfig,
    model_path: str,
    settings: SharedRunSettings,
    source: SourceFile | None,
    generation: Generation,
) -> Played:
    """Trajectories of the environment, whose turns `generation` completes."""
    limits = TrajectoryLimits(
        *(config.max_turns, settings.max_total_tokens, config.max_turn_tokens, config.max_trajectory_s),
        settings.vocab_size,
    )
    chat = Chat(load_tokenizer(model_path))
    if source is None:
        assert config.environment is not None
        endpoint = Endpoint(config.endpoint_host, config.endpoint_port)
        agent = RunAgent(config.environment.removeprefix(AGENT), endpoint)
        served = {"start": endpoint.start, "close": endpoint.close}
        return Played(
            generation, agent, chat, limits, at_once=config.environment_processes or AGENTS, **served
        )
    kind = kind_of(source.object())
    if kind == "program":
        return Played(generation, source.object(), chat, limits)
    processes = EnvironmentProcesses(
        *(source, config.environment_settings, config.environment_processes or PROCESSES),
        config.environment_timeout_s,
    )
    program = Play(processes, settings.seed) if kind == "environment" else UseTools(processes)
    return Played(generation, program, chat, limits, start=processes.start, close=processes.close)
