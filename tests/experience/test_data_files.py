"""Columns by `--prompt-column` and `--answer-column`, and files of rows as JSON and as tables of text."""

import json
from pathlib import Path

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.experience import data_files
from async_grpo.experience.data_config import DataConfig
from async_grpo.experience.data_files import read_rows

USER = [{"role": "user", "content": "a"}]
PROMPT = {"messages": USER, "prompt": USER}


def read(path: Path, content: str | bytes, **options) -> list[dict]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return rows_of(path, **options)


def rows_of(path: Path, **options) -> list[dict]:
    return [row for _, row in read_rows(path, DataConfig(**options).column_map)]


# --- columns ---

# Row, options, and the row that the run gets
MAPPED = {
    "a name": ({"problem": "a"}, {"prompt_column": "problem"}, {"problem": "a"} | PROMPT),
    "a text as it is": (
        {"problem": "a"},
        {"prompt_column": "problem", "prompt_as": "text"},
        {"problem": "a", "input": "a"},
    ),
    "messages": ({"chat": USER}, {"prompt_column": "chat"}, {"chat": USER} | PROMPT),
    "messages as text": (
        {"chat": json.dumps(USER)},
        {"prompt_column": "chat"},
        {"chat": json.dumps(USER)} | PROMPT,
    ),
    "token ids": ({"ids": [5, 6]}, {"prompt_column": "ids"}, {"ids": [5, 6], "input_token_ids": [5, 6]}),
    "a column that others would hide": (
        {"input_token_ids": [1], "messages": [], "prompt": "x", "input": "y", "problem": "a"},
        {"prompt_column": "problem"},
        {"problem": "a"} | PROMPT,
    ),
    "prompt instead of input": ({"prompt": "a", "input": "x"}, {"prompt_column": "prompt"}, PROMPT),
    "input instead of prompt": ({"prompt": "x", "input": "a"}, {"prompt_column": "input"}, PROMPT),
    "an object": ({"q": {"text": "a"}}, {"prompt_column": "q.text"}, {"q": {"text": "a"}} | PROMPT),
    "a place from the end of a list": (
        {"q": ["x", "a"]},
        {"prompt_column": "q.-1"},
        {"q": ["x", "a"]} | PROMPT,
    ),
    "a place in a list": ({"q": ["x", "a"]}, {"prompt_column": "q.1"}, {"q": ["x", "a"]} | PROMPT),
    "a name with a dot": ({"q.text": "a"}, {"prompt_column": "q.text"}, {"q.text": "a"} | PROMPT),
    "the second of two names": ({"q": "a"}, {"prompt_column": "p, q"}, {"q": "a"} | PROMPT),
    "the second where the first is null": (
        {"p": None, "q": "a"},
        {"prompt_column": "p,q"},
        {"p": None, "q": "a"} | PROMPT,
    ),
    "an answer": ({"input": "a", "label": "7"}, {"answer_column": "label"}, {"answer": "7"}),
    "an answer instead of answer": (
        {"input": "a", "label": "7", "answer": "8"},
        {"answer_column": "label"},
        {"answer": "7"},
    ),
    "an answer in an object": (
        {"input": "a", "reward_model": {"ground_truth": "7"}},
        {"answer_column": "reward_model.ground_truth"},
        {"answer": "7"},
    ),
    "an answer in a list in an object": (
        {"input": "a", "reward_model": {"ground_truth": {"target": ["7", "8"]}}},
        {"answer_column": "reward_model.ground_truth.target.1"},
        {"answer": "8"},
    ),
    "an answer in JSON text": (
        {"input": "a", "info": '{"ground_truth": "7"}'},
        {"answer_column": "info.ground_truth"},
        {"answer": "7"},
    ),
    "an answer of zero": ({"input": "a", "label": 0}, {"answer_column": "label"}, {"answer": 0}),
    "an answer that is a list": ({"input": "a", "label": [1]}, {"answer_column": "label"}, {"answer": [1]}),
    "an empty answer": ({"input": "a", "label": ""}, {"answer_column": "label"}, {"answer": ""}),
}


@pytest.mark.parametrize("kind", MAPPED)
def test_options_name_the_columns_of_prompt_and_answer(tmp_path, kind):
    row, options, expected = MAPPED[kind]
    if "prompt_column" not in options:  # all other columns stay
        expected = row | expected
    assert read(tmp_path / "data.jsonl", json.dumps(row), **options) == [expected]


