"""Everything that can be known to be wrong before anything is started: files, model, lengths, names.

Imports neither ray nor a process group: `trainer_core.py` and `async-grpo run` call it first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer

from async_grpo.algorithm.advantages import get_estimator
from async_grpo.config.compatibility import early_at_gate
from async_grpo.config.plans import advantage_plan, estimator_options, objective, optimizer_settings
from async_grpo.config.reward_plans import combination, failure_policy, pool_plan, with_secrets
from async_grpo.config.run import RunConfig
from async_grpo.data import registry_file
from async_grpo.errors import ConfigurationError
from async_grpo.experience.dataset import Question, check_longest, load_questions
from async_grpo.modeling.load import context_length, load_config, model_fingerprint, stop_token_ids
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, parse_names, resolve
from async_grpo.types import SharedRunSettings


@dataclass(frozen=True)
class Prepared:
    """A run that could start."""

    settings: SharedRunSettings
    questions: list[Question]
    eval_questions: list[Question]
    rewards: RewardRegistrySource


def prepare(config: RunConfig) -> Prepared:
    """Check a run's inputs and read them.

    Raises:
        ConfigurationError: the first thing that is wrong, with the way out.
    """
    _check_names(config)
    model = config.model_name_or_path
    vocab_size = load_config(model).get_text_config().vocab_size
    context = context_length(model)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    questions = load_questions(config.data_path, tokenizer, context - 1, vocab_size)
    eval_questions = []
    if config.eval_data_path:
        eval_questions = load_questions(config.eval_data_path, tokenizer, context - 1, vocab_size)

    def longest_total(prompt_tokens: int) -> int:
        return min(context, prompt_tokens + config.max_generation_tokens)

    check_longest([*questions, *eval_questions], longest_total, config.max_tokens_per_gpu)
    longest_prompt = max(len(question.token_ids) for question in [*questions, *eval_questions])
    rewards = _rewards(config)
    if config.reward_fns:
        adapters = resolve(rewards, config.reward_fns)
        check_reward_column(config, adapters, [*questions, *eval_questions])
    return Prepared(
        settings=SharedRunSettings(
            run_name=config.run_name,
            model_fingerprint=model_fingerprint(model),
            vocab_size=vocab_size,
            dtype=resolved_dtype(config.dtype),
            temperature=config.temperature,
            stop_token_ids=stop_token_ids(model),
            max_total_tokens=longest_total(longest_prompt),
            max_completion_tokens=config.max_generation_tokens,
            samples_per_question=config.samples_per_question,
            transport=config.weight_transport,
            logprob_roles=config.logprob_roles,
            seed=config.infinite_sampler_seed,
            char_ends=get_estimator(config.advantage_estimator).process,
            float32_head=config.float32_head,
        ),
        questions=questions,
        eval_questions=eval_questions,
        rewards=rewards,
    )


def check_reward_column(
    config: RunConfig, adapters: Mapping[str, Any], questions: Iterable[Question]
) -> None:
    """Read the column that names who judges a row, of all rows: the run would end at the first wrong one.

    Args:
        adapters: the run's rewards by name.

    Raises:
        ConfigurationError: a row names nobody, an unknown one, or at a gate one too early; says which row.
    """
    if config.reward_column is None:
        return
    combined = combination(config, adapters)
    for question in questions:
        try:
            names = combined.chosen(question.row)
        except ConfigurationError as error:
            raise ConfigurationError(f"{question.where}: {error}") from error
        if early := early_at_gate(config, names, adapters):
            raise ConfigurationError(
                f"{question.where}: the column {config.reward_column!r} says {','.join(names)!r}, but a gate decides "
                f"before the group is known, and {', '.join(early)} scores by the whole group: name it last"
            )


def resolved_dtype(dtype: str) -> str:
    """`auto` is bfloat16 where there is a GPU, float32 elsewhere."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if torch.cuda.is_available() else "float32"


def _check_names(config: RunConfig) -> None:
    estimator = get_estimator(config.advantage_estimator)
    estimator_options(config)
    if config.kl_in_reward and not estimator.outcome:
        raise ConfigurationError(
            f"--kl-in-reward pays every token, and {config.advantage_estimator} compares steps: use the KL in the loss"
        )
    objective(config)
    optimizer_settings(config)
    if config.weight_transport == "nccl" and not torch.cuda.is_available():
        raise ConfigurationError("--weight-transport nccl needs GPUs; object_store works everywhere")
    if config.weight_transport == "nccl" and "proximal" in config.logprob_roles:
        raise ConfigurationError(
            "proximal logprob workers get their weights by --weight-transport object_store alone"
        )
    if config.reward_fns:
        source = _rewards(config)
        adapters = resolve(source, config.reward_fns)
        advantage_plan(config, adapters)
        failure_policy(config, adapters)
        with_secrets(pool_plan(config, source, parse_names(config.reward_fns)), source)


def _rewards(config: RunConfig) -> RewardRegistrySource:
    page = RewardRegistrySource.from_file(registry_file(config.reward_registry))
    return page.with_files(config.reward_fns)
