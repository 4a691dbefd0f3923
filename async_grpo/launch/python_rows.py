"""Write the rows that are passed to `async_grpo.train` to a JSONL file (docs/your-data.md)."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.column_paths import is_missing
from async_grpo.experience.plain_values import plain, plain_row
from async_grpo.experience.row_columns import DEFAULT_COLUMNS, ColumnMap
from async_grpo.experience.row_schemas import PROMPT_COLUMNS, TOKENS
from async_grpo.launch.python_files import write_private_file
from async_grpo.options.fields import refuse

SHOWN_COLUMNS = 12  # number of names that an error message lists


@dataclass(frozen=True)
class RowFile:
    """The file of a data set, and its columns."""

    path: str
    columns: frozenset[str] | None  # the columns that every row has; None if the caller passed a path


def row_file(dataset: Any, folder: Path, name: str, column_map: ColumnMap = DEFAULT_COLUMNS) -> RowFile:
    """Return the file of a data set. Rows are written to a new file.

    Args:
        dataset: The path of a JSONL file, or rows: anything that yields dicts, such as a list or a `datasets.Dataset`.
            Each dict has `prompt` (a text, or a list of messages), `messages`, `input` or `input_token_ids`. Rewards
            receive all columns.
        folder: Private folder for the file of rows. The file's name contains a digest of the rows, so the rows of an
            earlier run are not overwritten.
        name: Name of the data set in messages and in the file's name.
        column_map: The columns of prompt and answer. The file has the columns of the rows; the run reads it by this map.

    Raises:
        ConfigurationError: A row cannot be used. The message names the first such row and the reason.
    """
    if isinstance(dataset, str | os.PathLike):
        return RowFile(os.fspath(dataset), None)
    _refuse_what_holds_no_rows(dataset, name)
    columns: set[str] = set()
    # Arrow gives all objects of a list the same keys, and fills the missing values with None
    is_arrow = type(dataset).__module__.partition(".")[0] == "datasets"

    def lines() -> Iterator[bytes]:
        number = -1
        for number, row in enumerate(dataset):
            place = f"{name}, row {number}"
            checked_row = _checked_row(row, place, has_prompt_column=bool(column_map.prompt))
            if is_arrow:
                checked_row = plain_row(checked_row, place)
            text = _as_json(checked_row, place)
            try:
                mapped_row = column_map.apply(json.loads(text))
            except ConfigurationError as error:
                raise ConfigurationError(f"{place}: {error}") from error
            if number == 0:
                columns.update(mapped_row)
            columns.intersection_update(mapped_row)
            yield text.encode() + b"\n"
        refuse(number < 0, f"{name} holds no rows")

    path = write_private_file(folder, f"{name}-{{digest}}.jsonl", lines())
    return RowFile(str(path), frozenset(columns))


def _refuse_what_holds_no_rows(dataset: Any, name: str) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, list(dataset)[:SHOWN_COLUMNS]))
        raise ConfigurationError(
            f"{name} is a {kind} of {names}: give one of its splits, or a list of rows, where each row is a dict"
        )
    # Iterating over a DataFrame yields the names of its columns, not its rows
    if hasattr(dataset, "to_dict") and hasattr(dataset, "columns"):
        raise ConfigurationError(
            f'{name} is a {kind}: give {name}.to_dict("records"), which has a dict for each row'
        )
    is_rows = isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")
    refuse(not is_rows, f"{name} is a {kind}: give the path of a JSONL file, or a list of dicts")


def _checked_row(row: Any, place: str, has_prompt_column: bool) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ConfigurationError(
            f'{place} is a {type(row).__name__}, not a dict such as {{"prompt": "3 + 4 = ?"}}'
        )
    checked_row = dict(row)
    # `datasets` fills missing columns with None
    for column in PROMPT_COLUMNS:
        if column in checked_row and is_missing(checked_row[column]):
            del checked_row[column]
    if has_prompt_column:
        return checked_row
    prompt_columns = [column for column in PROMPT_COLUMNS if column in checked_row]
    if not prompt_columns:
        names = ", ".join(map(str, list(row)[:SHOWN_COLUMNS])) or "none"
        raise ConfigurationError(
            f"{place} has no prompt: its columns are {names}. Name the question `prompt`, as a text or as a list of "
            'messages: {"role": "user", "content": "..."}, or name its column by prompt_column'
        )
    for column in prompt_columns:
        _check_prompt(column, checked_row[column], place)
    return checked_row


def _check_prompt(column: str, value: Any, place: str) -> None:
    if column == TOKENS:
        return
    is_text = isinstance(value, str) and column != "messages"
    are_messages = isinstance(value, list | tuple) and column != "input" and _are_messages(value)
    form = {"input": "a text", "messages": "a list of messages"}.get(column, "a text or a list of messages")
    if column != "input":
        form += ', each a dict such as {"role": "user", "content": "3 + 4 = ?"}'
    refuse(not (is_text or are_messages), f"{place}: {column} must be {form}, not {value!r:.80}")


def _are_messages(value: Any) -> bool:
    return bool(value) and all(
        isinstance(message, Mapping) and ("content" in message or message.get("tool_calls"))
        for message in value
    )


def _as_json(row: dict[str, Any], place: str) -> str:
    try:
        return json.dumps(row, allow_nan=False, default=plain)
    except (TypeError, ValueError, RecursionError) as row_error:
        for column, value in row.items():
            try:
                json.dumps({column: value}, allow_nan=False, default=plain)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigurationError(
                    f"{place}: the column {column} cannot be written as JSON ({error}): use only texts, finite numbers, "
                    "lists and dicts, or leave the column out"
                ) from error
        raise ConfigurationError(f"{place} cannot be written as JSON ({row_error})") from row_error