NOT_MAPPED = {
    "no such column": (
        {"question": "a", "answer": "7"},
        {"prompt_column": "problem"},
        "--prompt-column problem: problem is not in this row, which has question, answer",
    ),
    "no such part": (
        {"input": "a", "reward_model": {"style": "rule"}},
        {"answer_column": "reward_model.ground_truth"},
        "reward_model.ground_truth is not in this row, which has style in reward_model",
    ),
    "no such place": (
        {"q": ["a"]},
        {"prompt_column": "q.3"},
        "q.3 is not in this row, which has a list of 1 in q",
    ),
    "a text without parts": (
        {"input": "a", "answer": "7"},
        {"answer_column": "answer.value"},
        "answer.value is not in this row, which has '7' in answer",
    ),
    "a null": ({"problem": None}, {"prompt_column": "problem"}, "problem is null in this row"),
    "the NaN of pandas": (
        {"problem": float("nan")},
        {"prompt_column": "problem"},
        "problem is NaN in this row",
    ),
    "a null answer": (
        {"input": "a", "label": None},
        {"answer_column": "label"},
        "--answer-column label: label is null",
    ),
    "an answer that is none": (
        {"input": "a", "label": float("inf")},
        {"answer_column": "label"},
        "answer is Inf",
    ),
    "several names": ({"a": "x"}, {"prompt_column": "p,q"}, "--prompt-column p,q: q is not in this row"),
    "a system message of ShareGPT": (
        {"turns": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]},
        {"prompt_column": "turns.0.value"},
        "turns.0.value: this message is from 'system', so it is no question: name the column of the whole",
    ),
    "an answer of ShareGPT": (
        {"turns": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt_column": "turns.2.value,turns.1.value"},
        "turns.1.value: this message is from 'gpt'",
    ),
    "an empty text": ({"problem": " \n"}, {"prompt_column": "problem"}, "the text there is empty"),
    "an empty list": ({"chat": []}, {"prompt_column": "chat"}, "a prompt must be a text, a list of messages"),
    "a number": (
        {"problem": 34},
        {"prompt_column": "problem"},
        "a list of token ids, not 34; if a number is the question, write it as a text",
    ),
    "one message": ({"chat": USER[0]}, {"prompt_column": "chat"}, "a list of token ids, not {'role'"),
    "a list of texts": ({"chat": ["a", "b"]}, {"prompt_column": "chat"}, "a list of token ids, not .'a'"),
    "an answer alone of ShareGPT": (
        {"conversations": [{"from": "gpt", "value": "a"}]},
        {"prompt_column": "conversations"},
        "--prompt-column conversations: the only message is an answer",
    ),
    "a question of ShareGPT as the answer": (
        {"talk": [{"from": "human", "value": "q"}] * 2},
        {"prompt_column": "talk", "answer_column": "talk.-1.value"},
        "--answer-column talk.-1.value: this message is from 'human', so it is no answer",
    ),
    "a place before the first": (
        {"q": ["x"]},
        {"prompt_column": "q.-2"},
        "q.-2 is not in this row, which has a list of 1 in q",
    ),
    "a text that is no number, as a question": (
        {"problem": True},
        {"prompt_column": "problem"},
        "a list of token ids, not True$",
    ),
    "messages that Python printed": (
        {"chat": str(USER)},
        {"prompt_column": "chat"},
        "--prompt-column chat: the text is a list of messages as Python prints it",
    ),
}


