"""`IdleSleep`: vLLM servers sleep while they have no call, so that the programs on the same GPUs get the memory."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from async_grpo.rewards.http.endpoint import Deadline, JudgeUnavailable

ANSWER_S, MOVE_S = 10.0, 120.0  # to say how it is, and to move the weights of a large model
log = logging.getLogger(__name__)


class IdleSleep:
    """For all who ask the same servers from this process, in one event loop.

    Args:
        urls: base addresses of vLLM servers started with `--enable-sleep-mode` and VLLM_SERVER_DEV_MODE=1.
        after_s: without a call, until they sleep (level 1: the weights wait in main memory).
    """

    def __init__(self, urls: Sequence[str], after_s: float) -> None:
        self._urls, self._after_s = tuple(urls), after_s
        self._callers, self._last_call = 0, 0.0
        # From waking to sleeping: a task of its own, or a caller that gives up leaves servers behind that are half awake
        self._day: asyncio.Task[None] | None = None
        self._awake: asyncio.Future[None]

    @asynccontextmanager
    async def keep_awake(self, deadline: Deadline) -> AsyncIterator[None]:
        """The servers are awake inside; waking them is not on the caller's time. Raises JudgeUnavailable if it fails."""
        self._callers += 1
        try:
            if self._day is None or self._day.done():
                self._awake = asyncio.get_running_loop().create_future()
                self._day = asyncio.ensure_future(self._live())
            with deadline.put_off():
                await asyncio.shield(self._awake)
            yield
        finally:
            self._callers -= 1
            self._last_call = time.monotonic()

    async def close(self) -> None:
        """Leave the servers as they are."""
        if self._day:
            self._day.cancel()
            self._awake.cancel()

    async def _live(self) -> None:
        """Wake, stay awake as long as somebody calls now and then, sleep; and again if somebody came meanwhile."""
        try:
            while self._callers:
                await asyncio.gather(*map(self._wake, self._urls))
                self._awake.set_result(None)
                while (rest_s := self._last_call + self._after_s - time.monotonic()) > 0 or self._callers:
                    await asyncio.sleep(rest_s if rest_s > 0 else self._after_s)
                self._awake = asyncio.get_running_loop().create_future()
                await asyncio.gather(*map(self._sleep, self._urls))
        except Exception as error:  # whoever comes next tries again
            self._awake.set_exception(error)

    async def _wake(self, url: str) -> None:
        try:
            if (await self._ask("GET", f"{url}/is_sleeping", ANSWER_S))["is_sleeping"]:
                await self._ask("POST", f"{url}/wake_up", MOVE_S)
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise JudgeUnavailable(f"the judge at {url} cannot be woken: {error!r}") from error

    async def _sleep(self, url: str) -> None:
        try:
            await self._ask("POST", f"{url}/sleep?level=1", MOVE_S)
        except (aiohttp.ClientError, OSError) as error:
            log.warning("the judge at %s does not sleep, its memory is not free: %r", url, error)

    async def _ask(self, method: str, url: str, timeout_s: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.request(method, url, timeout=timeout, raise_for_status=True) as reply:
            return await reply.json(content_type=None) if method == "GET" else None
