"""Options of teachers: what is refused and why, whose vocabulary fits, and the prompts that only a teacher reads."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from checked_run import config

from async_grpo.config.teachers import check_teachers, checked_teachers, refuse_other_vocabulary
from async_grpo.data import TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.experience.dataset import Question
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.modeling.load import load_tokenizer

SELF = {"teacher": "self", "teacher_demonstration": "solution"}
SERVER = {"teacher": "http://127.0.0.1:1/v1"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"teacher_coef": 2.0}, "--teacher-coef 2.0 does nothing without --teacher"),
        ({"teacher": "a=x,b=y"}, "several teachers need the column"),
        ({"teacher": "x", "teacher_column": "topic"}, "give the teachers names"),
        ({"teacher": "a=x,a=y", "teacher_column": "topic"}, "with different names"),
        ({"teacher": " "}, "--teacher is empty"),
        ({"teacher": "self"}, "the teacher is the policy itself"),
        ({"teacher": "initial"}, "the teacher is the policy itself"),
        (SELF | {"teacher_template": "{question}"}, r"must contain \{question\} and \{demonstration\}"),
        ({"teacher": "x", "teacher_template": "t"}, "does nothing without --teacher-demonstration"),
        (SELF | {"environment": "guess"}, "an environment writes the prompts of its turns itself"),
        (SELF | {"teacher": "initial", "init_adapter": "x"}, "a frozen teacher has no adapter"),
        (SELF | {"weight_transport": "nccl"}, "a logprob worker that follows the policy"),
        (SERVER | {"temperature": 0.7}, "a server returns log-probs at temperature 1"),
        (SERVER | {"top_p": 0.9}, "--top-p 0.9 .*do not fit: a server returns log-probs over all tokens"),
        ({"teacher": "x", "teacher_top_k": 4, "min_p": 0.1}, "outside of those that the policy samples"),
        ({"teacher": "x", "teacher_timeout_s": 3.0}, "does nothing with a --teacher that no server holds"),
        ({"teacher": "http://u:p@h/v1"}, "it holds a user or password"),
        (SERVER | {"teacher_api_key_env": "NO_SUCH_KEY"}, "the environment variable is not set"),
        (
            {"teacher": "x", "environment": "guess"},
            "cannot restrict its distribution to the tokens of a grammar",
        ),
        ({"teacher": "x", "advantage_estimator": "gae"}, "the advantages of a critic from rewards alone"),
        ({"teacher": "x", "zero_variance": "filter"}, "a teacher also teaches groups of equal rewards"),
        (
            {"teacher": "x", "advantage_estimator": "teacher", "overlong_buffer": 0.2},
            "--overlong-buffer 0.2 does nothing with --advantage-estimator teacher",
        ),
        (
            {"teacher": "x", "advantage_estimator": "teacher", "retire_solved_above": 0.9},
            "nothing scores the completions",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        check_teachers(config(**options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"teacher": "x"},
        SELF,
        SERVER,
        {"teacher": "maths=x,code=big@http://127.0.0.1:1/v1", "teacher_column": "topic"},
        {"teacher": "x", "advantage_estimator": "teacher"},
    ],
)
def test_what_makes_sense_is_not_refused(options):
    check_teachers(config(**options))


def test_each_teacher_has_its_kind_of_worker_or_its_server():
    made = config(teacher="maths=x,code=big@http://h/v1,me=self,start=initial", teacher_column="topic")
    assert made.logprob_roles == ("teacher:maths", "self_teacher", "teacher:start")
    assert made.teacher_folders == {"teacher:maths": "x"}
    assert made.teacher_servers["code"] == ("http://h/v1", "big")
    assert made.with_folders(lambda folder: f"/models/{folder}").startswith("maths=/models/x,code=big@http")
    assert config(teacher="x").with_folders(lambda folder: f"/models/{folder}") == "/models/x"


def test_the_estimator_that_ignores_rewards_needs_a_teacher_and_no_reward():
    with pytest.raises(ConfigurationError, match="learns from a teacher alone"):
        config(advantage_estimator="teacher").refuse_missing_teacher()
    made = config(advantage_estimator="teacher", teacher="x")
    made.refuse_missing_teacher()
    assert made.reward_fns == "unscored"
    assert config(advantage_estimator="teacher", teacher="x", reward_fns="format").reward_fns == "format"


def with_tokens(folder, change):
    """A copy of the tiny model whose tokenizer has other tokens."""
    shutil.copytree(TINY_MODEL, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer["model"]["vocab"])
    path.write_text(json.dumps(tokenizer))
    return folder


def test_a_teacher_with_another_vocabulary_is_refused_by_the_name_of_a_token(tmp_path):
    refuse_other_vocabulary(str(TINY_MODEL), str(TINY_MODEL))

    def swap(vocabulary):
        first, second = list(vocabulary)[10:12]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    other = with_tokens(tmp_path / "other", swap)
    with pytest.raises(
        ConfigurationError, match="has the id 1. here and has the id 1. there; a teacher must have"
    ):
        refuse_other_vocabulary(str(other), str(TINY_MODEL))


def question(**row) -> Question:
    return Question(np.array([1], np.int32), {"input": "2+2", **row}, "rows.jsonl:1")


def check(questions, **options):
    made = config(model_name_or_path=str(TINY_MODEL), max_generation_tokens=16, **options)
    tokenizer = load_tokenizer(TINY_MODEL)
    model = SimpleNamespace(renderer=PromptRenderer(tokenizer), context_tokens=128, images=None)
    return checked_teachers(made, model, questions), tokenizer


def test_the_demonstration_stands_in_the_prompt_of_the_teacher_alone():
    options = SELF | {"teacher_template": "{question}: {demonstration}!"}
    checked, tokenizer = check([question(solution="1+3"), question(solution="")], **options)
    with_it, without = checked.questions
    assert tokenizer.decode(with_it.teacher_token_ids) == "2+2: 1+3!" and with_it.token_ids.tolist() == [1]
    assert without.teacher_token_ids is None
    assert checked.longest_sequence == len(with_it.teacher_token_ids) + 16


def test_every_placeholder_is_replaced_and_none_that_a_row_spells():
    options = SELF | {"teacher_template": "{demonstration} {question} {demonstration}"}
    checked, tokenizer = check([question(solution="{question}")], **options)
    (teacher_prompt,) = [tokenizer.decode(row.teacher_token_ids) for row in checked.questions]
    assert teacher_prompt == "{question} 2+2 {question}"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "rows.jsonl:1: the column 'solution'.*holds None: it must be a text"),
        ({"solution": 4}, "holds 4: it must be a text"),
        (
            {"solution": "1" * 120},
            "the teacher's prompt has .* tokens with the demonstration; at most 112 fit",
        ),
        ({"solution": "1", "input_token_ids": [1]}, "into which no demonstration can be written"),
    ],
)
def test_a_row_whose_demonstration_cannot_be_read_is_refused_by_its_place(row, reason):
    with pytest.raises(ConfigurationError, match=reason):
        check(
            [question(**row)],
            **SELF,
        )


def test_every_row_must_name_a_teacher():
    options = {"teacher": "me=http://h/v1,you=http://g/v1", "teacher_column": "topic"}
    check([question(topic="me")], **options)
    with pytest.raises(ConfigurationError, match="rows.jsonl:1: the column 'topic'"):
        check([question(topic="art")], **options)


def test_a_folder_that_does_not_exist_is_refused():
    with pytest.raises(ConfigurationError, match="--teacher nowhere: there is no such folder"):
        check([question()], teacher="nowhere")