@pytest.mark.parametrize("kind", NOT_MAPPED)
def test_a_row_without_the_named_column_is_refused_by_line(tmp_path, kind):
    row, options, message = NOT_MAPPED[kind]
    good = {"problem": "a", "chat": USER, "conversations": USER, "q": list("abcd"), "p": "x", "input": "a"}
    good |= {"turns": [{"from": "human", "value": "q"}] * 2}
    good |= {"talk": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    good |= {"label": "7", "reward_model": {"ground_truth": "7"}, "answer": {"value": "7"}}
    text = json.dumps(good) + "\n\n" + json.dumps(row) + "\n"
    with pytest.raises(ConfigurationError, match=f"data.jsonl, line 3: .*{message}"):
        read(tmp_path / "data.jsonl", text, **options)


@pytest.mark.parametrize("column", ["", " ", ",", "a,,b", ".a", "a.", "a..b"])
def test_an_option_that_names_no_column_is_refused(column):
    with pytest.raises(ConfigurationError, match="give the name of a column"):
        DataConfig(answer_column=column)


# First row -> the columns that are named in a warning
UNREAD = {
    "an instruction beside its input": ({"instruction": "Add.", "input": "3+4"}, ["instruction"]),
    "a question beside another prompt": ({"question": "3+4?", "prompt": "Hello"}, ["question"]),
    "a conversation beside a prompt": (
        {"conversations": [{"from": "human", "value": "b"}], "messages": USER},
        ["conversations"],
    ),
    "two of them": ({"question": "x", "problem": "y", "input": "a"}, ["question", "problem"]),
    "messages of OpenRLHF": ({"context_messages": USER, "input": "b"}, ["context_messages"]),
    # Neighbours
    "a question that the prompt holds": ({"question": "3+4?", "prompt": "3+4?\nThink."}, []),
    "a question in a message": (
        {"problem": "3 +\n 4?", "messages": [{"role": "user", "content": "Q: 3 + 4? Go."}]},
        [],
    ),
    "a null": ({"question": None, "input": "a"}, []),
    "an empty text": ({"instruction": "", "input": "a"}, []),
    "token ids": ({"question": "3+4?", "input_token_ids": [1, 2]}, []),
    "a number": ({"problem": 3, "input": "a"}, []),
    "other columns": ({"solution": "x", "source": "y", "input": "a"}, []),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_columns_that_look_like_a_prompt_and_are_not_read_are_named(tmp_path, caplog, kind):
    row, names = UNREAD[kind]
    read(tmp_path / "data.jsonl", json.dumps(row | {"answer": "7"}) + "\n" + json.dumps({"input": "a"}))
    assert [record.args[1] for record in caplog.records] == names
    assert caplog.text.count("--prompt-column") == len(names)


# --- JSON ---

A, B = {"input": "a"}, {"input": "b"}
JSON_FILES = {
    "a list": (json.dumps([A, B]), [A, B]),
    "a list over many lines": (json.dumps([A, B], indent=2), [A, B]),
    "an object with a list": (json.dumps({"version": 1, "data": [A, B]}), [A, B]),
    "an object with a list and texts": (json.dumps({"tags": ["x"], "rows": [A], "name": "n"}, indent=1), [A]),
    "JSONL": (json.dumps(A) + "\n" + json.dumps(B) + "\n", [A, B]),
    "JSONL with empty lines": ("\n" + json.dumps(A) + "\n\n" + json.dumps(B), [A, B]),
    "JSONL of one row": (json.dumps(A), [A]),
    "JSONL of one row with lists": (json.dumps(A | {"tests": [{"x": 1}]}), [A | {"tests": [{"x": 1}]}]),
    "JSONL of one row of messages": (json.dumps({"messages": USER}), [{"messages": USER}]),
}


@pytest.mark.parametrize("kind", JSON_FILES)
def test_a_json_file_is_read_whatever_form_it_has(tmp_path, kind):
    content, expected = JSON_FILES[kind]
    assert read(tmp_path / "data.json", content) == expected


WRONG_JSON = {
    "nothing": ("", "data.json: not JSON"),
    "half a list": ('[{"input": "a"}, {"inp', "data.json: not JSON"),
    "an empty list": ("[]", "data.json holds no questions"),
    "a number": ("7", "data.json: holds a int: a list of rows is needed"),
    "a list of texts": ('["a"]', "data.json, row 1: a row must be an object, not str"),
    "a row of the list": (json.dumps([A, {"answer": 1}]), "data.json, row 2: a row needs input_token_ids"),
    "several lists": (json.dumps({"train": [A], "test": [B]}), "holds several lists of rows, train, test"),
    "no list": (json.dumps({"name": "x"}), "holds no list of rows, but name"),
    "columns of pandas": (
        json.dumps({"prompt": {"0": "a"}, "answer": {"0": "7"}}),
        "holds columns .prompt, answer",
    ),
    "lists by column": (
        json.dumps({"prompt": ["a", "b"], "answer": ["1", "2"]}),
        'to_json.FILE, orient="records"',
    ),
    "a line of JSONL": (json.dumps(A) + "\n{broken", "data.json, line 2: not JSON"),
    "a mark before an empty list": (b"\xef\xbb\xbf[]", "data.json holds no questions"),
    "cp1252": ('[{"input": "é"}]'.encode("cp1252"), "data.json: not UTF-8 .*utf-8"),
    "UTF-16": ('[{"input": "é"}]'.encode("utf-16"), "data.json.*: not UTF-8 .* iconv -f utf-16 "),
    "brackets without end": ("[" * 10**5, "data.json: not JSON"),
}


@pytest.mark.parametrize("kind", WRONG_JSON)
def test_a_wrong_json_file_is_refused_by_row(tmp_path, kind):
    content, message = WRONG_JSON[kind]
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path / "data.json", content)


def test_a_json_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "MAX_JSON_BYTES", 1 << 20)
    with pytest.raises(ConfigurationError, match="larger than 1 MB.* write it as JSONL"):
        read(tmp_path / "data.json", json.dumps([A] * 100_000))


