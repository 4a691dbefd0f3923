"""`IdleSleep`: vLLM servers sleep while they have no calls, and their GPU memory is free for other processes."""

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

ANSWER_S = 5.0  # time limit of a question to a server
MOVE_S = 120.0  # time limit for moving the weights of a large model
MAX_REPLY_BYTES = 2**16  # replies are short: whether the server sleeps
UNABLE = (OSError, HTTPException, ValueError, KeyError, TypeError)  # errors of a request to a server
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
log = logging.getLogger(__name__)


def server_reply(url: str, method: str = "GET") -> dict[str, Any]:
    """Send a request to one of our vLLM servers, and return its reply. The call blocks.

    Raises:
        OSError or another of UNABLE: There is no usable reply.
    """
    request = urllib.request.Request(url, method=method)
    with _NO_PROXY.open(request, timeout=ANSWER_S if method == "GET" else MOVE_S) as reply:
        return json.loads(reply.read(MAX_REPLY_BYTES) or b"{}")


def set_sleeping(url: str, asleep: bool) -> None:
    """Let a server sleep (at level 1, which keeps the weights in main memory) or wake. The call blocks.

    Raises:
        OSError or another of UNABLE: The server does not answer or does not obey.
    """
    if server_reply(f"{url}/is_sleeping")["is_sleeping"] is not asleep:
        server_reply(url + ("/sleep?level=1" if asleep else "/wake_up"), "POST")
        if server_reply(f"{url}/is_sleeping")["is_sleeping"] is not asleep:
            raise ValueError("it says that it obeys, and does not")


class IdleSleep:
    """Puts servers to sleep while nobody calls them. All callers of a process share one object, in one event loop.

    Args:
        urls: Base addresses of vLLM servers that were started with `--enable-sleep-mode` and VLLM_SERVER_DEV_MODE=1.
        after_s: Seconds without a call after which the servers sleep.
    """

    def __init__(self, urls: Sequence[str], after_s: float) -> None:
        self._urls = tuple(urls)
        self._after_s = after_s
        self._num_callers = 0
        self._last_call_at = 0.0
        # From waking to sleeping. It is a task of its own, because a caller that gives up would leave servers half awake
        self._wake_period: asyncio.Task[None] | None = None
        self._awake: asyncio.Future[None]

    @asynccontextmanager
    async def keep_awake(self, deadline: Deadline) -> AsyncIterator[None]:
        """Keep the servers awake inside the context. The deadline is put off by the time that waking takes.

        Raises:
            JudgeUnavailable: A server cannot be woken.
        """
        self._num_callers += 1
        try:
            if self._wake_period is None or self._wake_period.done():
                self._awake = asyncio.get_running_loop().create_future()
                self._wake_period = asyncio.ensure_future(self._stay_awake_while_called())
            with deadline.put_off():
                await asyncio.shield(self._awake)
            yield
        finally:
            self._num_callers -= 1
            self._last_call_at = time.monotonic()

    async def close(self) -> None:
        """Leave the servers as they are."""
        if self._wake_period:
            self._wake_period.cancel()
            self._awake.cancel()

    async def _stay_awake_while_called(self) -> None:
        """Wake the servers, and let them sleep once nobody has called for a while; repeat if somebody calls meanwhile."""
        try:
            while self._num_callers:
                await self._set(asleep=False)
                self._awake.set_result(None)
                await self._wait_until_idle()
                self._awake = asyncio.get_running_loop().create_future()
                await self._set(asleep=True)
        except Exception as error:
            # All waiting callers get the error, and the next caller tries again
            self._awake.set_exception(error)

    async def _wait_until_idle(self) -> None:
        """Wait until there has been no call for `after_s` seconds."""
        while True:
            remaining_s = self._last_call_at + self._after_s - time.monotonic()
            if remaining_s <= 0 and not self._num_callers:
                return
            await asyncio.sleep(remaining_s if remaining_s > 0 else self._after_s)

    async def _set(self, *, asleep: bool) -> None:
        moves = [asyncio.to_thread(set_sleeping, url, asleep) for url in self._urls]
        # The limits of `server_reply` begin again with each byte that arrives
        async with asyncio.timeout(MOVE_S + 2 * ANSWER_S):
            errors = await asyncio.gather(*moves, return_exceptions=True)
        for url, error in zip(self._urls, errors, strict=True):
            if error and not asleep:
                raise JudgeUnavailable(f"the judge at {url} cannot be woken: {error!r}")
            if error:
                log.warning("the judge at %s does not sleep, its memory is not free: %r", url, error)
