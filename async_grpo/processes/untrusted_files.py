"""Safe reading of files that other people may have made: checkpoints, models, folders of runs, data files.

Only regular files are opened, because a command would wait forever for a pipe, and a device such as /dev/zero has no
end. If a file names another file, that file must be inside the same folder, and links are not followed. A malicious
folder can therefore not make a program show or overwrite files elsewhere. The length of lines and texts and the depth
of JSON are limited, because a line of 200 MB took 12 GB of memory.
"""

import errno
import json
import logging
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

MAX_TEXT_BYTES = 16 << 20  # largest file that is read as a whole, such as a manifest or a run's parameters
MAX_LINE_BYTES = 8 << 20  # longest line in a run's own files; a step's metrics take a few kilobytes
MAX_ROW_BYTES = 32 << 20  # longest row of a data file, whose columns may contain test cases
MAX_JSON_DEPTH = 100  # deepest nesting of objects and lists; Python's own functions fail at some hundreds
BYTE_ORDER_MARK = "\ufeff"
CHUNK_BYTES = 1 << 18  # number of bytes that are read at a time to skip a long line
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
SHOWN_CHARACTERS = 60  # number of characters of a value that a message shows
log = logging.getLogger(__name__)


class RepeatedKey(ValueError):
    """An object in a JSON text has the same key twice."""


def open_regular(path: Path, *, follow_links: bool = False) -> BufferedReader:
    """Open a regular file for reading, without ever waiting.

    Args:
        path: The file. Links among its parent folders are followed.
        follow_links: Whether the file itself may be a link, like the files of a downloaded model.

    Raises:
        OSError: There is no such file, or it is a link, a pipe, a socket, a device or a folder.
    """
    return _open(path, None, follow_links=follow_links)


def open_inside(folder: Path, name: str) -> BufferedReader:
    """Open a regular file in a folder by a name from an untrusted file. Links in the folder are not followed.

    Raises:
        OSError: The name leads out of the folder, or does not name a regular file.
    """
    parts = plain_parts(name)
    directory = os.open(folder, FOLDER_FLAGS)
    try:
        for part in parts[:-1]:
            below = os.open(part, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = below
        return _open(Path(parts[-1]), directory, follow_links=False)
    finally:
        os.close(directory)


def plain_parts(name: str) -> tuple[str, ...]:
    """Return the parts of a relative path that stays inside its folder.

    Raises:
        OSError: The name is absolute or empty, or contains `..` or a NUL character.

    >>> plain_parts("training/shard-1.safetensors")
    ('training', 'shard-1.safetensors')
    >>> plain_parts("../elsewhere")
    Traceback (most recent call last):
    OSError: [Errno 22] leads out of its folder: '../elsewhere'
    """
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name
    if leads_out:
        raise OSError(errno.EINVAL, "leads out of its folder", name)
    return path.parts


def _open(path: Path, directory: int | None, *, follow_links: bool) -> BufferedReader:
    try:
        status = os.stat(path, dir_fd=directory, follow_symlinks=follow_links)
    # `ValueError` means that the name contains a NUL character or a lone surrogate
    except ValueError as error:
        raise OSError(errno.EINVAL, "cannot be the name of a file", str(path)) from error
    _refuse_irregular(status, path)
    # Another program may have replaced the file since the check. With these flags, `open` does not wait if it is a pipe
    # now
    flags = FILE_FLAGS if follow_links else FILE_FLAGS | os.O_NOFOLLOW
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        _refuse_irregular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _refuse_irregular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "is a link, and links are not followed", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def is_regular(path: Path, *, follow_links: bool = False) -> bool:
    """Return whether `open_regular` would open the file."""
    try:
        return stat.S_ISREG(os.stat(path, follow_symlinks=follow_links).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES, *, follow_links: bool = False) -> bytes:
    """Return the content of a regular file of at most `max_bytes`.

    Raises:
        OSError: For the same reasons as in `open_regular`, or because the file is larger.
    """
    with open_regular(path, follow_links=follow_links) as file:
        return read_bounded(file, path, max_bytes)


def read_bounded(file: BinaryIO, path: Path, max_bytes: int) -> bytes:
    """Return the content of an open file.

    Raises:
        OSError: The file is larger than `max_bytes`.
    """
    size = os.fstat(file.fileno()).st_size
    content = file.read(min(size, max_bytes) + 1)
    if size > max_bytes or len(content) > max_bytes:
        limit_mb = max_bytes >> 20
        raise OSError(errno.EFBIG, f"is larger than {limit_mb} MB, the most that is read", str(path))
    return content


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES, *, follow_links: bool = False) -> str:
    """Return the text of a regular file.

    Raises:
        OSError: For the same reasons as in `read_bytes`.
        ValueError: The file is not UTF-8.
    """
    return read_bytes(path, max_bytes, follow_links=follow_links).decode("utf-8")


