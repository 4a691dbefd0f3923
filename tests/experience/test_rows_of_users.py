"""Rows as people write them: those that would become another prompt are refused or named, and their neighbours are read."""

import json
import logging
import re

import pytest
from prompt_models import make_tokenizer

from async_grpo.errors import ConfigurationError
from async_grpo.experience.data_files import read_rows
from async_grpo.experience.dataset import questions_of
from async_grpo.experience.prompt_options import PromptOptions
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.experience.row_columns import ColumnMap

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3\n"
ASK = {"role": "user", "content": "3+4?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLED = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}]


def conversation(*messages, **columns):
    return {"messages": list(messages), "answer": "7", **columns}


def prompts(folder, content, name="rows.jsonl", prompt=(), answer=(), **options):
    """Return the texts of a file's prompts. The content is the text of the file, its bytes, or rows."""
    path = folder / name
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    tokenizer = make_tokenizer(folder, options.pop("model", "tiny"))
    renderer = PromptRenderer(tokenizer, PromptOptions(**options))
    rows = read_rows(path, ColumnMap(prompt=prompt, answer=answer))
    questions = questions_of(rows, tokenizer, 900, 266, renderer)
    return [tokenizer.decode(question.token_ids.tolist()) for question in questions]


REPEATED = {
    "a key of the row": (
        '{"prompt": "a", "prompt": "b"}',
        "the key 'prompt' is there 2 times, with 'a' and 'b'",
    ),
    "the same value": ('{"prompt": "a", "answer": "7", "answer": "7"}', "the key 'answer' is there 2 times"),
    "a key of a message": (
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        "the key 'content' is there 2 times",
    ),
    "three values": (
        '{"prompt": "a", "x": 1, "x": 2, "x": 1}',
        "the key 'x' is there 3 times, with 1 and 2 and 1",
    ),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_a_key_that_is_there_twice_is_refused(tmp_path, kind):
    content, words = REPEATED[kind]
    with pytest.raises(ConfigurationError, match=f"rows.jsonl, line 1: {words}"):
        prompts(tmp_path, content)
    with pytest.raises(ConfigurationError, match=f"rows.jsonl, line 2: {words}"):
        prompts(tmp_path, '{"prompt": "a"}\n' + content)
    with pytest.raises(ConfigurationError, match=f"rows.json: {words}"):
        prompts(tmp_path, f"[{content}]", "rows.json")


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "a", "Prompt": "a"}',
        '{"prompt": "a", "info": {"prompt": "b"}}',
        '{"prompt": "a"}\n{"prompt": "a"}',
        '{"prompt": "a", "items": [{"x": 1}, {"x": 2}]}',
    ],
)
def test_a_key_that_is_there_once_in_each_object_is_read(tmp_path, content):
    assert set(prompts(tmp_path, content)) == {"a"}


OTHER_CONTENTS = {
    "a pointer of git-lfs": (LFS, "rows.jsonl", "no rows, but a pointer of git-lfs"),
    "such a pointer as CSV": (LFS, "rows.csv", "no rows, but a pointer of git-lfs"),
    "such a pointer as JSON": (LFS, "rows.json", "no rows, but a pointer of git-lfs"),
    "such a pointer as Parquet": (LFS, "rows.parquet", "no rows, but a pointer of git-lfs"),
    "a page": ("<!DOCTYPE html>\n<html>", "rows.jsonl", "no rows, but a page of the web"),
    "xz": (b"\xfd7zXZ\0\0", "rows.jsonl", "packed by xz: unpack it first"),
    "bzip2": (b"BZh91AY&SY", "rows.jsonl", "packed by bzip2"),
    "lines of CR": ('{"prompt": "a"}\r{"prompt": "b"}\r', "rows.jsonl", "lines end with CR alone"),
    "a long number": (
        f'{{"prompt": "a", "answer": {"9" * 5000}}}',
        "rows.jsonl",
        "write it as a text, in double",
    ),
    "such a number in JSON": (
        f'[{{"prompt": "a", "answer": {"9" * 5000}}}]',
        "rows.json",
        "write it as a text",
    ),
    "nothing as JSON": (" \n", "rows.json", "not JSON, because it is empty"),
    "bars": ("prompt|answer\na|7\n", "rows.csv", "'prompt.answer', probably because bars separate"),
    "semicolons": ("prompt;answer\na;7\n", "rows.csv", "probably because semicolons separate"),
    "commas under the name of tabs": ("prompt,answer\na,7\n", "rows.tsv", "probably because commas separate"),
}


