"""The verdict cache on disk: one SQLite table, shared by any number of threads and processes of one machine.

A process that is killed while it writes loses its last entry at most. Not for network file systems, whose locks
SQLite cannot trust. (diskcache was looked at: it unpickles what it finds in the file, and cannot tell what a reward's
entries take or have saved.)
"""

import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from async_grpo.errors import ConfigurationError

APPLICATION_ID = 0x67725643  # "grVC", in the header of every file of ours
SCHEMA = 1
_CREATE = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA}",
    """CREATE TABLE verdicts (
        key TEXT PRIMARY KEY, adapter TEXT NOT NULL, answer TEXT NOT NULL, cost REAL NOT NULL,
        checksum INTEGER NOT NULL, created REAL NOT NULL, last_used REAL NOT NULL, hits INTEGER NOT NULL,
        size INTEGER NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX by_last_used ON verdicts (last_used, size)",
)
_NUM_TABLES = "SELECT count(*) FROM sqlite_master"
_MAGIC = b"SQLite format 3\0"
_SETTINGS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",  # a power cut may cost entries, not the file
    f"PRAGMA journal_size_limit = {16 * 2**20}",
)
ENTRY_OVERHEAD_BYTES = 150  # of the columns beside key and answer, and of the index, roughly
STORAGE_ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)  # whatever a file can do to its users


@dataclass(frozen=True)
class AdapterEntries:
    """What the file holds of one adapter. Moments are seconds since 1970, the cost is in the judges' currency."""

    adapter: str
    count: int
    hits: int
    num_bytes: int
    oldest: float
    newest: float
    cost_saved: float


