"""A connection to the verdict cache's file: made if missing, refused if it is somebody else's, begun anew if damaged."""

import errno
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from async_grpo.errors import ConfigurationError

APPLICATION_ID = 0x67725643  # "grVC", in the header of every file of ours
SCHEMA = 1
WAL_LIMIT_BYTES = 16 * 2**20
_APPLICATION_ID_AT = slice(68, 72)  # https://www.sqlite.org/fileformat.html, 1.3
_MAGIC = b"SQLite format 3\0"
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # not the fault of the path that the user named
_CREATE = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA}",
    """CREATE TABLE verdicts (
        key TEXT PRIMARY KEY, adapter TEXT NOT NULL, answer TEXT NOT NULL, cost REAL NOT NULL,
        checksum INTEGER NOT NULL, created REAL NOT NULL, last_used REAL NOT NULL, hits INTEGER NOT NULL,
        size INTEGER NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX by_last_used ON verdicts (last_used, size)",
)
log = logging.getLogger(__name__)


def connect(path: Path, busy_s: float, repair: bool) -> sqlite3.Connection:
    """Open the file, with all of it checked; several processes may do so at once.

    Args:
        busy_s: how long another process's lock is waited for.
        repair: move a damaged cache aside and begin anew, instead of refusing it.

    Raises:
        ConfigurationError: it is no verdict cache, of another version, damaged, or cannot be written.
        sqlite3.Error, OSError: it is locked, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(path.with_name(f"{path.name}.lock"), busy_s):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
            try:
                return _checked(path, busy_s)
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in _DAMAGE:
                    raise
                _move_aside(path, error, repair)
                return _checked(path, busy_s)
    except OSError as error:
        if error.errno in _PASSING:
            raise
        raise ConfigurationError(f"the verdict cache {path} cannot be written: {error}") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Write all or nothing; the write lock is taken at the start, where waiting for it cannot fail half-way."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):  # the first error tells more
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _checked(path: Path, busy_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        _check_kind(connection, path)
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(" ".join(problem.split()))
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost entries, not the file
        connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
    except UnicodeDecodeError as error:  # even SQLite's complaint about the damage cannot be read
        connection.close()
        raise sqlite3.DatabaseError(f"not text: {error.object!r:.100}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check_kind(connection: sqlite3.Connection, path: Path) -> None:
    queries = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    application_id, schema, num_tables = (connection.execute(query).fetchone()[0] for query in queries)
    if (application_id, schema, num_tables) == (0, 0, 0):
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) not in (b"", _MAGIC):  # a few bytes of text count as empty for SQLite
                raise ConfigurationError(f"{path} is no verdict cache: name another file, or delete this one")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        with transaction(connection):
            for statement in _CREATE:
                connection.execute(statement)
    elif application_id != APPLICATION_ID:
        raise ConfigurationError(f"{path} is the database of something else: name another verdict cache")
    elif schema != SCHEMA:
        raise ConfigurationError(
            f"the verdict cache {path} has schema {schema}, and this version of async-grpo knows {SCHEMA}: "
            "name another file, or delete this one"
        )


def _move_aside(path: Path, error: sqlite3.DatabaseError, repair: bool) -> None:
    """Rename a damaged cache; anything else is somebody's file and stays where it is."""
    with path.open("rb") as file:
        header = file.read(100)
    if header[_APPLICATION_ID_AT] != APPLICATION_ID.to_bytes(4, "big"):
        raise ConfigurationError(
            f"{path} is no verdict cache ({error}): name another file, or delete this one"
        ) from error
    if not repair:
        raise ConfigurationError(f"the verdict cache {path} is damaged ({error}): delete it") from error
    aside = f"{path}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("-wal", "-shm", ""):  # a journal left behind would be played into the new file
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    log.error("the verdict cache %s is damaged (%s): moved to %s, and begun anew", path, error, aside)


@contextmanager
def _exclusive(path: Path, timeout_s: float) -> Iterator[None]:
    """Keep other processes from opening the cache: two that find it damaged would both move it aside."""
    deadline = time.monotonic() + timeout_s
    with path.open("a") as file:  # never deleted: the next one to come would lock a file without a name
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise sqlite3.OperationalError(f"{path} is held for {timeout_s:g} s") from error
                time.sleep(0.01)
        yield
