"""Read parts of files that a run may still be writing: the last lines, or a few lines spread over the file.

The files may be untrusted. So only regular files are read, and at most MAX_TAIL_BYTES at their end.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from async_grpo.processes.untrusted_files import CHUNK_BYTES, MAX_LINE_BYTES, open_regular, parse_json

CHUNK = 1 << 18  # number of bytes that are read at a time, from the end of the file backwards
# Maximum number of bytes that are read. Parsed JSON may take twenty times as much memory as its text
MAX_TAIL_BYTES = 64 << 20
log = logging.getLogger(__name__)


def last_lines(path: Path, count: int) -> list[str]:
    r"""Return up to `count` last complete lines, or [] if there is no file.

    Lines longer than MAX_LINE_BYTES are skipped, and so is everything before the last MAX_TAIL_BYTES.

    >>> import tempfile; path = Path(tempfile.mkstemp()[1]); _ = path.write_text("a\nb\nc\nunfinish")
    >>> last_lines(path, 2)
    ['b', 'c']
    """
    file = _opened(path)
    if file is None:
        return []
    parts: list[bytes] = []
    num_ends = 0
    with file:
        begin = file.seek(0, os.SEEK_END)
        first = max(0, begin - MAX_TAIL_BYTES)
        while begin > first and num_ends <= count:
            end = begin
            begin = max(first, begin - CHUNK)
            file.seek(begin)
            parts.append(file.read(end - begin))
            num_ends += parts[-1].count(b"\n")
    lines = b"".join(reversed(parts)).split(b"\n")[:-1]
    if begin > 0:
        # The first line is incomplete
        lines = lines[1:]
    return [line.decode("utf-8", "replace") for line in _short(lines[-count:], path)]


def last_records(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the objects in the last `count` lines of a JSONL file. Lines without an object are skipped."""
    return list(_records(last_lines(path, count)))


def spread_records(path: Path, since: int, count: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (object, position of its line's end in bytes) for up to `count` lines spread evenly over a JSONL file.

    Only about `count` lines are read, even from a long file. A file with clearly fewer lines is read completely. Lines
    longer than MAX_LINE_BYTES are skipped. If there is no file, nothing is yielded.

    Args:
        path: The file.
        since: Position in bytes at which to begin, which must be the beginning of a line.
        count: Maximum number of lines.
    """
    file = _opened(path)
    if file is None:
        return
    with file:
        size = file.seek(0, os.SEEK_END)
        place = since
        stride = -(-(size - since) // count)
        for number in range(1, count + 1):
            file.seek(max(0, place - 1))
            if place:
                _skip_line(file)  # go to the beginning of the next line
            line = file.readline(MAX_LINE_BYTES + 1)
            if len(line) > MAX_LINE_BYTES:
                list(_short([line], path))
                file.seek(-1, os.SEEK_CUR)
                _skip_line(file)
                line = b"\n"
            if not line.endswith(b"\n"):  # the end of the file, or an incomplete line that the run is writing
                return
            for record in _records([line.decode("utf-8", "replace")]):
                yield record, file.tell()
            place = max(file.tell(), since + number * stride)


def _opened(path: Path) -> BinaryIO | None:
    try:
        return open_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s is not read: %s", path, error.strerror)
        return None


def _skip_line(file: BinaryIO) -> None:
    while (piece := file.readline(CHUNK_BYTES)) and not piece.endswith(b"\n"):
        pass


def _short(lines: Iterable[bytes], path: Path) -> Iterator[bytes]:
    num_skipped = 0
    for line in lines:
        if len(line) > MAX_LINE_BYTES:
            num_skipped += 1
        else:
            yield line
    if num_skipped:
        log.warning("%s: %d lines of more than %d MB are not read", path, num_skipped, MAX_LINE_BYTES >> 20)


def _records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
