"""`IdleSleep`: vLLM servers sleep while they have no call, so that the programs on the same GPUs get the memory."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from async_grpo.rewards.http.deadline import Deadline
from async_grpo.rewards.http.endpoint import JudgeUnavailable

ANSWER_S, MOVE_S = 10.0, 120.0  # to say how it is, and to move the weights of a large model
log = logging.getLogger(__name__)


class IdleSleep:
    """For all who ask the same servers from this process; plain asyncio, one event loop.

        async with idle_sleep.keep_awake(deadline):
            ... ask ...

    Args:
        urls: base addresses of vLLM servers started with `--enable-sleep-mode` and VLLM_SERVER_DEV_MODE=1.
        after_s: without a call, until they sleep (level 1: the weights wait in main memory).
    """

    def __init__(self, urls: Sequence[str], after_s: float) -> None:
        self._urls, self._after_s = tuple(urls), after_s
        self._callers = 0
        self._asleep = True  # for all that is known
        self._turn = asyncio.Lock()  # to tell the servers something
        self._waking: asyncio.Task[None] | None = None
        self._dozing: asyncio.Task[None] | None = None
        self._falling_asleep: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None  # it can only be made in an event loop
        self.num_sleeps = 0

    @asynccontextmanager
    async def keep_awake(self, deadline: Deadline) -> AsyncIterator[None]:
        """The servers are awake inside; waking them is not on the caller's time.

        Raises:
            JudgeUnavailable: one of them cannot be woken.
        """
        self._callers += 1
        if self._dozing:
            self._dozing.cancel()  # what has begun to fall asleep does so, and is woken when it has
            self._dozing = None
        try:
            if self._asleep or self._turn.locked():
                if self._waking is None or self._waking.done():
                    # A task of its own: a caller that gives up must not leave servers behind that are half awake
                    self._waking = asyncio.ensure_future(self._wake_all())
                    self._waking.add_done_callback(_look_at_its_error)
                with deadline.put_off():
                    await asyncio.shield(self._waking)
            yield
        finally:
            self._callers -= 1
            if not self._callers:
                self._dozing = asyncio.ensure_future(self._sleep_when_idle())

    async def close(self) -> None:
        """Leave the servers as they are."""
        if self._dozing:
            self._dozing.cancel()
        if self._session:
            await self._session.close()

    async def _sleep_when_idle(self) -> None:
        await asyncio.sleep(self._after_s)
        self._falling_asleep = asyncio.ensure_future(self._sleep())
        await asyncio.shield(self._falling_asleep)

    async def _sleep(self) -> None:
        async with self._turn:
            if self._callers or self._asleep:
                return
            self._asleep = True  # also if one of them does not obey: who asks next finds out
            told = await asyncio.gather(
                *(self._ask("POST", f"{url}/sleep?level=1", MOVE_S) for url in self._urls),
                return_exceptions=True,
            )
            self.num_sleeps += 1
            for url, error in zip(self._urls, told, strict=True):
                if error is not None:
                    log.warning("the judge at %s does not sleep, its memory is not free: %r", url, error)

    async def _wake_all(self) -> None:
        async with self._turn:
            if self._asleep:
                await asyncio.gather(*map(self._wake, self._urls))
                self._asleep = False

    async def _wake(self, url: str) -> None:
        try:
            if (await self._ask("GET", f"{url}/is_sleeping", ANSWER_S))["is_sleeping"]:
                await self._ask("POST", f"{url}/wake_up", MOVE_S)
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise JudgeUnavailable(f"the judge at {url} cannot be woken: {error!r}") from error

    async def _ask(self, method: str, url: str, timeout_s: float) -> Any:
        self._session = self._session or aiohttp.ClientSession(raise_for_status=True)
        async with (
            asyncio.timeout(timeout_s),
            self._session.request(method, url, timeout=aiohttp.ClientTimeout(total=None)) as reply,
        ):
            return await reply.json(content_type=None) if method == "GET" else None


def _look_at_its_error(waking: asyncio.Task[None]) -> None:
    """Or the event loop reports it as never retrieved, when all callers have given up."""
    if not waking.cancelled():
        waking.exception()
