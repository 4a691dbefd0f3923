"""`make_played`: makes a `Generation` whose completions are trajectories in the environment of `--environment`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.environments.adapters import ADAPTERS, adapter_of, argument_of
from async_grpo.environments.call_reader import CallReader
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import DROP, ROWS, EnvironmentConfig, TrajectoryLimits
from async_grpo.environments.constructor import check_constructor_options
from async_grpo.environments.host import kind_of
from async_grpo.environments.images import ConversationImages
from async_grpo.environments.openai_server.endpoint import AgentEndpoint
from async_grpo.environments.played import Played
from async_grpo.environments.processes import EnvironmentProcess, EnvironmentProcesses
from async_grpo.environments.programs import Play, UseTools
from async_grpo.errors import ConfigurationError
from async_grpo.experience.run_images import RunImages
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import load_tokenizer
from async_grpo.options.fields import nearest, refuse
from async_grpo.options.redaction import redacted
from async_grpo.options.source_file import SourceFile, is_file, read_once
from async_grpo.processes.http_server import MAX_CONNECTIONS
from async_grpo.processes.image_files import RUN_IMAGES
from async_grpo.processes.output_log import OutputLog
from async_grpo.protocols import Generation

HERE = Path(__file__).parent
# Defaults of --environment-processes: for environments and tools, and for agents
PROCESSES = 4
AGENTS = 64

# File in the run's output folder with what environments, tools and agents print
OUTPUT_FILE = "environment_output.log"
CONNECTIONS_PER_AGENT = 8  # connections to the endpoint that each agent may have open
# Games of this package, name -> FILE.py:NAME. Names must stay valid, because stored options of earlier runs contain
# them
ENVIRONMENTS: dict[str, str] = {
    "guess": "games/guess.py:Guess",
    "countdown_tools": "games/countdown_tools.py:TOOLS",
}


def source_of(name: str) -> SourceFile | None:
    """Return the source file that `--environment` names, whose text is sent to the processes. Return None for agents.

    Raises:
        ConfigurationError: The name is unknown, the file cannot be read, or the named object is not an environment, a
            list of tools or a program.
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
    """Return the possible values of `--environment`, for an error message."""
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


def refuse_wrong_options(config: EnvironmentConfig) -> None:
    """Check that the environment exists, and that it can be made with the options of `--environment-options`.

    Raises:
        ConfigurationError: The environment is unknown, or its constructor does not fit the options.
    """
    name = config.environment or ""
    source = source_of(name)
    if source is not None:
        check_constructor_options(source.object(), settings_of(config))
        return
    adapter = adapter_of(name)
    assert adapter is not None, f"{name} has no source, so it names an adapter of agents"
    refuse(
        bool(config.environment_options) and not adapter.takes_options,
        f"--environment-options {config.environment_options}: an agent takes no options; write them into its command, "
        "or give its variables by --reward-env",
    )


def rows_of(
    config: EnvironmentConfig, split: str, variables: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of data that the environment itself makes.

    Args:
        config: The environment and its options.
        split: "train" or "eval".
        variables: Environment variables for an external program that makes the rows.

    Raises:
        ConfigurationError: The environment does not make rows.
    """
    name = config.environment or ""
    adapter = adapter_of(name)
    if adapter is not None and adapter.rows is not None:
        return adapter.rows(config, split, variables)
    source = source_of(name) if name else None
    make = getattr(source.object(), "rows", None) if source else None
    if make is None:
        raise ConfigurationError(
            f"--environment {name} makes no rows, so it cannot be used with --data-path {ROWS}: give a data file"
        )
    return make(split, **settings_of(config))


def make_played(
    config: EnvironmentConfig,
    model_path: str,
    settings: SharedRunSettings,
    source: SourceFile | None,
    generation: Generation,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    *,
    run_images: RunImages | None = None,
) -> Played:
    """Return a `Generation` that returns trajectories of the environment.

    Args:
        config: The environment, its options and the limits of a trajectory.
        model_path: Folder of the model, whose tokenizer and chat template are used.
        settings: Settings that all workers of the run share.
        source: The environment's source file, from `source_of`; None for agents.
        generation: The engines, which sample the turns.
        folder: Output folder of the run. Agents that run elsewhere find the endpoint's address there, and what
            environments, tools and agents print is written to OUTPUT_FILE in it. Without it, this goes to stderr.
        variables: Environment variables for the processes of environments or agents. They also get the variables of the
            allow-list.
        run_images: Files of the run's images. Without them, or if the model reads none, conversations have texts only.
    """
    limits = _limits_of(config, settings)
    images = None
    if run_images is not None and folder is not None and settings.image_token_id >= 0:
        images = _images_of(model_path, settings, folder, run_images)
    chat = _chat_of(config, model_path, limits, images)
    output_log = OutputLog(folder / OUTPUT_FILE, redacted) if folder is not None else None
    if source is None:
        return _played_by_agents(config, chat, limits, generation, folder, variables, output_log)
    kind = kind_of(source.object())
    if kind == "program":
        return Played(generation, source.object(), chat, limits)
    processes = EnvironmentProcesses(
        partial(
            EnvironmentProcess,
            source,
            source.name,
            settings_of(config),
            environment=variables,
            output=output_log,
        ),
        count=config.environment_processes or PROCESSES,
        timeout_s=config.environment_timeout_s,
    )
    program = (
        Play(processes, settings.seed)
        if kind == "environment"
        else UseTools(processes, config.max_tool_tokens)
    )
    return Played(generation, program, chat, limits, needs=processes)


def _limits_of(config: EnvironmentConfig, settings: SharedRunSettings) -> TrajectoryLimits:
    """Return the limits of a trajectory."""
    return TrajectoryLimits(
        turns=config.max_turns,
        tokens=settings.max_total_tokens,
        turn_tokens=config.max_turn_tokens,
        seconds=config.max_trajectory_s,
        vocabulary=settings.vocab_size,
        new_tokens=settings.max_completion_tokens,
        drops_abandoned=config.abandoned_turns == DROP,
    )


def _images_of(
    model_path: str, settings: SharedRunSettings, folder: Path, run_images: RunImages
) -> ConversationImages:
    """Return the store of the images of conversations, with the model's image processor."""
    # Imported here, because these modules import torch, which the controller needs only if the model reads images
    from async_grpo.modeling.image_models import ImageReader
    from async_grpo.modeling.load import load_config

    reader = ImageReader.load(model_path, load_config(model_path))
    return ConversationImages(
        reader,
        settings.image_token_id,
        settings.most_images,
        folder / RUN_IMAGES,
        run_images,
    )


def _chat_of(
    config: EnvironmentConfig,
    model_path: str,
    limits: TrajectoryLimits,
    images: ConversationImages | None,
) -> Chat:
    """Return the model's tokenizer with its chat template."""
    make_reader = partial(
        CallReader,
        model_path=model_path,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )
    return Chat(
        load_tokenizer(model_path),
        limits.tokens,
        config.split_control_tokens,
        options=config,
        make_reader=make_reader,
        typed_output=config.typed_output,
        images=images,
    )


def _played_by_agents(
    config: EnvironmentConfig,
    chat: Chat,
    limits: TrajectoryLimits,
    generation: Generation,
    folder: Path | None,
    variables: Mapping[str, str] | None,
    output_log: OutputLog | None,
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
    program, needs = adapter.agents(config, endpoint, variables, output_log)
    return Played(generation, program, chat, limits, at_once=at_once, needs=needs)