def read_json(path: Path, max_bytes: int = MAX_TEXT_BYTES, *, follow_links: bool = False) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: For the same reasons as in `read_bytes`.
        ValueError: For the same reasons as in `parse_json`.
    """
    return parse_json(read_bytes(path, max_bytes, follow_links=follow_links))


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: The JSON text.
        unique_keys: Whether an object that has a key twice is wrong. If not, its last value counts.

    Raises:
        RepeatedKey: An object has a key twice.
        ValueError: The text is not UTF-8, is not JSON, begins with a byte order mark, or is nested deeper than
            MAX_JSON_DEPTH.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if text.startswith(BYTE_ORDER_MARK):
        raise ValueError(
            "it begins with a byte order mark (BOM), which JSON forbids: save it as UTF-8 without one"
        )
    too_deep = f"brackets are nested deeper than {MAX_JSON_DEPTH}"
    try:
        value = json.loads(text, object_pairs_hook=_object_of if unique_keys else None)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    may_be_deep = text.count("[") + text.count("{") > MAX_JSON_DEPTH
    if may_be_deep and is_deeper(value, MAX_JSON_DEPTH):
        raise ValueError(too_deep)
    return value


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these keys and values, or raise RepeatedKey."""
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    keys = [key for key, _ in pairs]
    repeated_key = next(key for key in keys if keys.count(key) > 1)
    values = [repr(value)[:SHOWN_CHARACTERS] for key, value in pairs if key == repeated_key]
    raise RepeatedKey(
        f"the key {repeated_key!r} is there {len(values)} times, with {' and '.join(values)}: keep one of them"
    )


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether dicts and lists are nested more than `depth` levels deep in a value.

    >>> is_deeper({"a": [1]}, 2), is_deeper({"a": [[1]]}, 2)
    (False, True)
    """
    level = [value]
    for _ in range(depth):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = []
        for container in containers:
            level.extend(container.values() if isinstance(container, dict) else container)
    return any(isinstance(item, dict | list) for item in level)


def bounded_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes | None]:
    r"""Yield the lines of a file, including their line ends. Yield None for each line of more than `max_bytes`.

    >>> import io
    >>> list(bounded_lines(io.BytesIO(b"ab\nabcdefgh\nc"), 4))
    [b'ab\n', None, b'c']
    """
    while line := file.readline(max_bytes + 1):
        if len(line) <= max_bytes:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(CHUNK_BYTES)
        yield None


def is_text(value: Any) -> bool:
    r"""Return whether a value is text that UTF-8 can encode. Text from JSON may contain a lone surrogate.

    >>> is_text("a"), is_text("\ud800"), is_text(1)
    (True, False, False)
    """
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def all_is_text(value: Any) -> bool:
    """Return whether UTF-8 can encode all texts in a JSON value, including keys."""
    if isinstance(value, str):
        return is_text(value)
    if isinstance(value, dict):
        return all(is_text(key) and all_is_text(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(all_is_text, value))
    return True


def printable(text: str) -> str:
    r"""Replace control characters, with which a text could change other parts of a terminal, by question marks.

    >>> printable("a\x1b[2Jb\tc")
    'a?[2Jb\tc'
    """
    return "".join(c if c.isprintable() or c == "\t" else "?" for c in text)


def files_inside(folder: Path, pattern: str) -> list[Path]:
    """Return the regular files below a folder that match a pattern, sorted. Links are not followed."""
    files = []
    for path in sorted(folder.glob(pattern)):
        below = path.relative_to(folder)
        above = [folder.joinpath(*below.parts[:depth]) for depth in range(1, len(below.parts))]
        if is_regular(path) and not any(place.is_symlink() for place in above):
            files.append(path)
        else:
            log.warning("%s is not read: it is a link, or not a regular file", path)
    return files
