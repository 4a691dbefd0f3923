"""The verdict cache on disk: one SQLite table, shared by any number of processes of one machine.

A process that is killed while it writes loses its last entry at most. Not for network file systems, whose locks
SQLite cannot trust. (diskcache unpickles what it finds in the file.)
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

APPLICATION_ID = 0x67725643  # in the header of every file of ours; another table gets another number
_HEADER = b"SQLite format 3\0"  # which every file of SQLite begins with
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
ENTRY_OVERHEAD_BYTES = 150  # of the columns beside key and answer, and of the index, roughly
STORAGE_ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)  # whatever a file can do to its users


@dataclass(frozen=True)
class AdapterEntries:
    """Moments are seconds since 1970, the cost is in the judges' currency."""

    adapter: str
    count: int
    hits: int
    num_bytes: int
    oldest: float
    newest: float
    cost_saved: float


class CacheFile:
    """Keys `ADAPTER:DIGEST` -> answers as text. For one thread at a time; every method blocks.

    Each may raise ConfigurationError (the file is no verdict cache, of another version, damaged, or cannot be made) and
    `STORAGE_ERRORS`; the next call then opens the file anew. A missing file is made, with its folder; another process's
    lock is waited for `busy_s`.
    """

    def __init__(self, path: str | Path, *, busy_s: float = 2.0) -> None:
        self.path, self._busy_s = Path(path), busy_s
        self._connection: sqlite3.Connection | None = None

    def open(self) -> sqlite3.Connection:
        """The connection to the file, which is opened and checked if it is not open."""
        self._connection = self._connection or _connect(self.path, self._busy_s)
        return self._connection

    def get(self, key: str) -> tuple[str, float] | None:
        """The answer and what it cost; None if there is none, or none that is as it was written."""
        rows = self._execute("SELECT answer, cost, checksum FROM verdicts WHERE key = ?", key)
        if not rows or rows[0][2] != _checksum(key, *rows[0][:2]):  # SQLite's own pages have none
            return None
        use = "UPDATE verdicts SET hits = hits + 1, last_used = max(last_used, ?) WHERE key = ?"
        with suppress(sqlite3.OperationalError):  # locked for long: an answer is worth more than its count
            self.open().execute(use, (time.time(), key))
        return rows[0][:2]

    def put(self, key: str, answer: str, cost: float = 0.0) -> int:
        """Write an answer, in place of an older one of this key; returns the bytes that it takes."""
        now, adapter = time.time(), key.rpartition(":")[0]
        size = len(key.encode()) + len(answer.encode()) + ENTRY_OVERHEAD_BYTES
        row = (key, adapter, answer, cost, _checksum(key, answer, cost), now, now, size)
        self._execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?)", *row)
        return size

    def prune(
        self, *, unused_for_s: float | None = None, adapter: str | None = None, max_bytes: int | None = None
    ) -> int:
        """Delete the entries that `unused_for_s` and `adapter` both apply to, then the longest unused until the rest fits
        `max_bytes`; returns how many. The file shrinks.
        """
        age_s = unused_for_s if unused_for_s is not None else math.inf if adapter is None else -math.inf
        old = "DELETE FROM verdicts WHERE last_used <= ? AND (? IS NULL OR adapter = ?) RETURNING 1"
        so_far = "sum(size) OVER (ORDER BY last_used DESC, key DESC) AS so_far"
        too_many = f"key IN (SELECT key FROM (SELECT key, {so_far} FROM verdicts) WHERE so_far > ?)"
        limit = math.inf if max_bytes is None else max_bytes
        deleted = self._execute(old, time.time() - age_s, adapter, adapter)
        deleted += self._execute(f"DELETE FROM verdicts WHERE {too_many} RETURNING 1", limit)
        return len(deleted)

    def entries(self) -> list[AdapterEntries]:
        """What the file holds, by adapter."""
        columns = "adapter, count(*), sum(hits), sum(size), min(created), max(created), sum(hits * cost)"
        rows = self._execute(f"SELECT {columns} FROM verdicts GROUP BY adapter ORDER BY adapter")
        return [AdapterEntries(*row) for row in rows]

    def close(self) -> None:
        """Let go of the file; with the next call it is opened again."""
        connection, self._connection = self._connection, None
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
    """A connection to the file, with all of it checked, and the table in it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            is_ours = file.read(len(_HEADER)) in (b"", _HEADER)
    except OSError as error:
        raise ConfigurationError(f"the verdict cache {path} cannot be written: {error}") from error
    connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        if not is_ours:  # SQLite takes a file of a few bytes for an empty one
            raise sqlite3.DatabaseError("it does not begin as SQLite's files do")
        if _is_empty(connection):
            _make_table(connection)
        # First, as quick_check may read a view: one of somebody else's, or a trigger, computes without end
        queries = ("PRAGMA application_id", _NUM_PROGRAMS, "PRAGMA quick_check(1)")
        found = [connection.execute(query).fetchone()[0] for query in queries]
        if found != [APPLICATION_ID, 0, "ok"]:
            raise sqlite3.DatabaseError(
                f"application id {found[0]}, {found[1]} views or triggers, check {found[2]!r}"
            )
        _use_write_ahead_log(connection, busy_s)
        connection.executescript(_SETTINGS)
    except BaseException as error:
        connection.close()
        is_read = isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError)
        if is_read and not isinstance(error, sqlite3.OperationalError):
            message = f"{path} is no verdict cache of this version, or damaged ({error})"
            raise ConfigurationError(f"{message}: name another file, or delete this one") from error
        raise
    return connection


def _is_empty(connection: sqlite3.Connection) -> bool:
    """Whether the file holds no table, as a new one does, or one that another process is making."""
    connection.execute("BEGIN")  # both are read of one state of the file
    queries = ("PRAGMA application_id", "SELECT count(*) FROM sqlite_master")
    found = [connection.execute(query).fetchone()[0] for query in queries]
    connection.execute("COMMIT")
    return found == [0, 0]


def _make_table(connection: sqlite3.Connection) -> None:
    """Make the table, unless another process that opened the same new file has made it meanwhile."""
    connection.execute("PRAGMA auto_vacuum = FULL")  # only before the first table; a transaction of its own
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        for statement in _CREATE:
            connection.execute(statement)
    connection.execute("COMMIT")


def _use_write_ahead_log(connection: sqlite3.Connection, busy_s: float) -> None:
    """Switch the file to a write-ahead log, waiting `busy_s` for other processes.

    SQLite's own waiting does not cover this switch: of two processes that open a new file at once, one is refused.
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
            time.sleep(0.02)


def _checksum(key: str, answer: str, cost: float) -> int:
    return zlib.crc32(f"{key} {answer} {cost!r}".encode())
