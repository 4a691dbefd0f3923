"""Parse the text of a file of options, and explain the mistakes in it that users commonly make.

Common mistakes are files of other formats (YAML, JSON, lines of a command line), the encodings of Windows, and values
without quotes.
"""

import codecs
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.processes.untrusted_files import parse_json, read_bytes

YAML_ENDINGS = (".yaml", ".yml")
BYTE_ORDER_MARK = "\ufeff"
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Patterns of lines that are no TOML: a key in YAML, an item in YAML, an option of a command line, and an assignment
# whose value may be anything
YAML_KEY = re.compile(r"\s*(?P<key>[A-Za-z_][\w-]*)\s*:(?:\s+(?P<value>[^#]*)|$)")
YAML_ITEM = re.compile(r"\s*-\s+\S|---\s*$")
FLAG = re.compile(r"\s*--(?P<key>[A-Za-z][\w-]*)(?:[ =]\s*(?P<value>.*))?")
ASSIGNMENT = re.compile(r"\s*(?P<key>[\w-]+)\s*=\s*(?P<value>[^#]*)")
PLACE = re.compile(r"\(at line (?P<number>\d+),")
TOML_WORDS = {"True": "true", "False": "false", "yes": "true", "no": "false", "on": "true", "off": "false"}
NULLS = ("None", "null", "nil", "~")
# Beginnings of messages of `tomllib` about a name that occurs twice
GIVEN_TWICE = ("Cannot overwrite a value", "Cannot declare ")
SHOWN_CHARACTERS = 80


def parse_options_file(path: Path) -> Any:
    """Return the content of a TOML file, or of a JSON file if the name ends in `.json`.

    Raises:
        ConfigurationError: The file cannot be read. The message names the line, and says how to write it, if known.
    """
    try:
        text = _decoded(read_bytes(path, follow_links=True))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error}") from error
    try:
        if path.suffix == ".json":
            return parse_json(text, unique_keys=True)
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"--config {path} cannot be read: {error}{_advice(path, text, error)}"
        ) from error


def _decoded(content: bytes) -> str:
    if content.startswith(UTF_16_MARKS):
        raise ValueError("it is UTF-16, as Windows PowerShell writes it: save it as UTF-8")
    try:
        return content.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 ({error}): save it as UTF-8") from error


def _advice(path: Path, text: str, error: Exception) -> str:
    """Return advice on how to write the file.

    Without advice, return the line that cannot be parsed; "" if it is unknown.
    """
    if path.suffix == ".json":
        return ""
    if "\r" in text.replace("\r\n", ""):
        return (
            "; a line ends with CR alone, as old Macintosh programs write: convert the file by tr '\\r' '\\n'"
        )
    if text.lstrip().startswith("{"):
        return "; it looks like JSON: give its name the ending .json"
    if any(words in str(error) for words in GIVEN_TWICE):
        return "; an option or table is given twice: remove one of them"
    place = PLACE.search(str(error))
    lines = text.split("\n")
    number = int(place["number"]) if place else 0
    line = lines[number - 1].rstrip() if 0 < number <= len(lines) else ""
    key = YAML_KEY.match(line)
    if path.suffix in YAML_ENDINGS or key or YAML_ITEM.match(line):
        return f"; it looks like YAML, and options are read from TOML{_rewritten(key)}"
    flag = FLAG.match(line)
    if flag:
        return f"; line {number} is an option of a command line{_rewritten(flag)}"
    assignment = ASSIGNMENT.match(line)
    if assignment and assignment["value"].strip():
        return f"; line {number} is {line[:SHOWN_CHARACTERS]!r}{_rewritten(assignment)}"
    return f"; line {number} is {line[:SHOWN_CHARACTERS]!r}" if line else ""


def _rewritten(match: re.Match[str] | None) -> str:
    """Return a hint with the line as it would be in TOML, made from a key and its value."""
    key = match["key"].replace("-", "_") if match else "batch_size"
    value = (match["value"] or "").strip() if match else "16"
    if value in NULLS:
        return ": leave the option out"
    if not value:
        return f": write {key} = VALUE, and texts in quotes"
    return f": write {key} = {_toml_value(value)}, and texts in quotes"


def _toml_value(text: str) -> str:
    """Return a value in the spelling of TOML.

    >>> _toml_value("1e-6"), _toml_value("True"), _toml_value("runs/a"), _toml_value('"x"'), _toml_value("4,")
    ('1e-6', 'true', '"runs/a"', '"x"', '4')
    """
    value = text.rstrip(",;")
    inner = value.strip("\"'")
    for spelling in (TOML_WORDS.get(value, value), f'"{value}"', f"'{inner}'"):
        with suppress(tomllib.TOMLDecodeError):
            tomllib.loads(f"key = {spelling}")
            return spelling
    return f'"{inner}"'
