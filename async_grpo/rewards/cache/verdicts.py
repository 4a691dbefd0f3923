"""`VerdictCache` keeps the answers of rewards, so that neither this run nor a later one repeats a call.

It keeps only answers with the status ok or abstained (see `adapter.result`). If the file becomes unusable during the
run, for example because of a full disk or a lock, the cache logs this once and works without the file until it is
usable again. No sample fails because of the cache.
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

# Settings of a judge that affect how it is called, but not what it answers
DELIVERY = frozenset(
    "limits api_key_env timeout_s attempts hedge_quantile endpoint_options price_per_million_tokens".split()
)
COST = "judge_cost"  # name of the extra with the cost of a call, in the judge's currency
WRITES_PER_PRUNE = 1000
TIMEOUT_S = 10.0  # time limit of a look-up or write, after which the file counts as broken
RETRY_S = 30.0  # seconds until a broken file is tried again
COUNTS = ("hits", "shared", "misses", "stored", "errors", "skipped", "cost_saved")
log = logging.getLogger(__name__)

Answer = dict[str, Any]


class VerdictCache:
    """Answers of rewards by key, in a `CacheFile`. Use it from one event loop.

    `counts` contains totals since the start: answers from the file (`hits`), calls shared with a concurrent caller
    (`shared`), calls made (`misses`), answers written (`stored`), errors of the file (`errors`), operations skipped
    while the file was unusable (`skipped`), and the money saved (`cost_saved`).

    Args:
        path: Path of the file.
        max_bytes: Limit of the file's size. From time to time, the least recently used entries are deleted to enforce
            it.

    Raises:
        ConfigurationError: The file cannot be created, is not a verdict cache of this version, or is damaged.
    """

    def __init__(self, path: str | Path, *, max_bytes: int | None = None) -> None:
        self.counts: dict[str, float] = dict.fromkeys(COUNTS, 0)
        self._file = CacheFile(path)
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verdict cache")
        self._calls: dict[str, asyncio.Future[str]] = {}  # calls in flight, by key
        self._retry_at = 0.0  # when a broken file is tried again; 0 while the file works
        try:
            self._file.open()
        except STORAGE_ERRORS as error:
            self._note_error(error)

    async def get_or_call(self, key: str, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the cached answer, or else the answer of `call`.

        Concurrent callers with the same key share one call and its error. If the caller that makes the call is
        cancelled, another caller makes it. In a cached or shared answer, the extra `judge_cost` is 0.
        """
        while key in self._calls:
            shared_call = self._calls[key]
            await asyncio.wait({shared_call})
            if not shared_call.cancelled():
                self.counts["shared"] += 1
                return self._free_answer(shared_call.result())

        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls[key] = outcome
        try:
            entry = await self._use(self._file.get, key)
            if entry is not None:
                self.counts["hits"] += 1
                text, _ = entry
                outcome.set_result(text)
                return self._free_answer(text)
            self.counts["misses"] += 1
            answer = await call()
            text = json.dumps(answer)
        except Exception as error:
            outcome.set_exception(error)
            # Mark the error as retrieved, because asyncio would log it if no other caller waits
            outcome.exception()
            raise
        else:
            outcome.set_result(text)
            # The call stays in `_calls` until its answer is in the file. Otherwise, another caller could find the answer in
            # neither place, and repeat the call
            await self._keep(key, text, answer)
        finally:
            del self._calls[key]
            # `outcome` is only unset if this caller was cancelled. Then the first of the waiting callers makes the call
            outcome.cancel()
        return answer

    async def _keep(self, key: str, text: str, answer: Answer) -> None:
        """Write an answer into the file, unless it is a failure."""
        if answer.get("status") not in ("ok", "abstained"):
            return
        cost = answer.get("extra", {}).get(COST, 0.0)
        if await self._use(self._file.put, key, text, cost) is None:
            return
        self.counts["stored"] += 1
        if self._max_bytes is not None and self.counts["stored"] % WRITES_PER_PRUNE == 0:
            await self._use(partial(self._file.prune, max_bytes=self._max_bytes))

    async def close(self) -> None:
        """Close the file. Later calls are made without the cache."""
        self._retry_at = math.inf
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._file.close)
        await asyncio.wait({closing}, timeout=TIMEOUT_S)
        self._thread.shutdown(wait=False)

    async def _use(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Run an operation on the file in a thread. Return its result, or None while the file is broken or closed."""
        if time.monotonic() < self._retry_at:
            self.counts["skipped"] += 1
            return None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                result = await asyncio.get_running_loop().run_in_executor(self._thread, operation, *arguments)
        except (ConfigurationError, *STORAGE_ERRORS) as error:
            self._note_error(error)
            return None
        if 0.0 < self._retry_at < math.inf:
            log.warning("the verdict cache %s works again", self._file.path)
            self._retry_at = 0.0
        return result

    def _note_error(self, error: BaseException) -> None:
        """Count an error of the file, and log it if the file worked until now."""
        self.counts["errors"] += 1
        if not self._retry_at:
            # The TimeoutError for a disk that hangs has no text
            reason = str(error) or f"no answer within {TIMEOUT_S:g} s"
            log.error(
                "the verdict cache %s failed, the run goes on without it and tries again every %g s: %s: %s",
                self._file.path,
                RETRY_S,
                type(error).__name__,
                reason,
            )
        self._retry_at = max(self._retry_at, time.monotonic() + RETRY_S)

    def _free_answer(self, text: str) -> Answer:
        """Return a cached or shared answer with a cost of 0, and count the money that it saves."""
        answer: Answer = json.loads(text)
        cost = answer.get("extra", {}).get(COST, 0.0)
        if cost:
            self.counts["cost_saved"] += cost
            answer["extra"][COST] = 0.0
        return answer


def key_of(adapter: str, version: str, sample: Mapping[str, Any]) -> str:
    """Return the key `ADAPTER:DIGEST` of a call. It depends on every column of the sample except `group_id`.

    Raises:
        ValueError: The sample contains something that JSON cannot represent.

    >>> key = key_of("mathd", "v1", {"completion": "4", "answer": "4", "group_id": 1})
    >>> key == key_of("mathd", "v1", {"answer": "4", "group_id": 2, "completion": "4"}), key[:6]
    (True, 'mathd:')
    """
    read = {name: value for name, value in sample.items() if name != "group_id"}
    return f"{adapter}:{_digest([adapter, version, read])}"


def version_of(*settings: Any) -> str:
    """Return a digest of everything that a reward's answers depend on.

    The digest covers the source of this library's rewards and judges, so that an upgrade of this library invalidates
    the cached answers. It does not cover other packages. After an upgrade of those, delete the old answers with
    `async-grpo cache --prune-adapter`.

    Args:
        settings: The settings, such as the SHA-256 of the registry file and the reward's options.

    Raises:
        ValueError: A setting contains something that JSON cannot represent.
    """
    return _digest([_library(), *settings])


def version_of_judge(judge: Any, code: str = "", addresses: JudgeAddresses | None = None) -> str:
    """Return a digest of a judge's class and of the settings that its answers depend on.

    The digest depends neither on the settings in `DELIVERY` nor on the order of replicas.

    Args:
        judge: The judge.
        code: SHA-256 of the user's file. It is included if the judge's class is not a class of this library.
        addresses: Addresses of the run's judges. If they contain a model id, it is included instead of the URLs.

    Raises:
        ConfigurationError: A setting is not a value that JSON can represent.
    """
    kind = type(judge)
    if dataclasses.is_dataclass(judge):
        names = [field.name for field in dataclasses.fields(judge) if field.init]
    else:
        names = list(vars(judge))
    settings = {name: getattr(judge, name) for name in names if name not in DELIVERY}
    for name in {"url", "urls"} & settings.keys():
        if addresses and addresses.judge_model_id and addresses.are_asked_by(judge):
            # The servers that a run starts for its judges have different ports in each run
            settings[name] = addresses.judge_model_id
        elif not isinstance(settings[name], str):
            settings[name] = sorted(settings[name])
    is_library_class = kind.__module__.startswith("async_grpo.")
    try:
        return version_of(kind.__qualname__, "" if is_library_class else code, settings)
    except ValueError as error:
        raise ConfigurationError(
            f"the verdict cache cannot tell two settings of {kind.__qualname__} apart ({error}): make it a dataclass "
            "of plain values, or run without --verdict-cache"
        ) from error


@lru_cache
def _library() -> str:
    """Return a digest of the source of this library's rewards and judges."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _digest([[file.name, file.read_text(encoding="utf-8")] for file in files])


def _digest(value: Any) -> str:
    try:
        canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(f"no key of the verdict cache can be made: {error}") from error
    return hashlib.sha256(canonical.encode()).hexdigest()