class CacheFile:
    """Keys `ADAPTER:DIGEST` -> answers as text. Every method may be called from any thread, and blocks.

    Each of them may raise ConfigurationError (the file is no verdict cache, of another version, damaged, or cannot be
    made) and `STORAGE_ERRORS`; the connection is then given up, and the next call opens the file anew.

    Args:
        path: made if missing, with its folder.
        busy_s: how long another process's lock is waited for.
        now: the clock, in seconds since 1970.
    """

    def __init__(
        self, path: str | Path, *, busy_s: float = 2.0, now: Callable[[], float] = time.time
    ) -> None:
        self.path = Path(path)
        self._busy_s, self._now = busy_s, now
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.RLock()

    def open(self) -> None:
        """Open the file now, to learn whether it can be."""
        with self._session():
            pass

    def get(self, key: str) -> tuple[str, float] | None:
        """The answer and what it cost; None if there is none, or none that is as it was written."""
        use = "UPDATE verdicts SET hits = hits + 1, last_used = max(last_used, ?) WHERE key = ?"
        with self._session() as connection:
            query = "SELECT answer, cost, checksum FROM verdicts WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone()
            if row is None or row[2] != _checksum(key, row[0], row[1]):  # SQLite's own pages have none
                return None
            with suppress(
                sqlite3.OperationalError
            ):  # locked for long: an answer is worth more than its count
                connection.execute(use, (self._now(), key))
            return row[0], row[1]

    def put(self, key: str, answer: str, cost: float = 0.0) -> None:
        """Write an answer, in place of an older one of this key."""
        now, adapter = self._now(), key.rpartition(":")[0]
        size = len(key.encode()) + len(answer.encode()) + ENTRY_OVERHEAD_BYTES
        row = (key, adapter, answer, cost, _checksum(key, answer, cost), now, now, size)
        with self._session() as connection:
            connection.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?)", row)

    def prune(
        self,
        *,
        unused_for_s: float | None = None,
        adapter: str | None = None,
        max_bytes: int | None = None,
        compact: bool = False,
    ) -> int:
        """Delete entries; returns how many.

        `unused_for_s` and `adapter`: those that both apply to. Then, until the rest fits `max_bytes`, the longest
        unused. `compact`: shrink the file to what is left; this writes all of it anew.
        """
        deleted = 0
        with self._session() as connection:
            if unused_for_s is not None or adapter is not None:
                before = float("inf") if unused_for_s is None else self._now() - unused_for_s
                condition = "last_used <= ? AND (? IS NULL OR adapter = ?)"
                deleted += connection.execute(
                    f"DELETE FROM verdicts WHERE {condition}", (before, adapter, adapter)
                ).rowcount
            if max_bytes is not None:
                newest_first = (
                    "SELECT key, sum(size) OVER (ORDER BY last_used DESC, key DESC) AS so_far FROM verdicts"
                )
                too_many = f"SELECT key FROM ({newest_first}) WHERE so_far > ?"
                deleted += connection.execute(
                    f"DELETE FROM verdicts WHERE key IN ({too_many})", (max_bytes,)
                ).rowcount
            connection.execute("VACUUM" if compact else "PRAGMA incremental_vacuum").fetchall()
            connection.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if compact else 'PASSIVE'})").fetchall()
        return deleted

    def entries(self) -> list[AdapterEntries]:
        """What the file holds, by adapter."""
        with self._session() as connection:
            rows = connection.execute(
                "SELECT adapter, count(*), sum(hits), sum(size), min(created), max(created), sum(hits * cost) "
                "FROM verdicts GROUP BY adapter ORDER BY adapter"
            )
            return [AdapterEntries(*row) for row in rows]

    def close(self) -> None:
        """Let go of the file; used again, it is opened again."""
        with self._lock, suppress(sqlite3.Error):
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    @contextmanager
    def _session(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time."""
        with self._lock:
            try:
                self._connection = self._connection or _open(self.path, self._busy_s)
                yield self._connection
            except (ConfigurationError, *STORAGE_ERRORS):
                self.close()
                raise


def _open(path: Path, busy_s: float) -> sqlite3.Connection:
    """A connection to the file, with all of it checked; several processes may make it at the same time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigurationError(f"the verdict cache {path} cannot be written: {error}") from error
    locked = retry_if_exception_type(sqlite3.OperationalError)
    retrying = Retrying(retry=locked, stop=stop_after_delay(busy_s), wait=wait_fixed(0.05), reraise=True)
    return retrying(_connect, path, busy_s)


def _connect(path: Path, busy_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        _check_kind(connection, path)
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(" ".join(problem.split()))
        for statement in _SETTINGS:
            connection.execute(statement).fetchall()
    except (sqlite3.OperationalError, ConfigurationError):
        connection.close()
        raise
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        connection.close()
        raise ConfigurationError(f"the verdict cache {path} is damaged ({error}): delete it") from error
    return connection


def _check_kind(connection: sqlite3.Connection, path: Path) -> None:
    """Make the table in an empty file; raise ConfigurationError for a file of something else or of another version."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) not in (b"", _MAGIC):  # a few bytes of text count as empty for SQLite
            raise ConfigurationError(f"{path} is no verdict cache: name another file, or delete this one")
    if connection.execute(_NUM_TABLES).fetchone() == (0,):
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("BEGIN IMMEDIATE")
        with connection:  # all or nothing
            if connection.execute(_NUM_TABLES).fetchone() == (0,):  # else another process was quicker
                for statement in _CREATE:
                    connection.execute(statement)
    queries = ("PRAGMA application_id", "PRAGMA user_version")
    application_id, schema = (connection.execute(query).fetchone()[0] for query in queries)
    if application_id != APPLICATION_ID:
        raise ConfigurationError(f"{path} is the database of something else: name another verdict cache")
    if schema != SCHEMA:
        raise ConfigurationError(
            f"the verdict cache {path} has schema {schema}, and this version of async-grpo knows {SCHEMA}: "
            "name another file, or delete this one"
        )


def _checksum(key: str, answer: str, cost: float) -> int:
    return zlib.crc32(f"{key} {answer} {cost!r}".encode())
