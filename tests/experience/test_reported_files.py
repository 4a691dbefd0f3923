"""Data files after public bug reports: their columns, nulls, encodings and numbers that are none."""

import json
from pathlib import Path

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.experience.data_files import read_rows

REPORTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "reports" / "data"
USER = [{"role": "user", "content": "a"}]

# File of the reports -> the message that refuses it
REFUSED = {
    "d03_cp1252.jsonl": "d03_cp1252.jsonl, line 1: not UTF-8 .*utf-8",
    "d05_nan.jsonl": "d05_nan.jsonl, line 1: answer is NaN, which is no finite number",
    "d06_array.jsonl": "d06_array.jsonl, line 1: a row must be an object, not list",
    "d19_sharegpt.jsonl": "d19_sharegpt.jsonl, line 1: a row needs .*conversations",
    "d23_gsm8k_raw.jsonl": "d23_gsm8k_raw.jsonl, line 1: a row needs .*--prompt-column question",
    "d44_bom_middle.jsonl": "d44_bom_middle.jsonl, line 2: a byte order mark .BOM. within the file",
}
# File of the reports -> the prompts of its rows
READ = {
    "d26_null_input.jsonl": [{"prompt": "What is 3+4?", "answer": "7"}],
    "d27_null_ids.jsonl": [{"prompt": "What is 3+4?", "answer": "7"}],
    "d54_lsep.jsonl": [
        {"messages": [{"role": "user", "content": "a\u2028b\u0085c"}], "answer": "7"},
        {"messages": [{"role": "user", "content": "b"}], "answer": "7"},
    ],
}
has_reports = pytest.mark.skipif(not REPORTS.exists(), reason="the inputs of the reports are not there")


@has_reports
@pytest.mark.parametrize("name", REFUSED)
def test_a_reported_file_is_refused_in_words(name):
    with pytest.raises(ConfigurationError, match=REFUSED[name]):
        list(read_rows(REPORTS / name))


@has_reports
@pytest.mark.parametrize("name", READ)
def test_a_reported_file_is_read(name):
    assert [row for _, row in read_rows(REPORTS / name)] == READ[name]


def rows_of(path: Path, *rows: object) -> list[dict]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [row for _, row in read_rows(path)]


NULLS = {
    "input beside a prompt": ({"input": None, "prompt": "a"}, {"prompt": "a"}),
    "prompt beside an input": ({"prompt": None, "input": "a"}, {"input": "a"}),
    "messages beside an input": ({"messages": None, "input": "a"}, {"input": "a"}),
    "messages beside a prompt": ({"messages": None, "prompt": USER}, {"prompt": USER}),
    "token ids beside messages": ({"input_token_ids": None, "messages": USER}, {"messages": USER}),
    "all but one": (
        {"input_token_ids": None, "messages": None, "prompt": None, "input": "a"},
        {"input": "a"},
    ),
    "the NaN of pandas for a text": ({"input": float("nan"), "prompt": "a"}, {"prompt": "a"}),
    "the NaN of pandas for a list": ({"messages": float("nan"), "input": "a"}, {"input": "a"}),
    # Neighbours that stay as they are
    "another column": ({"prompt": "a", "tests": None}, {"prompt": "a", "tests": None}),
    "an answer": ({"prompt": "a", "answer": None}, {"prompt": "a", "answer": None}),
    "an empty text": ({"input": "", "prompt": "a"}, {"input": "", "prompt": "a"}),
    "the text null": ({"input": "null", "answer": "None"}, {"input": "null", "answer": "None"}),
    "zero": ({"input": "a", "answer": 0}, {"input": "a", "answer": 0}),
    "false": ({"input": "a", "answer": False}, {"input": "a", "answer": False}),
    "a NaN that is no answer": ({"input": "a", "level": 1.5, "cost": [0.1]},) * 2,
    "a null within a column": ({"input": "a", "extra": {"x": None}},) * 2,
}


@pytest.mark.parametrize("kind", NULLS)
def test_a_null_counts_as_a_missing_prompt(tmp_path, kind):
    row, expected = NULLS[kind]
    assert rows_of(tmp_path / "data.jsonl", row) == [expected]


NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "[1, NaN]", "[[Infinity]]"]


@pytest.mark.parametrize("column", ["answer", "answers"])
@pytest.mark.parametrize("text", NO_NUMBERS)
def test_an_answer_that_is_no_finite_number_is_refused_by_row(tmp_path, column, text):
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": "a", "answer": "1"}\n' + f'{{"input": "a", "{column}": {text}}}\n')
    with pytest.raises(
        ConfigurationError, match=f"data.jsonl, line 2: {column} is -?(NaN|Infinity), which is"
    ):
        list(read_rows(path))


@pytest.mark.parametrize(
    "answer", ["nan", "NaN", "infinity", "-inf", "\\infty", 1e308, -1e-308, 10**400, 0.0, [1.5, "NaN"]]
)
def test_an_answer_that_only_resembles_one_is_kept(tmp_path, answer):
    assert rows_of(tmp_path / "data.jsonl", {"input": "a", "answer": answer})[0]["answer"] == answer


