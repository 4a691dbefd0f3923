"""Prompts of rows as people write them: right, or refused by name, never silently another prompt.

The reported rows are in `shared/data/reports`, which stands beside the checkout.
"""

import json
from functools import partial

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.experience.data_files import read_rows
from async_grpo.experience.dataset import questions_of
from tests.helpers import prompt_models
from tests.helpers.prompt_models import ASKED, BOS_TEXT, REPORTS, chat


@pytest.fixture(scope="module")
def make_tokenizer(tmp_path_factory):
    """Return a function that loads a fresh tokenizer of `MODELS`."""
    return partial(prompt_models.make_tokenizer, tmp_path_factory.mktemp("models"))


# Reported file -> its prompts (None: refused), and words of the refusal or of the warning
REPORTED = {
    ("d15_content_parts.jsonl", "tiny"): ([chat(("user", "What is 3+4?"))], ""),
    ("d14_content_none.jsonl", "tiny"): (None, "line 1: message 1 of 1: its content is null"),
    ("d55_content_int.jsonl", "tiny"): ([chat(("user", "34"))], ""),
    ("d17_last_assistant.jsonl", "tiny"): (None, "line 1: the last message is the assistant's"),
    ("d57_role_upper.jsonl", "tiny"): (None, "line 1: .* the role 'User' is unknown.*did you mean user?"),
    ("d19_sharegpt.jsonl", "tiny"): (None, "line 1: "),
    ("d23_gsm8k_raw.jsonl", "tiny"): (None, "line 1: "),
    ("d30_tools.jsonl", "tiny"): ([ASKED], "does not use the column tools"),
    ("d30_tools.jsonl", "usestools"): (
        ['[{"type": "function", "function": {"name": "add", "parameters": {}}}]' + ASKED],
        "",
    ),
    ("d32_surrogate.jsonl", "tiny"): (None, "line 1: prompt holds half of a surrogate pair"),
    ("d26_null_input.jsonl", "tiny"): (["What is 3+4?"], ""),
    ("d27_null_ids.jsonl", "tiny"): (["What is 3+4?"], ""),
    ("t1.jsonl", "addeos"): ([BOS_TEXT + ASKED], ""),
    ("t1.jsonl", "tiny"): ([BOS_TEXT + ASKED], ""),
    ("t1.jsonl", "bos"): ([BOS_TEXT + ASKED], ""),
    ("t2.jsonl", "bos"): ([BOS_TEXT + ASKED], ""),
    ("t2.jsonl", "nogenprompt"): (["<|im_start|>user\n3+4?<|im_end|>"], "ignores add_generation_prompt"),
    ("t2.jsonl", "concat"): ([ASKED], ""),
    ("t2.jsonl", "dicttemplate"): ([ASKED], ""),
    ("t2.jsonl", "dictnodefault"): (None, "line 1: .*multiple chat templates with no default"),
    ("t2.jsonl", "notemplate"): (None, "line 1: .*no chat template: give one with --chat-template"),
    ("t2.jsonl", "broken"): (None, "line 1: the model's chat template cannot be read, line [0-9]+: .*endfor"),
    ("t3.jsonl", "nosystem"): (None, "line 1: the model's chat template refuses these messages: System role"),
    ("t3.jsonl", "tiny"): ([chat(("system", "Add."), ("user", "3+4?"))], ""),
}


@pytest.mark.skipif(not REPORTS.is_dir(), reason="the reported rows are not beside this checkout")
@pytest.mark.parametrize(("file", "model"), REPORTED)
def test_a_reported_row_has_the_right_prompt_or_is_refused_by_line(file, model, make_tokenizer, caplog):
    prompts, words = REPORTED[file, model]
    tokenizer = make_tokenizer(model)
    rows = read_rows(REPORTS / "data" / file)
    if prompts is None:
        with pytest.raises(ConfigurationError, match=f"(?s){file}, {words}"):
            questions_of(rows, tokenizer, 900, 266)
        return
    questions = questions_of(rows, tokenizer, 900, 266)
    assert [tokenizer.decode(question.token_ids.tolist()) for question in questions] == prompts
    assert words in caplog.text and bool(words) == bool(caplog.records)


@pytest.mark.skipif(not REPORTS.is_dir(), reason="the reported rows are not beside this checkout")
def test_every_reported_row_about_prompts_is_in_the_table():
    kinds = {
        "content is no string",
        "rows of supervised data: the answer is in the messages",
        "messages without role",
        "column tools",
        "text that is no UTF-8",
        "null columns",
        "tokenizer that appends an end token",
        "text that spells the first token itself",
        "template that refuses the row",
    }
    reports = [json.loads(line) for line in (REPORTS / "data.jsonl").read_text().splitlines()]
    listed = {(report["file"], report["model"]) for report in reports if report["kind"] in kinds}
    assert listed <= REPORTED.keys()
