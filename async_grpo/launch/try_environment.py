"""`async-grpo try-environment`: play one trajectory of an environment, and print it turn by turn.

The trajectory passes through the same code as in a run: processes, endpoint, chat template, parsers of tool calls and
the recorder of tokens. Only the engine is replaced: fixed texts, or a model on the CPU, take its place.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.environments.config import ROWS, EnvironmentConfig
from async_grpo.environments.make import OUTPUT_FILE, make_played, refuse_wrong_options, rows_of, source_of
from async_grpo.environments.played import Played
from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.experience.data_config import DataConfig
from async_grpo.experience.data_files import read_rows
from async_grpo.experience.dataset import questions_of
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.launch.trajectory_text import outcome_text, turn_text
from async_grpo.launch.tried_policies import (
    ModelPolicy,
    ScriptedPolicy,
    end_token_of,
    text_from_terminal,
    texts_in_order,
)
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import (
    context_length,
    load_config,
    load_tokenizer,
    model_fingerprint,
    stop_token_ids,
)
from async_grpo.options.fields import LIST, POSITIVE, option, refuse, required
from async_grpo.options.listed_values import split_list
from async_grpo.processes.hub import local_model
from async_grpo.protocols import Generation
from async_grpo.rewards.adapter.registry_source import parse_names
from async_grpo.rewards.isolation.adapter_process import named_environment
from async_grpo.types import Completion, Prompt, RewardStatus, Sample, Turn, Verdict

# The model whose tokenizer and chat template are used if the user names none
SMALL_MODEL = Path(__file__).parents[1] / "data" / "tiny-model"
SMALL_MODEL_TOOL_PARSER = "hermes"
# Turns of the policy if the user gives neither texts nor a model
DEFAULT_TEXTS = ("Hello.", "I do not know.", "1")
DEFAULT_ROW = {"input": "Hello."}
TERMINAL = "-"  # value of --say that reads the texts from the terminal
_trial = partial(option, panel="Trial", everyday=True)


@dataclass(frozen=True, kw_only=True)
class TryEnvironmentConfig(EnvironmentConfig, DataConfig):
    """Options of `async-grpo try-environment`."""

    environment: str = required(
        "The environment, in any form that --environment of a run takes: FILE.py:NAME, a name, agent:COMMAND, ...",
        "Trial",
        argument=True,
    )
    say: str = _trial(
        "",
        "Text that the policy says in its next turn. Repeat the option for more turns; the last text is said again in all "
        "later turns. - reads the texts from the terminal. By default three harmless texts.",
        repeatable=True,
        form=LIST,
    )
    model_name_or_path: str | None = _trial(
        None,
        "Model that plays, on the CPU, as the run's first policy would. With --say, only its tokenizer and chat template "
        "are used. By default those of a tiny model that ships with the library.",
    )
    row: str | None = _trial(
        None, 'Row of data that the environment gets, as a JSON object such as {"input": "2 + 2"}.'
    )
    data_path: str | None = _trial(
        None,
        "File of rows, of which the first one is played; environment takes the first row that the environment makes.",
    )
    max_generation_tokens: int = option(
        4096, "Maximum tokens after the first prompt, as in a run.", "Trial", range=POSITIVE
    )
    temperature: float = option(1.0, "Sampling temperature of a model.", "Trial", range=POSITIVE)
    seed: int = option(0, "Seed of the task and of a model's sampling.", "Trial")
    reward_env: str = option(
        "",
        "Comma list of further environment variables that the environment's or agent's process gets.",
        "Trial",
        form=LIST,
    )
    output_dir: str = option(
        "runs/try-environment",
        "Folder for environment_output.log, which contains what the environment's processes print, and for endpoint.json.",
        "Trial",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            self.row is not None and self.data_path is not None,
            "--row and --data-path both name the row: leave one of them out",
        )


def try_environment(config: TryEnvironmentConfig) -> None:
    """Play one trajectory, and print it.

    Raises:
        ConfigurationError: The environment, one of its options or the row cannot be used.
        RunFailed: The trajectory failed.
    """
    refuse_wrong_options(config)
    if config.model_name_or_path is None and config.tool_parser is None:
        # The small model's template shows no tools, so the format of calls cannot be derived from it
        config = replace(config, tool_parser=SMALL_MODEL_TOOL_PARSER)
    variables = named_environment(parse_names(config.reward_env))
    model = local_model(config.model_name_or_path) if config.model_name_or_path else str(SMALL_MODEL)
    prompt = _prompt_of(config, model, variables)
    settings = _settings_of(config, model, prompt)
    policy = _policy_of(config, model, settings)
    folder = Path(config.output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    output_path = folder / OUTPUT_FILE
    if output_path.exists():
        # Move the output of earlier trajectories away, so that only the output of this one is shown
        output_path.replace(output_path.with_name(f"{OUTPUT_FILE}.1"))
    if config.environment == "endpoint":
        print(
            f"agents find the address and the key of the endpoint in {folder / 'endpoint.json'}", flush=True
        )
    played = make_played(
        config, model, settings, source_of(config.environment), policy, folder=folder, variables=variables
    )
    trajectory = asyncio.run(_play(played, prompt))
    sample = Sample(prompt, trajectory, Verdict(RewardStatus.ABSTAINED, None))
    print(f"\n{outcome_text(trajectory, sample)}", flush=True)
    print(f"what its processes printed, if anything: {output_path}", flush=True)
    if trajectory.failure:
        raise RunFailed("the trajectory failed; the reason stands above")


async def _play(played: Played, prompt: Prompt) -> Completion:
    """Play one trajectory, and print each turn as soon as it is taken."""

    def show(turn: Turn, message: Mapping[str, Any]) -> None:
        print(f"\n{turn_text(turn, message)}", flush=True)

    played.observer = show
    try:
        await played.start()
        return await anext(played.generate(prompt, 1))
    finally:
        await played.close()


def _prompt_of(config: TryEnvironmentConfig, model: str, variables: Mapping[str, str]) -> Prompt:
    """Return the row that is played, with its prompt, and print it.

    Raises:
        ConfigurationError: There is no such row, or a run would refuse it.
    """
    place, row = _row_of(config, variables)
    tokenizer = load_tokenizer(model)
    vocab_size = load_config(model).get_text_config().vocab_size
    max_prompt_tokens = context_length(model) - 1
    questions = questions_of(
        [(place, row)], tokenizer, max_prompt_tokens, vocab_size, PromptRenderer(tokenizer, config)
    )
    (question,) = questions
    shown_row = {name: value for name, value in question.row.items() if name != "input_token_ids"}
    print(f"row ({place}): {json.dumps(shown_row, ensure_ascii=False, default=str)[:2000]}", flush=True)
    return Prompt(0, question.token_ids, question.row)


def _row_of(config: TryEnvironmentConfig, variables: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return (a description of where the row comes from, the row)."""
    if config.row is not None:
        try:
            row = json.loads(config.row)
        except ValueError as error:
            raise ConfigurationError(
                f'--row {config.row!r:.200} is not JSON ({error}): give an object such as {{"input": "2 + 2"}}'
            ) from error
        return "--row", config.column_map.apply(row)
    if config.data_path is not None and config.data_path != ROWS:
        return next(iter(read_rows(config.data_path, config.column_map)))
    source = source_of(config.environment)
    makes_rows = source is None or hasattr(source.object(), "rows")
    if config.data_path == ROWS or (source is not None and makes_rows):
        rows = rows_of(config, "train", variables)
        refuse(not rows, f"--data-path {ROWS}: the environment makes no row: give --row or a file")
        return "row 1 of the environment", rows[0]
    return "the default; give another one by --row or --data-path", dict(DEFAULT_ROW)


