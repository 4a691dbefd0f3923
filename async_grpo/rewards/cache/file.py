"""The verdict cache on disk: one SQLite table, shared by any number of processes of one machine.

A process that is killed while it writes loses at most its last entry. The file must not be on a network file system,
because SQLite cannot rely on the locks there. The library diskcache is not used, because it would unpickle whatever the
file contains.
"""

import math
import sqlite3
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError

APPLICATION_ID = 0x67725643  # marks a verdict cache in the file's header; change it with the table layout
_HEADER = b"SQLite format 3\0"  # beginning of every SQLite file
_CREATE = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    """
    CREATE TABLE verdicts (
        key TEXT PRIMARY KEY, adapter TEXT NOT NULL, answer TEXT NOT NULL, cost REAL NOT NULL,
        checksum INTEGER NOT NULL, created REAL NOT NULL, last_used REAL NOT NULL, hits INTEGER NOT NULL,
        size INTEGER NOT NULL) WITHOUT ROWID
    """,
    "CREATE INDEX by_last_used ON verdicts (last_used, size)",
)
_SETTINGS = """
    PRAGMA synchronous = NORMAL;  -- a power cut may cost entries, not the file
    PRAGMA journal_size_limit = 16777216
"""
_NUM_PROGRAMS = "SELECT count(*) FROM sqlite_master WHERE type IN ('view', 'trigger')"
# Approximate size of an entry without its key and answer: its other columns, and its place in the index
ENTRY_OVERHEAD_BYTES = 150
STORAGE_ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)  # errors that a broken file can cause
LOCK_POLL_S = 0.02  # seconds between two attempts to switch the file to a write-ahead log


@dataclass(frozen=True)
class AdapterEntries:
    """A summary of the entries of one adapter in the cache."""

    adapter: str
    count: int
    hits: int
    num_bytes: int
    oldest: float  # Unix time of the oldest entry
    newest: float  # Unix time of the newest entry
    cost_saved: float  # money saved by the entries, in the judges' currency


class CacheFile:
    """A file with answers as text, by keys of the form `ADAPTER:DIGEST`. Every method blocks.

    Use an object from one thread at a time. A missing file is created with its folder. Every method may raise one of
    `STORAGE_ERRORS`, or ConfigurationError if the file cannot be created, is not a verdict cache of this version, or is
    damaged. After an error, the next call opens the file again.

    Args:
        path: Path of the file.
        busy_s: Maximum number of seconds to wait for another process's lock.
    """

    def __init__(self, path: str | Path, *, busy_s: float = 2.0) -> None:
        self.path = Path(path)
        self._busy_s = busy_s
        self._connection: sqlite3.Connection | None = None

    def open(self) -> sqlite3.Connection:
        """Return the connection to the file. If the file is not open, open and check it first."""
        if self._connection is None:
            self._connection = _connect(self.path, self._busy_s)
        return self._connection

    def get(self, key: str) -> tuple[str, float] | None:
        """Return the answer to a key and its cost, or None if there is none or it has changed since it was written."""
        rows = self._execute("SELECT answer, cost, checksum FROM verdicts WHERE key = ?", key)
        if not rows:
            return None
        answer, cost, checksum = rows[0]
        # Entries have their own checksum, because SQLite keeps no checksums of its pages
        if checksum != _checksum(key, answer, cost):
            return None
        use = "UPDATE verdicts SET hits = hits + 1, last_used = max(last_used, ?) WHERE key = ?"
        # If the file is locked for too long, the answer is returned without counting its use
        with suppress(sqlite3.OperationalError):
            self.open().execute(use, (time.time(), key))
        return answer, cost

    def put(self, key: str, answer: str, cost: float = 0.0) -> int:
        """Write an answer, replacing an older answer to this key, and return the size of the entry in bytes."""
        now = time.time()
        adapter = key.rpartition(":")[0]
        size = len(key.encode()) + len(answer.encode()) + ENTRY_OVERHEAD_BYTES
        self._execute(
            "INSERT OR REPLACE INTO verdicts "
            "(key, adapter, answer, cost, checksum, created, last_used, hits, size) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?)",
            key,
            adapter,
            answer,
            cost,
            _checksum(key, answer, cost),
            now,
            now,
            size,
        )
        return size

    def prune(
        self, *, unused_for_s: float | None = None, adapter: str | None = None, max_bytes: int | None = None
    ) -> int:
        """Delete entries, shrink the file and return the number of deleted entries.

        Args:
            unused_for_s: Delete entries that were not used for this number of seconds. With `adapter`, delete only such
                entries of this adapter.
            adapter: Delete only entries of this adapter. If `unused_for_s` is None, delete all of its entries.
            max_bytes: Afterwards, delete the least recently used entries until the file has at most this size.
        """
        if unused_for_s is None:
            # Without `unused_for_s`, delete all entries of the adapter, or no entries if no adapter is named
            unused_for_s = math.inf if adapter is None else -math.inf
        delete_old = "DELETE FROM verdicts WHERE last_used <= ? AND (? IS NULL OR adapter = ?) RETURNING 1"
        deleted = self._execute(delete_old, time.time() - unused_for_s, adapter, adapter)

        running_size = "sum(size) OVER (ORDER BY last_used DESC, key DESC) AS running_size"
        keys_beyond = f"SELECT key FROM (SELECT key, {running_size} FROM verdicts) WHERE running_size > ?"
        delete_beyond = f"DELETE FROM verdicts WHERE key IN ({keys_beyond}) RETURNING 1"
        deleted += self._execute(delete_beyond, math.inf if max_bytes is None else max_bytes)
        return len(deleted)

    def entries(self) -> list[AdapterEntries]:
        """Return a summary of the entries of each adapter."""
        columns = "adapter, count(*), sum(hits), sum(size), min(created), max(created), sum(hits * cost)"
        rows = self._execute(f"SELECT {columns} FROM verdicts GROUP BY adapter ORDER BY adapter")
        return [AdapterEntries(*row) for row in rows]

    def close(self) -> None:
        """Close the file. The next call opens it again."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _execute(self, statement: str, *values: Any) -> list[Any]:
        try:
            return self.open().execute(statement, values).fetchall()
        except (ConfigurationError, *STORAGE_ERRORS):
            self.close()
            raise


def _connect(path: Path, busy_s: float) -> sqlite3.Connection:
    """Open the file, check all of it, and create the table if the file is new."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            has_header = file.read(len(_HEADER)) in (b"", _HEADER)
    except OSError as error:
        raise ConfigurationError(f"the verdict cache {path} cannot be written: {error}") from error
    connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        if not has_header:
            # SQLite would treat a file of a few bytes as empty
            raise sqlite3.DatabaseError("it does not begin as SQLite's files do")
        if _is_empty(connection):
            _make_table(connection)
        _refuse_foreign(connection)
        _use_write_ahead_log(connection, busy_s)
        connection.executescript(_SETTINGS)
    except BaseException as error:
        connection.close()
        is_content_error = isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError)
        if is_content_error and not isinstance(error, sqlite3.OperationalError):
            message = f"{path} is no verdict cache of this version, or damaged ({error})"
            raise ConfigurationError(f"{message}: name another file, or delete this one") from error
        raise
    return connection