@pytest.mark.parametrize("kind", OTHER_CONTENTS)
def test_a_file_with_another_content_is_refused_by_its_name(tmp_path, kind):
    content, name, words = OTHER_CONTENTS[kind]
    with pytest.raises(ConfigurationError, match=words):
        prompts(tmp_path, content, name)


NEIGHBORS_OF_CONTENTS = {
    "a prompt about a page": ('{"prompt": "<!DOCTYPE html>"}', "rows.jsonl", ["<!DOCTYPE html>"]),
    "CR in a text": (json.dumps({"prompt": "a\rb"}), "rows.jsonl", ["a\rb"]),
    "CR before the end": ('{"prompt": "a"}\r\n', "rows.jsonl", ["a"]),
    "4,000 digits": (f'{{"prompt": "a", "answer": {"9" * 4000}}}', "rows.jsonl", ["a"]),
    "a column with bars in its cells": ("prompt\na|b\n", "rows.csv", ["a|b"]),
    "commas within tabs": ("prompt\tanswer\na,b\t7\n", "rows.tsv", ["a,b"]),
    "an object alone": ('{"prompt": "a"}', "rows.json", ["a"]),
}


@pytest.mark.parametrize("kind", NEIGHBORS_OF_CONTENTS)
def test_a_file_that_looks_like_another_is_read(tmp_path, kind):
    content, name, expected = NEIGHBORS_OF_CONTENTS[kind]
    assert prompts(tmp_path, content, name) == expected


WRONG_ROWS = {
    "a message as an object in a text": (
        {"prompt": json.dumps(ASK)},
        "prompt: the text is a JSON object with messages",
    ),
    "messages within an object in a text": (
        {"prompt": json.dumps({"messages": [ASK]})},
        "prompt: the text is a JSON object with messages",
    ),
    "token ids in prompt": ({"prompt": [1, 2]}, "token ids belong into the column input_token_ids"),
    "an older call": (
        conversation(ASK, {"role": "assistant", "content": "", "function_call": CALL["function"]}, ASK),
        "message 2 of 3: it has a function_call, the older form of a tool call.*write tool_calls",
    ),
    "an older call without content": (
        conversation(ASK, {"role": "assistant", "content": None, "function_call": CALL["function"]}, ASK),
        "it has a function_call",
    ),
    "a call without a name": (
        conversation(ASK, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, ASK),
        "message 2 of 3: tool_calls has .*a call is",
    ),
    "an image": (
        conversation({"role": "user", "content": "<image>What?"}, images=["a.png"]),
        "<image> .* images",
    ),
    "a video": ({"prompt": "<video> What?", "video": "a.mp4"}, "<video> .* the column video"),
    "Alpaca without an input": ({"instruction": "Add", "input": ""}, "--prompt-column instruction"),
    "columns with capitals": (
        {"ID": 1, "Problem": "3+4?", "Solution": "7", "Answer": 7},
        "--prompt-column Problem --answer-column Answer",
    ),
    "GSM8K with capitals": (
        {"Question": "3+4?", "Answer": 7},
        "--prompt-column Question --answer-column Answer",
    ),
    "a prompt with a capital": ({"Prompt": "3+4?"}, "If Prompt is the question: --prompt-column Prompt"),
    "a column of any name": ({"user_text": "3+4?"}, "--prompt-column with its name"),
}


@pytest.mark.parametrize("kind", WRONG_ROWS)
def test_a_row_that_would_be_another_prompt_is_refused(tmp_path, kind):
    row, words = WRONG_ROWS[kind]
    with pytest.raises(ConfigurationError, match=words):
        prompts(tmp_path, row)


RIGHT_ROWS = {
    "JSON in a question": ({"prompt": '{"a": 1} is what?'}, '{"a": 1} is what?'),
    "an object without messages": ({"prompt": '{"content": "a"}'}, '{"content": "a"}'),
    "messages in a text": ({"prompt": json.dumps([ASK])}, "3+4?"),
    "no system text": (conversation({"role": "system", "content": ""}, ASK), "3+4?"),
    "no text beside calls": (conversation(*CALLED), "3+4?"),
    "no text of a tool": (conversation(*CALLED[:2], {"role": "tool", "content": ""}), "3+4?"),
    "no older call": (conversation({**ASK, "function_call": None}), "3+4?"),
    "a word for an image without one": ({"prompt": "What is <image> in HTML?"}, "<image>"),
    "no images": (conversation({"role": "user", "content": "<image>?"}, images=[], image=None), "<image>?"),
}


