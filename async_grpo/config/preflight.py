"""Check and read the inputs of a run before anything is started: files, model, lengths and names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from async_grpo.config.compatibility import check_methods
from async_grpo.config.critic_model import check_critic_model
from async_grpo.config.evaluation_files import refuse_ambiguous_files
from async_grpo.config.images import image_settings
from async_grpo.config.model_facts import MODEL_KINDS
from async_grpo.config.resume import find_checkpoint, refuse_changes
from async_grpo.config.rewards import ResolvedRewards, check_rewards, early_at_gate
from async_grpo.config.row_checks import check_rows
from async_grpo.config.run import RunConfig
from async_grpo.config.teachers import check_teachers, checked_teachers
from async_grpo.environments.config import ENFORCE, ROWS
from async_grpo.environments.make import refuse_wrong_options, rows_of
from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import RunFacts
from async_grpo.experience.curriculum import make_curriculum
from async_grpo.experience.data_config import DataConfig
from async_grpo.experience.data_files import read_rows
from async_grpo.experience.dataset import Question
from async_grpo.experience.image_prompts import ImagePrompts
from async_grpo.experience.running_means import check_column
from async_grpo.experience.worker_registry import scheduling_policy
from async_grpo.messages import SharedRunSettings
from async_grpo.options.fields import dashed, refuse
from async_grpo.options.source_file import absolute, library_version
from async_grpo.training.checkpoint_folder import Manifest
from async_grpo.weights.config import TRANSPORTS, get_transport

SAMPLED_PROMPTS = 8  # number of prompts that are decoded to check that the tokenizer belongs to the model


@dataclass(frozen=True)
class Prepared:
    """The checked inputs of a run."""

    config: RunConfig
    settings: SharedRunSettings
    questions: list[Question]
    eval_questions: dict[str, list[Question]]  # held-out questions, by name of their file
    # None if the trainer has no `--reward-fns` and the workers have not named the rewards yet (see `with_rewards`)
    rewards: ResolvedRewards | None
    hidden_size: int  # hidden size of the model
    resumed: Manifest | None = None  # manifest of the checkpoint from which the run continues
    images: ImagePrompts | None = None  # renders prompts with images; None if the model reads no images

    def store_images(self) -> "Prepared":
        """Write images that are needed during the whole run to its folder, and return the inputs without their bytes.

        Without the bytes, the inputs are small enough to be sent to other processes.
        """
        if self.images is not None:
            self.images.store(self._kept_images)
        return replace(self, images=None)

    @property
    def _kept_images(self) -> frozenset[str]:
        """Return the digests of the images that the run needs until its end.

        These are the images of evaluations and of the canary; with `--record`, they are all images.
        """
        canary = self.settings.image_canary
        questions = list(chain.from_iterable(self.eval_questions.values()))
        if self.config.record:
            questions += self.questions
        digests = {image.digest for question in questions for image in question.images}
        return frozenset(digests if canary is None else digests | {canary.image.digest})

    @property
    def facts(self) -> RunFacts:
        """Return the facts about rewards and model that the batcher needs."""
        assert self.rewards is not None
        facts = self.rewards.facts(self.config, self.settings.guaranteed_completion_tokens)
        return replace(
            facts,
            hidden_size=self.hidden_size,
            unsampled_token_ids=self.settings.unsampled_token_ids,
            kept_images=self._kept_images,
            keeps_images=self.config.record,
        )

    def with_rewards(self, names: str) -> "Prepared":
        """Return these inputs with the rewards that the workers name, because the trainer has no `--reward-fns`.

        Args:
            names: Comma-separated names of the rewards.

        Raises:
            ConfigurationError: A reward cannot be found, or does not fit the configuration or the data.
        """
        config = replace(self.config, reward_fns=names)
        questions = [*self.questions, *chain.from_iterable(self.eval_questions.values())]
        rewards = _checked_rewards(config, questions)
        if self.resumed is not None:
            refuse_changes(config, Path(self.settings.checkpoint), self.resumed.options)
        return replace(self, config=config, rewards=rewards)


def prepare(config: RunConfig) -> Prepared:
    """Check and read the inputs of a run.

    Raises:
        ConfigurationError: An input is wrong. The message names the first problem and a way out.
    """
    check_methods(config)
    check_teachers(config)
    _check_sources(config)
    model = MODEL_KINDS[config.policy].read(config)  # read the model before the data, which may take long
    check_critic_model(config)
    context_tokens = model.context_tokens
    images = model.images

    def read_questions(path: str, is_training: bool = False) -> list[Question]:
        rows = _rows(config, path, is_training, reads_images=images is not None)
        # At least one token of the context must remain for the completion after the prompt
        folder = Path(path).parent
        return model.questions_of(rows, context_tokens - 1, folder)

    questions = read_questions(config.data_path, is_training=True)
    eval_questions = {name: read_questions(path) for name, path in config.eval_files.items()}
    model.renderer.warn_about_use(has_environment=config.environment is not None)
    all_questions = [*questions, *chain.from_iterable(eval_questions.values())]
    _check_tokenizer(model.tokenizer, config.model_name_or_path, model.vocab_size, all_questions)
    make_curriculum(config, [question.row for question in questions])
    taught = checked_teachers(config, model, questions)
    check_column(config.running_mean_column, [question.row for question in questions])
    longest_prompt = max(len(question.token_ids) for question in all_questions)
    max_sample_tokens = min(context_tokens, longest_prompt + config.max_generation_tokens)
    max_eval_tokens = min(context_tokens, longest_prompt + (config.eval_max_tokens or 0))
    _check_lengths(config, longest_prompt, max_sample_tokens)
    rewards = _checked_rewards(config, all_questions) if config.reward_fns else None
    folder, manifest = find_checkpoint(config) or (None, None)
    settings = SharedRunSettings(
        model_fingerprint=model.fingerprint,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        stop_token_ids=model.stop_token_ids,
        lora=model.lora,
        teacher_fingerprints=taught.fingerprints,
        flow=model.flow,
        max_total_tokens=max(max_sample_tokens, max_eval_tokens, taught.longest_sequence),
        guaranteed_completion_tokens=max_sample_tokens - longest_prompt,
        checkpoint=str(folder.absolute()) if folder else "",
        library=library_version(),
        **_settings_of_options(config),
        **image_settings(config, images, all_questions, max(max_sample_tokens, max_eval_tokens)),
    )
    return Prepared(
        config=config,
        settings=settings,
        questions=taught.questions,
        eval_questions=eval_questions,
        rewards=rewards,
        hidden_size=model.hidden_size,
        resumed=manifest,
        images=images,
    )


def _settings_of_options(config: RunConfig) -> dict[str, Any]:
    """Return the fields of `SharedRunSettings` that depend only on the options."""
    return {
        "run_name": config.run_name,
        "temperature": config.temperature,
        "truncation": config.truncation,
        "max_completion_tokens": config.max_generation_tokens,
        "transport": absolute(config.weight_transport),
        "logprob_roles": config.logprob_roles,
        "seed": config.infinite_sampler_seed,
        "char_ends": config.estimator.process,
        "float32_head": config.float32_head,
        "group_size": config.samples_per_question,
        "samples_in_flight": config.samples_in_flight,
        "sleep_level": config.sleep_level,
        "moves_reference": config.moves_reference,
        "deterministic": config.deterministic,
        "has_grammars": config.environment is not None and config.typed_output == ENFORCE,
    }


def _check_sources(config: RunConfig) -> None:
    """Read the user's files for scheduling and environment, and check that the transport works on this machine.

    Also refuse ambiguous file names, and options for files that the run does not read.
    """
    refuse_ambiguous_files(config)
    _refuse_unused_columns(config)
    scheduling_policy(config.scheduling)
    if config.environment:
        refuse_wrong_options(config)
    if get_transport(config.weight_transport).needs_gpu and not torch.cuda.is_available():
        cpu_transports = ", ".join(name for name, transport in TRANSPORTS.items() if not transport.needs_gpu)
        raise ConfigurationError(
            f"--weight-transport {config.weight_transport} needs GPUs; {cpu_transports} work everywhere"
        )


def _check_lengths(config: RunConfig, longest_prompt: int, max_sample_tokens: int) -> None:
    # For a picture, the prompt's text is not sent to the trainer; a single token takes its place (`Sample.pieces`)
    num_packed_tokens = max_sample_tokens - longest_prompt + 1 if config.draws else max_sample_tokens
    if num_packed_tokens > config.max_tokens_per_gpu:
        raise ConfigurationError(
            f"a prompt of {longest_prompt} tokens and its longest completion make a sample of {num_packed_tokens} tokens, "
            f"which cannot fit --max-tokens-per-gpu {config.max_tokens_per_gpu}: raise it, or lower "
            "--max-generation-tokens"
        )
    guaranteed_tokens = max_sample_tokens - longest_prompt
    if config.overlong_buffer and not round(config.overlong_buffer * guaranteed_tokens):
        raise ConfigurationError(
            f"--overlong-buffer {config.overlong_buffer} of {guaranteed_tokens} tokens, the longest completion, is less "
            "than one token: give a larger share, or leave it out"
        )


def _rows(
    config: RunConfig, path: str, is_training: bool, *, reads_images: bool
) -> Iterable[tuple[str, Any]]:
    """Return (location, row) for each row of a file or of the environment. The location is a text for messages."""
    if path != ROWS:
        return read_rows(path, config.column_map, reads_images=reads_images)
    rows = rows_of(config, "train" if is_training else "eval", config.reward_environment())
    return ((f"row {number} of the environment", row) for number, row in enumerate(rows))


def _refuse_unused_columns(config: RunConfig) -> None:
    """Refuse options about columns of data files if the environment makes all rows: they would have no effect."""
    if any(path != ROWS for path in (config.data_path, *config.eval_files.values())):
        return
    defaults = {field.name: field.default for field in fields(DataConfig)}
    for name, default in defaults.items():
        value = getattr(config, name)
        refuse(
            value != default,
            f"--{dashed(name)} {value}: it is about columns of files, and the environment makes all rows "
            f"(--data-path {ROWS}), so it would change nothing: leave it out",
        )


def _check_tokenizer(tokenizer: Any, model: str, vocab_size: int, questions: Sequence[Question]) -> None:
    """Check that the tokenizer belongs to the model.

    If a folder has no tokenizer files, transformers makes an empty tokenizer, which decodes every completion to "".
    """
    if len(tokenizer) > vocab_size:
        raise ConfigurationError(
            f"the tokenizer of {model} has {len(tokenizer)} tokens, its model only {vocab_size}: they do not belong "
            "together; copy the tokenizer's files from the model that this one was made of"
        )
    for question in questions[:SAMPLED_PROMPTS]:
        if not tokenizer.decode(question.token_ids.tolist()).strip():
            raise ConfigurationError(
                f"{question.where}: the tokenizer of {model} decodes the prompt to no text: put the model's tokenizer "
                "files (tokenizer.json, tokenizer_config.json) into its folder"
            )


def _checked_rewards(config: RunConfig, questions: Sequence[Question]) -> ResolvedRewards:
    """Return the rewards of the run, after checking that they fit its options and its rows."""
    rewards = ResolvedRewards.of(config)
    check_rewards(config, rewards)
    # Both calls raise an error if an environment variable is not set
    rewards.secrets()
    config.reward_environment()
    if config.reward_column is not None:
        _check_reward_column(config, rewards, questions)
    check_rows(config, rewards, questions)
    return rewards


def _check_reward_column(config: RunConfig, rewards: ResolvedRewards, questions: Sequence[Question]) -> None:
    """Check the reward column of every row before the start. A wrong row would otherwise fail only when it is reached."""
    combination = config.combination
    for question in questions:
        try:
            names = combination.chosen(question.row)
        except ConfigurationError as error:
            raise ConfigurationError(f"{question.where}: {error}") from error
        early_names = early_at_gate(config, names, rewards)
        if early_names:
            raise ConfigurationError(
                f"{question.where}: the column {config.reward_column!r} says {','.join(names)!r}, but a gate decides "
                f"before the group is complete, and {', '.join(early_names)} scores whole groups: name that reward last"
            )