def _settings_of(config: TryEnvironmentConfig, model: str, prompt: Prompt) -> SharedRunSettings:
    """Return the settings that a run with this model, row and options would have."""
    return SharedRunSettings(
        run_name="try-environment",
        model_fingerprint=model_fingerprint(model),
        vocab_size=load_config(model).get_text_config().vocab_size,
        dtype="float32",
        temperature=config.temperature,
        stop_token_ids=stop_token_ids(model),
        max_total_tokens=_max_total_tokens(config, model, prompt),
        max_completion_tokens=config.max_generation_tokens,
        transport="",
        logprob_roles=(),
        seed=config.seed,
        trains=False,
    )


def _max_total_tokens(config: TryEnvironmentConfig, model: str, prompt: Prompt) -> int:
    """Return the maximum length of a sequence in tokens.

    The model's context limits it. Without `--model-name-or-path`, no model answers: the policy's turns are fixed texts (see
    `_policy_of`), and only the options limit the length.
    """
    longest = len(prompt.token_ids) + config.max_generation_tokens
    return longest if config.model_name_or_path is None else min(longest, context_length(model))


def _policy_of(config: TryEnvironmentConfig, model: str, settings: SharedRunSettings) -> Generation:
    """Return the policy that plays, and print which one it is."""
    tokenizer = load_tokenizer(model)
    texts = split_list(config.say)
    if config.model_name_or_path is not None and not texts:
        print(f"policy: {config.model_name_or_path}, on the CPU", flush=True)
        return ModelPolicy(model, tokenizer, settings)
    end_token_id = end_token_of(PromptRenderer(tokenizer, config), tokenizer, settings.stop_token_ids)
    if texts == [TERMINAL]:
        print("policy: you; type what the policy says in each turn", flush=True)
        return ScriptedPolicy(text_from_terminal, tokenizer, end_token_id)
    if not texts:
        texts = list(DEFAULT_TEXTS)
        print("policy: default texts; give others by --say, or a model by --model-name-or-path", flush=True)
    else:
        print(f"policy: the {len(texts)} texts of --say", flush=True)
    return ScriptedPolicy(texts_in_order(texts), tokenizer, end_token_id)