@pytest.mark.parametrize("kind", RIGHT_ROWS)
def test_a_row_that_looks_like_a_wrong_one_is_read(tmp_path, kind):
    row, text = RIGHT_ROWS[kind]
    assert text in prompts(tmp_path, row)[0]


WARNINGS = {
    "a column of the system's text": (conversation(ASK, system="Be brief."), "the column system is not part"),
    "the same by another name": (
        conversation(ASK, system_prompt="Be brief."),
        "the column system_prompt is not",
    ),
    "a text to read": (
        {"prompt": "Who?", "context": "Ann won."},
        "the column context is not part of the prompt",
    ),
    "choices": (
        {"prompt": "Who?", "choices": ["Ann", "Bob"]},
        "the column choices is not part of the prompt",
    ),
    "an image without its place": ({"prompt": "Who?", "image": "a.png"}, "the column image is not part"),
    "a question with a capital": ({"prompt": "Go", "Question": "3+4?"}, "the column Question is not part"),
    "an answer with a capital": ({"prompt": "Go", "Answer": "7"}, "--answer-column Answer"),
    "Tulu's answer": ({"messages": [ASK], "ground_truth": "7"}, "Tulu's rows: --answer-column ground_truth"),
    "a template that was applied": (
        conversation({"role": "user", "content": "<|im_start|>user\n3+4?"}),
        "a message spells the control token <.im_start.>.*--prompt-as text",
    ),
}
SILENT = {
    "the system's text is in the messages": conversation(
        {"role": "system", "content": "Be  brief."}, ASK, system="Be brief."
    ),
    "the text to read is in the prompt": {"prompt": "Ann won. Who?", "context": "Ann won.", "answer": "7"},
    "the choices are in the prompt": {"prompt": "Ann or Bob?", "choices": ["Ann", "Bob"], "answer": "7"},
    "nothing there": {"prompt": "Who?", "context": "", "choices": [], "system": None, "answer": "7"},
    "options that are numbers": {"prompt": "Who?", "options": {"seed": 3}, "answer": "7"},
    "tags that are no control tokens": conversation({"role": "user", "content": "Think in <think> tags."}),
    "a text that is the whole prompt": {"prompt": "<|im_start|>user\n3+4?<|im_end|>", "answer": "7"},
}


@pytest.mark.parametrize("kind", WARNINGS)
def test_a_column_that_is_not_in_the_prompt_is_named_at_the_start(tmp_path, caplog, kind):
    row, words = WARNINGS[kind]
    with caplog.at_level(logging.WARNING, "async_grpo"):
        prompts(tmp_path, row)
    assert re.search(words, caplog.text)


@pytest.mark.parametrize("kind", SILENT)
def test_a_column_that_is_in_the_prompt_is_not_named(tmp_path, caplog, kind):
    with caplog.at_level(logging.WARNING, "async_grpo"):
        prompts(tmp_path, SILENT[kind])
    assert not caplog.text


def test_one_column_cannot_be_the_prompt_and_the_answer():
    with pytest.raises(ConfigurationError, match="both name question: the prompt would be the answer"):
        ColumnMap(prompt=("question",), answer=("label", "question"))
    ColumnMap(prompt=("turns.0",), answer=("turns.-1",))


WRITES_CALLS = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


@pytest.mark.parametrize(
    ("function", "written"),
    [
        ({"name": "now"}, "now{}"),
        ({"name": "now", "arguments": None}, "now{}"),
        ({"name": "now", "arguments": ""}, "now{}"),
        ({"name": "now", "arguments": "{}"}, "now{}"),
        ({"name": "now", "arguments": {}}, "now{}"),
        ({"name": "add", "arguments": '{"a": 3}'}, 'add{"a": 3}'),
        ({"name": "add", "arguments": "{a: 3"}, 'add"{a: 3"'),
        ({"name": "", "arguments": {"a": 3}}, '{"a": 3}'),
    ],
)
def test_a_call_without_arguments_has_an_empty_object_of_them(tmp_path, function, written):
    template = tmp_path / "calls.jinja"
    template.write_text(WRITES_CALLS)
    row = conversation(
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "7"},
    )
    assert prompts(tmp_path, row, chat_template=str(template)) == [f"3+4?{written}7A"]


