"""Everything that can be known to be wrong before anything is started: files, model, lengths, names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from async_grpo.config.compatibility import check_methods
from async_grpo.config.resume import find_checkpoint, refuse_changes
from async_grpo.config.rewards import ResolvedRewards, check_rewards, early_at_gate
from async_grpo.config.run import RunConfig
from async_grpo.environments.config import ROWS
from async_grpo.environments.make import rows_of, source_of
from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import RunFacts
from async_grpo.experience.curriculum import make_curriculum
from async_grpo.experience.dataset import Question, questions_of, read_rows
from async_grpo.experience.worker_registry import scheduling_policy
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import (
    context_length,
    load_config,
    load_tokenizer,
    model_fingerprint,
    stop_token_ids,
)
from async_grpo.options.source_file import absolute, library_version
from async_grpo.training.checkpoint_folder import Manifest
from async_grpo.weights.config import TRANSPORTS, get_transport

SAMPLED_PROMPTS = 8  # decoded to see that the tokenizer is the model's


@dataclass(frozen=True)
class Prepared:
    """A run that could start. `rewards` is None as long as only the workers know them."""

    config: RunConfig
    settings: SharedRunSettings
    questions: list[Question]
    eval_questions: dict[str, list[Question]]  # by the names of their files
    rewards: ResolvedRewards | None
    resumed: Manifest | None = None  # of the checkpoint that it goes on from

    @property
    def facts(self) -> RunFacts:
        """What the batcher must know of all this."""
        assert self.rewards is not None
        facts = self.rewards.facts(self.config, self.settings.guaranteed_completion_tokens)
        model = load_config(self.config.model_name_or_path).get_text_config()
        return replace(facts, hidden_size=model.hidden_size)

    def with_rewards(self, names: str) -> "Prepared":
        """The same with the rewards that the workers named, where `--reward-fns` names none.

        ConfigurationError: they cannot be found, or do not fit the configuration or the data.
        """
        config = replace(self.config, reward_fns=names)
        both = [*self.questions, *chain.from_iterable(self.eval_questions.values())]
        rewards = _checked_rewards(config, both)
        if self.resumed is not None:
            refuse_changes(config, Path(self.settings.checkpoint), self.resumed.options)
        return replace(self, config=config, rewards=rewards)


def prepare(config: RunConfig) -> Prepared:
    """Check a run's inputs and read them.

    ConfigurationError: the first thing that is wrong, with the way out.
    """
    check_methods(config)
    scheduling_policy(config.scheduling)  # a file of the user's is read here first
    _ = config.environment and source_of(config.environment)
    if get_transport(config.weight_transport).needs_gpu and not torch.cuda.is_available():
        anywhere = ", ".join(name for name, transport in TRANSPORTS.items() if not transport.needs_gpu)
        what = f"--weight-transport {config.weight_transport}"
        raise ConfigurationError(f"{what} needs GPUs; everywhere works {anywhere}")
    vocab_size = load_config(model := config.model_name_or_path).get_text_config().vocab_size
    context = context_length(model)
    tokenizer = load_tokenizer(model)
    questions, *held_out = (
        questions_of(_rows(config, path, not n), tokenizer, context - 1, vocab_size)
        for n, path in enumerate((config.data_path, *config.eval_files.values()))
    )
    eval_questions = dict(zip(config.eval_files, held_out, strict=True))
    both = [*questions, *chain.from_iterable(held_out)]
    _check_tokenizer(tokenizer, model, vocab_size, both)
    make_curriculum(config, [question.row for question in questions])
    longest_prompt = max(len(question.token_ids) for question in both)
    total = min(context, longest_prompt + config.max_generation_tokens)
    if total > config.max_tokens_per_gpu:
        raise ConfigurationError(
            f"a prompt of {longest_prompt} tokens and its longest completion make a sample of {total} tokens, which cannot "
            f"fit --max-tokens-per-gpu {config.max_tokens_per_gpu}: raise it, or lower --max-generation-tokens"
        )
    guaranteed = total - longest_prompt
    if config.overlong_buffer and not round(config.overlong_buffer * guaranteed):
        raise ConfigurationError(
            f"--overlong-buffer {config.overlong_buffer} of {guaranteed} tokens, the longest completion, is less than "
            "one token: give a larger share, or leave it out"
        )
    rewards = _checked_rewards(config, both) if config.reward_fns else None
    folder, manifest = find_checkpoint(config) or (None, None)
    automatic = "bfloat16" if torch.cuda.is_available() else "float32"
    settings = SharedRunSettings(
        run_name=config.run_name,
        model_fingerprint=model_fingerprint(model),
        vocab_size=vocab_size,
        dtype=automatic if config.dtype == "auto" else config.dtype,
        temperature=config.temperature,
        stop_token_ids=stop_token_ids(model),
        max_total_tokens=max(total, min(context, longest_prompt + (config.eval_max_tokens or 0))),
        max_completion_tokens=config.max_generation_tokens,
        transport=absolute(config.weight_transport),
        logprob_roles=config.logprob_roles,
        seed=config.infinite_sampler_seed,
        char_ends=config.estimator.process,
        float32_head=config.float32_head,
        guaranteed_completion_tokens=guaranteed,
        group_size=config.samples_per_question,
        samples_in_flight=config.samples_in_flight,
        checkpoint=str(folder.absolute()) if folder else "",
        library=library_version(),
    )
    return Prepared(config, settings, questions, eval_questions, rewards, manifest)


def _rows(config: RunConfig, path: str, to_train_on: bool) -> Iterable[tuple[str, Any]]:
    if path != ROWS:
        return read_rows(path)
    rows = rows_of(config, "train" if to_train_on else "eval", config.reward_environment())
    return ((f"row {number} of the environment", row) for number, row in enumerate(rows))


def _check_tokenizer(tokenizer: Any, model: str, vocab_size: int, questions: Sequence[Question]) -> None:
    """From a folder without tokenizer files transformers makes an empty one: every completion would be the text ''."""
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


def _checked_rewards(config: RunConfig, questions: Iterable[Question]) -> ResolvedRewards:
    """The rewards, if they fit; with `--reward-column`, every row: the run would end at the first wrong one."""
    rewards = ResolvedRewards.of(config)
    check_rewards(config, rewards)
    rewards.secrets(), config.reward_environment()  # a missing key ends the run here
    combined = config.combination
    for question in questions if config.reward_column is not None else ():
        try:
            names = combined.chosen(question.row)
        except ConfigurationError as error:
            raise ConfigurationError(f"{question.where}: {error}") from error
        if early := early_at_gate(config, names, rewards):
            raise ConfigurationError(
                f"{question.where}: the column {config.reward_column!r} says {','.join(names)!r}, but a gate decides "
                f"before the group is known, and {', '.join(early)} scores by the whole group: name it last"
            )
    return rewards
