"""VerdictCache: what was asked once is not asked again, in this run or in a later one.

    cache = VerdictCache("verdicts.sqlite")
    key = key_of("judge", version_of(settings), sample)
    answer = await cache.get_or_call(key, lambda: judge.score(sample, ...))

Kept are the answers of contract.py with the status ok or abstained; a failure or a time-out is asked again. A cache
that breaks (full disk, locked or damaged file) is said so once and done without until it works again: no sample
fails for it.
"""

import asyncio
import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.rewards.cache.file import STORAGE_ERRORS, CacheFile
from async_grpo.rewards.cache.key import key_of, version_of, version_of_judge

__all__ = ["VerdictCache", "key_of", "version_of", "version_of_judge"]

KEPT_STATUSES = frozenset({"ok", "abstained"})
COST = "judge_cost"  # of the answer's extras: what the call cost, in the judge's currency
HITS_PER_FLUSH = 256
WRITES_PER_PRUNE = 1000
MAX_WRITES_WAITING = 10_000
log = logging.getLogger(__name__)

Answer = dict[str, Any]


class VerdictCache:
    """Answers by key, in a file. Use one object from one event loop; others open the same file for themselves.

    Args:
        path: of the SQLite file, on a local disk; made if missing.
        max_bytes: now and then, entries beyond are deleted, the longest unused first.
        patience_s: for one look-up; then the cache counts as broken.
        retry_s: how long a broken cache is left alone.
        file_options: further keywords of CacheFile.

    Raises:
        ConfigurationError: the file is something else, of another version, or cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_bytes: int | None = None,
        patience_s: float = 10.0,
        retry_s: float = 30.0,
        **file_options: Any,
    ) -> None:
        self._file = CacheFile(path, **file_options)
        self._max_bytes, self._patience_s, self._retry_s = max_bytes, patience_s, retry_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verdict cache")
        self._in_flight: dict[str, asyncio.Future[str]] = {}
        self._writing: set[asyncio.Future[Any]] = set()
        self._broken_since: dict[str, float] = {}  # "reading" or "writing" -> the last time that it was tried
        self._counts: Counter[str] = Counter()
        self._cost_saved = 0.0
        self._closed = False
        try:
            self._file.open()
        except (sqlite3.Error, OSError) as error:
            self._broke("reading", error)

    async def get_or_call(self, key: str, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """The kept answer, or that of `call`, which is made once however many ask for it at the same time.

        If the one who calls is cancelled, another one calls with its own `call`. What `call` raises reaches everybody
        who waits for it. An answer that cost nothing (this time) has 0 as its extra `judge_cost`.
        """
        while (flight := self._in_flight.get(key)) is not None:
            await asyncio.wait({flight})
            if not flight.cancelled():
                self._counts["shared"] += 1
                return self._for_free(flight.result())
        flight = self._in_flight[key] = asyncio.get_running_loop().create_future()
        try:
            if (kept := await self._look_up(key)) is not None:
                flight.set_result(kept)
                return self._for_free(kept)
            answer = await call()
            flight.set_result(json.dumps(answer))
            self._keep(key, answer, flight.result())
            return answer
        except Exception as error:
            if not flight.done():
                flight.set_exception(error)
                flight.exception()  # that nobody else waits for it is no error of its own
            raise
        finally:
            del self._in_flight[key]
            flight.cancel()  # without an outcome it was cancelled: the first of those who wait takes over

    def stats(self) -> dict[str, float]:
        """Since the start: calls saved by the file (`hits`) and by each other (`shared`), calls made (`misses`),
        answers kept (`stored`), what went wrong with the file (`errors`) and was left out for it (`skipped`), and the
        cost saved."""
        names = ("hits", "shared", "misses", "stored", "errors", "skipped")
        return {name: self._counts[name] for name in names} | {"cost_saved": self._cost_saved}

    async def close(self) -> None:
        """Write what is still to be written, for `patience_s` at most; later calls go through uncached."""
        self._closed = True
        if self._writing:
            await asyncio.wait(self._writing, timeout=self._patience_s)
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._file.close)
        await asyncio.wait({closing}, timeout=self._patience_s)
        self._thread.shutdown(wait=False)

    async def _look_up(self, key: str) -> str | None:
        kept = None
        if self._works("reading"):
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(self._patience_s):
                    kept = await loop.run_in_executor(self._thread, self._file.get, key)
                self._mended("reading")
            except TimeoutError:  # a disk that hangs
                self._broke("reading", TimeoutError(f"no answer within {self._patience_s:g} s"))
            except STORAGE_ERRORS as error:
                self._broke("reading", error)
        else:
            self._counts["skipped"] += 1
        self._counts["misses" if kept is None else "hits"] += 1
        if self._file.num_touched >= HITS_PER_FLUSH and not self._writing:
            self._write("flushed", self._file.flush)
        return kept[0] if kept else None

    def _keep(self, key: str, answer: Answer, text: str) -> None:
        if answer.get("status") not in KEPT_STATUSES:
            return
        if self._max_bytes is not None and self._counts["kept"] % WRITES_PER_PRUNE == 0:
            self._write("pruned", partial(self._file.prune, max_bytes=self._max_bytes))
        self._counts["kept"] += 1
        if not self._write("stored", self._file.put, key, text, _cost(answer)):
            self._counts["skipped"] += 1

    def _write(self, count: str, operation: Callable[..., Any], *arguments: Any) -> bool:
        """Have it written, later: nobody waits for it. False if the file is broken."""
        if len(self._writing) >= MAX_WRITES_WAITING:
            self._broke("writing", TimeoutError(f"{len(self._writing)} writes are waiting"))
        if not self._works("writing"):
            return False
        writing = asyncio.get_running_loop().run_in_executor(self._thread, operation, *arguments)
        self._writing.add(writing)
        writing.add_done_callback(partial(self._written, count))
        return True

    def _written(self, count: str, writing: asyncio.Future[Any]) -> None:
        self._writing.discard(writing)
        if writing.cancelled():
            return
        if (error := writing.exception()) is not None:
            self._broke("writing", error)
        else:
            self._counts[count] += 1
            self._mended("writing")

    def _works(self, what: str) -> bool:
        """Whether to try: it is not broken, or has been left alone long enough."""
        alone_s = time.monotonic() - self._broken_since.get(what, float("-inf"))
        return alone_s >= self._retry_s and not self._closed

    def _broke(self, what: str, error: BaseException) -> None:
        self._counts["errors"] += 1
        if what not in self._broken_since:
            log.error(
                "%s the verdict cache %s failed, the run goes on without it and tries again every %g s: %s: %s",
                *(what, self._file.path, self._retry_s, type(error).__name__, error),
            )
        self._broken_since[what] = time.monotonic()

    def _mended(self, what: str) -> None:
        if self._broken_since.pop(what, None) is not None:
            log.warning("%s the verdict cache %s works again", what, self._file.path)

    def _for_free(self, text: str) -> Answer:
        answer: Answer = json.loads(text)
        if cost := _cost(answer):
            self._cost_saved += cost
            answer["extra"][COST] = 0.0
        return answer


def _cost(answer: Answer) -> float:
    return float(answer.get("extra", {}).get(COST, 0.0))
