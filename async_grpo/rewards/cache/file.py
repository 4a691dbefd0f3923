"""The verdict cache on disk: one SQLite table, shared by any number of threads and processes of one machine.

A process that is killed while it writes loses its last entry at most. Not for network file systems, whose locks
SQLite cannot trust.
"""

import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.cache.connection import connect, transaction

ENTRY_OVERHEAD_BYTES = 150  # of the columns beside key and answer, and of the index, roughly
ROWS_PER_DELETE = 1000  # other processes may write between two of them
STORAGE_ERRORS = (sqlite3.Error, OSError, ConfigurationError)  # whatever a file can do to its users


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

    Each of them raises what `connect` raises, ConfigurationError and sqlite3.Error; the connection is then given
    up, and the next call opens the file anew.

    Args:
        path: made if missing, with its folder.
        busy_s: how long another process's lock is waited for.
        repair: move a damaged file aside and begin anew, instead of refusing it.
        now: the clock, in seconds since 1970.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        busy_s: float = 2.0,
        repair: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self._busy_s, self._repair, self._now = busy_s, repair, now
        self._connection: sqlite3.Connection | None = None
        self._touched: dict[str, int] = {}  # key -> hits that the file does not know of yet
        self._lock = threading.RLock()

    @property
    def num_touched(self) -> int:
        """Entries with hits that only `flush` will write."""
        return len(self._touched)

    def open(self) -> None:
        """Open the file now, to learn whether it can be."""
        with self._session():
            pass

    def get(self, key: str) -> tuple[str, float] | None:
        """The answer and what it cost; None if there is none, or none that is as it was written."""
        with self._session() as connection:
            query = "SELECT answer, cost, checksum FROM verdicts WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone()
            if row is None or row[2] != _checksum(key, row[0], row[1]):  # SQLite's own pages have none
                return None
            self._touched[key] = self._touched.get(key, 0) + 1
            return row[0], row[1]

    def put(self, key: str, answer: str, cost: float = 0.0) -> None:
        """Write an answer, in place of an older one of this key."""
        now, adapter = self._now(), key.rpartition(":")[0]
        size = len(key.encode()) + len(answer.encode()) + ENTRY_OVERHEAD_BYTES
        row = (key, adapter, answer, cost, _checksum(key, answer, cost), now, now, size)
        with self._session() as connection, transaction(connection):
            connection.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?)", row)

    def flush(self) -> None:
        """Write the hits since the last flush; they wait in memory, so that no hit waits for a lock."""
        update = "UPDATE verdicts SET hits = hits + ?, last_used = max(last_used, ?) WHERE key = ?"
        with self._session() as connection:
            now = self._now()
            with transaction(connection):
                connection.executemany(update, [(hits, now, key) for key, hits in self._touched.items()])
            self._touched.clear()

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
        if self._touched:
            self.flush()
        deleted = 0
        if unused_for_s is not None or adapter is not None:
            before = float("inf") if unused_for_s is None else self._now() - unused_for_s
            deleted += self._delete(
                "last_used <= ? AND (? IS NULL OR adapter = ?)", (before, adapter, adapter)
            )
        if max_bytes is not None:
            deleted += self._delete_longest_unused(max_bytes)
        with self._session() as connection:
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
        """Write the last hits and let go of the file; used again, it is opened again."""
        if self._touched:
            with suppress(*STORAGE_ERRORS):  # they are statistics only
                self.flush()
        with self._lock:
            self._disconnect()

    def _delete(self, condition: str, values: tuple) -> int:
        found = f"SELECT key FROM verdicts WHERE {condition} LIMIT {ROWS_PER_DELETE}"
        deleted = 0
        while True:
            with self._session() as connection, transaction(connection):
                count = connection.execute(f"DELETE FROM verdicts WHERE key IN ({found})", values).rowcount
            deleted += count
            if count < ROWS_PER_DELETE:
                return deleted

    def _delete_longest_unused(self, max_bytes: int) -> int:
        victims: list[tuple[str]] = []
        with self._session() as connection:
            (total,) = connection.execute("SELECT coalesce(sum(size), 0) FROM verdicts").fetchone()
            for key, size in connection.execute("SELECT key, size FROM verdicts ORDER BY last_used, key"):
                if total <= max_bytes:
                    break
                victims.append((key,))
                total -= size
        for start in range(0, len(victims), ROWS_PER_DELETE):
            with self._session() as connection, transaction(connection):
                some = victims[start : start + ROWS_PER_DELETE]
                connection.executemany("DELETE FROM verdicts WHERE key = ?", some)
        return len(victims)

    @contextmanager
    def _session(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = connect(self.path, self._busy_s, self._repair)
                yield self._connection
            except UnicodeDecodeError as error:  # text, or a message of SQLite, that is damaged
                self._disconnect()
                raise sqlite3.DatabaseError(f"not text: {error.object!r:.100}") from error
            except STORAGE_ERRORS:
                self._disconnect()
                raise

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _checksum(key: str, answer: str, cost: float) -> int:
    return zlib.crc32(f"{key} {answer} {cost!r}".encode())