COUNTS_LETTERS = (
    "{% for m in messages %}{% if m.content is none or m.content | length == 0 %}-{% endif %}"
    "{{ m.content | length }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def test_a_template_that_counts_the_letters_of_no_content_gets_an_empty_text(tmp_path):
    template = tmp_path / "counts.jinja"
    template.write_text(COUNTS_LETTERS.replace("m.content is none or ", ""))
    assert prompts(tmp_path, conversation(*CALLED), chat_template=str(template)) == ["43+4?-017A"]
    template.write_text("{% if messages[0].content is none %}{% endif %}" + COUNTS_LETTERS)
    assert prompts(tmp_path, conversation(*CALLED), chat_template=str(template)) == ["43+4?-017A"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ("x=null", "would take it for the text 'null': write x=none"),
        ('{"x": 1, "x": 2}', "the key 'x' is there 2 times"),
    ],
)
def test_variables_of_a_template_that_would_be_misread_are_refused(tmp_path, variables, words):
    template = tmp_path / "variable.jinja"
    template.write_text("{{ x }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigurationError, match=words):
        prompts(tmp_path, conversation(ASK), chat_template=str(template), chat_template_kwargs=variables)


@pytest.mark.parametrize(
    ("variables", "text"),
    [("x=none", "None"), ('{"x": null}', "None"), ("x=nil", "nil"), ('{"x": {"x": 1}}', "1")],
)
def test_variables_of_a_template_that_look_like_these_are_read(tmp_path, variables, text):
    template = tmp_path / "variable.jinja"
    template.write_text("{{ x }}{% for m in messages %}{{ m.content }}{% endfor %}")
    (prompt,) = prompts(
        tmp_path, conversation(ASK), chat_template=str(template), chat_template_kwargs=variables
    )
    assert text in prompt


def test_a_template_that_is_given_as_a_text_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigurationError, match="must be the name of a file: write the template into one"):
        PromptOptions(chat_template="{% for m in messages %}{% endfor %}").read_template()
    with pytest.raises(ConfigurationError, match="No such file or directory: '[^']*'$"):
        PromptOptions(chat_template=str(tmp_path / "none.jinja")).read_template()


DROPPED = {
    "a task and its text": (
        {"prompt": "Solve:", "input": "3 4"},
        "column prompt .* which is the column input",
    ),
    "messages and a text": (
        conversation(ASK, input="7 + 8?"),
        "column input .* which is the column messages",
    ),
    "messages and a prompt": (conversation(ASK, prompt="7 + 8?"), "column prompt .* the column messages"),
}


@pytest.mark.parametrize("kind", DROPPED)
def test_a_text_that_is_not_part_of_the_prompt_is_named(tmp_path, caplog, kind):
    row, words = DROPPED[kind]
    prompts(tmp_path, row)
    assert re.search(f"rows.jsonl, line 1: the text in the {words}", caplog.text)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Solve:", "input": ""},
        {"prompt": "3 4", "input": "Solve: 3 4"},
        conversation(ASK, prompt="3+4?"),
        conversation(ASK, prompt=[ASK]),
        {"input_token_ids": [51, 43], "prompt": "3+4?"},
    ],
)
def test_a_text_that_the_prompt_contains_is_not_named(tmp_path, caplog, row):
    prompts(tmp_path, row)
    assert "is not part of the prompt" not in caplog.text


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": ""}]])
def test_messages_without_text_are_refused(tmp_path, content):
    empty = {"role": "user", "content": content}
    with pytest.raises(
        ConfigurationError, match="line 1: the messages have no text, so there is no question"
    ):
        prompts(tmp_path, conversation({"role": "system", "content": " "}, empty))
    assert prompts(tmp_path, conversation(ASK, {"role": "tool", "content": ""}))
    assert prompts(tmp_path, conversation({"role": "system", "content": "What is 3+4?"}, empty))


def test_a_row_on_several_lines_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigurationError, match="line 1: not JSON .* Each row must stand on one line"):
        prompts(tmp_path, json.dumps({"prompt": "a"}, indent=1))


@pytest.mark.parametrize("name", ["documents", "functions"])
def test_columns_of_documents_and_functions_that_are_not_read_are_named(tmp_path, caplog, name):
    prompts(tmp_path, conversation(ASK, **{name: [{"name": "add"}]}))
    assert f"the column {name} is not part of the prompt" in caplog.text