def encoded(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


LINE = '{"prompt": "é × 5?", "answer": "7"}\n'
WRONG_ENCODINGS = {
    "cp1252": (LINE.encode("cp1252"), "line 1: not UTF-8 .*utf-8"),
    "latin-1 in line 3": (LINE.encode() * 2 + LINE.encode("latin-1"), "line 3: not UTF-8 .*utf-8"),
    "UTF-16": (LINE.encode("utf-16"), "line 1: not UTF-8 .* iconv -f utf-16 -t utf-8"),
    "UTF-16 of the other order": (
        b"\xfe\xff" + LINE.encode("utf-16-be"),
        "line 1: not UTF-8 .* iconv -f utf-16 ",
    ),
    "UTF-16 without a mark": (LINE.encode("utf-16-le"), "line 1: not UTF-8 .* iconv -f utf-16le "),
    "gzip": (b"\x1f\x8b\x08\0", "line 1: not UTF-8 text, but packed by gzip"),
    "Parquet": (b"PAR1\x15\n", "line 1: not UTF-8 text, but a Parquet file: .* ends in .parquet"),
    "Excel": (b"PK\x03\x04", "line 1: not UTF-8 text, but a zip file: .* Excel"),
    "a mark in the middle": (
        LINE.encode() + LINE.encode("utf-8-sig"),
        "line 2: a byte order mark .BOM. within the file",
    ),
    "shift-jis": ('{"prompt": "三足す四"}\n'.encode("shift-jis"), "line 1: not UTF-8"),
    "half a character": (LINE.encode()[:-20] + b"\xe2\x82", "line 1: not UTF-8"),
}
RIGHT_TEXTS = [
    "a\u2028b",
    "a\u2029b",
    "a\u0085b",
    "a\x0bb\x0cc",
    "a\ufeffb",
    "三足す四",
    "😀 × é",
    "a\r\nb",
    "a\u200bb",
    "\ufeffa",
]


# Contents of files that look like those of WRONG_ENCODINGS, and are read
RIGHT_ENCODINGS = {
    "a mark at the beginning": LINE.encode("utf-8-sig"),
    "ends of Windows": LINE.encode().replace(b"\n", b"\r\n"),
    "an empty line first": b"\n" + LINE.encode(),
}


@pytest.mark.parametrize("kind", RIGHT_ENCODINGS)
@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_utf_8_is_read_with_or_without_a_mark(tmp_path, kind, name):
    (tmp_path / name).write_bytes(RIGHT_ENCODINGS[kind])
    assert [row["prompt"] for _, row in read_rows(tmp_path / name)] == ["é × 5?"]


NO_JSON = {
    "a page of a server": ("<!DOCTYPE html>", "Expecting value at column 1, '<!DOCTYPE html>'"),
    "Python": ("{'prompt': 'a'}", "column 2, \"'prompt': 'a'}\""),
    "half a line": ('{"prompt": "a"', 'delimiter at column 15, \'{"prompt": "a"\''),
    "a comma at the end": ('{"prompt": "a",}', "at column 1[56]"),
}


@pytest.mark.parametrize("kind", NO_JSON)
def test_a_line_that_is_no_json_is_shown(tmp_path, kind):
    line, message = NO_JSON[kind]
    (tmp_path / "data.jsonl").write_text(LINE + line + "\n")
    with pytest.raises(ConfigurationError, match=f"data.jsonl, line 2: not JSON .*{message}"):
        list(read_rows(tmp_path / "data.jsonl"))


@pytest.mark.parametrize("kind", WRONG_ENCODINGS)
def test_another_encoding_is_refused_by_line(tmp_path, kind):
    content, message = WRONG_ENCODINGS[kind]
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"data.jsonl, {message}"):
        list(read_rows(tmp_path / "data.jsonl"))


@pytest.mark.parametrize("text", RIGHT_TEXTS)
def test_a_text_stays_as_it_is(tmp_path, text):
    for row in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        line = json.dumps(row, ensure_ascii=False) + "\n"
        (tmp_path / "data.jsonl").write_bytes((line * 2).encode())
        assert [row for _, row in read_rows(tmp_path / "data.jsonl")] == [row, row]


# A text that is a conversation, as a table stores it
SERIALIZED = json.dumps(USER)
CONVERSATIONS_IN_TEXTS = {
    "JSON": ({"prompt": SERIALIZED}, {"messages": USER}),
    "JSON in input": ({"input": SERIALIZED}, {"messages": USER}),
    "JSON with spaces": ({"prompt": f"  {SERIALIZED}\n"}, {"messages": USER}),
    "beside messages": ({"messages": USER, "input": SERIALIZED},) * 2,
    "beside token ids": ({"input_token_ids": [1], "input": str(USER)},) * 2,
    "a request about a conversation": ({"prompt": f"{SERIALIZED} Who speaks here?"},) * 2,
    "a request about Python's": ({"prompt": f"{USER} Who speaks here?"},) * 2,
    "a list of numbers": ({"prompt": "[1, 2]"},) * 2,
    "an object": ({"prompt": '{"role": "user"}'},) * 2,
    "another list of objects": ({"prompt": '[{"name": "Anna"}]'},) * 2,
}


@pytest.mark.parametrize("kind", CONVERSATIONS_IN_TEXTS)
def test_a_conversation_that_was_written_as_json_text_is_one(tmp_path, kind):
    row, expected = CONVERSATIONS_IN_TEXTS[kind]
    assert rows_of(tmp_path / "data.jsonl", row) == [expected]


PRINTED = [
    str(USER),
    str([*USER, {"role": "assistant", "content": "b"}]),
    "array([{'content': 'a', 'role': 'user'}], dtype=object)",
    "[{'from': 'human', 'value': 'a'}]",
    "[{'content': 'a', 'role': 'user'}\n {'content': 'b', 'role': 'user'}]",
]


@pytest.mark.parametrize("text", PRINTED)
def test_a_conversation_that_python_printed_is_refused(tmp_path, text):
    with pytest.raises(ConfigurationError, match="line 1: prompt: the text is a list of messages as Python"):
        rows_of(tmp_path / "data.jsonl", {"prompt": text})
