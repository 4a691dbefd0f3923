"""Read the rows of data files: JSONL, JSON, CSV and TSV."""

import codecs
import csv
import hashlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from async_grpo.errors import ConfigurationError
from async_grpo.experience.column_paths import is_missing
from async_grpo.experience.row_columns import DEFAULT_COLUMNS, ColumnMap
from async_grpo.experience.row_schemas import (
    PROMPT_COLUMNS,
    PROMPT_LIKE,
    TOKENS,
    joined_texts,
    names_of,
    proposal,
    refuse_placeholders,
    unread_columns,
    unread_parts,
    without_images,
)
from async_grpo.experience.text_lines import (
    decoded,
    json_problem,
    refuse_other_contents,
    refuse_other_texts,
    text_lines,
)
from async_grpo.options.fields import refuse
from async_grpo.processes.hub import is_hub_name
from async_grpo.processes.untrusted_files import (
    BYTE_ORDER_MARK,
    MAX_ROW_BYTES,
    RepeatedKey,
    bounded_lines,
    is_regular,
    open_regular,
    parse_json,
    read_bounded,
)

log = logging.getLogger(__name__)

Rows = Iterator[tuple[str, Any]]  # (file and line or row number as text, row)
PROGRESS_S = 10.0  # seconds between two lines about the progress of a large file
MAX_JSON_BYTES = 512 << 20  # largest JSON file, because all of it is read at once
NAME_IT_JSON = "If the whole file is one JSON list, its name must end in .json"
ROWS_ON_LINES = "Each row must stand on one line, as `jq -c . FILE` writes them"
LINES_OF_CR = (
    "Its lines end with CR alone, as old Macintosh programs write: convert the file by tr '\\r' '\\n'"
)
BARE_RETURN = "new-line character"  # part of the error message of `csv` for a line that ends with CR alone
# Delimiters of tables, and their names in messages. Excel writes semicolons in many languages
DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}


def read_rows(
    path: str | Path,
    columns: ColumnMap = DEFAULT_COLUMNS,
    *,
    needs_prompt: bool = True,
    reads_images: bool = False,
) -> Rows:
    """Yield (file and line number as text, row) for each row of a data file.

    Args:
        path: The file. Its extension names its format; without a known one it is JSONL.
        columns: The columns of prompt and answer.
        needs_prompt: Whether a row without a prompt is an error.
        reads_images: Whether the model reads images. Then a prompt may have placeholders for images.

    Raises:
        ConfigurationError: The file does not exist, has no rows, or has another format. Or a row is not an object, is
            too long, is not UTF-8, or has no prompt or answer where `columns` looks for them.
    """
    begin = time.monotonic()
    next_line_s = PROGRESS_S
    num_rows = 0
    warned_of: set[str] = set()
    for place, raw_row in raw_rows(Path(path)):
        try:
            row = columns.apply(raw_row, needs_prompt=needs_prompt)
            refuse_placeholders(row, reads_images=reads_images)
        except ConfigurationError as error:
            raise ConfigurationError(f"{place}: {error}") from error
        if num_rows == 0 and needs_prompt:
            text_columns = without_images(row) if reads_images else row
            _warn_of_unread_columns(path, raw_row, text_columns, columns)
        if needs_prompt:
            _warn_of_dropped_texts(place, raw_row, row, columns, warned_of)
        num_rows += 1
        yield place, row
        if time.monotonic() - begin > next_line_s:
            log.info("%s: %s rows read so far", path, f"{num_rows:,}")
            next_line_s += PROGRESS_S
    refuse(not num_rows, f"{path} holds no questions")


def raw_rows(path: Path) -> Rows:
    """Yield (file and line number as text, row) for each row of a data file, without renaming any columns.

    Raises:
        ConfigurationError: The file does not exist, or has another format.
    """
    if not is_regular(path, follow_links=True):
        yield from _rows_of_no_file(path)
        return
    suffix = path.suffix.lower()
    refuse(suffix in REFUSED_SUFFIXES, f"{path}: {REFUSED_SUFFIXES.get(suffix)}")
    read = READERS.get(suffix, _jsonl_rows)
    try:
        file = open_regular(path, follow_links=True)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        refuse_other_texts(file, path)
        yield from read(path, file)


def _rows_of_no_file(path: Path) -> Rows:
    """Yield the rows of a folder, or of a data set of the hub.

    Raises:
        ConfigurationError: The path names neither a folder nor a data set, or its rows cannot be read.
    """
    from async_grpo.experience.table_files import dataset_rows

    refuse(path.exists() and not path.is_dir(), f"{path}: there is no such file (it is not a regular file)")
    refuse(not names_data_set(path), f"{path}: there is no such file")
    return dataset_rows(str(path), raw_rows)


def names_data_set(path: Path) -> bool:
    """Return whether a path is a folder, or looks like a data set of the Hugging Face Hub and not like a file."""
    name = str(path).split(":")[0]
    if path.is_dir() or Path(name).is_dir():
        return True
    is_file_name = path.suffix.lower() in (*READERS, *REFUSED_SUFFIXES, ".jsonl", ".ndjson", ".txt")
    return is_hub_name(name) and not is_file_name and not path.exists()


