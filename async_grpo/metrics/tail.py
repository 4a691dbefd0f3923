"""Files that a run still writes, read without reading all of them: their ends, and a thin selection of their lines."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CHUNK = 1 << 18  # bytes read at a time, from the end


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` finished lines; fewer if there are no more, [] without a file.

    >>> import tempfile; path = Path(tempfile.mkstemp()[1]); _ = path.write_text("a\\nb\\nc\\nunfinish")
    >>> last_lines(path, 2)
    ['b', 'c']
    """
    try:
        with path.open("rb") as file:
            begin, parts, ends = file.seek(0, os.SEEK_END), list[bytes](), 0
            while begin and ends <= count:
                end, begin = begin, max(0, begin - CHUNK)
                file.seek(begin)
                parts.append(file.read(end - begin))
                ends += parts[-1].count(b"\n")
    except OSError:
        return []
    return b"".join(reversed(parts)).decode("utf-8", "replace").split("\n")[:-1][-count:]


def last_records(path: Path, count: int) -> list[dict[str, Any]]:
    """The last objects of a JSONL file; lines that are none are passed over."""
    return list(_records(last_lines(path, count)))


def spread_records(path: Path, since: int, count: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Objects of a JSONL file from byte `since` on, where a line begins, each with the byte at which its line ends.

    They are `count` at most, evenly spread, and of a long file no more than them is read; where it has clearly fewer, they
    are all. Nothing without a file.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        size, place = file.seek(0, os.SEEK_END), since
        stride = -(-(size - since) // count)
        for number in range(1, count + 1):
            file.seek(max(0, place - 1))
            if place:
                file.readline()  # the rest of the line that it lies in
            line = file.readline()
            if not line.endswith(b"\n"):  # the end, or what the run is writing
                return
            for record in _records([line.decode("utf-8", "replace")]):
                yield record, file.tell()
            place = max(file.tell(), since + number * stride)


def _records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
