"""Reading the data file: every mistake is an error with file and line, and the cursor misses nothing."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError
from async_grpo.experience.data_files import read_rows
from async_grpo.experience.dataset import PromptCursor, Question, questions_of


class Letters:
    """A tokenizer of single letters."""

    chat_template: str | None = "yes"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids) -> str:
        return "".join(chr(int(i) + ord("a")) for i in ids)

    def apply_chat_template(self, messages, **_) -> str:
        return "".join(message["content"] for message in messages) + "z"


def load(tmp_path, *rows, tokenizer=None):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return questions_of(read_rows(path), tokenizer or Letters(), max_prompt_tokens=8, vocab_size=26)


def test_a_prompt_comes_from_token_ids_or_messages_or_text_in_this_order(tmp_path):
    by_ids, by_messages, by_prompt, by_text = load(
        tmp_path,
        {"input_token_ids": [0, 1], "input": "given", "answer": 3},
        {"messages": [{"role": "user", "content": "ab"}], "answer": "x"},
        {"prompt": [{"role": "user", "content": "cd"}]},
        {"input": "ef"},
    )
    assert by_ids.token_ids.tolist() == [0, 1] and by_ids.row["input"] == "given"
    assert by_messages.token_ids.tolist() == [0, 1, 25] and by_messages.row["input"] == "abz"
    assert by_prompt.token_ids.tolist() == [2, 3, 25] and by_text.token_ids.tolist() == [4, 5]
    assert by_ids.token_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1, 2]", "line 2: a row must be an object, not list"),
        ({"answer": 1}, "line 2: a row needs input_token_ids, messages, or prompt/input text"),
        ({"input_token_ids": ["a"]}, "line 2: input_token_ids must be a list of integers"),
        ({"input_token_ids": []}, "line 2: a prompt of 0 tokens, because it is empty: write the question"),
        ({"input": "abcdefghi"}, "line 2: a prompt of 9 tokens; between 1 and 8"),
        ({"input_token_ids": [26]}, "line 2: token id 26 is outside the model's vocabulary of 26"),
        ({"input_token_ids": [-1]}, "line 2: token id"),
        ({"input_token_ids": [2**40]}, "line 2: token id 1099511627776 is outside"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, row, message):
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path, {"input": "ok"}, row)


def test_messages_without_a_chat_template_are_refused(tmp_path):
    bare = Letters()
    bare.chat_template = None
    with pytest.raises(ConfigurationError, match="line 1: a row of messages, but .* no chat template"):
        load(tmp_path, {"messages": [{"role": "user", "content": "ab"}]}, tokenizer=bare)


def test_a_missing_and_an_empty_file_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="there is no such file"):
        questions_of(read_rows(tmp_path / "none.jsonl"), Letters(), 8, 26)
    with pytest.raises(ConfigurationError, match="holds no questions"):
        load(tmp_path, "")


@given(count=st.integers(1, 12), drawn=st.integers(0, 40), seed=st.integers(0, 99))
def test_the_cursor_draws_every_question_once_per_epoch(count, drawn, seed):
    questions = [Question(np.array([i], np.int32), {}) for i in range(count)]
    cursor = PromptCursor(questions, seed)
    prompts = [next(cursor) for _ in range(drawn + count)]
    assert [prompt.ordinal for prompt in prompts] == list(range(drawn + count))
    for epoch in range((drawn + count) // count):
        ids = [int(p.token_ids[0]) for p in prompts[epoch * count : (epoch + 1) * count]]
        assert sorted(ids) == list(range(count))


def test_every_epoch_has_an_order_of_its_own_which_the_seed_decides():
    questions = [Question(np.array([i], np.int32), {}) for i in range(30)]

    def orders(seed: int) -> list[tuple[int, ...]]:
        cursor = PromptCursor(questions, seed)
        drawn = [int(next(cursor).token_ids[0]) for _ in range(4 * 30)]
        return [tuple(drawn[epoch * 30 : (epoch + 1) * 30]) for epoch in range(4)]

    # two random orders of 30 are the same in one of 30! draws
    assert len({*orders(1), *orders(2), tuple(range(30))}) == 9
    assert orders(1) == orders(1)
