"""Rules for the options of teachers, and the checks that each teacher fits the policy and the data."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.algorithm.teacher_config import (
    DEMONSTRATION,
    INITIAL,
    QUESTION,
    SELF,
    TEMPLATE,
    UNSCORED,
    TeacherConfig,
)
from async_grpo.config.rules import BrokenRules, changed_options, idle, refuse_broken
from async_grpo.config.run import RunConfig
from async_grpo.environments.config import ENFORCE
from async_grpo.errors import ConfigurationError
from async_grpo.experience.dataset import Question
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.experience.row_messages import prompt_of
from async_grpo.experience.teachers.distillation import teacher_name
from async_grpo.modeling.load import load_config, load_tokenizer, model_fingerprint
from async_grpo.options.fields import refuse
from async_grpo.rewards.http.endpoint import check_url
from async_grpo.weights.config import get_transport

if TYPE_CHECKING:
    from async_grpo.config.model_facts import ModelFacts

# Options that have no effect without --teacher. `teacher_coef` is in a second list, because a recipe may set it
NEED_TEACHER = """
    teacher_column teacher_coef teacher_top_k teacher_demonstration teacher_template teacher_api_key_env teacher_concurrency
    teacher_requests_per_minute teacher_timeout_s teacher_attempts
""".split()
NEED_SERVER = """
    teacher_api_key_env teacher_concurrency teacher_requests_per_minute teacher_timeout_s teacher_attempts