# --- tables of text ---

ROW = {"input": "3 + 4?", "answer": "7"}
TABLES = {
    "a line": ("input,answer\n3 + 4?,7\n", [ROW]),
    "breaks of CR alone within quotes": ('input,answer\n"a\rb",7\n', [{"input": "a\rb", "answer": "7"}]),
    "ends of Windows": ("input,answer\r\n3 + 4?,7\r\n", [ROW]),
    "the mark of Excel": ("\ufeffinput,answer\n3 + 4?,7\n", [ROW]),
    "no last end": ("input,answer\n3 + 4?,7", [ROW]),
    "empty lines": ("\ninput,answer\n\n3 + 4?,7\n\n", [ROW]),
    "the rows' numbers of pandas": (",input,answer\n0,3 + 4?,7\n", [ROW]),
    "blanks in the header": ("input, answer\n3 + 4?,7\n", [ROW]),
    "an empty cell": ("input,answer,note\n3 + 4?,7,\n", [ROW | {"note": None}]),
    "texts that are no numbers": ("input,answer\na,007\nb,NA\nc,1e5\n", None),
    "separators in a text": ('input,answer\n"a, ""b""\nc",7\n', [{"input": 'a, "b"\nc', "answer": "7"}]),
    "separators of lines in a text": ("input,answer\na\u2028b,7\n", [{"input": "a\u2028b", "answer": "7"}]),
    "messages as JSON": (
        'messages,prompt,answer\n,"[{""role"": ""user"", ""content"": ""a""}]",7\n',
        [{"messages": USER, "answer": "7"}],
    ),
    "messages in messages": (
        'messages,answer\n"[{""role"": ""user"", ""content"": ""a""}]",7\n',
        [{"messages": USER, "answer": "7"}],
    ),
    "columns that were cleared": ("input,answer,,\na,7,,\n", [{"input": "a", "answer": "7"}]),
    "rows that were cleared": ("input,answer\na,7\n,\n,\n", [{"input": "a", "answer": "7"}]),
    "a text of 200 KB": (
        "input,answer\n" + "a" * 200_000 + ",7\n",
        [{"input": "a" * 200_000, "answer": "7"}],
    ),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_text_is_read(tmp_path, kind):
    content, expected = TABLES[kind]
    rows = read(tmp_path / "data.csv", content)
    if expected is None:
        assert [row["answer"] for row in rows] == ["007", "NA", "1e5"]
    else:
        assert rows == expected
    if '"' not in content and content.count(",") == content.replace("\r", "").count(","):
        assert read(tmp_path / "data.tsv", content.replace(",", "\t")) == rows


WRONG_TABLES = {
    "a line for Excel": ("sep=;\ninput;answer\na;7\n", "line 1: the table has only one column, 'sep=;'"),
    "a cell under no name": ("input,answer,\na,7,,\n", "line 2: a row of 4 cells under 3 columns"),
    "messages of Python in messages": (
        "messages,answer\n\"[{'role': 'user', 'content': 'a'}]\",7\n",
        "line 2: messages: the text is a list of messages as Python prints it",
    ),
    "too many cells": ("input,answer\na,b,7\n", "line 2: a row of 3 cells under 2 columns .input, answer."),
    "too few cells": ("input,answer\na,7\nb\n", "line 3: a row of 1 cells under 2 columns"),
    "a quote without end": ('input,answer\na,7\n"b,7\n', "line 3: no row of a table"),
    "a quote within a text": ('input,answer\n"a"b,7\n', "line 2: no row of a table"),
    "a name twice": ("input,answer,input\na,7,b\n", "line 1: two columns have the name 'input'"),
    "no prompt": ("question,answer\na,7\n", "line 2: a row needs .*--prompt-column question"),
    "no header": ("3 + 4?,7\n5 + 5?,10\n", "line 2: a row needs input_token_ids"),
    "a header alone": ("input,answer\n", "holds no questions"),
    "nothing": ("", "holds no questions"),
    "cp1252": ("input,answer\na,7\né,7\n".encode("cp1252"), "line 3: not UTF-8 .*iconv -f cp1252"),
    "UTF-16": ("input,answer\n".encode("utf-16"), "line 1: not UTF-8 .* iconv -f utf-16 "),
    "an Excel file under another name": (
        b"PK\x03\x04",
        "line 1: not UTF-8 text, but a zip file: .* CSV UTF-8",
    ),
    "ends of old Macintosh": ("input,answer\ra,7\r", "line 1: no row of a table: .* by tr '.r' '.n'"),
    "a break of CR alone within a text": (
        "input,answer\na\rb,7\n",
        "line 2: .* put texts with line breaks between",
    ),
    "a mark in the middle": ("input,answer\na,7\n\ufeffinput,answer\n", "line 3: a byte order mark"),
    "semicolons": (
        "input;answer\na;7\n",
        "line 1: the table has only one column, 'input;answer', .* save it with commas",
    ),
    "messages of Python": (
        "prompt,answer\n\"[{'role': 'user', 'content': 'a'}]\",7\n",
        "line 2: prompt: the text is a list of messages as Python prints it",
    ),
    "a row behind a text of two lines": (
        'input,answer\n"a\nb",7\n,7\n',
        "line 4: a row needs input_token_ids",
    ),
}


@pytest.mark.parametrize("kind", WRONG_TABLES)
def test_a_wrong_table_is_refused_by_line(tmp_path, kind):
    content, message = WRONG_TABLES[kind]
    with pytest.raises(ConfigurationError, match=f"data.csv.*{message}"):
        read(tmp_path / "data.csv", content)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data.jsonl.gz", "a packed file: unpack it first"),
        ("data.zip", "a packed file"),
        ("data.jsonl.zst", "a packed file"),
        ("data.pkl", "a pickle can run code"),
        ("data.xlsx", "a table of Excel: save it as CSV UTF-8"),
        ("data.yaml", "write the rows as JSONL"),
        ("data.arrow", "give the folder"),
    ],
)
def test_a_format_that_is_not_read_is_refused_in_words(tmp_path, name, message):
    with pytest.raises(ConfigurationError, match=f"{name}: .*{message}"):
        read(tmp_path / name, b"\x00\x01")


