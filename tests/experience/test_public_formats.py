"""Files in the schemas of public data sets and of other libraries are read as they are."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from async_grpo.data import TINY_MODEL
from async_grpo.experience.data_config import DataConfig
from async_grpo.experience.data_files import read_rows
from async_grpo.experience.dataset import questions_of
from async_grpo.rewards.builtin.answers import gold_answer

FOLDER = Path(__file__).parents[1] / "data" / "formats"
SUM, SQUARE = "What is 3 + 4?", "What is 5 * 5?"
OF_ANSWER = ["7", "25"]
GROUND_TRUTH = {"prompt_column": "prompt", "answer_column": "reward_model.ground_truth"}


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def system(text: str) -> list[dict]:
    return [{"role": "system", "content": text}]


# File -> options, prompts (messages, or a text without a template), answers as rewards read them. A text that ends in
# "..." is the beginning of the message
FORMATS = {
    "verl.jsonl": (GROUND_TRUTH, [user("Anna has 3 pens..."), user("What is 6 * 7?...")], ["7", "42"]),
    "dapo.jsonl": (
        GROUND_TRUTH,
        [user("Solve the following..."), user("Solve the following...")],
        ["7", "-4"],
    ),
    "deepscaler.json": (
        {"prompt_column": "problem"},
        [
            user("The sum of two numbers is $7$ and one is $3$. Find the other."),
            user("Simplify $\\frac{2}{4}$."),
        ],
        ["4", "\\frac{1}{2}"],
    ),
    "openrlhf.jsonl": (
        {"prompt_column": "context_messages", "answer_column": "label"},
        [user(SUM), system("Be brief.") + user(SQUARE)],
        OF_ANSWER,
    ),
    "openrlhf_input.jsonl": (
        {"prompt_column": "input", "answer_column": "label"},
        [user(SUM), user(SQUARE)],
        OF_ANSWER,
    ),
    "trl.jsonl": ({}, [SUM, SQUARE], OF_ANSWER),
    "trl_conversational.jsonl": (
        {"answer_column": "solution"},
        [user(SUM), system("Be brief.") + user(SQUARE)],
        OF_ANSWER,
    ),
    "open_r1.jsonl": ({"prompt_column": "problem"}, [user(SUM), user(SQUARE)], OF_ANSWER),
    "gsm8k.jsonl": (
        {"prompt_column": "question"},
        [
            user("Anna has 3 pens and buys 4. How many are there now?"),
            user("A box holds 1,000 nuts. How many do two boxes hold?"),
        ],
        ["7", "2000"],
    ),
    "nemo_skills.jsonl": (
        {"prompt_column": "problem", "answer_column": "expected_answer"},
        [user(SUM), user(SQUARE)],
        OF_ANSWER,
    ),
    "nemo_gym.jsonl": (
        {"prompt_column": "responses_create_params.input", "answer_column": "expected_answer"},
        [system("Put the answer into \\boxed{}.") + user(SUM), user(SQUARE)],
        OF_ANSWER,
    ),
    "sharegpt_system.json": (
        {"prompt_column": "conversations", "answer_column": "conversations.-1.value"},
        [
            user(SUM),
            system("Be brief.") + user(SQUARE),
            [*user("Hi."), {"role": "assistant", "content": "Hello."}, *user("What is 2 + 2?")],
        ],
        [*OF_ANSWER, "4"],
    ),
    "sharegpt.json": (
        {"prompt_column": "conversations.0.value", "answer_column": "conversations.1.value"},
        [user(SUM), user(SQUARE)],
        OF_ANSWER,
    ),
    "questions.csv": (
        {"prompt_column": "question"},
        [user("What is 3 + 4, if you can?"), user('Two\r\nlines "quoted"')],
        ["007", "NA"],
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_MODEL)


def are_equal(prompt: object, expected: list[dict] | str) -> bool:
    if isinstance(expected, str) or not expected[-1]["content"].endswith("..."):
        return prompt == expected
    (message,) = prompt
    (expected_message,) = expected
    return message["role"] == expected_message["role"] and message["content"].startswith(
        expected_message["content"].removesuffix("...")
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_public_format_is_read_as_it_is(name, tokenizer):
    options, prompts, answers = FORMATS[name]
    rows = read_rows(FOLDER / name, DataConfig(**options).column_map)
    questions = questions_of(rows, tokenizer, max_prompt_tokens=2000, vocab_size=len(tokenizer))
    assert len(questions) == len(prompts)
    for question, prompt, answer in zip(questions, prompts, answers, strict=True):
        row = question.row
        if isinstance(prompt, str):
            assert row["prompt"] == prompt and "messages" not in row
            expected_text = prompt
        else:
            messages = row.get("messages", row.get("prompt"))
            assert are_equal(messages, prompt)
            expected_text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        assert tokenizer.decode(question.token_ids.tolist()) == expected_text
        assert gold_answer(row, is_latex=name != "questions.csv") == answer


WITHOUT_OPTIONS = {
    "deepscaler.json": "row 1: a row needs .* --prompt-column problem$",
    "gsm8k.jsonl": "line 1: a row needs .* These look like GSM8K's rows: --prompt-column question$",
    "nemo_gym.jsonl": "line 1: .* --prompt-column responses_create_params.input --answer-column expected_answer$",
    "nemo_skills.jsonl": "line 1: .* --prompt-column problem --answer-column expected_answer$",
    "openrlhf.jsonl": "line 1: .* --prompt-column context_messages --answer-column label$",
    "questions.csv": "line 2: .* --prompt-column question$",
    "sharegpt.json": "row 1: .* --prompt-column conversations --answer-column conversations.-1.value$",
}


@pytest.mark.parametrize("name", WITHOUT_OPTIONS)
def test_without_options_the_error_proposes_those_that_read_the_file(name):
    from async_grpo.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match=WITHOUT_OPTIONS[name]):
        list(read_rows(FOLDER / name))


WARNINGS = {
    "verl.jsonl": "these look like verl's rows: --answer-column reward_model.ground_truth",
    "dapo.jsonl": "these look like verl's rows: --answer-column reward_model.ground_truth",
    "openrlhf_input.jsonl": "these look like OpenRLHF's rows: --answer-column label",
    "trl_conversational.jsonl": "these look like TRL's rows: --answer-column solution",
    "trl.jsonl": "",
}


@pytest.mark.parametrize("name", WARNINGS)
def test_rows_with_a_prompt_whose_answer_has_another_name_are_warned_of(name, caplog):
    list(read_rows(FOLDER / name))
    assert WARNINGS[name] in caplog.text and bool(WARNINGS[name]) == bool(caplog.text)