""".split()
# Options that need a reward. They have no effect in a run whose only reward is `unscored`
NEED_REWARD = "retire_solved_above curriculum keep_best eval_data_path kl_in_reward overlong_buffer".split()
MAX_SHOWN_CHARACTERS = 60


def check_teachers(config: RunConfig) -> None:
    """Raise ConfigurationError for options of teachers that cannot work together or with other options."""
    refuse_broken(config, _broken_teachers(config))
    for server in config.teacher_servers.values():
        check_url(server.url)
    variable = config.teacher_api_key_env
    refuse(
        variable is not None and not os.environ.get(variable),
        f"--teacher-api-key-env {variable}: the environment variable is not set",
    )


def _broken_teachers(c: RunConfig) -> BrokenRules:
    if not c.teachers:
        yield from idle(c, " ".join(NEED_TEACHER), "without --teacher: name a teacher, or leave it out")
        return
    yield from _broken_names(c)
    yield from _broken_demonstration(c)
    yield from _broken_servers(c)
    if c.draws:
        yield (
            "policy teacher",
            "do not go together: a picture has no tokens for which a teacher has log-probs",
        )
    if c.typed_output == ENFORCE and c.environment and (c.teacher_servers or c.teacher_folders):
        yield (
            "typed_output teacher",
            "do not go together: another model cannot restrict its distribution to the tokens of a grammar; use "
            "--typed-output hint",
        )
    if c.teacher_top_k and c.truncation is not None:
        yield (
            "teacher_top_k top_p top_k min_p",
            "do not go together: the teacher's most probable tokens may be outside of those that the policy samples; use "
            "the log-prob of the sampled token (--teacher-top-k 0), or leave the truncation out",
        )
    if c.teacher_top_k and c.typed_output == ENFORCE and c.environment:
        yield (
            "teacher_top_k typed_output",
            "do not go together: the teacher's most probable tokens may be outside of a grammar; use --typed-output hint",
        )
    estimator = c.estimator
    if estimator.needs_critic:
        yield (
            "advantage_estimator teacher",
            "do not go together: the trainer computes the advantages of a critic from rewards alone; use another estimator",
        )
    if c.zero_variance != "keep":
        yield (
            "zero_variance teacher",
            "do not go together: a teacher also teaches groups of equal rewards; use --zero-variance keep",
        )
    if estimator.ignores_rewards:
        yield from idle(
            c, "kl_in_reward overlong_buffer", f"with --advantage-estimator {c.advantage_estimator}"
        )
    if c.reward_fns == UNSCORED:
        for name in changed_options(c, NEED_REWARD):
            yield (
                f"{name} reward_fns",
                "do not fit: nothing scores the completions; name rewards in --reward-fns",
            )
    needs_packages = SELF in c.teachers.values()
    if needs_packages and not get_transport(c.weight_transport).sends_packages:
        yield (
            "weight_transport teacher",
            "do not go together: a logprob worker that follows the policy needs a --weight-transport that sends packages "
            "(object_store)",
        )


def _broken_names(c: RunConfig) -> BrokenRules:
    """Find teachers without names although there are several, or without the column that assigns them to rows."""
    has_names = "" not in c.teachers
    if has_names and c.teacher_column is None:
        yield (
            "teacher teacher_column",
            "do not fit: several teachers need the column that names the teacher of each row",
        )
    if not has_names and c.teacher_column is not None:
        yield (
            "teacher teacher_column",
            "do not fit: give the teachers names: --teacher NAME=TEACHER,NAME=TEACHER",
        )


def _broken_demonstration(c: RunConfig) -> BrokenRules:
    """Find a teacher that is the policy itself but has no text that only the teacher reads; and unusable templates."""
    is_itself = {SELF, INITIAL} & set(c.teachers.values())
    if c.teacher_demonstration is None:
        if is_itself:
            yield (
                "teacher teacher_demonstration",
                "do not fit: the teacher is the policy itself, and knows no more than the policy; name the column of a "
                "text that only the teacher reads",
            )
        yield from idle(c, "teacher_template", "without --teacher-demonstration")
        return
    template = c.teacher_template or TEMPLATE
    if DEMONSTRATION not in template or QUESTION not in template:
        yield "teacher_template", f"must contain {QUESTION} and {DEMONSTRATION}"
    if c.environment:
        yield (
            "environment teacher_demonstration",
            "do not go together: an environment writes the prompts of its turns itself",
        )
    if INITIAL in c.teachers.values() and c.init_adapter is not None:
        yield (
            "teacher init_adapter",
            "do not go together: a frozen teacher has no adapter, so it is not the policy at the start; use self",
        )


def _broken_servers(c: RunConfig) -> BrokenRules:
    """Find options that teachers on servers cannot use, or that only they use."""
    if not c.teacher_servers:
        yield from idle(c, " ".join(NEED_SERVER), "with a --teacher that no server holds: leave it out")
        return
    if c.temperature != 1.0:
        yield (
            "teacher temperature",
            "do not fit: a server returns log-probs at temperature 1; use --temperature 1, or a teacher in a folder",
        )
    if c.truncation is not None:
        yield (
            "teacher top_p top_k min_p",
            "do not fit: a server returns log-probs over all tokens; use --top-p 1 --top-k 0 --min-p 0, or a teacher in a "
            "folder",
        )


@dataclass(frozen=True)
class CheckedTeachers:
    """The result of the check of the teachers' models and prompts."""

    questions: list[Question]  # the questions, with the prompts of their teachers
    fingerprints: dict[str, str]  # fingerprint of the model of each teacher, by kind of logprob worker
    # Number of tokens of the longest sequence that a teacher may read; 0 if teachers read the same tokens as the policy
    longest_sequence: int


def checked_teachers(config: RunConfig, model: "ModelFacts", questions: list[Question]) -> CheckedTeachers:
    """Check that each teacher has the policy's vocabulary, that each row has a teacher, and render the teachers' prompts.

    Args:
        config: The run's options.
        model: The policy's model.
        questions: The questions of the training.

    Raises:
        ConfigurationError: A teacher or a row does not fit. The message names it.
    """
    if not config.teachers:
        return CheckedTeachers(questions, {}, 0)
    refuse(
        model.images is not None,
        f"--teacher {config.teacher}: teachers of models that read images are not supported; leave the option out",
    )
    fingerprints = {}
    for kind, folder in config.teacher_folders.items():
        refuse(not Path(folder).is_dir(), f"--teacher {folder}: there is no such folder")
        refuse_other_vocabulary(folder, config.model_name_or_path)
        fingerprints[kind] = model_fingerprint(folder)
    # Together with the longest completion, the teacher's prompt must fit into the context and into a micro-batch
    max_tokens = min(model.context_tokens, config.max_tokens_per_gpu) - config.max_generation_tokens
    taught_questions = []
    longest_sequence = 0
    for question in questions:
        try:
            teacher_name(config, question.row)
            token_ids = _teacher_prompt(config, model.renderer, question.row, max_tokens)
        except ConfigurationError as error:
            raise ConfigurationError(f"{question.where}: {error}") from error
        if token_ids is not None:
            longest_sequence = max(longest_sequence, len(token_ids) + config.max_generation_tokens)
            question = replace(question, teacher_token_ids=np.asarray(token_ids, np.int32))
        taught_questions.append(question)
    return CheckedTeachers(taught_questions, fingerprints, longest_sequence)


