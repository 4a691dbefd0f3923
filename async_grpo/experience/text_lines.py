"""Read the lines of a data file as text. If a file is no UTF-8 text, the error names what it is."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse
from async_grpo.processes.untrusted_files import BYTE_ORDER_MARK, MAX_ROW_BYTES, bounded_lines

UTF_16 = "UTF-16, as some programs of Windows write: convert it by iconv -f utf-16 -t utf-8 FILE"
# Beginnings of files that are no UTF-8 text, and what to do with them
BEGINNINGS = {
    codecs.BOM_UTF16_LE: UTF_16,
    codecs.BOM_UTF16_BE: UTF_16,
    b"PAR1": "a Parquet file: give it a name that ends in .parquet",
    b"\x1f\x8b": "packed by gzip: unpack it first, by gunzip",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it first, by zstd -d",
    b"\xfd7zXZ\0": "packed by xz: unpack it first, by unxz",
    b"BZh91AY&SY": "packed by bzip2: unpack it first, by bunzip2",
    b"PK\x03\x04": "a zip file: unpack it first; a table of Excel is saved as CSV UTF-8",
    b"\x93NUMPY": "an array of numpy: write the rows as JSONL",
}
# Beginnings of texts that are no rows, in lower case, and what to do with them
TEXT_BEGINNINGS = {
    b"version https://git-lfs.github.com/spec/": "a pointer of git-lfs: fetch its content, by `git lfs pull` in its folder",
    b"<!doctype html": "a page of the web, such as an error message: download the file itself",
    b"<html": "a page of the web, such as an error message: download the file itself",
}
TOO_LONG_NUMBER = "integer string conversion"  # in Python's message for a number of thousands of digits
SHOWN_CHARACTERS = 40  # number of characters of a wrong line that a message shows


def text_lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, str]]:
    """Yield (file and line number as text, line) for each line of a UTF-8 file.

    Windows begins such a file with a byte order mark, which is skipped.

    Raises:
        ConfigurationError: A line is too long, or is not UTF-8.
    """
    for number, line in enumerate(bounded_lines(file, MAX_ROW_BYTES), start=1):
        place = f"{path}, line {number}"
        if number == 1:
            refuse_other_contents(line or b"", place)
        if line is None:
            raise ConfigurationError(
                f"{place}: longer than {MAX_ROW_BYTES >> 20} MB, the most that is read of a row"
            )
        text = decoded(line, place)
        if number == 1:
            text = text.removeprefix(BYTE_ORDER_MARK)
        refuse(
            text.startswith(BYTE_ORDER_MARK),
            f"{place}: a byte order mark (BOM) within the file, as after joining files: remove it",
        )
        yield place, text


def refuse_other_contents(beginning: bytes, place: str) -> None:
    """Raise ConfigurationError if a file that should be text begins as one of BEGINNINGS, or with NUL bytes."""
    for signature, content in BEGINNINGS.items():
        refuse(beginning.startswith(signature), f"{place}: not UTF-8 text, but {content}")
    refuse(
        b"\0" in beginning,
        f"{place}: not UTF-8 text, because it holds NUL bytes: convert UTF-16 without a mark by iconv -f utf-16le (or "
        "utf-16be) -t utf-8 FILE; rows in a binary format are written as JSONL",
    )


def refuse_other_texts(file: BinaryIO, path: Path) -> None:
    """Raise ConfigurationError if an open file, whatever its name, begins as one of TEXT_BEGINNINGS."""
    beginning = file.read(max(map(len, TEXT_BEGINNINGS))).lower()
    file.seek(0)
    for signature, content in TEXT_BEGINNINGS.items():
        refuse(beginning.startswith(signature), f"{path}: no rows, but {content}")


def decoded(content: bytes, place: str) -> str:
    """Return the text of bytes.

    Args:
        content: Bytes in UTF-8.
        place: File and line of the bytes, for the message.

    Raises:
        ConfigurationError: The bytes are not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{place}: not UTF-8 ({error}): convert the file, such as by iconv -f cp1252 -t utf-8"
        ) from error


def json_problem(error: ValueError) -> str:
    """Return what is wrong with a row that is not JSON, and the text at the wrong place.

    The decoder's own message is not used, because it counts lines within the row, and would seem to name a line of the
    file.
    """
    if TOO_LONG_NUMBER in str(error):
        return "a whole number has thousands of digits: write it as a text, in double quotes"
    if not isinstance(error, json.JSONDecodeError):  # brackets nested too deeply
        return str(error)
    begin = error.pos if error.pos < len(error.doc.rstrip()) else max(0, len(error.doc) - SHOWN_CHARACTERS)
    excerpt = error.doc[begin : begin + SHOWN_CHARACTERS].rstrip()
    words = f"{error.msg} at column {error.colno}"
    return f"{words}, {excerpt!r}" if excerpt else words
