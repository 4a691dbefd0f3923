"""VerdictCache: what was asked once is not asked again, in this run or in a later one.

Kept are answers (see `adapter.result`) with the status ok or abstained. A file that breaks during the run (full disk,
locked or damaged file) is said so once and done without until it works again: no sample fails for it.
"""

import asyncio
import dataclasses
import hashlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.cache.file import STORAGE_ERRORS, CacheFile
from async_grpo.rewards.judges.remote_judge import JudgeAddresses

DELIVERY = frozenset(  # settings of a judge that say how it is asked, not what
    "limits api_key_env timeout_s attempts hedge_quantile endpoint_options price_per_million_tokens".split()
)
COST = "judge_cost"  # of the answer's extras: what the call cost, in the judge's currency
WRITES_PER_PRUNE = 1000
TIMEOUT_S = 10.0  # for one look-up or write; then the file counts as broken
RETRY_S = 30.0  # for which a broken file is left alone
COUNTS = ("hits", "shared", "misses", "stored", "errors", "skipped", "cost_saved")
log = logging.getLogger(__name__)

Answer = dict[str, Any]


class VerdictCache:
    """Answers by key, in a `CacheFile`, whose errors it raises at the start. For one event loop.

    `counts` since the start: calls saved by the file (`hits`) and by each other (`shared`), calls made (`misses`) ...
    Now and then, entries beyond `max_bytes` are deleted, the longest unused first.
    """

    def __init__(self, path: str | Path, *, max_bytes: int | None = None) -> None:
        self._file, self._max_bytes = CacheFile(path), max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verdict cache")
        self._in_flight: dict[str, asyncio.Future[str]] = {}
        self._retry_at = 0.0  # 0 while the file works
        self.counts: dict[str, float] = dict.fromkeys(COUNTS, 0)
        try:
            self._file.open()
        except STORAGE_ERRORS as error:
            self._broke(error)

    async def get_or_call(self, key: str, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """The kept answer, or that of `call`, which is made once however many ask for it at the same time; if that one is
        cancelled, another one calls. What `call` raises reaches all who wait. An answer that cost nothing this time has 0
        as its extra `judge_cost`.
        """
        while (flight := self._in_flight.get(key)) is not None:
            await asyncio.wait({flight})
            if not flight.cancelled():
                self.counts["shared"] += 1
                return self._for_free(flight.result())
        flight = self._in_flight[key] = asyncio.get_running_loop().create_future()
        try:
            kept = await self._use(self._file.get, key)
            self.counts["misses" if kept is None else "hits"] += 1
            if kept is not None:
                flight.set_result(kept[0])
                return self._for_free(kept[0])
            answer = await call()
            flight.set_result(text := json.dumps(answer))
        except Exception as error:
            flight.set_exception(error)
            flight.exception()  # that nothing else waits for it is no error of its own
            raise
        finally:
            del self._in_flight[key]
            flight.cancel()  # without an outcome it was cancelled: the first of those who wait takes over
        keeps, cost = answer.get("status") in ("ok", "abstained"), answer.get("extra", {}).get(COST, 0.0)
        if keeps and await self._use(self._file.put, key, text, cost) is not None:
            self.counts["stored"] += 1
            if self._max_bytes is not None and self.counts["stored"] % WRITES_PER_PRUNE == 0:
                await self._use(partial(self._file.prune, max_bytes=self._max_bytes))
        return answer

    async def close(self) -> None:
        """Let go of the file; later calls go through uncached."""
        self._retry_at = math.inf
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._file.close)
        await asyncio.wait({closing}, timeout=TIMEOUT_S)
        self._thread.shutdown(wait=False)

    async def _use(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """What the file says, in a thread; None while it is broken, and after the end."""
        if time.monotonic() < self._retry_at:
            self.counts["skipped"] += 1
            return None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                result = await asyncio.get_running_loop().run_in_executor(self._thread, operation, *arguments)
        except (ConfigurationError, *STORAGE_ERRORS) as error:
            self._broke(error)
            return None
        if 0.0 < self._retry_at < math.inf:
            log.warning("the verdict cache %s works again", self._file.path)
            self._retry_at = 0.0
        return result

    def _broke(self, error: BaseException) -> None:
        self.counts["errors"] += 1
        if not self._retry_at:
            reason = str(error) or f"no answer within {TIMEOUT_S:g} s"  # of a disk that hangs
            log.error(
                "the verdict cache %s failed, the run goes on without it and tries again every %g s: %s: %s",
                *(self._file.path, RETRY_S, type(error).__name__, reason),
            )
        self._retry_at = max(self._retry_at, time.monotonic() + RETRY_S)

    def _for_free(self, text: str) -> Answer:
        answer: Answer = json.loads(text)
        if cost := answer.get("extra", {}).get(COST, 0.0):
            self.counts["cost_saved"] += cost
            answer["extra"][COST] = 0.0
        return answer


def key_of(adapter: str, version: str, sample: Mapping[str, Any]) -> str:
    """`ADAPTER:DIGEST`, the same for the same question to the same version of an adapter; every column but `group_id`
    makes a difference. Raises ValueError for a sample that holds what JSON cannot.

    >>> one = key_of("mathd", "v1", {"completion": "4", "answer": "4", "group_id": 1})
    >>> one == key_of("mathd", "v1", {"answer": "4", "group_id": 2, "completion": "4"}), one[:6]
    (True, 'mathd:')
    """
    read = {name: value for name, value in sample.items() if name != "group_id"}
    return f"{adapter}:{_digest([adapter, version, read])}"


def version_of(*settings: Any) -> str:
    """A digest of what a reward's answers depend on (of user code, the sha256 of its registry file and its options), and
    of the library's own rewards and judges, so that an upgrade asks anew. Other packages do not count: after an upgrade
    of theirs, `async-grpo cache --prune-adapter` forgets the old answers.
    Raises ValueError for settings that hold what JSON cannot."""
    return _digest([_library(), *settings])


def version_of_judge(judge: Any, code: str = "", addresses: JudgeAddresses | None = None) -> str:
    """A digest of a judge's class and settings; how it is asked (`DELIVERY`, the order of replicas) makes no difference.

    Args:
        code: the sha256 of the user's text; it counts if the class is defined there.
        addresses: of the run's judges; where a `model_id` is known, it counts, and not their addresses.
    Raises ConfigurationError: a setting is no plain value.
    """
    kind, is_dataclass = type(judge), dataclasses.is_dataclass(judge)
    names = [one.name for one in dataclasses.fields(judge) if one.init] if is_dataclass else list(vars(judge))
    settings = {name: getattr(judge, name) for name in names if name not in DELIVERY}
    for name in {"url", "urls"} & settings.keys():
        if addresses and addresses.judge_model_id and addresses.are_asked_by(judge):
            settings[name] = addresses.judge_model_id  # our own servers have other ports in each run
        elif not isinstance(settings[name], str):
            settings[name] = sorted(settings[name])
    ours = kind.__module__.startswith("async_grpo.")
    try:
        return version_of(kind.__qualname__, "" if ours else code, settings)
    except ValueError as error:
        raise ConfigurationError(
            f"the verdict cache cannot tell two settings of {kind.__qualname__} apart ({error}): let it be a dataclass "
            "of plain values, or run without --verdict-cache"
        ) from error


@lru_cache
def _library() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _digest([[file.name, file.read_text(encoding="utf-8")] for file in files])


def _digest(value: Any) -> str:
    try:
        canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(f"no key of the verdict cache can be made: {error}") from error
    return hashlib.sha256(canonical.encode()).hexdigest()