def _teacher_prompt(
    config: TeacherConfig, renderer: PromptRenderer, row: Mapping[str, Any], max_tokens: int
) -> list[int] | None:
    """Return the token ids of the prompt with the row's demonstration, or None if the row has none.

    Raises:
        ConfigurationError: The demonstration is no text, or the prompt does not fit.
    """
    column = config.teacher_demonstration
    if column is None:
        return None
    demonstration = row.get(column)
    refuse(
        not isinstance(demonstration, str),
        f"the column {column!r} (--teacher-demonstration) holds {demonstration!r:.{MAX_SHOWN_CHARACTERS}}: it must be a "
        "text, which may be empty",
    )
    if not demonstration:
        return None
    refuse(
        row.get("input_token_ids") is not None,
        "the prompt is given as input_token_ids, into which no demonstration can be written: give messages or a text",
    )

    def with_demonstration(question: str) -> str:
        # Split the template before filling it in, so that a question or a demonstration may contain the name of a
        # placeholder
        template = config.teacher_template or TEMPLATE
        parts = [part.replace(QUESTION, question) for part in template.split(DEMONSTRATION)]
        return demonstration.join(parts)

    prompt = prompt_of(row)
    if isinstance(prompt, str):
        teacher_row: dict[str, Any] = {"input": with_demonstration(prompt)}
    else:
        teacher_row = {
            "messages": _with_last_user_text(prompt, with_demonstration),
            "tools": row.get("tools"),
        }
    token_ids = renderer.prompt_tokens(teacher_row, max_tokens)
    refuse(
        len(token_ids) > max_tokens,
        f"the teacher's prompt has {len(token_ids)} tokens with the demonstration; at most {max_tokens} fit beside a "
        "completion: shorten the demonstration, or raise --max-tokens-per-gpu",
    )
    return token_ids


def _with_last_user_text(messages: Sequence[Any], rewrite: Callable[[str], str]) -> list[Any]:
    """Return the messages with the text of the last user message replaced by `rewrite(text)`."""
    places = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    refuse(
        not places, "the messages have none of the role user, into which the demonstration could be written"
    )
    changed = list(messages)
    text = changed[places[-1]].get("content")
    refuse(not isinstance(text, str), "the content of the last user message is no text")
    changed[places[-1]] = {**changed[places[-1]], "content": rewrite(text)}
    return changed


def refuse_other_vocabulary(teacher: str, policy: str) -> None:
    """Check that all tokens of the policy have the same ids in the teacher's tokenizer, which may have further tokens.

    Args:
        teacher: Folder of the teacher.
        policy: Folder of the policy.

    Raises:
        ConfigurationError: A token differs; the message names it. Or the teacher's model has fewer tokens.
    """
    ids_of_teacher = load_tokenizer(teacher).get_vocab()
    for text, token_id in load_tokenizer(policy).get_vocab().items():
        teacher_id = ids_of_teacher.get(text)
        if teacher_id != token_id:
            difference = "is missing" if teacher_id is None else f"has the id {teacher_id}"
            raise ConfigurationError(
                f"--teacher {teacher}: its tokenizer differs from that of {policy}: the token "
                f"{text!r:.{MAX_SHOWN_CHARACTERS}} has the id {token_id} here and {difference} there; a teacher must have "
                "the policy's vocabulary"
            )
    num_tokens_of_teacher = load_config(teacher).get_text_config().vocab_size
    num_tokens_of_policy = load_config(policy).get_text_config().vocab_size
    refuse(
        num_tokens_of_teacher < num_tokens_of_policy,
        f"--teacher {teacher}: its model has {num_tokens_of_teacher} tokens, and {policy} has {num_tokens_of_policy}, so "
        "the policy may sample tokens that the teacher does not know",
    )