def digest_of_rows(path: Path) -> str:
    """Return the SHA-256 of a data file, or of the rows in a folder or in a data set of the hub.

    Raises:
        ConfigurationError: There is no such file, folder or data set.
    """
    if is_regular(path, follow_links=True):
        with open_regular(path, follow_links=True) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for _, row in raw_rows(path):
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _jsonl_rows(path: Path, file: BinaryIO) -> Rows:
    for place, line in text_lines(path, file):
        if not line.strip():
            continue
        try:
            row = parse_json(line.rstrip(), unique_keys=True)
        except RepeatedKey as error:
            raise ConfigurationError(f"{place}: {error}") from error
        except ValueError as error:  # not JSON, or brackets nested too deeply
            hint = f". {NAME_IT_JSON}" if line.lstrip().startswith("[") else ""
            if line.strip() == "{":
                hint = f". {ROWS_ON_LINES}"
            if "\r" in line.rstrip():
                hint = f". {LINES_OF_CR}"
            raise ConfigurationError(f"{place}: not JSON ({json_problem(error)}){hint}") from error
        refuse(isinstance(row, list), f"{place}: a row must be an object, not list. {NAME_IT_JSON}")
        yield place, row


def _json_rows(path: Path, file: BinaryIO) -> Rows:
    """Yield the rows of a JSON file, which contains a list of rows, or an object with a single list of rows.

    Many public files with the extension .json are JSONL instead. Their lines are read as rows.
    """
    is_jsonl = _is_jsonl(file)
    file.seek(0)
    if is_jsonl:
        yield from _jsonl_rows(path, file)
        return
    try:
        content = read_bounded(file, path, MAX_JSON_BYTES)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror} of a JSON file: write it as JSONL, one row per line (jq -c '.[]' FILE)"
        ) from error
    refuse_other_contents(content, str(path))
    refuse(not content.strip(), f"{path}: not JSON, because it is empty: copy the file again")
    try:
        value = parse_json(decoded(content, str(path)).removeprefix(BYTE_ORDER_MARK), unique_keys=True)
    except RepeatedKey as error:
        raise ConfigurationError(f"{path}: {error}") from error
    except ValueError as error:
        problem = str(error) if isinstance(error, json.JSONDecodeError) else json_problem(error)
        raise ConfigurationError(f"{path}: not JSON ({problem})") from error
    for number, row in enumerate(_listed_rows(path, value), start=1):
        yield f"{path}, row {number}", row


def _is_jsonl(file: BinaryIO) -> bool:
    """Return whether the first line is a JSON object by itself, and other lines follow."""
    lines = (line for line in bounded_lines(file, MAX_ROW_BYTES) if line is None or line.strip())
    first_line = next(lines, None)
    if first_line is None or next(lines, b"") == b"":
        return False
    try:
        return isinstance(parse_json(first_line.removeprefix(codecs.BOM_UTF8)), dict)
    except ValueError:
        return False


