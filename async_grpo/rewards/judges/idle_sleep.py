"""`IdleSleep`: vLLM servers sleep while they have no call, and others on their GPUs get the memory."""

import asyncio
import json
import logging
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http.client import HTTPException
from typing import Any

from async_grpo.rewards.http.endpoint import Deadline, JudgeUnavailable

ANSWER_S, MOVE_S = 5.0, 120.0  # to say how it is, and to move the weights of a large model
MAX_REPLY_BYTES = 2**16  # a server says no more than whether it sleeps
UNABLE = (OSError, HTTPException, ValueError, KeyError, TypeError)  # what asking a server may raise
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
log = logging.getLogger(__name__)


def server_reply(url: str, method: str = "GET") -> dict[str, Any]:
    """What one of our vLLM servers replies; blocks. Raises one of UNABLE."""
    request = urllib.request.Request(url, method=method)
    with _NO_PROXY.open(request, timeout=ANSWER_S if method == "GET" else MOVE_S) as reply:
        return json.loads(reply.read(MAX_REPLY_BYTES) or b"{}")


def set_sleeping(url: str, asleep: bool) -> None:
    """Let it sleep (level 1: the weights wait in main memory) or wake; blocks. Raises one of UNABLE."""
    if server_reply(f"{url}/is_sleeping")["is_sleeping"] is not asleep:
        server_reply(url + ("/sleep?level=1" if asleep else "/wake_up"), "POST")
        if server_reply(f"{url}/is_sleeping")["is_sleeping"] is not asleep:
            raise ValueError("it says that it obeys, and does not")


class IdleSleep:
    """For all who ask the same servers from this process, in one event loop. `urls`: base addresses of vLLM servers
    started with `--enable-sleep-mode` and VLLM_SERVER_DEV_MODE=1; they sleep after `after_s` without a call."""

    def __init__(self, urls: Sequence[str], after_s: float) -> None:
        self._urls, self._after_s = tuple(urls), after_s
        self._callers, self._last_call = 0, 0.0
        # From waking to sleeping: a task, or a caller that gives up would leave servers half awake
        self._day: asyncio.Task[None] | None = None
        self._awake: asyncio.Future[None]

    @asynccontextmanager
    async def keep_awake(self, deadline: Deadline) -> AsyncIterator[None]:
        """The servers are awake inside; waking puts the deadline off. Raises JudgeUnavailable if it fails."""
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
        """Wake, stay awake while somebody calls now and then, sleep; again if somebody came meanwhile."""
        try:
            while self._callers:
                await self._set(asleep=False)
                self._awake.set_result(None)
                while (rest_s := self._last_call + self._after_s - time.monotonic()) > 0 or self._callers:
                    await asyncio.sleep(rest_s if rest_s > 0 else self._after_s)
                self._awake = asyncio.get_running_loop().create_future()
                await self._set(asleep=True)
        except Exception as error:  # whoever comes next tries again
            self._awake.set_exception(error)

    async def _set(self, *, asleep: bool) -> None:
        moves = (asyncio.to_thread(set_sleeping, url, asleep) for url in self._urls)
        async with asyncio.timeout(
            MOVE_S + 2 * ANSWER_S
        ):  # those of `server_reply` begin anew with each byte
            errors = await asyncio.gather(*moves, return_exceptions=True)
        for url, error in zip(self._urls, errors, strict=True):
            if error and not asleep:
                raise JudgeUnavailable(f"the judge at {url} cannot be woken: {error!r}")
            if error:
                log.warning("the judge at %s does not sleep, its memory is not free: %r", url, error)
