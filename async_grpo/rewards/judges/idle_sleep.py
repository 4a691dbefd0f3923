"""`IdleSleep` puts idle vLLM servers to sleep, which frees their GPU memory for other processes."""

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

ANSWER_S = 5.0  # time limit of a GET request, in seconds
MOVE_S = 120.0  # time limit of a POST request, which may move the weights of a large model, in seconds
MAX_REPLY_BYTES = 2**16  # size limit of a reply, which only states whether the server sleeps
UNABLE = (OSError, HTTPException, ValueError, KeyError, TypeError)  # what a failed request can raise
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
log = logging.getLogger(__name__)


def server_reply(url: str, method: str = "GET") -> dict[str, Any]:
    """Send a request to a vLLM server and return its JSON reply. The call blocks.

    Raises:
        OSError: There is no usable reply. The other errors in `UNABLE` are possible too.
    """
    request = urllib.request.Request(url, method=method)
    with _NO_PROXY.open(request, timeout=ANSWER_S if method == "GET" else MOVE_S) as reply:
        return json.loads(reply.read(MAX_REPLY_BYTES) or b"{}")


def set_sleeping(url: str, asleep: bool) -> None:
    """Put a server to sleep or wake it. The call blocks. Sleep level 1 keeps the weights in main memory.

    Raises:
        OSError: The server does not answer or does not obey. The other errors in `UNABLE` are possible too.
    """
    if server_reply(f"{url}/is_sleeping")["is_sleeping"] is not asleep:
        server_reply(url + ("/sleep?level=1" if asleep else "/wake_up"), "POST")
        if server_reply(f"{url}/is_sleeping")["is_sleeping"] is not asleep:
            raise ValueError("it accepted the request, but did not obey")


class IdleSleep:
    """Puts servers to sleep while no call uses them. All callers in a process share one object, in one event loop.

    Args:
        urls: Base addresses of vLLM servers that were started with `--enable-sleep-mode` and VLLM_SERVER_DEV_MODE=1.
        after_s: Seconds without a call after which the servers sleep.
    """

    def __init__(self, urls: Sequence[str], after_s: float) -> None:
        self._urls = tuple(urls)
        self._after_s = after_s
        self._num_callers = 0
        self._last_call_at = 0.0
        # The task that wakes the servers and later puts them to sleep. It is independent of the callers, because a
        # cancelled caller would leave some of the servers asleep
        self._wake_period: asyncio.Task[None] | None = None
        self._awake: asyncio.Future[None]

    @asynccontextmanager
    async def keep_awake(self, deadline: Deadline) -> AsyncIterator[None]:
        """Keep the servers awake inside the context. The time that waking takes extends the deadline.

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
        """Stop managing the servers. They stay asleep or awake, as they are now."""
        if self._wake_period:
            self._wake_period.cancel()
            self._awake.cancel()

    async def _stay_awake_while_called(self) -> None:
        """Wake the servers, and put them to sleep when they are idle. Repeat this if a call arrives in the meantime."""
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
        # This limits the total time, because the time-outs in `server_reply` restart with each byte that arrives
        async with asyncio.timeout(MOVE_S + 2 * ANSWER_S):
            errors = await asyncio.gather(*moves, return_exceptions=True)
        for url, error in zip(self._urls, errors, strict=True):
            if error and not asleep:
                raise JudgeUnavailable(f"the judge at {url} cannot be woken: {error!r}")
            if error:
                log.warning("the judge at %s does not sleep, its memory is not free: %r", url, error)