def _listed_rows(path: Path, value: Any) -> list[Any]:
    """Return the rows in the value of a JSON file.

    Raises:
        ConfigurationError: The value contains no rows, or it is unclear which of its values are the rows.
    """
    if isinstance(value, list):
        return value
    refuse(not isinstance(value, dict), f"{path}: holds a {type(value).__name__}: a list of rows is needed")
    cells = [cell for cell in value.values() if isinstance(cell, list | dict)]
    is_by_column = bool(cells) and len(cells) == len(value) and not any(map(_is_list_of_objects, cells))
    if is_by_column and any(name in value for name in (*PROMPT_COLUMNS, *PROMPT_LIKE)):
        raise ConfigurationError(
            f"{path}: holds columns ({names_of(value)}) instead of rows: write rows, in pandas by "
            'to_json(FILE, orient="records")'
        )
    if any(name in value for name in (*PROMPT_COLUMNS, *PROMPT_LIKE)):
        return [value]
    lists = {name: cell for name, cell in value.items() if _is_list_of_objects(cell)}
    if len(lists) == 1:
        return next(iter(lists.values()))
    content = (
        f"several lists of rows, {', '.join(lists)}" if lists else f"no list of rows, but {names_of(value)}"
    )
    raise ConfigurationError(f"{path}: holds {content}: write one list of rows")


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _csv_rows(path: Path, file: BinaryIO, delimiter: str = ",") -> Rows:
    """Yield the rows of a table whose first line names the columns. All values are texts, and an empty cell is null."""
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.reader((line for _, line in text_lines(path, file)), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        place = f"{path}, line {reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ConfigurationError(f"{place}: no row of a table: {_table_problem(error)}") from error
        if cells is None:
            return
        if not any(cells):  # an empty line. Excel writes commas for rows that were cleared
            continue
        if not header:
            header = _checked_header(place, cells, delimiter)
            continue
        refuse(
            len(cells) != len(header),
            f"{place}: a row of {len(cells)} cells under {len(header)} columns ({', '.join(header)}): put texts with "
            f"{delimiter!r} or line breaks between double quotes",
        )
        # pandas writes the number of each row as a first column without a name
        named_cells = [(name, cell) for name, cell in zip(header, cells, strict=True) if name]
        yield place, {name: cell or None for name, cell in named_cells}


def _tsv_rows(path: Path, file: BinaryIO) -> Rows:
    return _csv_rows(path, file, delimiter="\t")


def _table_problem(error: csv.Error) -> str:
    """Return what is wrong with a row that `csv` refuses, and what to do about it if this is known."""
    if BARE_RETURN not in str(error):
        return str(error)
    return (
        "a line break of CR alone outside of double quotes: put texts with line breaks between double quotes; if all "
        "lines end in CR, as in files of old Macintosh programs, convert the file by tr '\\r' '\\n'"
    )


def _checked_header(place: str, cells: list[str], delimiter: str) -> list[str]:
    header = [cell.strip() for cell in cells]
    other_delimiters = [name for sign, name in DELIMITERS.items() if sign != delimiter and sign in header[0]]
    refuse(
        len(header) == 1 and bool(other_delimiters),
        f"{place}: the table has only one column, {header[0]!r}, probably because {' or '.join(other_delimiters)} separate "
        "its cells: save it with commas as .csv, or with tabs as .tsv",
    )
    # Excel writes columns without a name for cells that were cleared
    twice = [name for name in header if name and header.count(name) > 1]
    refuse(bool(twice), f"{place}: two columns have the name {twice[0] if twice else ''!r}")
    return header


def _warn_of_unread_columns(
    path: str | Path, raw_row: dict[str, Any], row: dict[str, Any], columns: ColumnMap
) -> None:
    """Warn if the first row has columns that look like a prompt or an answer, but are not read."""
    for name in unread_columns(row):
        log.warning(
            "%s: the column %s is not part of the prompt, though it may be the question: --prompt-column %s reads it",
            path,
            name,
            name,
        )
    for name in unread_parts(row):
        log.warning(
            "%s: the column %s is not part of the prompt: if it belongs to the question, write its text into a message",
            path,
            name,
        )
    if not columns.answer and is_missing(raw_row.get("answer")):
        proposed = proposal(raw_row)
        if "--answer-column" in proposed:
            log.warning("%s has no column answer, which most rewards read; %s", path, proposed)


def _warn_of_dropped_texts(
    place: str, raw_row: dict[str, Any], row: dict[str, Any], columns: ColumnMap, warned_of: set[str]
) -> None:
    """Warn, once for each column, if a row has a text in a column of prompts that is not part of its prompt.

    For example, rows of Alpaca have a task in `instruction`, and sometimes a text for this task in `input`. There is no
    warning for rows with token ids, because a text in such a row is probably the text of these tokens.

    `raw_row` is the row in the file, from which `columns` has made `row`. Columns in `warned_of` have had a warning.
    """
    if TOKENS in row and not columns.prompt:
        return
    prompt_source, prompt = _used_prompt(row, columns)
    for name in PROMPT_COLUMNS:
        text = raw_row.get(name)
        if name in warned_of or not isinstance(text, str) or not text.strip() or name in columns.prompt:
            continue
        if joined_texts(text) not in joined_texts(prompt):
            warned_of.add(name)
            log.warning(
                "%s: the text in the column %s is not part of the prompt, which is %s: if both belong to the question, "
                "join them in one column",
                place,
                name,
                prompt_source,
            )


def _used_prompt(row: dict[str, Any], columns: ColumnMap) -> tuple[str, Any]:
    """Return where the prompt of a row comes from, and the prompt: a text or messages."""
    if columns.prompt:
        return f"--prompt-column {','.join(columns.prompt)}", row.get("messages", row.get("input"))
    if "messages" in row:
        return "the column messages", row["messages"]
    name = "input" if row.get("input") and not isinstance(row.get("prompt"), list) else "prompt"
    return f"the column {name}", row.get(name)


def _table_rows(path: Path, file: BinaryIO) -> Rows:
    from async_grpo.experience.table_files import parquet_rows

    return parquet_rows(path, file)


READERS = {
    ".csv": _csv_rows,
    ".json": _json_rows,
    ".parquet": _table_rows,
    ".pq": _table_rows,
    ".tsv": _tsv_rows,
}
UNPACK = "a packed file: unpack it first, such as by gunzip or zstd -d"
REFUSED_SUFFIXES = {
    ".7z": UNPACK,
    ".arrow": "one file of a folder that `datasets` wrote: give the folder",
    ".bz2": UNPACK,
    ".gz": UNPACK,
    ".pickle": "a pickle can run code when it is read: write the rows as JSONL",
    ".pkl": "a pickle can run code when it is read: write the rows as JSONL",
    ".tar": UNPACK,
    ".xls": "a table of Excel: save it as CSV UTF-8",
    ".xlsx": "a table of Excel: save it as CSV UTF-8",
    ".xz": UNPACK,
    ".yaml": "YAML is not read: write the rows as JSONL",
    ".yml": "YAML is not read: write the rows as JSONL",
    ".zip": UNPACK,
    ".zst": UNPACK,
}