def _first_value(connection: sqlite3.Connection, query: str) -> Any:
    return connection.execute(query).fetchone()[0]


def _refuse_foreign(connection: sqlite3.Connection) -> None:
    """Raise DatabaseError if the file is not a verdict cache or is damaged.

    A verdict cache has no views or triggers. A view or trigger in a foreign file could run forever.
    """
    application_id = _first_value(connection, "PRAGMA application_id")
    num_programs = _first_value(connection, _NUM_PROGRAMS)
    check = _first_value(connection, "PRAGMA quick_check(1)")
    if application_id != APPLICATION_ID or num_programs != 0 or check != "ok":
        raise sqlite3.DatabaseError(
            f"application id {application_id}, {num_programs} views or triggers, check {check!r}"
        )


def _is_empty(connection: sqlite3.Connection) -> bool:
    """Return whether the file contains no table, because it is new or another process is about to create the table."""
    connection.execute("BEGIN")  # both queries must read the same state of the file
    application_id = _first_value(connection, "PRAGMA application_id")
    num_objects = _first_value(connection, "SELECT count(*) FROM sqlite_master")
    connection.execute("COMMIT")
    return application_id == 0 and num_objects == 0


def _make_table(connection: sqlite3.Connection) -> None:
    """Create the table, unless another process that opened the same new file has already created it."""
    # This setting takes effect only before the first table is created, and outside a transaction
    connection.execute("PRAGMA auto_vacuum = FULL")
    connection.execute("BEGIN IMMEDIATE")
    if _first_value(connection, "SELECT count(*) FROM sqlite_master") == 0:
        for statement in _CREATE:
            connection.execute(statement)
    connection.execute("COMMIT")


def _use_write_ahead_log(connection: sqlite3.Connection, busy_s: float) -> None:
    """Switch the file to a write-ahead log. Wait up to `busy_s` for other processes.

    SQLite's own time-out does not cover this switch: if two processes open a new file at once, one of them gets an
    error.
    """
    deadline = time.monotonic() + busy_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
            return
        except sqlite3.OperationalError as error:
            is_locked = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not is_locked or time.monotonic() > deadline:
                raise
            time.sleep(LOCK_POLL_S)


def _checksum(key: str, answer: str, cost: float) -> int:
    return zlib.crc32(f"{key} {answer} {cost!r}".encode())