@pytest.mark.parametrize("name", ["data.txt", "data.ndjson", "data", "data.JSONL", "data.2"])
def test_a_file_of_another_name_is_jsonl(tmp_path, name):
    assert read(tmp_path / name, json.dumps(A)) == [A]


def test_a_large_file_says_how_far_it_is_read(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(data_files, "PROGRESS_S", 0.0)
    caplog.set_level("INFO")
    read(tmp_path / "data.jsonl", json.dumps(A) * 1)
    assert "data.jsonl: 1 rows read so far" in caplog.text


def test_a_text_that_the_prompt_column_leaves_out_is_named_once(tmp_path, caplog):
    """The first row of such a file often has an empty `input`, or one that the prompt repeats."""
    task = {"instruction": "Add the numbers", "output": "7"}
    lines = [task | {"input": text} for text in ("", "numbers", "3 and 4", "5 and 2")]
    path = tmp_path / "alpaca.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = [
        row["messages"][0]["content"]
        for row in rows_of(path, prompt_column="instruction", answer_column="output")
    ]
    assert prompts == ["Add the numbers"] * 4
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "line 3: the text in the column input is not part of the prompt" in warning
    caplog.clear()
    rows_of(path, prompt_column="instruction,input", answer_column="output")
    path.write_text(json.dumps({"question": "Say: 3 + 4", "prompt": "3 + 4", "answer": "7"}) + "\n")
    rows_of(path, prompt_column="question")
    assert not caplog.records


@pytest.mark.parametrize(
    "text", ['[{"prompt": "a"}, {"prompt": "b"}]', '[\n{"prompt": "a"},\n{"prompt": "b"}]']
)
def test_a_list_in_a_file_of_lines_is_refused_with_the_name_that_it_needs(tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"line 1: .* its name must end in \.json"):
        rows_of(path)
    assert len(rows_of(path.rename(tmp_path / "data.json"))) == 2
